"""What every backend asks of the arguments of SSM hooks before it launches anything. As `step.checks`, whose words
these rules use: Python attributes only, a function per hook that a backend calls first, or once per launch plan."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from hwbackends.errors import (
    ArgumentError,
    MissingArgumentError,
    ShapeError,
    StrideError,
    TreeDraftsError,
    UnsupportedError,
)
from hwbackends.ssm.state import SSMState
from hwbackends.step import checks
from hwbackends.step.batch import UNIFORM_DRAFT_MODES, ForwardMode
from hwbackends.step.metadata import StepMetadata
from hwbackends.step.pool import StatePool
from hwbackends.step.rulebook import Call, hold, rule
from hwbackends.step.rules import MODE_OF_HOOK

ACTIVATION_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SSM = tuple(hook for hook in MODE_OF_HOOK if hook.startswith("ssm_"))
DRAFTS = ("ssm_target_verify", "ssm_draft_extend")
MATERIALIZE = "materialize_slots"
_TREE = "retrieve_parent_token"
_OF_KINDS = {
    "b": ("gdn", "kda"),
    "D": ("mamba2",),
    "dt_limit": ("mamba2",),
    "lower_bound": ("kda",),
    "use_qk_l2norm_in_kernel": ("gdn", "kda"),
}
"""Arguments that not every kind takes."""


def compute(
    hook: str,
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
) -> None:
    """Check a call of a compute hook.

    Raises:
        TreeDraftsError: a tree on a ring.
        UnsupportedError: an argument that the state's kind does not take.
        OverlapError: memory that is written is memory of another argument.
        ArgumentError: wrong phase, shape, dtype, device or strides.
    """
    call = SimpleNamespace(
        hook=hook, q=q, k=k, v=v, a=a, b=b, A_log=A_log, dt_bias=dt_bias, state=state, metadata=metadata, D=D,
        dt_limit=dt_limit, scale=scale, lower_bound=lower_bound, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        retrieve_parent_token=retrieve_parent_token, out=out,
    )  # fmt: skip
    hold(checks.plain(hook), call)


def materialize(
    pool: StatePool, req_pool_indices: Tensor, computed_lens: Tensor, destination_indices: Tensor | None
) -> None:
    """Check a call of `materialize_slots`.

    Raises:
        ArgumentError: no pool, a missing tensor, or a wrong shape, dtype or device.
    """
    call = SimpleNamespace(
        hook=MATERIALIZE, pool=pool, req_pool_indices=req_pool_indices, computed_lens=computed_lens,
        destination_indices=destination_indices,
    )  # fmt: skip
    hold(checks.plain(MATERIALIZE), call)


@rule(SSM, "CS-SSM-14")
def _kinds_of_an_ssm(call: Call) -> None:
    """`state` and `metadata` are the contract's classes, and the metadata is of the hook's phase."""
    checks.kind(call.hook, "state", call.state, SSMState)
    checks.kind(call.hook, "metadata", call.metadata, StepMetadata)
    checks.mode(call.hook, call.metadata.forward_mode, "metadata")


@rule(SSM, "CS-SSM-14")
def _arguments_of_a_kind(call: Call) -> None:
    """`b` is there for gdn and kda; nothing is given that the state's kind does not take."""
    kind = call.state.kind
    for name, kinds in _OF_KINDS.items():
        value = getattr(call, name)
        given = value is not None and value is not False
        if given and kind not in kinds:
            got = f"a value for a state of kind {kind}"
            raise UnsupportedError(call.hook, name, got, f"nothing: it belongs to {' and '.join(kinds)}")
    if call.b is None and kind != "mamba2":
        raise MissingArgumentError(call.hook, "b", None, f"a tensor [T, HV]: {kind} has a beta")


