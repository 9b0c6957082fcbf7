"""Deliberately wrong backends: the reference with one fault each, of a kind that was seen in real engines or that a
clause is there for. The kit names one as `tests.conformance.mutants:plugins.NAME`; `table.yaml` says what it must turn
red."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hwbackends.contract.hookspecs import ProbeResult, hookimpl
from hwbackends.conv.state import ConvState
from hwbackends.errors import HwBackendsError
from hwbackends.reference import plugin as reference
from hwbackends.step.metadata import StepMetadata
from hwbackends.step.pool import StatePool

Hook = Callable[..., Any]
PREPARES = (
    "prepare_decode_metadata", "prepare_extend_metadata", "prepare_target_verify_metadata",
    "prepare_draft_extend_metadata",
)  # fmt: skip
CONVS = ("conv_decode", "conv_extend", "conv_target_verify", "conv_draft_extend")
COMMIT = "update_mamba_state_after_mtp_verify"
FUSED = ("fused_decode_add_rmsnorm", "fused_target_verify_add_rmsnorm")
SSM = ("ssm_decode", "ssm_extend", "ssm_target_verify", "ssm_draft_extend")
MATERIALIZE = "materialize_slots"
HOOKS = (*PREPARES, *CONVS, COMMIT, "clear_slots", "copy_slots", "probe", *FUSED, *SSM, MATERIALIZE)

MUTANTS: dict[str, Callable[[], dict[str, Hook]]] = {}


class Call:
    """One call of a hook of the reference: its arguments as attributes, and `run` to make it, with changes."""

    def __init__(self, original: Hook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(original).bind(*args, **kwargs)
        bound.apply_defaults()
        self._original, self.arguments = original, dict(bound.arguments)
        self.hook_name = getattr(original, "__name__", "")

    def __getattr__(self, name: str) -> Any:
        return self.arguments[name]

    def run(self, **changes: Any) -> Any:
        """The reference's own result."""
        return self._original(**{**self.arguments, **changes})

    def with_metadata(self, **changes: Any) -> Any:
        """`run` over changed metadata."""
        return self.run(metadata=replace(self.metadata, **changes))

    def spare_state(self) -> ConvState:
        """A copy of the state, to be thrown away."""
        drafts = None if self.state.draft_rows is None else self.state.draft_rows.clone()
        return ConvState(self.state.tensor.clone(), self.state.layout, self.state.width, drafts)


def mutant(*hooks: str) -> Callable[[Callable[[Call], Any]], Callable[[Call], Any]]:
    """Register `fault(call)` in the place of each of `hooks`."""

    def register(fault: Callable[[Call], Any]) -> Callable[[Call], Any]:
        MUTANTS[fault.__name__] = lambda: {hook: wrap(getattr(reference, hook), fault) for hook in hooks}
        return fault

    return register


def wrap(original: Hook, fault: Callable[[Call], Any]) -> Hook:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return fault(Call(original, args, kwargs))

    call.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # a wrapper is not looked through
    return call


class _Plugins:
    """One attribute per mutant: its plugin."""

    def __getattr__(self, name: str) -> SimpleNamespace:
        if name not in all_mutants():
            raise AttributeError(name)
        return SimpleNamespace(**{hook: getattr(reference, hook) for hook in HOOKS} | MUTANTS[name]())


plugins = _Plugins()


def all_mutants() -> dict[str, Callable[[], dict[str, Hook]]]:
    """Every mutant of the four files."""
    for part in ("sizes", "memory", "ssm"):
        importlib.import_module(f"tests.conformance.mutants_{part}")
    return MUTANTS


def changed_hooks() -> dict[str, list[str]]:
    """The hooks that each mutant changes."""
    return {name: sorted(make()) for name, make in all_mutants().items()}


def live(metadata: StepMetadata) -> Tensor:
    """[B] whether a row is live."""
    return metadata.cache_indices > 0


def live_tokens(metadata: StepMetadata, rows: int) -> Tensor:
    """[rows] whether a row of x belongs to a live request."""
    found = torch.zeros(rows, dtype=torch.bool)
    for slot, start, end in spans(metadata):
        found[start:end] = slot > 0
    return found


