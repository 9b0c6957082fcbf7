"""The rules that need device memory: slots, lengths and counts that lie in tensors. Each waits for the device, so they
run in checked mode alone (`HWBACKENDS_CHECKED=1`), behind the rules of `checks`, and never inside a capture."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from hwbackends.errors import ArgumentError, SlotError
from hwbackends.step.batch import UNIFORM_DRAFT_MODES, ForwardMode, StepBatch
from hwbackends.step.checks import COMMIT, CONV, PREPARE, VERIFY
from hwbackends.step.metadata import LAST_POSITION, StepMetadata
from hwbackends.step.pool import StatePool
from hwbackends.step.rulebook import Call, rule, rules_of


@functools.cache
def rules(hook: str) -> tuple[Any, ...]:
    """The rules of a hook that read device memory."""
    return rules_of(hook, reads=True)


# words that several rules share


def _live(batch: StepBatch, pool: StatePool) -> list[int]:
    """Rows of a batch that are live by their count, their request row and, in draft extend, their accepted count."""
    if batch.forward_mode is ForwardMode.IDLE:
        return []
    count = batch.num_reqs
    if batch.num_reqs_device is not None:
        count = min(count, int(batch.num_reqs_device.item()))
    requests = batch.req_pool_indices.tolist()
    accepted = [0] * len(requests)
    if batch.forward_mode is ForwardMode.DRAFT_EXTEND and batch.num_accept_tokens is not None:
        accepted = batch.num_accept_tokens.tolist()
    return [b for b in range(max(0, count)) if requests[b] >= 0 and accepted[b] >= 0]


def slots(hook: str, parameter: str, pool: StatePool, requests: Sequence[int]) -> list[int]:
    """Physical slots of request rows that are not negative."""
    wrong = [row for row in requests if row >= pool.request_rows]
    if wrong:
        raise SlotError(hook, parameter, f"request row {wrong[0]}", f"below {pool.request_rows}, the map's rows")
    mapping = pool.mamba_index_mapping.tolist()
    return physical(hook, parameter, pool, [mapping[row] for row in requests])


def physical(hook: str, parameter: str, pool: StatePool, given: Sequence[int]) -> list[int]:
    if pool.mamba_v2p_table is None:
        return list(given)
    table = pool.mamba_v2p_table.tolist()
    wrong = [slot for slot in given if slot >= len(table)]
    if wrong:
        raise SlotError(hook, parameter, f"virtual slot {wrong[0]}", f"below {len(table)}, the table's entries")
    return [table[slot] if slot > 0 else 0 for slot in given]


def below(hook: str, parameter: str, given: Iterable[int], count: int, what: str = "the pool's slots") -> None:
    wrong = [slot for slot in given if slot >= count]
    if wrong:
        raise SlotError(hook, parameter, f"slot {wrong[0]}", f"below {count}, {what}")


def once(hook: str, parameter: str, given: Sequence[int], what: str = "slot") -> None:
    seen: set[int] = set()
    for value in given:
        if value in seen:
            wanted = f"each live {what} once"
            raise SlotError(hook, parameter, f"{what} {value} in two live rows", wanted, "mark one padded")
        seen.add(value)


def _ints(value: Tensor | None, count: int, default: int) -> list[int]:
    return [default] * count if value is None else value.tolist()


def between(hook: str, parameter: str, given: Iterable[int], low: int, high: int, what: str) -> None:
    wrong = [value for value in given if not low <= value <= high]
    if wrong:
        raise ArgumentError(hook, parameter, wrong[0], f"{low}..{high}, {what}")


def apart(hook: str, writes: Sequence[tuple[int, int]], tracks: Sequence[tuple[int, int]],
           sources: Sequence[tuple[int, int]], names: tuple[str, str]) -> None:  # fmt: skip
    """Hold (row, slot) pairs of one step: a slot that one row writes is written by no other and read by no other."""
    owner = {slot: row for row, slot in writes}
    track_name, source_name = names
    once(hook, track_name, [slot for _, slot in tracks], "track slot")
    taken = [slot for _, slot in tracks if slot in owner]
    if taken:
        got = f"slot {taken[0]}, which the step writes for a request"
        raise SlotError(hook, track_name, got, "slots of their own")
    tracked = {slot for _, slot in tracks}
    for row, slot in sources:
        if owner.get(slot, row) != row or slot in tracked:
            got = f"slot {slot}, which another row writes"
            hint = "prepare the request that reads it in a step of its own"
            raise SlotError(hook, source_name, got, "slots that the step does not write", hint)


# preparation


def _batch_slots(call: Call) -> tuple[list[int], list[int]]:
    """Live rows of a batch, padded slots left out, and their physical slots."""
    batch, pool = call.batch, call.pool
    rows = _live(batch, pool)
    requests = batch.req_pool_indices.tolist()
    if batch.cache_indices is None:
        found = slots(call.hook, "batch.req_pool_indices", pool, [requests[b] for b in rows])
    else:
        given = batch.cache_indices.tolist()
        found = [given[b] for b in rows]
    kept = [(b, slot) for b, slot in zip(rows, found, strict=True) if slot > 0]
    return [b for b, _ in kept], [slot for _, slot in kept]


def _second(call: Call, name: str, rows: Sequence[int]) -> list[tuple[int, int]]:
    """(row, physical slot) of a second index of the batch, where it is positive."""
    value = getattr(call.batch, name)
    if value is None:
        return []
    given = value.tolist()
    kept = [(b, given[b]) for b in rows if given[b] > 0]
    if call.batch.cache_indices is not None:
        return kept
    found = physical(call.hook, f"batch.{name}", call.pool, [slot for _, slot in kept])
    return [(b, slot) for (b, _), slot in zip(kept, found, strict=True)]


def _tracking(call: Call, rows: Sequence[int]) -> list[int]:
    batch = call.batch
    if batch.mamba_track_mask is None or batch.forward_mode is ForwardMode.TARGET_VERIFY:
        return []
    mask = batch.mamba_track_mask.tolist()
    lengths = _ints(batch.mamba_track_seqlens, len(mask), 0)
    if batch.forward_mode is not ForwardMode.EXTEND:
        lengths = [0] * len(mask)
    return [b for b in rows if mask[b] and lengths[b] >= 0]


def _computed(batch: StepBatch) -> tuple[str, list[int]]:
    """n_b of every row, and the tensor that tells it."""
    count = batch.padded_reqs
    if batch.computed_lens is not None:
        return "batch.computed_lens", batch.computed_lens.tolist()
    if batch.forward_mode is ForwardMode.EXTEND:
        return "batch.extend_prefix_lens", _ints(batch.extend_prefix_lens, count, 0)
    lengths = _ints(batch.seq_lens, count, batch.tokens_per_req)
    return "batch.seq_lens", [length - batch.tokens_per_req for length in lengths]


@rule(PREPARE, "CS-PREP-02", reads=True)
def _slots_of_a_batch(call: Call) -> None:
    """Request rows, virtual slots and slots of live rows exist, and no slot stands in two live rows."""
    rows, found = _batch_slots(call)
    name = "batch.req_pool_indices" if call.batch.cache_indices is None else "batch.cache_indices"
    below(call.hook, name, found, call.pool.num_slots)
    once(call.hook, name, found)
    if call.batch.cache_indices is not None and call.pool.draft_rows:
        requests = call.batch.req_pool_indices.tolist()
        named = [requests[b] for b in rows]
        below(call.hook, "batch.req_pool_indices", named, call.pool.request_rows, "the map's rows")
        once(call.hook, "batch.req_pool_indices", named, "request row")


@rule(PREPARE, "CS-CONV-07", reads=True)
def _other_slots_of_a_batch(call: Call) -> None:
    """Source and track slots exist; a track slot is nobody else's; no slot that a row writes is another's source."""
    rows, found = _batch_slots(call)
    own = dict(zip(rows, found, strict=True))
    tracks = _second(call, "mamba_track_indices", _tracking(call, rows))
    sources = [(b, s) for b, s in _second(call, "source_indices", rows) if own[b] != s]
    for name, pairs in (("mamba_track_indices", tracks), ("source_indices", sources)):
        below(call.hook, f"batch.{name}", [slot for _, slot in pairs], call.pool.num_slots)
    lengths = _ints(call.batch.extend_seq_lens, call.batch.padded_reqs, 1)
    extend = call.batch.forward_mode is ForwardMode.EXTEND
    writes = [(b, slot) for b, slot in own.items() if not extend or lengths[b] > 0]
    positive = [(b, slot) for b, slot in tracks if slot > 0]
    apart(call.hook, writes, positive, sources, ("batch.mamba_track_indices", "batch.source_indices"))


@rule(("prepare_extend_metadata",), "CS-PREP-EXT-01", reads=True)
def _lengths_of_an_extend(call: Call) -> None:
    """`extend_seq_lens` before the live count are not negative, and their sum is at most `num_tokens`."""
    batch = call.batch
    count = batch.num_reqs
    if batch.num_reqs_device is not None:
        count = min(count, int(batch.num_reqs_device.item()))
    lengths = batch.extend_seq_lens.tolist()[: max(0, count)]
    between(call.hook, "batch.extend_seq_lens", lengths, 0, LAST_POSITION, "tokens of a request")
    if sum(lengths) > batch.num_tokens:
        wanted = f"at most {batch.num_tokens}, the step's num_tokens"
        raise ArgumentError(call.hook, "batch.extend_seq_lens", f"{sum(lengths)} tokens", wanted)


@rule(PREPARE, "CS-PREP-06", reads=True)
def _positions_of_a_batch(call: Call) -> None:
    """The computed lengths of live rows are not negative and at most `LAST_POSITION`."""
    rows, _ = _batch_slots(call)
    name, computed = _computed(call.batch)
    between(call.hook, name, [computed[b] for b in rows], 0, LAST_POSITION, "tokens before the step")


@rule(("prepare_draft_extend_metadata",), "CS-PREP-DEX-01", reads=True)
def _accepted_drafts(call: Call) -> None:
    """`num_accept_tokens` is at most `draft_token_num`."""
    rows, _ = _batch_slots(call)
    accepted, drafts = call.batch.num_accept_tokens.tolist(), call.batch.draft_token_num
    beyond = [accepted[b] for b in rows if accepted[b] > drafts]
    if beyond:
        raise ArgumentError(call.hook, "batch.num_accept_tokens", beyond[0], f"at most {drafts}, the drafts")


@rule(PREPARE, "CS-PREP-08", reads=True)
def _kept_tokens(call: Call) -> None:
    """On `lazy`, `num_accepted_tokens` of rows that read a history is 1 at least, and no more than the slot has rows
    for."""
    batch, pool = call.batch, call.pool
    if pool.layout != "lazy" or batch.num_accepted_tokens is None:
        return
    rows, _ = _batch_slots(call)
    kept, initial = batch.num_accepted_tokens.tolist(), _ints(batch.has_initial_state, batch.padded_reqs, True)
    if batch.forward_mode is ForwardMode.EXTEND and batch.has_initial_state is None:
        initial = [value > 0 for value in _computed(batch)[1]]
    elif batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND):
        initial = [True] * batch.padded_reqs
    most = pool.rows - (pool.width - 1) + 1
    given = [kept[b] for b in rows if initial[b]]
    between(call.hook, "batch.num_accepted_tokens", given, 1, most, "tokens that the step before kept")


# convs


def live_rows(metadata: StepMetadata) -> list[tuple[int, int]]:
    """(row, slot) of the live rows of metadata."""
    accepted = [0] * metadata.num_reqs
    if metadata.forward_mode is ForwardMode.DRAFT_EXTEND:
        accepted = metadata.num_accept_tokens.tolist()
    found = metadata.cache_indices.tolist()
    return [(b, slot) for b, slot in enumerate(found) if slot > 0 and accepted[b] >= 0]


@rule(CONV, "CS-CONV-07", reads=True)
def slots_of_the_metadata(call: Call) -> None:
    """Slots of live rows exist and stand in one row each; an idle step has none."""
    rows = live_rows(call.metadata)
    below(call.hook, "metadata.cache_indices", [slot for _, slot in rows], call.state.slots, "the state's slots")
    once(call.hook, "metadata.cache_indices", [slot for _, slot in rows])
    if rows and call.metadata.forward_mode is ForwardMode.IDLE:
        raise ArgumentError(call.hook, "metadata.cache_indices", f"slot {rows[0][1]} in IDLE", "no live row")


@rule(CONV, "CS-CONV-07", reads=True)
def other_slots_of_the_metadata(call: Call) -> None:
    """Source and track slots exist; sources differ from the row's slot in extend alone; no slot that a row writes is
    another's track slot or source."""
    metadata, hook = call.metadata, call.hook
    own = dict(live_rows(metadata))
    given = metadata.source_indices.tolist()
    sources = [(b, given[b]) for b in own if given[b] > 0 and given[b] != own[b]]
    if sources and metadata.forward_mode is not ForwardMode.EXTEND:
        wanted = "the row's own slot outside of EXTEND"
        raise ArgumentError(hook, "metadata.source_indices", f"slot {sources[0][1]}", wanted)
    tracks = []
    if metadata.tracks and metadata.forward_mode is not ForwardMode.TARGET_VERIFY:
        goals, counts = metadata.mamba_track_indices.tolist(), metadata.mamba_track_tokens.tolist()
        tracks = [(b, goals[b]) for b in own if goals[b] > 0 and counts[b] >= 0]
    for name, pairs in (("source_indices", sources), ("mamba_track_indices", tracks)):
        below(hook, f"metadata.{name}", [slot for _, slot in pairs], call.state.slots, "the state's slots")
    starts = metadata.query_start_loc.tolist()
    extend = metadata.forward_mode is ForwardMode.EXTEND
    writes = [(b, slot) for b, slot in own.items() if not extend or starts[b + 1] > starts[b]]
    apart(hook, writes, tracks, sources, ("metadata.mamba_track_indices", "metadata.source_indices"))