@rule(SSM, "CS-SSM-14")
def _inputs_of_an_ssm(call: Call) -> None:
    """`q`, `k` and `v` are [T, heads, dim] of one dtype, with the state's heads and dims, on its device; `a` and `b`
    have a value per token and head, for kda `a` one per channel."""
    hook, state = call.hook, call.state
    device, heads = state.tensor.device, state.num_v_heads
    checks.tensor(hook, "v", call.v, ACTIVATION_DTYPES, (None, heads, state.head_v_dim), device)
    rows = call.v.shape[0]
    for name in ("q", "k"):
        shape = (rows, state.num_k_heads, state.head_k_dim)
        checks.tensor(hook, name, getattr(call, name), (call.v.dtype,), shape, device)
    wide = (state.head_k_dim,) if state.kind == "kda" else ()
    checks.tensor(hook, "a", call.a, ACTIVATION_DTYPES, (rows, heads, *wide), device)
    if call.b is not None:
        checks.tensor(hook, "b", call.b, ACTIVATION_DTYPES, (rows, heads), device)


@rule(SSM, "CS-SSM-14")
def _weights_of_an_ssm(call: Call) -> None:
    """`A_log` and `D` are [HV]; `dt_bias` is [HV], for kda [HV, K] or [HV * K], or None."""
    hook, state = call.hook, call.state
    device, heads = state.tensor.device, state.num_v_heads
    checks.tensor(hook, "A_log", call.A_log, ACTIVATION_DTYPES, (heads,), device)
    if call.D is not None:
        checks.tensor(hook, "D", call.D, ACTIVATION_DTYPES, (heads,), device)
    if call.dt_bias is None:
        return
    shape: tuple[int, ...] = (heads,)
    if state.kind == "kda":
        flat = isinstance(call.dt_bias, Tensor) and call.dt_bias.dim() == 1
        shape = (heads * state.head_k_dim,) if flat else (heads, state.head_k_dim)
    checks.tensor(hook, "dt_bias", call.dt_bias, ACTIVATION_DTYPES, shape, device)


@rule(SSM, "CS-SSM-14")
def _numbers_of_an_ssm(call: Call) -> None:
    """`scale` is a number or None, `lower_bound` a negative one; `dt_limit` is a pair of numbers in order;
    `use_qk_l2norm_in_kernel` is a bool."""
    for name in ("scale", "lower_bound"):
        value = getattr(call, name)
        if value is not None and not _is_number(value):
            raise ArgumentError(call.hook, name, type(value).__name__, "a number or None")
    if call.lower_bound is not None and not call.lower_bound < 0:
        wanted = "a negative number: it bounds the log of a decay"
        raise ArgumentError(call.hook, "lower_bound", call.lower_bound, wanted)
    if not isinstance(call.use_qk_l2norm_in_kernel, bool):
        got = type(call.use_qk_l2norm_in_kernel).__name__
        raise ArgumentError(call.hook, "use_qk_l2norm_in_kernel", got, "True or False")
    limit = call.dt_limit
    if limit is None:
        return
    pair = isinstance(limit, tuple | list) and len(limit) == 2 and all(map(_is_number, limit))
    if not pair or not limit[0] <= limit[1]:
        raise ArgumentError(call.hook, "dt_limit", limit, "a pair of numbers, the smaller first, or None")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@rule(SSM, "CS-SSM-14")
def _rows_of_an_ssm(call: Call) -> None:
    """The inputs have the step's rows, and the step has rows for every request's tokens."""
    metadata, rows = call.metadata, call.v.shape[0]
    if rows < metadata.num_tokens:
        raise ShapeError(call.hook, "v", f"{rows} rows", f"at least {metadata.num_tokens}, the step's tokens")
    if metadata.forward_mode in (ForwardMode.EXTEND, ForwardMode.IDLE):
        return
    tokens = metadata.draft_token_num if metadata.forward_mode in UNIFORM_DRAFT_MODES else 1
    if metadata.num_tokens < metadata.num_reqs * tokens:
        got = f"{metadata.num_tokens} tokens for {metadata.num_reqs} requests"
        raise ShapeError(call.hook, "metadata", got, f"{tokens} for each")


@rule(SSM, "CS-SSM-14")
def _output_of_an_ssm(call: Call) -> None:
    """`out` is None, or contiguous and of v's shape, dtype and device."""
    if call.out is None:
        return
    checks.tensor(call.hook, "out", call.out, (call.v.dtype,), tuple(call.v.shape), call.v.device)
    if not call.out.is_contiguous():
        raise StrideError(call.hook, "out", f"strides {call.out.stride()}", "contiguous")


