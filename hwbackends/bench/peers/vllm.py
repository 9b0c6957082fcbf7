"""vLLM's Triton causal conv, loaded from an unpacked or installed wheel's one file beside small stand-ins for the
modules that it imports, so that no engine has to start."""

from __future__ import annotations

import importlib
import types
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hwbackends.bench.peers.common import Prefill, module, package, wheel_version
from hwbackends.errors import ArgumentError

_FOLDER = Path("vllm", "model_executor", "layers", "mamba", "ops")
_BLOCK_TOKENS = 8
"""Tokens of one program of its prefill kernel (its BLOCK_M)."""


class Vllm:
    """Its update and prefill over a cache [slots, W - 1, D]. Slot 0 is its null block.

    Args:
        wheel: folder that holds the package `vllm`: an unpacked wheel or a site-packages.

    Raises:
        ArgumentError: the folder holds no such file.
    """

    name = "vllm"
    note = "no residual; in extend no snapshots"

    def __init__(self, wheel: Path) -> None:
        if not (wheel / _FOLDER / "causal_conv1d.py").is_file():
            wanted = f"a folder that holds {_FOLDER}/causal_conv1d.py"
            raise ArgumentError("hwbackends bench", "--vllm", wheel, wanted, "unpack a wheel of vLLM there")
        self.version = wheel_version(wheel, "vllm*")
        self._load(wheel)

    def _load(self, wheel: Path) -> None:
        parts = _FOLDER.parts
        for depth in range(1, len(parts) + 1):
            package(".".join(parts[:depth]), wheel.joinpath(*parts[:depth]))
        for name in ("vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
            package(name, wheel / name.replace(".", "/"))
        module("vllm.platforms", current_platform=_Platform())
        module("vllm.triton_utils", tl=tl, triton=triton)
        module("vllm.v1.attention.backends.utils", NULL_BLOCK_ID=0, PAD_SLOT_ID=-1)
        self.ops: Any = importlib.import_module(".".join((*parts, "causal_conv1d")))

    def cache(self, windows: Tensor) -> Tensor:
        return windows.clone()

    def windows(self, cache: Tensor) -> Tensor:
        return cache

    def ready(self, size: int) -> None:
        """Nothing is tuned."""

    def indices(self, slots: Tensor) -> Tensor:
        return slots.int()

    def decode(self, x: Tensor, weight: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        """As vLLM's own layers call it: the outputs take the place of x."""
        y: Tensor = self.ops.causal_conv1d_update(x, cache.transpose(1, 2), weight, conv_state_indices=slots)
        return y

    def plan(self, prefill: Prefill) -> Any:
        blocks = [(i, b) for i, length in enumerate(prefill.lengths) for b in range(-(-length // _BLOCK_TOKENS))]
        owner, offset = torch.tensor(blocks, dtype=torch.int32, device=prefill.starts.device).t().contiguous()
        facts = {"tot": len(blocks), "mlist_len": len(blocks), "mlist": owner, "offsetlist": offset}
        facts |= {"batch_ptr": owner, "token_chunk_offset_ptr": offset}
        metadata = types.SimpleNamespace(
            nums_dict={_BLOCK_TOKENS: facts}, batch_ptr=owner, token_chunk_offset_ptr=offset
        )
        return {
            "query_start_loc": prefill.starts,
            "cache_indices": prefill.slots.int(),
            "has_initial_state": prefill.initial,
            "metadata": metadata,
        }

    def extend(self, x: Tensor, weight: Tensor, cache: Tensor, plan: Any) -> Tensor:
        y: Tensor = self.ops.causal_conv1d_fn(x.t(), weight, None, cache.transpose(1, 2), activation=None, **plan)
        return y.t()


class _Platform:
    """What the file asks of the device: whether it is a GPU with dependent launches."""

    def is_cpu(self) -> bool:
        return False

    def is_arch_support_pdl(self) -> bool:
        return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