@rule(CONV, "CS-PREP-EXT-01", reads=True)
def offsets_of_the_metadata(call: Call) -> None:
    """`query_start_loc` begins with 0, never falls and ends at or before `num_tokens`; outside of extend and idle it
    counts the phase's tokens per request. `seq_idx` of an extend names the request of each token."""
    metadata = call.metadata
    starts = metadata.query_start_loc.tolist()
    steps = [b - a for a, b in itertools.pairwise(starts)]
    tokens = metadata.draft_token_num if metadata.forward_mode in UNIFORM_DRAFT_MODES else 1
    uniform = metadata.forward_mode not in (ForwardMode.EXTEND, ForwardMode.IDLE)
    if starts[0] or min(steps, default=0) < 0 or (uniform and any(step != tokens for step in steps)):
        raise ArgumentError(call.hook, "metadata.query_start_loc", starts[:8], "offsets from 0 on that never fall")
    if metadata.forward_mode is ForwardMode.EXTEND:
        if starts[-1] > metadata.num_tokens:
            wanted = f"at most {metadata.num_tokens}, the step's tokens"
            raise ArgumentError(call.hook, "metadata.query_start_loc", starts[-1], wanted)
        owners = [b for b, step in enumerate(steps) for _ in range(step)]
        owners += [-1] * (metadata.num_tokens - len(owners))
        if metadata.seq_idx.tolist() != owners:
            raise ArgumentError(call.hook, "metadata.seq_idx", "other owners", "those of query_start_loc")