def spans(metadata: StepMetadata) -> list[tuple[int, int, int]]:
    """(slot, first token, last token + 1) of each request, padded ones too."""
    ends = metadata.query_start_loc.tolist()
    return list(zip(metadata.cache_indices.tolist(), ends[:-1], ends[1:], strict=True))


# --- reading ---


@mutant("conv_extend", "conv_draft_extend")
def reads_a_dirty_slot(c: Call) -> Tensor:
    return c.with_metadata(has_initial_state=live(c.metadata))


@mutant("conv_extend", "conv_draft_extend")
def multiplies_by_the_flag(c: Call) -> Tensor:
    for slot, flag in zip(c.metadata.cache_indices.tolist(), c.metadata.has_initial_state.tolist(), strict=True):
        if slot > 0 and not flag:
            c.state.tensor[slot] *= 0  # NaN stays NaN
    return c.with_metadata(has_initial_state=live(c.metadata))


@mutant(*CONVS)
def reads_after_writing(c: Call) -> Tensor:
    y = c.run()
    return y.copy_(c.run(state=c.spare_state(), out=None))


@mutant("conv_extend")
def leaks_across_requests(c: Call) -> Tensor:
    flags, state = c.metadata.has_initial_state.clone(), c.state
    for b, (slot, start, end) in enumerate(spans(c.metadata)):
        if slot > 0 and end > start >= state.history and not flags[b] and state.layout != "ring":
            state.tensor[slot, : state.history] = c.x[start - state.history : start].to(state.tensor.dtype)
            flags[b] = True
    return c.with_metadata(has_initial_state=flags)


@mutant(*CONVS)
def ignores_strides(c: Call) -> Tensor:
    x = c.x.as_strided(c.x.shape, (c.x.shape[-1], 1), c.x.storage_offset()) if c.x.dim() == 2 else c.x
    return c.run(x=x)


