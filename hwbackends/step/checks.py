"""What every backend asks of its arguments before it launches anything: shapes, dtypes, devices, strides, widths.

The plain checks look at Python attributes only and are cheap; a backend calls the one of its hook first, or once per
launch plan. `checked(hook, function)` adds what must read device memory (`HWBACKENDS_CHECKED=1`): slots out of range,
duplicate live slots, accepted steps beyond the drafts. Those wait for the device, so they cannot run in a capture.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hwbackends.conv.state import ConvState
from hwbackends.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    MissingArgumentError,
    ShapeError,
    SlotError,
    StrideError,
    TreeDraftsError,
    UnsupportedError,
    WidthError,
)
from hwbackends.step.batch import UNIFORM_DRAFT_MODES, ForwardMode, StepBatch
from hwbackends.step.capturing import capturing
from hwbackends.step.metadata import StepMetadata
from hwbackends.step.pool import StatePool
from hwbackends.step.rules import BATCH_TENSORS, MODE_OF_HOOK

ACTIVATION_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)
ACTIVATIONS = (None, "silu")


def tensor(
    hook: str,
    parameter: str,
    value: object,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
    device: torch.device,
) -> None:
    """Check one tensor; None in `shape` stands for any extent.

    Raises:
        ArgumentError: its subclass says what is wrong.
    """
    if not isinstance(value, Tensor):
        raise ArgumentError(hook, parameter, type(value).__name__, "a tensor")
    wanted_shape = "[" + ", ".join("any" if extent is None else str(extent) for extent in shape) + "]"
    if value.dtype not in dtypes:
        raise DtypeError(hook, parameter, value.dtype, " or ".join(str(dtype) for dtype in dtypes))
    same = value.dim() == len(shape) and all(w is None or w == g for w, g in zip(shape, value.shape, strict=True))
    if not same:
        raise ShapeError(hook, parameter, list(value.shape), wanted_shape)
    if value.device != device:
        raise DeviceError(hook, parameter, value.device, f"{device}, as the pool", f"move it with .to({str(device)!r})")


def kind(hook: str, parameter: str, value: object, wanted: type) -> None:
    """Check that an argument is of the contract's class; an engine's own class of a similar name is not."""
    if not isinstance(value, wanted):
        got = "None" if value is None else f"{type(value).__module__}.{type(value).__qualname__}"
        raise ArgumentError(hook, parameter, got, f"a {wanted.__module__}.{wanted.__qualname__}")


def mode(hook: str, got: ForwardMode, what: str) -> None:
    """Check that metadata or a batch is of the hook's phase."""
    kind(hook, what, got, ForwardMode)
    if got not in MODE_OF_HOOK[hook]:
        wanted = " or ".join(m.name for m in MODE_OF_HOOK[hook])
        raise ArgumentError(hook, what, got.name, wanted, "call the hook of the step's forward mode")


def prepare(hook: str, batch: StepBatch, pool: StatePool, out: StepMetadata) -> None:
    """Check a prepare call.

    Raises:
        TreeDraftsError: more than one draft per position.
        MissingArgumentError: a tensor that this phase and layout need is None.
        ArgumentError: wrong phase, shape, dtype or device.
    """
    kind(hook, "batch", batch, StepBatch)
    kind(hook, "pool", pool, StatePool)
    kind(hook, "out", out, StepMetadata)
    mode(hook, batch.forward_mode, "batch.forward_mode")
    mode(hook, out.forward_mode, "out.forward_mode")
    rows = batch.padded_reqs
    for name, dtypes in BATCH_TENSORS.items():
        value = getattr(batch, name)
        if value is not None:
            tensor(hook, f"batch.{name}", value, dtypes, (rows,), pool.device)
    if batch.num_reqs_device is not None:
        tensor(hook, "batch.num_reqs_device", batch.num_reqs_device, (torch.int32,), (1,), pool.device)
    if not 0 <= batch.num_reqs <= rows:
        raise ShapeError(hook, "batch.num_reqs", batch.num_reqs, f"0..{rows}, the rows of req_pool_indices")
    if batch.num_tokens < 0:
        raise ShapeError(hook, "batch.num_tokens", batch.num_tokens, "the step's rows of x, 0 or more")
    if out.num_reqs != rows or out.cache_indices.shape[0] != rows:
        raise ShapeError(hook, "out", f"{out.num_reqs} requests", f"{rows}, the rows of req_pool_indices")
    _needs(hook, batch, pool)
    _drafts(hook, batch, pool, out)