@rule(CONV, "CS-PREP-06", reads=True)
def positions_of_the_metadata(call: Call) -> None:
    """Computed lengths of live rows are not negative; on `lazy` the history lies inside of the slot."""
    metadata, state = call.metadata, call.state
    rows = [b for b, _ in live_rows(metadata)]
    lengths = metadata.computed_lens.tolist()
    between(call.hook, "metadata.computed_lens", [lengths[b] for b in rows], 0, LAST_POSITION, "tokens before it")
    if state.layout == "lazy":
        offsets, most = metadata.history_offset.tolist(), state.rows - state.history
        between(call.hook, "metadata.history_offset", [offsets[b] for b in rows], 0, most, "rows of the slot")


@rule(VERIFY, "CS-VERIFY-03", reads=True)
def _draft_rows_of_a_verify(call: Call) -> None:
    """On `window`, draft rows exist and stand in one live row each."""
    if call.state.draft_rows is None:
        return
    given = call.metadata.draft_indices.tolist()
    rows = [given[b] for b, _ in live_rows(call.metadata) if given[b] >= 0]
    below(call.hook, "metadata.draft_indices", rows, call.state.draft_rows.shape[0], "the state's draft rows")
    once(call.hook, "metadata.draft_indices", rows, "draft row")


@rule(("conv_draft_extend",), "CS-DRAFT-01", reads=True)
def accepted_drafts_of_the_metadata(call: Call) -> None:
    """`num_accept_tokens` of the metadata is at most `draft_token_num`."""
    drafts = call.metadata.draft_token_num
    beyond = [value for value in call.metadata.num_accept_tokens.tolist() if value > drafts]
    if beyond:
        raise ArgumentError(call.hook, "metadata.num_accept_tokens", beyond[0], f"at most {drafts}, the drafts")


