"""flash-linear-attention's causal conv, from the installed package (fla-core). Its decode kernel knows no state slots,
so the requests' states are gathered before it and scattered after it; its cache holds W columns."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from hwbackends.bench.peers.common import Prefill

CHUNK = 64
"""Tokens of one program of its prefill kernel."""


def installed() -> bool:
    """Whether the package is there."""
    return find_spec("fla") is not None and find_spec("fla.modules") is not None


class Fla:
    """Its decode and prefill over a cache [slots, D, W], the last column the newest token."""

    name = "fla"
    note = ""

    def __init__(self) -> None:
        self.ops: Any = importlib.import_module("fla.modules.causal_conv1d")
        self.version = str(getattr(importlib.import_module("fla"), "__version__", ""))
        self._tuned: dict[tuple[str, int], dict[Any, Any]] = {}

    def cache(self, windows: Tensor) -> Tensor:
        first = torch.zeros_like(windows[:, :1])
        return torch.cat([first, windows], dim=1).transpose(1, 2).contiguous()

    def windows(self, cache: Tensor) -> Tensor:
        return cache[:, :, 1:].transpose(1, 2)

    def ready(self, size: int) -> None:
        """Tune its kernels at each size; by itself it keeps the choice of the first size that it sees."""
        for name, tuner in self.tuners().items():
            tuner.cache = self._tuned.setdefault((name, size), {})

    def tuners(self) -> dict[str, Any]:
        """The autotuners of its kernels by the kernels' names."""
        kernels = importlib.import_module("fla.modules.causal_conv1d.ops")
        found = {}
        for name in ("causal_conv1d_update_kernel", "causal_conv1d_fwd_kernel"):
            kernel = getattr(kernels, name)
            while not hasattr(kernel, "configs"):
                kernel = kernel.fn
            found[name] = kernel
        return found

    def indices(self, slots: Tensor) -> Tensor:
        return slots.long()

    def decode(self, x: Tensor, weight: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        state = cache.index_select(0, slots)
        y, state = self.ops.causal_conv1d_update(x, state, residual=x, weight=weight)
        cache.index_copy_(0, slots, state)
        result: Tensor = y
        return result

    def plan(self, prefill: Prefill) -> Any:
        chunks = [(i, c) for i, length in enumerate(prefill.lengths) for c in range(-(-length // CHUNK))]
        device = prefill.starts.device
        return (
            prefill.starts.long(),
            torch.tensor(chunks, device=device),
            prefill.initial[:, None, None],
            self.indices(prefill.slots),
            self.indices(prefill.tracks),
        )

    def extend(self, x: Tensor, weight: Tensor, cache: Tensor, plan: Any) -> Tensor:
        starts, chunks, initial, slots, tracks = plan
        state = cache.index_select(0, slots) * initial
        y, state = self.ops.causal_conv1d(
            x[None], weight, residual=x[None], initial_state=state, output_final_state=True, cu_seqlens=starts,
            chunk_indices=chunks,
        )  # fmt: skip
        cache.index_copy_(0, slots, state)
        cache.index_copy_(0, tracks, state)
        result: Tensor = y[0]
        return result