def _needs(hook: str, batch: StepBatch, pool: StatePool) -> None:
    needed = []
    if batch.forward_mode is ForwardMode.EXTEND:
        needed.append("extend_seq_lens")
        if batch.computed_lens is None:
            needed.append("extend_prefix_lens")
    elif batch.seq_lens is None and batch.computed_lens is None:
        tracked = batch.forward_mode is ForwardMode.DRAFT_EXTEND and batch.mamba_track_mask is not None
        if pool.layout == "ring" or tracked:
            needed.append("seq_lens")
    if batch.forward_mode is ForwardMode.DRAFT_EXTEND:
        needed.append("num_accept_tokens")
    if batch.mamba_track_mask is not None and batch.forward_mode is not ForwardMode.TARGET_VERIFY:
        needed.append("mamba_track_indices")
        if batch.forward_mode is ForwardMode.EXTEND:
            needed.append("mamba_track_seqlens")
    for name in needed:
        if getattr(batch, name) is None:
            why = f"a tensor: {batch.forward_mode.name} on layout {pool.layout} reads it"
            raise MissingArgumentError(hook, f"batch.{name}", None, why)


def _drafts(hook: str, batch: StepBatch, pool: StatePool, out: StepMetadata) -> None:
    if batch.forward_mode not in UNIFORM_DRAFT_MODES:
        return
    if batch.topk != 1:
        hint = "a conv state follows one chain of tokens: run with topk=1"
        raise TreeDraftsError(hook, "batch.topk", batch.topk, "1", hint)
    if batch.draft_token_num < 1 or batch.draft_token_num != out.draft_token_num:
        raise ShapeError(hook, "batch.draft_token_num", batch.draft_token_num, f"{out.draft_token_num}, as out")
    if batch.draft_token_num > max(1, pool.draft_token_num):
        hint = "construct the pool with a larger draft_token_num"
        raise ShapeError(hook, "batch.draft_token_num", batch.draft_token_num, f"at most {pool.draft_token_num}", hint)


def conv(
    hook: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ConvState,
    metadata: StepMetadata,
    activation: str | None,
    out: Tensor | None,
) -> None:
    """Check a conv call.

    Raises:
        WidthError: the weights' width is not the state's.
        UnsupportedError: unknown activation.
        ArgumentError: wrong phase, shape, dtype, device or strides.
    """
    kind(hook, "state", state, ConvState)
    kind(hook, "metadata", metadata, StepMetadata)
    mode(hook, metadata.forward_mode, "metadata")
    device, dim = state.tensor.device, state.dim
    tensor(hook, "x", x, ACTIVATION_DTYPES, (None, dim), device)
    if weight.dim() == 2 and weight.shape[1] != state.width:
        hint = "make the pool with the width of the weights"
        raise WidthError(hook, "weight", f"width {weight.shape[1]}", f"width {state.width}, as the state", hint)
    tensor(hook, "weight", weight, ACTIVATION_DTYPES, (dim, state.width), device)
    if bias is not None:
        tensor(hook, "bias", bias, ACTIVATION_DTYPES, (dim,), device)
    if activation not in ACTIVATIONS:
        raise UnsupportedError(hook, "activation", repr(activation), "None or 'silu'")
    if (x.dtype == torch.float64) != (state.tensor.dtype == torch.float64):
        got = f"{x.dtype} activations over {state.tensor.dtype} state"
        raise DtypeError(hook, "x", got, "both float64, or both of at most 32 bits")
    least = metadata.num_tokens
    if x.shape[0] < least:
        raise ShapeError(hook, "x", f"{x.shape[0]} rows", f"at least {least}, the step's tokens")
    if out is not None:
        _out(hook, x, out)
    if metadata.cache_indices.device != device:
        raise DeviceError(hook, "metadata", metadata.cache_indices.device, f"{device}, as the state")
    if metadata.forward_mode in UNIFORM_DRAFT_MODES:
        _draft_room(hook, state, metadata)


def _out(hook: str, x: Tensor, out: Tensor) -> None:
    tensor(hook, "out", out, (x.dtype,), tuple(x.shape), x.device)
    if out.shape[1] > 1 and out.stride(1) != 1:
        raise StrideError(hook, "out", f"strides {out.stride()}", "last dimension contiguous")


def _draft_room(hook: str, state: ConvState, metadata: StepMetadata) -> None:
    drafts = metadata.draft_token_num
    hint = "construct the pool with draft_token_num"
    if state.layout == "window":
        if hook == "conv_draft_extend":
            return
        got = state.draft_rows.shape[1] if state.draft_rows is not None else 0
        least = state.history + drafts
    else:
        got, least = state.rows, state.history + drafts - (state.layout == "lazy")
        if hook == "conv_draft_extend" and state.layout == "lazy":
            return
    if got < least:
        raise ShapeError(hook, "state", f"{got} rows for drafts", f"at least {least} on layout {state.layout}", hint)


