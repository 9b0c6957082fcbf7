"""SGLang's SSM kernels out of an unpacked wheel, beside small stand-ins for its runtime: verify with intermediate
states and its commit, its opt-in replay, and decode."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hwbackends.bench.peers.common import module, package, wheel_version
from hwbackends.bench.ssm_sizes import ACCEPTED, DRAFTS, Inputs, Size, Weights
from hwbackends.errors import ArgumentError

FILES = "sglang/kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py"
_OPS = ("attention", "attention.linear", "attention.fla", "mamba", "mamba.triton_ops", "memory")
_REPLAY_ROWS = 16


@dataclass(frozen=True, slots=True)
class Step:
    """A verify or decode step of one size: the work of one layer, of the commit of all layers, and what must be set
    before each replay (None: nothing)."""

    layer: Callable[[int], object]
    commit: Callable[[], object] | None = None
    before: Callable[[], object] | None = None


class SglangSsm:
    """Loaded modules of SGLang.

    Args:
        wheel: folder that holds `sglang/kernels/ops`.

    Raises:
        ArgumentError: it does not.
    """

    def __init__(self, wheel: Path) -> None:
        if not (wheel / FILES).is_file():
            hint = "unpack a wheel of SGLang 0.5.23 there"
            raise ArgumentError("hwbackends bench ssm", "--sglang", wheel, f"a folder that holds {FILES}", hint)
        self.version = wheel_version(wheel, "sglang")
        _stand_ins(wheel)
        ops = "sglang.kernels.ops"
        self.recurrent: Any = importlib.import_module(f"{ops}.attention.linear.fused_sigmoid_gating_recurrent")
        self.replay_gdn: Any = importlib.import_module(f"{ops}.attention.linear.gdn_replayssm_spec_decode")
        self.replay_kda: Any = importlib.import_module(f"{ops}.attention.linear.kda_replayssm_spec_decode")
        self.packed: Any = importlib.import_module(f"{ops}.attention.fla.fused_recurrent")
        self.scatter: Any = importlib.import_module(f"{ops}.mamba.mamba_state_scatter_triton")
        self.mamba: Any = importlib.import_module(f"{ops}.mamba.triton_ops.mamba_ssm")

    def verify(self, size: Size, held: Tensor, inputs: list[Inputs], weights: Weights, slots: Tensor) -> Step:
        """Its default: every draft's state is kept, the commit copies one. `held` [L, slots, HV, V, K]."""
        batch, layers = len(slots), len(held)
        middle = held.new_zeros(layers, batch, DRAFTS, *held.shape[2:])
        rows = torch.arange(batch, dtype=torch.int32, device=held.device)
        offsets = torch.arange(batch + 1, dtype=torch.int32, device=held.device) * DRAFTS
        last = torch.full_like(rows, ACCEPTED - 1)

        def layer(index: int) -> object:
            given = (inputs[index], weights, held[index], slots)
            if size.kind == "mamba2":
                return self._mamba(*given, middle[index], rows)
            kept: dict[str, Any] = {"intermediate_states_buffer": middle[index], "intermediate_state_indices": rows}
            kept |= {"cache_steps": DRAFTS, "disable_state_update": True}
            return self._gated(size, *given, offsets, kept)

        def commit() -> object:
            return self.scatter.fused_mamba_state_scatter_with_mask(held, middle, slots, last, rows)

        return Step(layer, commit)

    def replay(self, size: Size, held: Tensor, inputs: list[Inputs], weights: Weights, slots: Tensor) -> Step | None:
        """Its opt-in replay; None for Mamba2, which has none."""
        if size.kind == "gdn":
            return self._replay_gdn(size, held, inputs, weights, slots)
        return self._replay_kda(size, held, inputs, weights, slots) if size.kind == "kda" else None

    def decode(self, size: Size, held: Tensor, inputs: list[Inputs], weights: Weights, slots: Tensor) -> Step:
        """One token per request."""
        batch = len(slots)
        offsets = torch.arange(batch + 1, dtype=torch.int32, device=held.device)
        shape = (batch, 1, size.num_v_heads, size.head_v_dim)
        out = torch.empty(shape, dtype=torch.bfloat16, device=held.device)

        def layer(index: int) -> object:
            x = inputs[index]
            if size.kind == "mamba2":
                return self._mamba(x, weights, held[index], slots, None, None)
            if size.kind == "kda":
                return self._gated(size, x, weights, held[index], slots, offsets, {})
            return self.packed.fused_recurrent_gated_delta_rule_packed_decode(
                x.mixed, x.a, x.b, weights.A_log, weights.dt_bias, size.head_k_dim**-0.5, held[index], out, slots,
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip

        return Step(layer)

    def _gated(
        self, size: Size, x: Inputs, weights: Weights, state: Tensor, slots: Tensor, offsets: Tensor,
        kept: dict[str, Any],
    ) -> object:  # fmt: skip
        return self.recurrent.fused_sigmoid_gating_delta_rule_update(
            weights.A_log, x.a.flatten(1), weights.dt_bias, 1.0, 20.0, x.q[None], x.k[None], x.v[None], x.b, state,
            slots, use_qk_l2norm_in_kernel=True, cu_seqlens=offsets, is_kda=size.kind == "kda", **kept,
        )  # fmt: skip

    def _mamba(
        self, x: Inputs, weights: Weights, state: Tensor, slots: Tensor, middle: Tensor | None, rows: Tensor | None
    ) -> object:
        _, width, dstate = state.shape[1:]
        rate = (-torch.exp(weights.A_log))[:, None, None].expand(-1, width, dstate)
        assert weights.D is not None
        skip, bias = (t[:, None].expand(-1, width) for t in (weights.D, weights.dt_bias))
        dt = x.a[:, :, None].expand(-1, -1, width)
        kept: dict[str, Any] = {}
        parts = [x.v, dt, x.k, x.q]
        if middle is not None:
            parts = [part.unflatten(0, (len(slots), DRAFTS)) for part in parts]  # type: ignore[no-untyped-call]
            kept = {"intermediate_states_buffer": middle, "intermediate_state_indices": rows, "cache_steps": DRAFTS}
            kept["disable_state_update"] = True
        v, dt, k, q = parts
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        return self.mamba.selective_state_update(
            state, v, dt, rate, k, q, skip, dt_bias=bias, dt_softplus=True, state_batch_indices=slots, out=out, **kept
        )

    def _replay_gdn(self, size: Size, held: Tensor, inputs: list[Inputs], weights: Weights, slots: Tensor) -> Step:
        layers, batch, device, ring = len(held), len(slots), held.device, _REPLAY_ROWS
        heads, groups = size.num_v_heads, size.num_k_heads

        def drawn(*shape: int) -> Tensor:
            return torch.randn(layers, batch + 1, *shape, device=device).mul_(0.1).bfloat16()

        d, k = drawn(heads, ring, size.head_v_dim), drawn(groups, ring, size.head_k_dim)
        low_d, low_k = d * 0.01, k * 0.01
        g = -torch.rand(layers, batch + 1, heads, ring, device=device)
        place, base, flags = (
            torch.zeros(batch + 1, dtype=t, device=device) for t in (torch.int32,) * 2 + (torch.int8,)
        )
        rows = torch.arange(batch, dtype=torch.int32, device=device)
        offsets = torch.arange(batch + 1, dtype=torch.int32, device=device) * DRAFTS
        accepted = torch.full_like(rows, ACCEPTED)
        open_places = (
            [0] if held.dtype != torch.float32 else [w for w in range(0, 17, ACCEPTED) if w + 2 * DRAFTS <= 16]
        )
        wanted = torch.tensor([open_places[b % len(open_places)] for b in range(batch)] + [0], device=device).int()
        out = torch.empty_like(inputs[0].v, memory_format=torch.contiguous_format)

        def layer(index: int) -> object:
            x = inputs[index]
            return self.replay_gdn.gdn_replayssm_spec_decode(
                x.q, x.k, x.v, x.a, x.b, weights.A_log, weights.dt_bias, held[index], d[index], k[index], g[index],
                low_d[index], low_k[index], None, out, offsets, slots, rows, place, base, flags, ring, DRAFTS,
                null_block_id=-1, launch_mode="verify",
            )  # fmt: skip

        def before() -> None:
            place.copy_(wanted)
            base.zero_()
            flags.zero_()

        def commit() -> None:
            fold = held.dtype != torch.float32
            self.replay_gdn.commit_gdn_replayssm_spec(
                place, base, flags, accepted, rows, ring, DRAFTS, fold_every_commit=fold, null_block_id=-1
            )
            self.replay_gdn.commit_gdn_replayssm_circular(
                checkpoint_state=held, d_cache=d, k_cache=k, g_cache=g, d_residual_cache=low_d, k_residual_cache=low_k,
                state_batch_indices=slots, replay_indices=rows, write_pos=place, cache_base=base, is_flush=flags,
                accept_lens=accepted, null_block_id=-1,
            )  # fmt: skip

        return Step(layer, commit, before)

    def _replay_kda(self, size: Size, held: Tensor, inputs: list[Inputs], weights: Weights, slots: Tensor) -> Step:
        layers, batch, device, ring = len(held), len(slots), held.device, _REPLAY_ROWS
        heads, groups = size.num_v_heads, size.num_k_heads

        def drawn(*shape: int) -> Tensor:
            return torch.randn(layers, batch + 1, *shape, device=device).mul_(0.1)

        v, k = drawn(heads, ring, size.head_v_dim).bfloat16(), drawn(groups, ring, size.head_k_dim).bfloat16()
        g, beta = -drawn(heads, ring, size.head_k_dim).abs(), drawn(heads, ring)
        offsets = torch.arange(batch + 1, dtype=torch.int32, device=device) * DRAFTS
        accepted = torch.full((batch,), ACCEPTED, dtype=torch.int32, device=device)

        def layer(index: int) -> object:
            rings = {"replayssm_rawv": v, "replayssm_rawk": k, "replayssm_g": g, "replayssm_beta": beta}
            kept: dict[str, Any] = {name: part[index] for name, part in rings.items()}
            kept |= {"disable_state_update": True, "cache_ring": True}
            return self._gated(size, inputs[index], weights, held[index], slots, offsets, kept)

        def commit() -> object:
            return self.replay_kda.commit_kda_replayssm_spec_all_layers(
                held, v, k, g, beta, slots, accepted, ring, groups, null_block_id=-1
            )

        return Step(layer, commit)


def _stand_ins(wheel: Path) -> None:
    """Packages without their `__init__`, and what the kernels ask SGLang's runtime for."""
    root = wheel / "sglang" / "kernels" / "ops"
    package("sglang", wheel / "sglang")
    package("sglang.kernels", wheel / "sglang" / "kernels")
    package("sglang.kernels.ops", root)
    for name in _OPS:
        package(f"sglang.kernels.ops.{name}", root / name.replace(".", "/"))
    for name in ("sglang.kernels.jit", "sglang.srt"):
        package(name, wheel / "none")
    seen = torch.cuda.is_available()
    chip = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1] if seen else 90
    module("sglang.kernels.jit.utils", is_arch_support_pdl=lambda: seen and chip >= 90)
    answers = {"is_cuda": True, "is_hip": False, "is_gfx95_supported": False, "is_sm90_supported": chip == 90}
    found = {name: (lambda value=value: value) for name, value in answers.items()}
    module("sglang.srt.utils", get_device_sm=lambda: chip, **found)
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:3])
    module("sglang.srt.utils.common", torch_release=release, get_device_core_count=_cores)


def _cores(index: int = 0) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
