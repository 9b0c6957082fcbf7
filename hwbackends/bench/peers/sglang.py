"""SGLang's short-conv kernels and modules out of an unpacked wheel, beside small stand-ins for its runtime, so that no
server, scheduler or model has to be started. Its CUDA sources build at run time (apache-tvm-ffi, msgspec, nvcc)."""

from __future__ import annotations

import importlib
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hwbackends.bench.peers.common import module, package, wheel_version
from hwbackends.errors import ArgumentError

_PACKAGES = (
    "sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.mamba", "sglang.kernels.ops.layernorm",
    "sglang.kernels.ops.memory", "sglang.srt", "sglang.srt.models", "sglang.srt.models.inkling_common",
    "sglang.srt.models.inkling_common.kernels", "sglang.srt.layers", "sglang.srt.layers.attention",
    "sglang.srt.layers.attention.linear", "sglang.srt.layers.attention.mamba", "sglang.srt.model_executor",
    "sglang.srt.speculative",
)  # fmt: skip


@dataclass
class Runtime:
    """What SGLang's modules ask its runtime for; set it before a step."""

    attn_backend: Any = None
    max_batch: int = 512
    draft_token_num: int = 4
    track_interval: int = 64
    chunk_size: int = 64
    extra_buffer: bool = True


class _Unset:
    """Every environment variable of theirs at its default: unset."""

    def __getattr__(self, name: str) -> Any:
        return types.SimpleNamespace(get=lambda: None)