def epilogue(hook: str, x: Tensor, residual_stream: Tensor, norm_weight: Tensor, out: Tensor | None) -> None:
    """Check what the fused epilogue adds to a conv call."""
    tensor(hook, "residual_stream", residual_stream, (x.dtype,), tuple(x.shape), x.device)
    if residual_stream.shape[1] > 1 and residual_stream.stride(1) != 1:
        raise StrideError(hook, "residual_stream", residual_stream.stride(), "last dimension contiguous")
    tensor(hook, "norm_weight", norm_weight, ACTIVATION_DTYPES, (x.shape[1],), x.device)
    if out is not None:
        _out(hook, x, out)


COMMIT = "update_mamba_state_after_mtp_verify"


def commit(
    pool: StatePool,
    req_pool_indices: Tensor,
    last_correct_step_indices: Tensor,
    mamba_track_indices: Tensor | None,
    mamba_steps_to_track: Tensor | None,
    computed_lens: Tensor | None,
    draft_indices: Tensor | None,
) -> None:
    """Check a commit call.

    Raises:
        MissingArgumentError: `req_pool_indices` is None; only one of the two track tensors is given; `computed_lens`
            is None on a ring that tracks.
        ArgumentError: wrong shape, dtype or device; a pool without draft rows.
    """
    kind(COMMIT, "pool", pool, StatePool)
    if req_pool_indices is None:
        hint = "slots of a commit come from the requests, not from the last step's metadata"
        raise MissingArgumentError(COMMIT, "req_pool_indices", None, "a tensor [B]", hint)
    tensor(COMMIT, "req_pool_indices", req_pool_indices, INDEX_DTYPES, (None,), pool.device)
    rows = (req_pool_indices.shape[0],)
    tensor(COMMIT, "last_correct_step_indices", last_correct_step_indices, INDEX_DTYPES, rows, pool.device)
    optional = {
        "mamba_track_indices": mamba_track_indices,
        "mamba_steps_to_track": mamba_steps_to_track,
        "computed_lens": computed_lens,
        "draft_indices": draft_indices,
    }
    for name, value in optional.items():
        if value is not None:
            tensor(COMMIT, name, value, INDEX_DTYPES, rows, pool.device)
    for name, other in (
        ("mamba_track_indices", "mamba_steps_to_track"),
        ("mamba_steps_to_track", "mamba_track_indices"),
    ):
        if optional[name] is None and optional[other] is not None:
            raise MissingArgumentError(COMMIT, name, None, f"a tensor, since {other} is given")
    if pool.layout == "ring" and mamba_steps_to_track is not None and computed_lens is None:
        hint = "pass the lengths that the verify step started from"
        raise MissingArgumentError(COMMIT, "computed_lens", None, "a tensor: a ring snapshot needs positions", hint)
    if pool.layout == "window" and not pool.draft_rows:
        hint = "construct the pool with draft_token_num"
        raise MissingArgumentError(COMMIT, "pool", "a pool without draft rows", "draft rows", hint)
    if pool.ssm_state is not None and pool.intermediate_ssm is None:
        hint = "construct the pool with draft_token_num, or wrap the engine's intermediate states"
        raise MissingArgumentError(COMMIT, "pool", "SSM state without intermediate_ssm", "intermediate_ssm", hint)


def slots(hook: str, pool: StatePool, **indices: Tensor) -> None:
    """Check the slot lists of a clear or a copy: all [M], one M."""
    kind(hook, "pool", pool, StatePool)
    count = None
    for name, value in indices.items():
        tensor(hook, name, value, INDEX_DTYPES, (count,), pool.device)
        count = value.shape[0]