@rule(tuple(hook for hook in CONV if hook not in VERIFY), "CS-EXTEND-04", reads=True)
def track_windows(call: Call) -> None:
    """`mamba_track_tokens` is at most the tokens of its request."""
    metadata = call.metadata
    if not metadata.tracks:
        return
    counts, starts = metadata.mamba_track_tokens.tolist(), metadata.query_start_loc.tolist()
    beyond = [counts[b] for b, _ in live_rows(metadata) if counts[b] > starts[b + 1] - starts[b]]
    if beyond:
        raise ArgumentError(call.hook, "metadata.mamba_track_tokens", beyond[0], "at most the request's tokens")


# commit, clear, copy


def committed(call: Call) -> list[tuple[int, int]]:
    """(row, slot) of the rows of a commit that are not padded."""
    requests = call.req_pool_indices.tolist()
    rows = [b for b, request in enumerate(requests) if request >= 0]
    found = slots(COMMIT, "req_pool_indices", call.pool, [requests[b] for b in rows])
    return [(b, slot) for b, slot in zip(rows, found, strict=True) if slot > 0]


@rule((COMMIT,), "CS-COMMIT-07", reads=True)
def _slots_of_a_commit(call: Call) -> None:
    """Request rows, virtual slots and slots exist, and no slot stands in two rows."""
    found = [slot for _, slot in committed(call)]
    below(COMMIT, "req_pool_indices", found, call.pool.num_slots)
    once(COMMIT, "req_pool_indices", found)