class Mode:
    """Their forward mode, by name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_decode_or_idle(self) -> bool:
        return self.name == "decode"

    def is_target_verify(self) -> bool:
        return self.name == "verify"

    def is_draft_extend_v2(self) -> bool:
        return self.name == "draft_extend"

    def is_extend(self, include_draft_extend_v2: bool = False) -> bool:
        if self.name == "draft_extend":
            return include_draft_extend_v2
        return self.name in ("extend", "verify")


@dataclass
class Pool:
    """Their request-to-token pool, cut down to state slots."""

    conv: list[torch.Tensor]
    intermediate_conv_window: list[torch.Tensor]
    mapping: torch.Tensor
    size: int
    mamba_v2p_table: torch.Tensor | None = None
    mamba_translate_is_fusable: bool = True
    layers: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        empty = torch.empty(0, device=self.mapping.device)
        cache = types.SimpleNamespace(
            conv=self.conv,
            intermediate_conv_window=self.intermediate_conv_window,
            temporal=empty,
            intermediate_ssm=empty,
        )
        self.mamba_pool = types.SimpleNamespace(mamba_cache=cache)
        self.req_index_to_mamba_index_mapping = self.mapping

    def get_mamba_indices(self, rows: torch.Tensor) -> torch.Tensor:
        return self.mapping[rows]

    def translate_mamba_indices(self, slots: torch.Tensor) -> torch.Tensor:
        return slots if self.mamba_v2p_table is None else self.mamba_v2p_table[slots]

    def mamba2_layer_index(self, layer: int) -> int:
        return self.layers.get(layer, layer)

    def get_speculative_mamba2_params_all_layers(self) -> Any:
        return self.mamba_pool.mamba_cache


class Sglang:
    """Loaded modules: `kernels` (conv and metadata), `cuda` (their CUDA versions), `modules` (ShortConvolution),
    `backend` (the conv-state backend), `indices`, `tracking`, `scatter`, `norm`, `update` (vLLM-style Triton)."""

    def __init__(self, wheel: Path) -> None:
        root = wheel / "sglang"
        if not (root / "srt" / "models" / "inkling_common").is_dir():
            wanted = "a folder that holds sglang/srt/models/inkling_common"
            raise ArgumentError("hwbackends bench", "--sglang", wheel, wanted, "unpack a wheel of SGLang 0.5.23 there")
        self.version = wheel_version(wheel, "sglang")
        self.runtime = Runtime()
        for name in _PACKAGES:
            package(name, root.parent / name.replace(".", "/"))
        self._stand_ins()
        load = importlib.import_module
        self.kernels = load("sglang.srt.models.inkling_common.kernels.sconv")
        self.cuda = load("sglang.kernels.ops.mamba.inkling_sconv")
        self.indices = load("sglang.kernels.ops.mamba.mamba_state_indices_triton")
        self.tracking = load("sglang.kernels.ops.mamba.sconv_tracking")
        self.scatter = load("sglang.kernels.ops.mamba.mamba_state_scatter_triton")
        self.norm = load("sglang.kernels.ops.layernorm.norm")
        self.update = load("sglang.kernels.ops.mamba.causal_conv1d_triton")
        self.modules = load("sglang.srt.models.inkling_common.sconv")
        self.backend = load("sglang.srt.layers.attention.linear.inkling_sconv_backend")
        self._prune_autotuning()

    def use_cuda_kernels(self, on: bool) -> None:
        """Their CUDA kernels (the default on NVIDIA GPUs) or their Triton ones."""
        for user in (self.kernels, self.modules):
            vars(user)["is_cuda"] = lambda: on

    def _prune_autotuning(self) -> None:
        """Their conv kernel has no loop to pipeline, so configurations that differ in stages alone are one."""
        kernel = self.kernels._causal_conv1d_fwd_with_prefix_kernel
        kernel.configs = [c for c in kernel.configs if c.num_stages == 3 and c.kwargs["BLOCK_T"] <= 32]

    def _stand_ins(self) -> None:
        runtime = self.runtime
        execution = types.SimpleNamespace(
            mamba=types.SimpleNamespace(enable_mamba_extra_buffer=True, mamba_track_interval=64),
            graph=types.SimpleNamespace(cuda_graph_config=None),
        )
        module("sglang.srt.environ", envs=_Unset())
        common = {"is_cuda": lambda: True, "set_weight_attrs": lambda weight, attrs: None}
        common |= {"get_cuda_version": lambda: tuple(int(v) for v in str(torch.version.cuda).split("."))}
        common |= {"get_device_core_count": lambda i: torch.cuda.get_device_properties(i).multi_processor_count}
        module("sglang.srt.utils", **common)
        module("sglang.srt.utils.common", **common)
        module("sglang.srt.model_executor.forward_batch_info", ForwardBatch=object)
        module("sglang.srt.model_executor.forward_context", get_attn_backend=lambda: runtime.attn_backend)
        module(
            "sglang.srt.runtime_context",
            get_exec=lambda: execution,
            get_parallel=lambda: types.SimpleNamespace(attn_tp_rank=0),
            get_spec=lambda: types.SimpleNamespace(speculative_num_draft_tokens=runtime.draft_token_num),
            mamba_cache_chunk_size=lambda: runtime.chunk_size,
        )
        base = type("MambaAttnBackendBase", (), dict(_BASE))
        hybrid = type("ShortConvHybridAttnBackend", (), {})
        module(
            "sglang.srt.layers.attention.hybrid_linear_attn_backend",
            MambaAttnBackendBase=base,
            ShortConvHybridAttnBackend=hybrid,
        )
        module("sglang.srt.layers.attention.mamba.mamba2_metadata", ForwardMetadata=types.SimpleNamespace)
        module("sglang.srt.speculative.eagle_info", EagleDraftExtendInput=type("EagleDraftExtendInput", (), {}))


def _base_init(self: Any, runner: Any) -> None:
    self.req_to_token_pool, self.device, self.forward_metadata = runner.req_to_token_pool, runner.device, None


_BASE = {
    "__init__": _base_init,
    "init_cuda_graph_state": lambda self, max_bs, max_num_tokens: None,
    "_translate_mamba_indices": lambda self, slots: self.req_to_token_pool.translate_mamba_indices(slots),
}
