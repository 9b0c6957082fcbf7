"""What every backend asks of its arguments before it launches anything: shapes, dtypes, devices, strides, widths, and
which tensors may share memory.

These rules look at Python attributes only and are cheap; a backend calls the function of its hook first, or once per
launch plan. `checked(hook, function)` adds the rules of `device_checks`, which read device memory
(`HWBACKENDS_CHECKED=1`). Those wait for the device, so they cannot run in a capture. docs/checks.md lists all of them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hwbackends.contract.reader import installed
from hwbackends.conv.state import ConvState
from hwbackends.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    MissingArgumentError,
    OverlapError,
    ShapeError,
    StrideError,
    TreeDraftsError,
    UnsupportedError,
    WidthError,
)
from hwbackends.step.batch import UNIFORM_DRAFT_MODES, ForwardMode, StepBatch
from hwbackends.step.capturing import capturing
from hwbackends.step.metadata import StepMetadata
from hwbackends.step.overlap import overlap, overlaps_itself
from hwbackends.step.pool import StatePool
from hwbackends.step.rulebook import Call, hold, rule, rules_of
from hwbackends.step.rules import BATCH_TENSORS, METADATA_TENSORS, MODE_OF_HOOK

ACTIVATION_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)
ACTIVATIONS = (None, "silu")
_INT32 = (torch.int32,)

PREPARE = tuple(hook for hook in MODE_OF_HOOK if hook.startswith("prepare_"))
FUSED = tuple(hook for hook in MODE_OF_HOOK if hook.startswith("fused_"))
CONV = tuple(hook for hook in MODE_OF_HOOK if hook.startswith("conv_")) + FUSED
VERIFY = tuple(hook for hook in CONV if ForwardMode.TARGET_VERIFY in MODE_OF_HOOK[hook])
COMMIT = "update_mamba_state_after_mtp_verify"
SLOTS = ("clear_slots", "copy_slots")


def prepare(hook: str, batch: StepBatch, pool: StatePool, out: StepMetadata) -> None:
    """Check a prepare call.

    Raises:
        TreeDraftsError: more than one draft per position.
        MissingArgumentError: a tensor that this phase and layout need is None.
        ArgumentError: wrong phase, shape, dtype, device, count, or memory that is read and written.
    """
    hold(plain(hook), SimpleNamespace(hook=hook, batch=batch, pool=pool, out=out))


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
        OverlapError: memory that is written is memory of another argument.
        ArgumentError: wrong phase, shape, dtype, device or strides.
    """
    hold(
        plain(hook),
        SimpleNamespace(
            hook=hook, x=x, weight=weight, bias=bias, state=state, metadata=metadata, activation=activation, out=out
        ),
    )


def fused(
    hook: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ConvState,
    metadata: StepMetadata,
    residual_stream: Tensor,
    norm_weight: Tensor,
    eps: float,
    activation: str | None,
    out: Tensor | None,
) -> None:
    """Check a call of a fused epilogue: all that a conv is asked, and what the epilogue adds."""
    call = SimpleNamespace(
        hook=hook, x=x, weight=weight, bias=bias, state=state, metadata=metadata, activation=activation, out=out,
        residual_stream=residual_stream, norm_weight=norm_weight, eps=eps,
    )  # fmt: skip
    hold(plain(hook), call)


def commit(
    pool: StatePool,
    req_pool_indices: Tensor,
    last_correct_step_indices: Tensor,
    mamba_track_indices: Tensor | None,
    mamba_steps_to_track: Tensor | None,
    computed_lens: Tensor | None,
    draft_indices: Tensor | None,
    families: tuple[str, ...] = (),
) -> None:
    """Check a commit call of a backend that commits these families' states beside convs.

    Raises:
        MissingArgumentError: `req_pool_indices` is None; only one of the two track tensors is given; `computed_lens`
            is None on a ring that tracks.
        ArgumentError: wrong shape, dtype or device; a pool without draft rows.
    """
    call = SimpleNamespace(
        hook=COMMIT, pool=pool, req_pool_indices=req_pool_indices, last_correct_step_indices=last_correct_step_indices,
        mamba_track_indices=mamba_track_indices, mamba_steps_to_track=mamba_steps_to_track,
        computed_lens=computed_lens, draft_indices=draft_indices, families=families,
    )  # fmt: skip
    hold(plain(COMMIT), call)


