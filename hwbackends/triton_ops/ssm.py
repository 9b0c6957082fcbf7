"""The SSM hooks over Triton kernels. Arguments are checked once per launch plan; a plan serves every later call with
the same shapes, strides, dtypes and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hwbackends.ssm import checks
from hwbackends.ssm.state import SSMState
from hwbackends.step.batch import ForwardMode
from hwbackends.step.metadata import StepMetadata
from hwbackends.triton_ops.conv import NOT_ARGUMENTS, check_device
from hwbackends.triton_ops.kernels_ssm import GATES, ssm_extend_kernel, ssm_step_kernel
from hwbackends.triton_ops.launch import Launch, cdiv, interpreting, ordered, power_of_two
from hwbackends.triton_ops.traits import SsmShape, Traits, TraitsOf

KIND_CODES = {"gdn": 0, "kda": 1, "mamba2": 2}
LAYOUT_CODES = {"intermediate": 0, "ring": 1}
_STRIDES = ("SQ", "SK", "SV", "SA", "SB")


def run(
    hook: str,
    traits_of: TraitsOf,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor | None,
    state: SSMState,
    metadata: StepMetadata,
    D: Tensor | None,
    dt_limit: tuple[float, float] | None,
    scale: float | None,
    lower_bound: float | None,
    use_qk_l2norm_in_kernel: bool,
    retrieve_parent_token: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """An SSM hook of every phase, by its name. See `hookspecs.ssm`."""
    tensors = (q, k, v, a, b, A_log, dt_bias, D, retrieve_parent_token)
    options = (dt_limit, scale, lower_bound, use_qk_l2norm_in_kernel)
    try:
        key = (hook, *options, *(None if t is None else form(t) for t in (*tensors, out)))
        plan = metadata.cache.get(("ssm", state))
        fits = type(plan) is SsmPlan and plan.key == key
    except NOT_ARGUMENTS:
        checks.compute(hook, *tensors[:7], state, metadata, D, *options, retrieve_parent_token, out)
        raise
    if not fits:
        checks.compute(hook, *tensors[:7], state, metadata, D, *options, retrieve_parent_token, out)
        checks.packed_tokens(hook, q=q, k=k, v=v, a=a, b=b)
        traits = traits_of(v.device)
        check_device(hook, "v", v.device, traits)
        plan = SsmPlan(key, *_planned(traits, hook, tensors, state, metadata, options))
        metadata.cache["ssm", state] = plan
    assert isinstance(plan, SsmPlan)
    return plan(tensors, out)


def form(tensor: Tensor) -> tuple[object, ...]:
    """What a plan fixes of a tensor: everything but its address."""
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.device)


@dataclass(slots=True)
class SsmPlan:
    """One SSM call made ready.

    Attributes:
        key: hook, options and forms of the tensors that it serves.
        launch: the kernel, its constants and the tensors that never move.
        work: floats of the two working buffers of a call; empty: none.
    """

    key: tuple[object, ...]
    launch: Launch
    work: tuple[int, ...]

    def __call__(self, tensors: tuple[Tensor | None, ...], out: Tensor | None) -> Tensor:
        """Launch and return out, allocated if None."""
        q, k, v, a, b, A_log, dt_bias, D, parents = tensors
        assert q is not None
        assert k is not None
        assert v is not None
        assert a is not None
        assert A_log is not None
        if out is None:
            out = torch.empty_like(v, memory_format=torch.contiguous_format)
        rate = A_log.contiguous()
        bias, skip = (rate if t is None else t.contiguous() for t in (dt_bias, D))
        given = [q, k, v, a, a if b is None else b, rate, bias, skip, out]
        if self.work:
            buffer = torch.empty(sum(self.work), dtype=torch.float32, device=v.device)
            given += [buffer, buffer[self.work[0] :]]
            given += [rate if parents is None else parents.contiguous()]
        self.launch(given)
        return out


def _planned(
    traits: Traits,
    hook: str,
    tensors: tuple[Tensor | None, ...],
    state: SSMState,
    metadata: StepMetadata,
    options: tuple[Any, ...],
) -> tuple[Launch, tuple[int, ...]]:
    constants = _constants(tensors, state, options)
    constants["TRACK"] = metadata.tracks and hook != "ssm_target_verify"
    if hook == "ssm_extend":
        return _extend(traits, tensors, state, metadata, constants, _scalars(state, options)), ()
    return _step(traits, hook, tensors, state, metadata, constants, _scalars(state, options))


def _scalars(state: SSMState, options: tuple[Any, ...]) -> list[float]:
    """scale, the limits of dt, and the lower bound, as kernels take them."""
    limit, scale, lower_bound, _ = options
    if scale is None:
        scale = 1.0 if state.kind == "mamba2" else state.head_k_dim**-0.5
    low, high = (0.0, 0.0) if limit is None else limit
    return [float(scale), float(low), float(high), float(lower_bound or 0.0)]


def _constants(tensors: tuple[Tensor | None, ...], state: SSMState, options: tuple[Any, ...]) -> dict[str, Any]:
    """Compile-time arguments that every kernel of a step takes."""
    dt_bias, D = tensors[6:8]
    limit, _, lower_bound, l2norm = options
    strides = {name: 0 if t is None else t.stride(0) for name, t in zip(_STRIDES, tensors[:5], strict=True)}
    return strides | ring_strides(state) | {
        "KIND": KIND_CODES[state.kind],
        "LAYOUT": LAYOUT_CODES[state.layout],
        "H": state.num_k_heads,
        "HV": state.num_v_heads,
        "K": state.head_k_dim,
        "V": state.head_v_dim,
        "KP": power_of_two(state.head_k_dim),
        "NORM": bool(l2norm),
        "BIAS": dt_bias is not None,
        "LIMIT": limit is not None,
        "SAFE": lower_bound is not None,
        "SKIP": D is not None,
    }  # fmt: skip


def ring_strides(state: SSMState) -> dict[str, int]:
    """Rows of the ring and the strides of slots and request rows; 0 where there is no ring."""
    ring = {"SRK": state.ring_k, "SRU": state.ring_u, "SRD": state.ring_d}
    strides = {name: 0 if t is None else t.stride(0) for name, t in ring.items()}
    return strides | {"C": max(1, state.ring_rows), "SS": state.tensor.stride(0)}


def _ring(state: SSMState) -> list[Tensor]:
    """The ring and the lengths; stand-ins where there are none."""
    return [state.tensor if t is None else t for t in (state.ring_k, state.ring_u, state.ring_d, state.state_lens)]


def lanes_of(state: SSMState, traits: Traits) -> dict[str, Any]:
    """Columns of K in a tile, by the dtype of the state: four lanes share a row. And whether PTX may be spoken."""
    return {"KI": 64 // state.tensor.dtype.itemsize, "PTX": traits.speaks_ptx and not interpreting()}


def _request_rows(state: SSMState) -> int:
    held = state.intermediate if state.ring_u is None else state.ring_u
    return 0 if held is None else held.shape[0]


def _step(
    traits: Traits,
    hook: str,
    tensors: tuple[Tensor | None, ...],
    state: SSMState,
    metadata: StepMetadata,
    constants: dict[str, Any],
    scalars: list[float],
) -> tuple[Launch, tuple[int, ...]]:
    drafts = hook != "ssm_decode"
    tokens = metadata.draft_token_num if drafts else 1
    v, parents, middle = tensors[2], tensors[8], state.intermediate
    assert v is not None
    rows = v.shape[0]
    requests = max(cdiv(rows, tokens), metadata.num_reqs)
    through = not drafts and (state.layout == "intermediate" or not traits.tuning.ssm_defers(state, requests))
    shape = traits.tuning.ssm(state, requests, tokens, through)
    constants |= {
        "N": tokens,
        "NP": power_of_two(tokens),
        "NMAX": max(tokens, state.draft_token_num),
        "SI": 0 if middle is None else middle.stride(0),
        "SIN": 0 if middle is None else middle.stride(1),
        "THROUGH": through,
        "DRAFTS": drafts,
        "COMMIT": hook == "ssm_draft_extend",
        "TREE": parents is not None,
    }
    fixed = [
        state.tensor, state.tensor if middle is None else middle, *_ring(state), metadata.cache_indices,
        metadata.computed_lens, metadata.draft_indices, metadata.has_initial_state, metadata.num_accept_tokens,
        metadata.mamba_track_indices, metadata.mamba_track_tokens,
    ]  # fmt: skip
    live = 0 if metadata.forward_mode is ForwardMode.IDLE else metadata.num_reqs
    extents = [live, rows, state.slots, _request_rows(state)]
    constants = ordered(ssm_step_kernel, constants | lanes_of(state, traits) | shape.constants())
    grid = requests * state.num_v_heads * cdiv(state.head_v_dim, shape.rows)
    scalars = [*scalars, *extents]
    room: dict[str, Any] = {"registers": shape.registers, "waves": shape.waves}
    launch = Launch(traits, ssm_step_kernel, grid, scalars, constants, shape.warps, fixed, **room)
    gates = GATES.value + (state.head_k_dim if state.kind == "kda" else 0)
    raw = requests * tokens * state.num_k_heads * 2 * state.head_k_dim if shape.staged else 0
    return launch, (raw, requests * tokens * state.num_v_heads * gates)


def _extend(
    traits: Traits,
    tensors: tuple[Tensor | None, ...],
    state: SSMState,
    metadata: StepMetadata,
    constants: dict[str, Any],
    scalars: list[float],
) -> Launch:
    shape: SsmShape = traits.tuning.ssm(state, metadata.num_reqs, 1, True)
    fixed = [
        state.tensor, *_ring(state), metadata.cache_indices, metadata.source_indices, metadata.query_start_loc,
        metadata.computed_lens, metadata.draft_indices, metadata.has_initial_state, metadata.mamba_track_indices,
        metadata.mamba_track_tokens,
    ]  # fmt: skip
    v = tensors[2]
    assert v is not None
    extents = [metadata.num_reqs, v.shape[0], metadata.num_tokens, state.slots, _request_rows(state)]
    constants = ordered(ssm_extend_kernel, constants | lanes_of(state, traits) | shape.constants())
    grid = (metadata.num_reqs + 1) * state.num_v_heads * cdiv(state.head_v_dim, shape.rows)
    return Launch(traits, ssm_extend_kernel, grid, [*scalars, *extents], constants, shape.warps, fixed)