@mutant(*CONVS)
def has_32_bit_offsets(c: Call) -> Tensor:
    tensor = c.state.tensor
    if max((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) < 2**31:
        return c.run()
    return c.run(state=ConvState(tensor[:1].expand(tensor.shape).clone(), c.state.layout, c.state.width))


@mutant("conv_extend")
def starts_every_chunk_afresh(c: Call) -> Tensor:
    return c.with_metadata(has_initial_state=c.metadata.has_initial_state & False)


# --- numbers ---


@mutant(*CONVS)
def drops_the_last_tap(c: Call) -> Tensor:
    short = c.weight.clone()
    short[:, :1] = 0
    return c.run(weight=short)


@mutant(*CONVS)
def swaps_axes(c: Call) -> Tensor:
    return c.run(x=c.x.t().reshape(c.x.shape) if c.x.dim() == 2 else c.x)


@mutant(*CONVS)
def rounds_products_to_bfloat16(c: Call) -> Tensor:
    before, y = c.spare_state(), c.run()
    if c.activation is not None or c.residual or c.bias is not None:
        return y
    total = torch.zeros(y.shape)
    for tap in range(c.weight.shape[1]):
        only = torch.zeros_like(c.weight)
        only[:, tap] = c.weight[:, tap]
        spare = ConvState(before.tensor.clone(), before.layout, before.width, before.draft_rows)
        total += c.run(weight=only, state=spare, out=None).bfloat16()
    return y.copy_(total)


@mutant(*CONVS)
def detours_through_float16(c: Call) -> Tensor:
    y = c.run()
    return y.copy_(y.half())


@mutant("conv_target_verify")
def verify_rounds_down(c: Call) -> Tensor:
    y = c.run()
    return y.copy_(torch.nextafter(y, torch.zeros((), dtype=y.dtype))) if y.dtype == torch.float32 else y


@mutant(*CONVS)
def adds_the_residual_before_the_activation(c: Call) -> Tensor:
    if not (c.activation and c.residual):
        return c.run()
    y = c.run(activation=None)
    return y.copy_(torch.nn.functional.silu(y.float()))


_TUNED: list[bool] = []


@mutant(*CONVS)
def tunes_on_the_first_call(c: Call) -> Tensor:
    y = c.run()
    if not _TUNED and y.dtype == torch.bfloat16:
        _TUNED.append(True)
        y *= 1.01
    return y


@mutant(*CONVS)
def rounds_x_to_the_states_dtype(c: Call) -> Tensor:
    return c.run(x=c.x.to(c.state.tensor.dtype).to(c.x.dtype) + (c.x.dtype != c.state.tensor.dtype))


# --- writing ---


@mutant("conv_decode")
def never_moves_the_window(c: Call) -> Tensor:
    return c.run(state=c.spare_state())


@mutant(*CONVS)
def writes_a_neighbours_slot(c: Call) -> Tensor:
    y, mine = c.run(), set(c.metadata.cache_indices.tolist())
    free = [slot for slot in range(1, c.state.slots - 1) if slot not in mine]
    c.state.tensor[free[0]] = 3
    return y


@mutant("conv_decode", "conv_extend")
def wraps_minus_one(c: Call) -> Tensor:
    y = c.run()
    if bool((c.metadata.cache_indices == -1).any()) and c.x.shape[0]:
        c.state.tensor[-1, -1] = c.x[0].to(c.state.tensor.dtype)
    return y


@mutant(*CONVS)
def leaves_padded_outputs_unwritten(c: Call) -> Tensor:
    before = torch.full_like(c.x, torch.nan) if c.out is None else c.out.clone()
    y = c.run()
    padded = ~live_tokens(c.metadata, c.x.shape[0])
    y[padded] = before[padded]
    return y


@mutant("conv_extend")
def overwrites_the_source_slot(c: Call) -> Tensor:
    y = c.run()
    for source, slot in zip(c.metadata.source_indices.tolist(), c.metadata.cache_indices.tolist(), strict=True):
        if slot > 0 and source > 0:
            c.state.tensor[source] = c.state.tensor[slot]
    return y


@mutant(*CONVS)
def keeps_rows_with_their_bias(c: Call) -> Tensor:
    y = c.run(state=c.spare_state())
    c.run(x=c.x if c.bias is None else c.x + c.bias, out=None)
    return y


@mutant("conv_extend", "conv_draft_extend")
def leaves_zero_rows_out(c: Call) -> Tensor:
    before, y = c.state.tensor.clone(), c.run()
    for slot in c.metadata.cache_indices[live(c.metadata) & ~c.metadata.has_initial_state].tolist():
        zero = (c.state.tensor[slot] == 0).all(-1)
        c.state.tensor[slot, zero] = before[slot, zero]
    return y


@mutant("conv_extend")
def shifts_an_empty_request(c: Call) -> Tensor:
    y = c.run()
    for slot, start, end in spans(c.metadata):
        if slot > 0 and start == end:
            c.state.tensor[slot] = 0
    return y


@mutant("conv_extend")
def forgets_history_of_short_chunks(c: Call) -> Tensor:
    y, history = c.run(), c.state.history
    for (slot, start, end), flag in zip(spans(c.metadata), c.metadata.has_initial_state.tolist(), strict=True):
        if slot > 0 and flag and 0 < end - start < history and c.state.layout == "window":
            c.state.tensor[slot, : history - (end - start)] = 0
    return y


@mutant("conv_target_verify")
def commits_in_verify(c: Call) -> Tensor:
    y = c.run()
    for slot, length in zip(c.metadata.cache_indices.tolist(), c.metadata.computed_lens.tolist(), strict=True):
        if slot > 0:
            c.state.tensor[slot, (length - 1) % c.state.rows if c.state.layout == "ring" else 0] = 5
    return y


@mutant("conv_target_verify")
def saves_one_draft_row_too_few(c: Call) -> Tensor:
    target = c.state.tensor if c.state.draft_rows is None else c.state.draft_rows
    before, y = target.clone(), c.run()
    if c.state.layout != "ring":
        target[:, -1] = before[:, -1]
        return y
    for slot, length in zip(c.metadata.cache_indices.tolist(), c.metadata.computed_lens.tolist(), strict=True):
        if slot > 0:
            row = (length + c.metadata.draft_token_num - 1) % c.state.rows
            target[slot, row] = before[slot, row]
    return y


@mutant("conv_decode", "conv_target_verify")
def moves_a_head(c: Call) -> Tensor:
    head = c.state.cache["head"] = int(c.state.cache.get("head", -1)) + 1  # type: ignore[call-overload]
    if c.state.draft_rows is not None:
        c.state.tensor[c.metadata.cache_indices.clamp(min=1)] *= 1 + head
    return c.with_metadata(computed_lens=(c.metadata.computed_lens + head * live(c.metadata).int()).int())


@mutant("conv_decode")
def advances_idle_slots(c: Call) -> Tensor:
    y = c.run()
    if not bool(live(c.metadata).any()):
        c.state.tensor[0] = 0
    return y


@mutant("conv_decode", "conv_extend", "conv_draft_extend")
def tracks_one_token_short(c: Call) -> Tensor:
    tokens = c.metadata.mamba_track_tokens
    return c.with_metadata(mamba_track_tokens=torch.where(tokens > 0, tokens - 1, tokens))


@mutant("conv_draft_extend")
def keeps_all_drafts(c: Call) -> Tensor:
    counts = c.metadata.num_accept_tokens
    return c.with_metadata(num_accept_tokens=torch.where(counts >= 0, c.metadata.draft_token_num, counts).int())


@mutant("conv_draft_extend")
def writes_for_a_negative_count(c: Call) -> Tensor:
    y = c.run()
    if bool((c.metadata.num_accept_tokens < 0).any()) and c.state.draft_rows is not None:
        c.state.draft_rows[2] = 1
    c.state.tensor[0] = 0
    return y


# --- preparation ---


@mutant("prepare_decode_metadata")
def advances_state_in_preparation(c: Call) -> None:
    c.run()
    for tensor in c.pool.conv_streams.values():
        tensor.copy_(tensor.roll(1, dims=2))


@mutant("prepare_draft_extend_metadata")
def takes_negative_counts_for_live(c: Call) -> None:
    counts = c.batch.num_accept_tokens
    c.run(batch=replace(c.batch, num_accept_tokens=None if counts is None else counts.clamp(min=0)))


@mutant(*PREPARES)
def reads_rows_behind_the_live_ones(c: Call) -> None:
    if 0 <= c.batch.num_reqs <= c.batch.padded_reqs:
        c.run(batch=replace(c.batch, num_reqs=c.batch.padded_reqs, num_reqs_device=None))
    else:
        c.run()


@mutant(*PREPARES)
def takes_request_rows_for_slots(c: Call) -> None:
    c.run()
    rows = c.batch.req_pool_indices.to(c.out.cache_indices.dtype).clamp(max=10)
    c.out.cache_indices.copy_(torch.where(live(c.out), rows, c.out.cache_indices))


@mutant(*PREPARES)
def ignores_the_table(c: Call) -> None:
    table, c.pool.mamba_v2p_table = c.pool.mamba_v2p_table, None
    try:
        c.run()
    finally:
        c.pool.mamba_v2p_table = table


@mutant(*PREPARES)
def leaves_old_track_slots(c: Call) -> None:
    slots, tokens = c.out.mamba_track_indices.clone(), c.out.mamba_track_tokens.clone()
    c.run()
    if c.batch.mamba_track_mask is None:
        c.out.mamba_track_indices.copy_(slots)
        c.out.mamba_track_tokens.copy_(tokens)


@mutant(*PREPARES)
def counts_this_step_in_the_lengths(c: Call) -> None:
    c.run()
    c.out.computed_lens.add_(live(c.out).int())


@mutant(*PREPARES)
def forgets_the_history_offset(c: Call) -> None:
    c.run()
    c.out.history_offset.zero_()


@mutant(*PREPARES)
def refuses_int32(c: Call) -> None:
    if c.batch.req_pool_indices.dtype == torch.int32:
        raise HwBackendsError("int64 wanted")
    c.run()


@mutant(*PREPARES)
def bounds_the_rows_of_a_step(c: Call) -> None:
    c.run()
    for tensor in c.out.tensors().values():
        tensor[2048:] = 0


@mutant(*PREPARES)
def synchronises(c: Call) -> None:
    c.run()
    c.out.cache_indices.max().item()


@mutant("prepare_target_verify_metadata", "prepare_draft_extend_metadata")
def takes_trees_for_chains(c: Call) -> None:
    c.run(batch=replace(c.batch, topk=1))


@mutant("prepare_extend_metadata")
def truncates_negative_quotients(c: Call) -> None:
    c.run()
    batch, out = c.batch, c.out
    if batch.mamba_track_seqlens is None or batch.mamba_track_mask is None:
        return
    distance = batch.mamba_track_seqlens - out.computed_lens
    truncated = (distance < 0) & (distance > -c.pool.track_interval) & (batch.mamba_track_seqlens >= 0)
    out.mamba_track_tokens[truncated & batch.mamba_track_mask & live(out)] = 0


@mutant("prepare_extend_metadata")
def names_an_owner_for_every_token(c: Call) -> None:
    c.run()
    c.out.seq_idx[int(c.out.query_start_loc[-1]) :] = 0


@mutant("prepare_extend_metadata")
def takes_every_prefix_for_filled(c: Call) -> None:
    c.run()
    c.out.has_initial_state.copy_(live(c.out))


@mutant("prepare_target_verify_metadata", "prepare_draft_extend_metadata")
def keeps_drafts_by_batch_row(c: Call) -> None:
    c.run()
    rows = torch.arange(c.out.num_reqs, dtype=torch.int32)
    c.out.draft_indices.copy_(torch.where(c.out.draft_indices >= 0, rows, c.out.draft_indices))


@mutant("prepare_draft_extend_metadata")
def ignores_the_fresh_flag(c: Call) -> None:
    c.run()
    c.out.has_initial_state.copy_(live(c.out))


@mutant("prepare_draft_extend_metadata")
def tracks_short_of_the_boundary(c: Call) -> None:
    c.run()
    tokens = c.out.mamba_track_tokens
    tokens.copy_(torch.where(tokens > 0, tokens - 1, tokens))


@mutant("prepare_decode_metadata")
def tracks_every_row(c: Call) -> None:
    c.run()
    if c.batch.mamba_track_mask is not None:
        c.out.mamba_track_tokens.copy_(torch.where(live(c.out), 1, -1))


# --- graphs and errors ---

_KEPT: list[Tensor] = []


@mutant(*CONVS)
def allocates_in_a_graph(c: Call) -> Tensor:
    _KEPT.append(torch.zeros(3) + 1)
    return c.run()


@mutant(*CONVS)
def bakes_warm_up_slots(c: Call) -> Tensor:
    return c.with_metadata(cache_indices=c.metadata.cache.setdefault("slots", c.metadata.cache_indices.clone()))


@mutant(*CONVS)
def swallows_an_error(c: Call) -> Tensor:
    try:
        return c.run()
    except HwBackendsError:
        return torch.zeros(c.x.shape)


@mutant(*PREPARES)
def swallows_a_bad_batch(c: Call) -> None:
    try:
        c.run()
    except HwBackendsError as error:
        if "topk" in str(error):
            raise


@mutant("conv_extend")
def crashes(c: Call) -> Tensor:
    if c.state.layout == "lazy":
        os.kill(os.getpid(), signal.SIGSEGV)
    result: Tensor = c.run()
    return result


@mutant("clear_slots")
def hangs(c: Call) -> None:
    c.run()
    if c.pool.layout == "lazy":
        time.sleep(600)


# --- commit, clear, copy ---


@mutant(COMMIT)
def accepts_one_token_less(c: Call) -> None:
    steps = c.last_correct_step_indices
    c.run(last_correct_step_indices=torch.where(steps > 0, steps - 1, steps))


def _commit_from_the_last_metadata() -> dict[str, Hook]:
    last: list[Tensor] = []

    def remember(c: Call) -> None:
        c.run()
        last[:] = [c.batch.req_pool_indices]

    def commit(c: Call) -> None:
        rows = c.req_pool_indices
        if last and isinstance(rows, Tensor) and last[0].shape[0] >= rows.shape[0]:
            rows = last[0][: rows.shape[0]]
        c.run(req_pool_indices=rows)

    wrapped = {hook: wrap(getattr(reference, hook), remember) for hook in PREPARES}
    return {**wrapped, COMMIT: wrap(reference.update_mamba_state_after_mtp_verify, commit)}


MUTANTS["commits_from_the_last_metadata"] = _commit_from_the_last_metadata


def _omits_parameters() -> dict[str, Hook]:
    @hookimpl
    def update_mamba_state_after_mtp_verify(
        pool: StatePool,
        last_correct_step_indices: Tensor,
        mamba_track_indices: Tensor | None = None,
        mamba_steps_to_track: Tensor | None = None,
    ) -> None:
        """The fault that started it all: `req_pool_indices` is not there."""

    return {COMMIT: update_mamba_state_after_mtp_verify}


MUTANTS["omits_parameters"] = _omits_parameters


@mutant(COMMIT)
def commits_the_first_layer_only(c: Call) -> None:
    kept = {name: tensor[1:].clone() for name, tensor in c.pool.conv_streams.items()}
    c.run()
    for name, tensor in c.pool.conv_streams.items():
        tensor[1:] = kept[name]


@mutant(COMMIT)
def forgets_the_ssm_state(c: Call) -> None:
    ssm, c.pool.ssm_state = c.pool.ssm_state, None
    try:
        c.run()
    finally:
        c.pool.ssm_state = ssm


@mutant(COMMIT)
def tracks_the_step_before(c: Call) -> None:
    steps = c.mamba_steps_to_track
    c.run(mamba_steps_to_track=None if steps is None else torch.where(steps > 0, steps - 1, steps))


@mutant(COMMIT)
def reads_the_slot_as_history(c: Call) -> None:
    if c.pool.layout == "window" and c.req_pool_indices is not None and c.pool.mamba_v2p_table is None:
        history = c.pool.width - 1
        for row in c.req_pool_indices.flatten().long().tolist():
            slot = int(c.pool.mamba_index_mapping[row]) if row >= 0 else 0
            for name, saved in c.pool.draft_rows.items():
                saved[:, row, :history] = c.pool.conv_streams[name][:, slot] if slot > 0 else saved[:, row, :history]
    c.run()


@mutant(COMMIT)
def copies_windows_on_a_ring(c: Call) -> None:
    c.run()
    if c.pool.layout != "window" and c.req_pool_indices is not None:
        for tensor in c.pool.conv_streams.values():
            tensor[:, 1] *= 2


@mutant(COMMIT)
def wraps_padded_commits(c: Call) -> None:
    c.run()
    if bool((c.req_pool_indices < 0).any()):
        for tensor in c.pool.conv_streams.values():
            tensor[:, -1] = 0


@mutant(COMMIT)
def synchronises_in_the_commit(c: Call) -> None:
    c.run()
    c.req_pool_indices.max().item()


@mutant(COMMIT)
def guesses_the_requests(c: Call) -> None:
    rows = c.req_pool_indices
    c.run(req_pool_indices=torch.arange(c.last_correct_step_indices.shape[0]) if rows is None else rows)


@mutant(COMMIT)
def swallows_a_bad_commit(c: Call) -> None:
    try:
        c.run()
    except HwBackendsError as error:
        if "req_pool_indices: got None" in str(error):
            raise


@mutant("clear_slots")
def clears_slot_zero(c: Call) -> None:
    c.run()
    for tensor in c.pool.conv_streams.values():
        tensor[:, 0] = 0


@mutant("copy_slots")
def copies_one_layer(c: Call) -> None:
    kept = {name: tensor[1:].clone() for name, tensor in c.pool.conv_streams.items()}
    c.run()
    for name, tensor in c.pool.conv_streams.items():
        tensor[1:] = kept[name]


@mutant("clear_slots", "copy_slots")
def synchronises_on_slots(c: Call) -> None:
    c.run()
    c.pool.conv_streams["k"].sum().item()


# --- the rest ---


@mutant(*FUSED)
def norms_without_eps(c: Call) -> Tensor:
    return c.run(eps=0.0)


@mutant(*FUSED)
def adds_padded_rows_to_the_stream(c: Call) -> Tensor:
    y = c.run()
    c.residual_stream[~live_tokens(c.metadata, c.x.shape[0])] += 1
    return y


@mutant("fused_target_verify_add_rmsnorm")
def rounds_the_verify_form_twice(c: Call) -> Tensor:
    return c.run().mul_(1 + 2**-7)


@mutant("probe")
def gives_no_reason(c: Call) -> ProbeResult:
    return ProbeResult(False, "", "")


_ASKED: list[int] = []


@mutant("probe")
def answers_differently(c: Call) -> ProbeResult:
    _ASKED.append(1)
    return ProbeResult(True, f"asked {len(_ASKED)} times", "")