def checked(hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the checks that read device memory before it; the same function for hooks that have none.

    Inside a capture, where nothing may wait for the device, only the plain checks run.
    """
    deep = _DEEP.get(hook)
    if deep is None:
        return function
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not capturing():
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            deep(hook, bound.arguments)
        return function(*args, **kwargs)

    return call


def _deep_prepare(hook: str, arguments: dict[str, Any]) -> None:
    batch, pool = arguments["batch"], arguments["pool"]
    prepare(hook, batch, pool, arguments["out"])
    count = batch.num_reqs
    if batch.num_reqs_device is not None:
        count = min(count, int(batch.num_reqs_device.item()))
    accepted = batch.num_accept_tokens[:count].tolist() if batch.num_accept_tokens is not None else [0] * count
    kept = [row for row, value in enumerate(accepted) if value >= 0]
    beyond = [value for value in accepted if value > batch.draft_token_num]
    if batch.forward_mode is ForwardMode.DRAFT_EXTEND and beyond:
        raise ArgumentError(hook, "batch.num_accept_tokens", beyond[0], f"at most {batch.draft_token_num}, the drafts")
    if batch.cache_indices is None:
        found = _mapped(hook, "batch.req_pool_indices", pool, batch.req_pool_indices[:count])
    else:
        found = batch.cache_indices[:count].tolist()
    live = [found[row] for row in kept if batch.req_pool_indices[row] >= 0]
    _good_slots(hook, "batch.req_pool_indices", live, pool.num_slots)
    for name in ("source_indices", "mamba_track_indices"):
        value = getattr(batch, name)
        if value is not None:
            given = value[:count]
            if name == "mamba_track_indices" and batch.mamba_track_mask is not None:
                given = torch.where(batch.mamba_track_mask[:count], given, 0)
            translated = given.tolist() if batch.cache_indices is not None else _translated(hook, name, pool, given)
            _in_range(hook, f"batch.{name}", translated, pool.num_slots)


def _deep_conv(hook: str, arguments: dict[str, Any]) -> None:
    state, metadata = arguments["state"], arguments["metadata"]
    x, weight, bias = arguments["x"], arguments["weight"], arguments["bias"]
    conv(hook, x, weight, bias, state, metadata, arguments["activation"], arguments["out"])
    _good_slots(hook, "metadata.cache_indices", metadata.cache_indices.tolist(), state.slots)
    for name in ("source_indices", "mamba_track_indices"):
        _in_range(hook, f"metadata.{name}", getattr(metadata, name).tolist(), state.slots)


def _deep_commit(hook: str, arguments: dict[str, Any]) -> None:
    commit(*arguments.values())
    pool, requests = arguments["pool"], arguments["req_pool_indices"]
    _good_slots(hook, "req_pool_indices", _mapped(hook, "req_pool_indices", pool, requests), pool.num_slots)
    for name in ("last_correct_step_indices", "mamba_steps_to_track"):
        value = arguments[name]
        beyond = [] if value is None else [step for step in value.tolist() if step >= max(1, pool.draft_token_num)]
        if beyond:
            raise ArgumentError(hook, name, beyond[0], f"below {pool.draft_token_num}, the drafts of a verify step")
    if arguments["mamba_track_indices"] is not None:
        track = _translated(hook, "mamba_track_indices", pool, arguments["mamba_track_indices"])
        _in_range(hook, "mamba_track_indices", track, pool.num_slots)


def _deep_slots(hook: str, arguments: dict[str, Any]) -> None:
    pool = arguments["pool"]
    named = {name: value for name, value in arguments.items() if name != "pool"}
    slots(hook, pool, **named)
    for name, value in named.items():
        (_in_range if name == "source_indices" else _good_slots)(hook, name, value.tolist(), pool.num_slots)
    if hook == "copy_slots":
        both = set(named["source_indices"].tolist()) & set(named["destination_indices"].tolist()) - {0, -1}
        if any(slot > 0 for slot in both):
            raise SlotError(hook, "destination_indices", sorted(both), "slots that are not also a source")


def _mapped(hook: str, parameter: str, pool: StatePool, requests: Tensor) -> list[int]:
    rows = requests.tolist()
    wrong = [row for row in rows if row >= pool.request_rows]
    if wrong:
        raise SlotError(hook, parameter, f"request row {wrong[0]}", f"below {pool.request_rows}, the map's rows")
    found = pool.mamba_index_mapping[requests.clamp(min=0).long()]
    found = torch.where(requests >= 0, found, 0)
    return _translated(hook, parameter, pool, found)


def _translated(hook: str, parameter: str, pool: StatePool, given: Tensor) -> list[int]:
    values = given.tolist()
    table = pool.mamba_v2p_table
    if table is None:
        return [int(value) for value in values]
    wrong = [value for value in values if value >= table.shape[0]]
    if wrong:
        raise SlotError(hook, parameter, f"virtual slot {wrong[0]}", f"below {table.shape[0]}, the table's entries")
    return [int(value) for value in table[given.clamp(min=0).long()].tolist()]


def _in_range(hook: str, parameter: str, given: list[int], count: int) -> None:
    wrong = [slot for slot in given if slot >= count]
    if wrong:
        raise SlotError(hook, parameter, f"slot {wrong[0]}", f"below {count}, the pool's slots")


def _good_slots(hook: str, parameter: str, given: list[int], count: int) -> None:
    _in_range(hook, parameter, given, count)
    live = [slot for slot in given if slot > 0]
    twice = sorted({slot for slot in live if live.count(slot) > 1})
    if twice:
        raise SlotError(hook, parameter, f"slot {twice[0]} in two live rows", "each live slot once", "mark one padded")


_DEEP: dict[str, Callable[[str, dict[str, Any]], None]] = {
    **{hook: _deep_prepare for hook in MODE_OF_HOOK if hook.startswith("prepare_")},
    **{hook: _deep_conv for hook in MODE_OF_HOOK if not hook.startswith("prepare_")},
    COMMIT: _deep_commit,
    "clear_slots": _deep_slots,
    "copy_slots": _deep_slots,
}