@rule((COMMIT,), "CS-COMMIT-01", reads=True)
def _accepted_steps(call: Call) -> None:
    """Accepted and tracked steps of live rows are below `draft_token_num`."""
    drafts = max(1, call.pool.draft_token_num)
    for name in ("last_correct_step_indices", "mamba_steps_to_track"):
        steps = _ints(getattr(call, name), call.req_pool_indices.shape[0], -1)
        beyond = [steps[b] for b, _ in committed(call) if steps[b] >= drafts]
        if beyond:
            raise ArgumentError(COMMIT, name, beyond[0], f"below {drafts}, the drafts of a verify step")


@rule((COMMIT,), "CS-COMMIT-04", reads=True)
def _track_slots_of_a_commit(call: Call) -> None:
    """Track slots of rows that track exist, once each, and are no live row's slot; on `ring` their lengths are not
    negative."""
    if call.mamba_track_indices is None:
        return
    rows = committed(call)
    steps, given = call.mamba_steps_to_track.tolist(), call.mamba_track_indices.tolist()
    kept = [b for b, _ in rows if steps[b] >= 0 and given[b] > 0]
    found = physical(COMMIT, "mamba_track_indices", call.pool, [given[b] for b in kept])
    below(COMMIT, "mamba_track_indices", found, call.pool.num_slots)
    tracks = [(b, slot) for b, slot in zip(kept, found, strict=True) if slot > 0]
    apart(COMMIT, rows, tracks, [], ("mamba_track_indices", ""))
    if call.pool.needs_positions:
        lengths = call.computed_lens.tolist()
        between(COMMIT, "computed_lens", [lengths[b] for b in kept], 0, LAST_POSITION, "tokens before the verify")


@rule((COMMIT,), "CS-COMMIT-03", reads=True)
def _draft_rows_of_a_commit(call: Call) -> None:
    """Draft rows of live rows, given or the request rows, exist in `draft_rows` and in `intermediate_ssm`."""
    pool = call.pool
    given = (call.req_pool_indices if call.draft_indices is None else call.draft_indices).tolist()
    rows = [given[b] for b, _ in committed(call)]
    saved = pool.draft_storages()[0].shape[1] if pool.draft_rows else None
    middle = None if pool.intermediate_ssm is None else pool.intermediate_ssm.shape[1]
    name = "req_pool_indices" if call.draft_indices is None else "draft_indices"
    for count, what in ((saved, "the pool's draft rows"), (middle, "the rows of intermediate_ssm")):
        if count is not None:
            below(COMMIT, name, rows, count, what)


@rule(("clear_slots",), "CS-CLEAR-01", reads=True)
def _slots_to_clear(call: Call) -> None:
    """Slots exist and are named once."""
    found = [slot for slot in call.cache_indices.tolist() if slot > 0]
    below(call.hook, "cache_indices", found, call.pool.num_slots)
    once(call.hook, "cache_indices", found)


@rule(("copy_slots",), "CS-COPY-01", reads=True)
def _slots_to_copy(call: Call) -> None:
    """Slots of pairs that are copied exist; a destination is named once and is no pair's source."""
    given = zip(call.source_indices.tolist(), call.destination_indices.tolist(), strict=True)
    pairs = [(source, destination) for source, destination in given if source > 0 and destination > 0]
    below(call.hook, "source_indices", [source for source, _ in pairs], call.pool.num_slots)
    found = [destination for _, destination in pairs]
    below(call.hook, "destination_indices", found, call.pool.num_slots)
    once(call.hook, "destination_indices", found)
    both = {source for source, _ in pairs} & set(found)
    if both:
        raise SlotError(call.hook, "destination_indices", sorted(both), "slots that are not also a source")