@rule(SSM, "CS-SSM-14")
def _metadata_of_an_ssm(call: Call) -> None:
    """Every tensor of the metadata has the contract's dtype and extent, contiguous, on the state's device."""
    checks.metadata_tensors(call.hook, "metadata", call.metadata, call.state.tensor.device)


@rule(DRAFTS, "CS-SSM-VER-03")
def _room_for_drafts_of_an_ssm(call: Call) -> None:
    """The state has room for the step's drafts: intermediate states in verify, rows of the ring."""
    state, drafts = call.state, call.metadata.draft_token_num
    checks.number(call.hook, "metadata.draft_token_num", drafts, 1, "tokens per request")
    hint = "construct the pool with draft_token_num"
    if state.layout == "intermediate":
        if call.hook == "ssm_target_verify" and state.intermediate is None:
            wanted = "a tensor [R, N, HV, V, K] on layout intermediate"
            raise MissingArgumentError(call.hook, "state.intermediate", None, wanted, hint)
        room = drafts if state.intermediate is None else state.intermediate.shape[1]
        room = room if call.hook == "ssm_target_verify" else drafts
    else:
        room = state.draft_token_num
    if drafts > room:
        raise ShapeError(call.hook, "metadata.draft_token_num", drafts, f"at most {room}, the state's drafts", hint)


@rule(("ssm_target_verify",), "CS-SSM-VER-06")
def _trees(call: Call) -> None:
    """`retrieve_parent_token` is [B, N] on `intermediate`, and refused on `ring`."""
    parents = getattr(call, _TREE)
    if parents is None:
        return
    if call.state.layout == "ring":
        hint = "put the state on layout intermediate, or draft one token per position"
        raise TreeDraftsError(call.hook, _TREE, "a tree on layout ring", "None: a ring follows one chain", hint)
    shape = (call.metadata.num_reqs, call.metadata.draft_token_num)
    checks.tensor(call.hook, _TREE, parents, checks.INDEX_DTYPES, shape, call.state.tensor.device)


@rule(SSM, "CS-SSM-14")
def _ssm_written_apart_from_read(call: Call) -> None:
    """What an SSM writes (state, ring, lengths, intermediate states, `out`) shares no memory with another argument or
    with itself."""
    state = call.state
    names = ("tensor", "intermediate", "ring_k", "ring_u", "ring_d", "state_lens")
    written = {f"state.{name}": getattr(state, name) for name in names} | {"out": call.out}
    read = {name: getattr(call, name, None) for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias", "D", _TREE)}
    checks.apart(call.hook, written, read)


@rule((MATERIALIZE,), "CS-SSM-MAT-04")
def _tensors_of_a_materialization(call: Call) -> None:
    """The pool is a `StatePool`; `req_pool_indices`, `computed_lens` and `destination_indices` are [B] int32 or int64
    on its device, of which the last may be None."""
    checks.kind(MATERIALIZE, "pool", call.pool, StatePool)
    device = call.pool.device
    checks.tensor(MATERIALIZE, "req_pool_indices", call.req_pool_indices, checks.INDEX_DTYPES, (None,), device)
    rows = (call.req_pool_indices.shape[0],)
    checks.tensor(MATERIALIZE, "computed_lens", call.computed_lens, checks.INDEX_DTYPES, rows, device)
    if call.destination_indices is not None:
        checks.tensor(MATERIALIZE, "destination_indices", call.destination_indices, checks.INDEX_DTYPES, rows, device)


def packed_tokens(hook: str, **inputs: Tensor | None) -> None:
    """For backends that read a token's elements side by side: refuse other strides.

    Raises:
        StrideError: elements of one token that are not packed.
    """
    for name, value in inputs.items():
        if value is not None and value.numel() and not value[0].is_contiguous():
            wanted = "any stride of tokens, the elements of one packed"
            raise StrideError(hook, name, f"strides {value.stride()}", wanted, "pass a view of the conv's output")