def slots(hook: str, pool: StatePool, families: tuple[str, ...] = (), **indices: Tensor) -> None:
    """Check the slot lists of a clear or a copy, all [M], one M, of a backend that moves these families' states."""
    hold(plain(hook), SimpleNamespace(hook=hook, pool=pool, families=families, **indices))


def with_families() -> None:
    """Import the checks of every family that has some, so that their rules are declared."""
    for family in installed():
        for name in (f"hwbackends.{family}.checks", f"hwbackends.{family}.device_checks"):
            if find_spec(f"hwbackends.{family}") is not None and find_spec(name) is not None:
                importlib.import_module(name)


@functools.cache
def plain(hook: str) -> tuple[Any, ...]:
    """The rules of a hook that Python attributes show."""
    return rules_of(hook, reads=False)


def checked(hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with every rule of its hook before it, those that read device memory too; the same function for hooks
    that have none.

    Inside a capture, where nothing may wait for the device, only the plain rules run.
    """
    from hwbackends.step import device_checks

    with_families()
    deep = device_checks.rules(hook)
    if not deep:
        return function
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = SimpleNamespace(hook=hook, **bound.arguments)
        hold(plain(hook), given)
        if not capturing():
            hold(deep, given)
        return function(*args, **kwargs)

    return call


# one argument


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
        error = MissingArgumentError if value is None else ArgumentError
        raise error(hook, parameter, "None" if value is None else type(value).__name__, "a tensor")
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
        error = MissingArgumentError if value is None else ArgumentError
        got = "None" if value is None else f"{type(value).__module__}.{type(value).__qualname__}"
        raise error(hook, parameter, got, f"a {wanted.__module__}.{wanted.__qualname__}")


def mode(hook: str, got: ForwardMode, what: str) -> None:
    """Check that metadata or a batch is of the hook's phase."""
    kind(hook, what, got, ForwardMode)
    if got not in MODE_OF_HOOK[hook]:
        wanted = " or ".join(m.name for m in MODE_OF_HOOK[hook])
        raise ArgumentError(hook, what, got.name, wanted, "call the hook of the step's forward mode")


def number(hook: str, parameter: str, value: object, least: int | None, what: str) -> None:
    """Check a count that the host holds: an int, not a tensor that would have to be waited for."""
    try:
        if isinstance(value, Tensor):
            raise TypeError
        found = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        error = MissingArgumentError if value is None else ArgumentError
        got = "None" if value is None else type(value).__name__
        raise error(hook, parameter, got, "an int on the host") from None
    if least is not None and found < least:
        raise ShapeError(hook, parameter, found, f"{what}, {least} or more")


def apart(hook: str, written: dict[str, Tensor | None], read: dict[str, Tensor | None]) -> None:
    """Check that no tensor that a hook writes has memory in common with another argument, or with itself."""
    targets = [(name, value) for name, value in written.items() if value is not None]
    for index, (name, target) in enumerate(targets):
        if overlaps_itself(target):
            raise StrideError(hook, name, f"strides {target.stride()}", "elements that each have a place of their own")
        others = [*targets[:index], *((n, v) for n, v in read.items() if v is not None)]
        for other, value in others:
            if overlap(target, value):
                raise OverlapError(hook, name, f"memory of {other}", "memory of its own", "pass a tensor of its own")


# preparation


@rule(PREPARE, "CS-PREP-10")
def _kinds_of_a_preparation(call: Call) -> None:
    """`batch`, `pool` and `out` are the contract's classes: None and an engine's own class are refused."""
    kind(call.hook, "batch", call.batch, StepBatch)
    kind(call.hook, "pool", call.pool, StatePool)
    kind(call.hook, "out", call.out, StepMetadata)


@rule(PREPARE, "CS-PREP-10")
def _phase_of_a_preparation(call: Call) -> None:
    """The forward mode is a `ForwardMode` of the hook, one and the same in `batch` and in `out`."""
    mode(call.hook, call.batch.forward_mode, "batch.forward_mode")
    mode(call.hook, call.out.forward_mode, "out.forward_mode")
    if call.batch.forward_mode is not call.out.forward_mode:
        got, wanted = call.out.forward_mode.name, call.batch.forward_mode.name
        raise ArgumentError(call.hook, "out.forward_mode", got, f"{wanted}, as the batch")


@rule(PREPARE, "CS-PREP-10")
def _counts_of_a_batch(call: Call) -> None:
    """`num_reqs`, `num_tokens`, `draft_token_num` and `topk` are ints on the host; `num_reqs` is within the rows of
    `req_pool_indices`."""
    batch = call.batch
    counts = (
        ("num_reqs", 0, "live rows"),
        ("num_tokens", 0, "the step's rows of x"),
        ("draft_token_num", 1, "tokens per request"),
        ("topk", None, "drafts per position"),
    )
    for name, least, what in counts:
        number(call.hook, f"batch.{name}", getattr(batch, name), least, what)
    if batch.num_reqs > batch.padded_reqs:
        wanted = f"0..{batch.padded_reqs}, the rows of req_pool_indices"
        raise ShapeError(call.hook, "batch.num_reqs", batch.num_reqs, wanted)


@rule(PREPARE, "CS-PREP-10")
def _tensors_of_a_batch(call: Call) -> None:
    """Every tensor of the batch is [B] on the pool's device, in a dtype of the contract."""
    batch, pool = call.batch, call.pool
    tensor(call.hook, "batch.req_pool_indices", batch.req_pool_indices, INDEX_DTYPES, (None,), pool.device)
    rows = batch.padded_reqs
    for name, dtypes in BATCH_TENSORS.items():
        value = getattr(batch, name)
        if value is not None:
            tensor(call.hook, f"batch.{name}", value, dtypes, (rows,), pool.device)
    if batch.num_reqs_device is not None:
        tensor(call.hook, "batch.num_reqs_device", batch.num_reqs_device, _INT32, (1,), pool.device)


@rule(PREPARE, "CS-PREP-10")
def _extents_of_the_output(call: Call) -> None:
    """`out` has the batch's requests and tokens and tensors of these extents."""
    batch, out = call.batch, call.out
    if out.num_reqs != batch.padded_reqs:
        raise ShapeError(call.hook, "out", f"{out.num_reqs} requests", f"{batch.padded_reqs}, the batch's rows")
    if out.num_tokens != batch.num_tokens:
        raise ShapeError(call.hook, "out", f"{out.num_tokens} tokens", f"{batch.num_tokens}, the batch's num_tokens")
    metadata_tensors(call.hook, "out", out, call.pool.device)


def metadata_tensors(hook: str, what: str, metadata: StepMetadata, device: torch.device) -> None:
    """Check the tensors of metadata: the contract's dtypes and extents, contiguous, on a device."""
    extents = {"B": metadata.num_reqs, "B + 1": metadata.num_reqs + 1, "T": metadata.num_tokens}
    for name, (dtypes, extent) in METADATA_TENSORS.items():
        value = getattr(metadata, name)
        tensor(hook, f"{what}.{name}", value, dtypes, (extents[extent],), device)
        if not value.is_contiguous():
            raise StrideError(hook, f"{what}.{name}", f"strides {value.stride()}", "contiguous")


@rule(PREPARE, "CS-PREP-10")
def _tensors_that_a_phase_needs(call: Call) -> None:
    """The tensors that the phase and the layout read are there."""
    batch, pool = call.batch, call.pool
    for name in _needed(batch, pool):
        if getattr(batch, name) is None:
            layout = "ring" if pool.needs_positions else pool.layout
            why = f"a tensor: {batch.forward_mode.name} on layout {layout} reads it"
            raise MissingArgumentError(call.hook, f"batch.{name}", None, why)


@rule(PREPARE, "CS-PREP-10")
def _tracks_of_the_output(call: Call) -> None:
    """`out` tracks where the batch does."""
    batch = call.batch
    if batch.mamba_track_mask is None or batch.forward_mode is ForwardMode.TARGET_VERIFY:
        return
    if not call.out.tracks:
        raise ArgumentError(call.hook, "out.tracks", "False", "True: the batch has a mamba_track_mask")


def _needed(batch: StepBatch, pool: StatePool) -> list[str]:
    phase = batch.forward_mode
    needed: list[str] = []
    if phase is ForwardMode.IDLE:
        return needed
    if phase is ForwardMode.EXTEND:
        needed.append("extend_seq_lens")
        if batch.computed_lens is None:
            needed.append("extend_prefix_lens")
    elif batch.seq_lens is None and batch.computed_lens is None:
        tracked = phase is ForwardMode.DRAFT_EXTEND and batch.mamba_track_mask is not None
        if pool.needs_positions or tracked:
            needed.append("seq_lens")
    if phase is ForwardMode.DRAFT_EXTEND:
        needed.append("num_accept_tokens")
    if batch.mamba_track_mask is not None and phase is not ForwardMode.TARGET_VERIFY:
        needed.append("mamba_track_indices")
        if phase is ForwardMode.EXTEND:
            needed.append("mamba_track_seqlens")
    return needed


@rule(PREPARE, "CS-PREP-VER-02")
def _one_chain_of_drafts(call: Call) -> None:
    """Trees (`topk` other than 1) over a state that follows one chain, and other draft counts than those of `out` and
    the pool, are refused."""
    batch, pool, out = call.batch, call.pool, call.out
    if batch.topk != 1 and pool.one_chain:
        hint = "a conv state or a ring follows one chain of tokens: run with topk=1"
        raise TreeDraftsError(call.hook, "batch.topk", batch.topk, "1", hint)
    if batch.forward_mode not in UNIFORM_DRAFT_MODES:
        return
    if batch.draft_token_num != out.draft_token_num:
        raise ShapeError(call.hook, "batch.draft_token_num", batch.draft_token_num, f"{out.draft_token_num}, as out")
    if batch.draft_token_num > max(1, pool.draft_token_num):
        hint = "construct the pool with a larger draft_token_num"
        wanted = f"at most {pool.draft_token_num}"
        raise ShapeError(call.hook, "batch.draft_token_num", batch.draft_token_num, wanted, hint)


@rule(PREPARE, "CS-PREP-10")
def _tokens_for_every_request(call: Call) -> None:
    """Outside of extend and idle, `num_tokens` has room for the tokens of every row, padded ones too."""
    batch = call.batch
    if batch.forward_mode in (ForwardMode.EXTEND, ForwardMode.IDLE):
        return
    least = batch.padded_reqs * batch.tokens_per_req
    if batch.num_tokens < least:
        wanted = f"at least {least}: {batch.padded_reqs} rows of {batch.tokens_per_req}"
        raise ShapeError(call.hook, "batch.num_tokens", batch.num_tokens, wanted)


@rule(PREPARE, "CS-PREP-EXT-02")
def _sources_in_extend_alone(call: Call) -> None:
    """`source_indices` is an extend's: elsewhere a request's history is in its own slot."""
    if call.batch.source_indices is not None and call.batch.forward_mode is not ForwardMode.EXTEND:
        hint = "copy the slot first, or leave source_indices out"
        got = f"a tensor in {call.batch.forward_mode.name}"
        raise UnsupportedError(call.hook, "batch.source_indices", got, "None outside of EXTEND", hint)


@rule(PREPARE, "CS-PREP-04")
def _outputs_apart_from_the_batch(call: Call) -> None:
    """No tensor of `out` shares memory with one of the batch, of the pool's map or of another tensor of `out`."""
    batch, pool, outputs = call.batch, call.pool, call.out.tensors()
    apart(call.hook, {f"out.{name}": value for name, value in outputs.items()}, {})
    homes = {value.untyped_storage().data_ptr() for value in outputs.values()}
    named = {f"batch.{name}": getattr(batch, name) for name in (*BATCH_TENSORS, "num_reqs_device")}
    named |= {"pool.mamba_index_mapping": pool.mamba_index_mapping, "pool.mamba_v2p_table": pool.mamba_v2p_table}
    for name, value in named.items():
        if value is None or value.device.type == "meta" or value.untyped_storage().data_ptr() not in homes:
            continue
        for target, output in outputs.items():
            if overlap(output, value):
                raise OverlapError(call.hook, f"out.{target}", f"memory of {name}", "memory of its own")


# convs


@rule(CONV, "CS-CONV-11")
def _kinds_of_a_conv(call: Call) -> None:
    """`state` and `metadata` are the contract's classes, with tensors where they hold tensors."""
    kind(call.hook, "state", call.state, ConvState)
    kind(call.hook, "metadata", call.metadata, StepMetadata)
    kind(call.hook, "state.tensor", call.state.tensor, Tensor)
    tensor(call.hook, "state.tensor", call.state.tensor, ACTIVATION_DTYPES, (None,) * 3, call.state.tensor.device)


@rule(CONV, "CS-CONV-11")
def _phase_of_a_conv(call: Call) -> None:
    """The metadata is of the hook's phase."""
    mode(call.hook, call.metadata.forward_mode, "metadata")


@rule(CONV, "CS-CONV-11")
def _activations(call: Call) -> None:
    """`x` is [T, D] on the state's device, of a dtype that goes with the state's."""
    tensor_ = call.state.tensor
    tensor(call.hook, "x", call.x, ACTIVATION_DTYPES, (None, call.state.dim), tensor_.device)
    if (call.x.dtype == torch.float64) != (tensor_.dtype == torch.float64):
        got = f"{call.x.dtype} activations over {tensor_.dtype} state"
        raise DtypeError(call.hook, "x", got, "both float64, or both of at most 32 bits")


@rule(CONV, "CS-CONV-11")
def _weights(call: Call) -> None:
    """`weight` is [D, W] of the state's width; `bias` is [D] or None; the activation is known."""
    hook, weight, state = call.hook, call.weight, call.state
    if isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[1] != state.width:
        hint = "make the pool with the width of the weights"
        raise WidthError(hook, "weight", f"width {weight.shape[1]}", f"width {state.width}, as the state", hint)
    tensor(hook, "weight", weight, ACTIVATION_DTYPES, (state.dim, state.width), state.tensor.device)
    if call.bias is not None:
        tensor(hook, "bias", call.bias, ACTIVATION_DTYPES, (state.dim,), state.tensor.device)
    if not (call.activation is None or isinstance(call.activation, str)) or call.activation not in ACTIVATIONS:
        raise UnsupportedError(hook, "activation", repr(call.activation), "None or 'silu'")


@rule(CONV, "CS-CONV-11")
def _rows_of_x(call: Call) -> None:
    """`x` has the step's rows, and the step has rows for every request's tokens."""
    metadata = call.metadata
    if call.x.shape[0] < metadata.num_tokens:
        wanted = f"at least {metadata.num_tokens}, the step's tokens"
        raise ShapeError(call.hook, "x", f"{call.x.shape[0]} rows", wanted)
    if metadata.forward_mode in (ForwardMode.EXTEND, ForwardMode.IDLE):
        return
    tokens = metadata.draft_token_num if metadata.forward_mode in UNIFORM_DRAFT_MODES else 1
    if metadata.num_tokens < metadata.num_reqs * tokens:
        got = f"{metadata.num_tokens} tokens for {metadata.num_reqs} requests"
        raise ShapeError(call.hook, "metadata", got, f"{tokens} for each")


@rule(CONV, "CS-CONV-11")
def _output(call: Call) -> None:
    """`out` is None, or of x's shape, dtype and device with its last dimension contiguous."""
    if call.out is not None:
        _rows_like(call.hook, "out", call.out, call.x)


def _rows_like(hook: str, name: str, value: Tensor, x: Tensor) -> None:
    tensor(hook, name, value, (x.dtype,), tuple(x.shape), x.device)
    if value.shape[1] > 1 and value.stride(1) != 1:
        raise StrideError(hook, name, f"strides {value.stride()}", "last dimension contiguous")


@rule(CONV, "CS-CONV-11")
def _tensors_of_the_metadata(call: Call) -> None:
    """Every tensor of the metadata has the contract's dtype and extent, contiguous, on the state's device."""
    metadata_tensors(call.hook, "metadata", call.metadata, call.state.tensor.device)


@rule((*VERIFY, "conv_draft_extend"), "CS-VERIFY-03")
def _room_for_drafts(call: Call) -> None:
    """The state has rows for the step's drafts: draft rows on `window`, rows of the slot on `ring` and `lazy`."""
    state, drafts = call.state, call.metadata.draft_token_num
    saves = call.hook != "conv_draft_extend"
    number(call.hook, "metadata.draft_token_num", drafts, 1, "tokens per request")
    if state.layout == "window":
        got, least = 0, state.history + drafts
        if state.draft_rows is not None:
            tensor(call.hook, "state.draft_rows", state.draft_rows, (state.tensor.dtype,), (None, None, state.dim),
                   state.tensor.device)  # fmt: skip
            got = state.draft_rows.shape[1]
    else:
        got, least = state.rows, state.history + drafts - (state.layout == "lazy")
    if got < least and (saves or state.layout == "ring"):
        wanted = f"at least {least} on layout {state.layout}"
        raise ShapeError(
            call.hook, "state", f"{got} rows for drafts", wanted, "construct the pool with draft_token_num"
        )


@rule(FUSED, "CS-CONV-11")
def _epilogue(call: Call) -> None:
    """`residual_stream` is like x, its last dimension contiguous; `norm_weight` is a contiguous [D]; `eps` a number."""
    hook, x = call.hook, call.x
    _rows_like(hook, "residual_stream", call.residual_stream, x)
    tensor(hook, "norm_weight", call.norm_weight, ACTIVATION_DTYPES, (x.shape[1],), x.device)
    if not call.norm_weight.is_contiguous():
        raise StrideError(hook, "norm_weight", f"strides {call.norm_weight.stride()}", "contiguous")
    if isinstance(call.eps, bool) or not isinstance(call.eps, int | float):
        error = MissingArgumentError if call.eps is None else ArgumentError
        raise error(hook, "eps", "None" if call.eps is None else type(call.eps).__name__, "a number")


@rule(CONV, "CS-CONV-11")
def _written_apart_from_read(call: Call) -> None:
    """What a conv writes (state, draft rows, `out`, `residual_stream`) shares no memory with another argument or with
    itself, partly neither: not with x, weight, bias or `norm_weight`, and not among each other."""
    state = call.state
    read = {name: getattr(call, name, None) for name in ("x", "weight", "bias", "norm_weight")}
    written = {"state.tensor": state.tensor, "state.draft_rows": state.draft_rows}
    written |= {"out": call.out, "residual_stream": getattr(call, "residual_stream", None)}
    apart(call.hook, written, read)


# commit, clear, copy


@rule((COMMIT,), "CS-COMMIT-11")
def _tensors_of_a_commit(call: Call) -> None:
    """The pool is a `StatePool`; `req_pool_indices` is there; each index tensor is [B] int32 or int64 on its device."""
    kind(COMMIT, "pool", call.pool, StatePool)
    if call.req_pool_indices is None:
        hint = "slots of a commit come from the requests, not from the last step's metadata"
        raise MissingArgumentError(COMMIT, "req_pool_indices", None, "a tensor [B]", hint)
    tensor(COMMIT, "req_pool_indices", call.req_pool_indices, INDEX_DTYPES, (None,), call.pool.device)
    rows = (call.req_pool_indices.shape[0],)
    tensor(COMMIT, "last_correct_step_indices", call.last_correct_step_indices, INDEX_DTYPES, rows, call.pool.device)
    for name in ("mamba_track_indices", "mamba_steps_to_track", "computed_lens", "draft_indices"):
        if getattr(call, name) is not None:
            tensor(COMMIT, name, getattr(call, name), INDEX_DTYPES, rows, call.pool.device)


@rule((COMMIT,), "CS-COMMIT-11")
def _snapshots_of_a_commit(call: Call) -> None:
    """Track slots and track steps come together, on `ring` with `computed_lens`."""
    pair = ("mamba_track_indices", "mamba_steps_to_track")
    for name, other in (pair, pair[::-1]):
        if getattr(call, name) is None and getattr(call, other) is not None:
            raise MissingArgumentError(COMMIT, name, None, f"a tensor, since {other} is given")
    if call.pool.needs_positions and call.mamba_steps_to_track is not None and call.computed_lens is None:
        hint = "pass the lengths that the verify step started from"
        raise MissingArgumentError(COMMIT, "computed_lens", None, "a tensor: a ring snapshot needs positions", hint)


@rule((COMMIT,), "CS-COMMIT-11")
def _what_a_commit_reads(call: Call) -> None:
    """The pool has the draft rows and the intermediate states that a commit takes its state from."""
    pool = call.pool
    if pool.conv_streams and pool.layout == "window" and not pool.draft_rows:
        hint = "construct the pool with draft_token_num"
        raise MissingArgumentError(COMMIT, "pool", "a pool without draft rows", "draft rows", hint)
    if pool.ssm_state is not None and pool.intermediate_ssm is None:
        hint = "construct the pool with draft_token_num, or wrap the engine's intermediate states"
        raise MissingArgumentError(COMMIT, "pool", "SSM state without intermediate_ssm", "intermediate_ssm", hint)
    for name, storage in pool.states.items():
        missing = storage.refuse_commit()
        if missing:
            hint = "construct the pool with draft_token_num, or wrap the engine's own"
            raise MissingArgumentError(COMMIT, f"pool.states[{name!r}]", f"a state without {missing}", missing, hint)


@rule(SLOTS, "CS-CLEAR-02")
def _slot_lists(call: Call) -> None:
    """The pool is a `StatePool`; every list of slots is [M] int32 or int64 on its device, with one M."""
    kind(call.hook, "pool", call.pool, StatePool)
    count = None
    for name in ("cache_indices",) if call.hook == "clear_slots" else ("source_indices", "destination_indices"):
        value = getattr(call, name)
        tensor(call.hook, name, value, INDEX_DTYPES, (count,), call.pool.device)
        count = value.shape[0]


@rule((COMMIT, *SLOTS), "CS-COMMIT-11")
def _families_of_a_pool(call: Call) -> None:
    """Every state of the pool is of a family whose states the backend commits, clears and copies."""
    families = getattr(call, "families", None)
    for name, storage in call.pool.states.items():
        if families is not None and storage.family not in families:
            got = f"a state of contract {storage.family}, which this backend does not serve"
            hint = "take the hook from the reference, or give the state a pool of its own"
            raise UnsupportedError(call.hook, f"pool.states[{name!r}]", got, "a family that it serves", hint)
