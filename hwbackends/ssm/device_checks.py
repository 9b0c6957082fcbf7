"""What checked mode asks of SSM hooks besides `ssm.checks`: slots, request rows, lengths and counts that lie in device
memory. As `step.device_checks`, whose rules on prepared metadata hold here too."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from hwbackends.errors import ArgumentError, SlotError
from hwbackends.ssm.checks import DRAFTS, MATERIALIZE, SSM
from hwbackends.ssm.state import SSMStorage
from hwbackends.step import device_checks as step
from hwbackends.step.batch import ForwardMode
from hwbackends.step.checks import COMMIT
from hwbackends.step.metadata import LAST_POSITION
from hwbackends.step.pool import StatePool
from hwbackends.step.rulebook import Call, rule


@rule(SSM, "CS-SSM-08", reads=True)
def _slots_of_an_ssm(call: Call) -> None:
    """Slots of live rows exist and stand in one row each; a slot that a row writes is no other's source, no track."""
    step.slots_of_the_metadata(call)
    step.other_slots_of_the_metadata(call)


@rule(SSM, "CS-SSM-EXT-05", reads=True)
def _tokens_of_an_ssm(call: Call) -> None:
    """Offsets and owners of tokens are those of the phase, and computed lengths are not negative."""
    step.offsets_of_the_metadata(call)
    step.positions_of_the_metadata(call)


@rule(SSM, "CS-SSM-VER-03", reads=True)
def _request_rows_of_an_ssm(call: Call) -> None:
    """Request rows of live rows exist in the ring or in the intermediate states, and stand in one row each."""
    state = call.state
    held = state.ring_u if state.layout == "ring" else state.intermediate
    if held is None or (state.layout != "ring" and call.hook != "ssm_target_verify"):
        return
    given = call.metadata.draft_indices.tolist()
    found = [given[b] for b, _ in step.live_rows(call.metadata) if given[b] >= 0]
    step.below(call.hook, "metadata.draft_indices", found, held.shape[0], "the state's request rows")
    step.once(call.hook, "metadata.draft_indices", found, "request row")


@rule(SSM, "CS-SSM-11", reads=True)
def _lengths_of_a_ring(call: Call) -> None:
    """On `ring` the checkpoint that a row starts from stands at or before its position, and the ring still holds every
    token behind it."""
    metadata, state = call.metadata, call.state
    if state.state_lens is None:
        return
    positions, initial = metadata.computed_lens.tolist(), metadata.has_initial_state.tolist()
    sources = metadata.source_indices.tolist()
    ahead = 1 if metadata.forward_mode is ForwardMode.DECODE else 0  # a decode that has run already
    for b, _ in step.live_rows(metadata):
        if initial[b] and positions[b] and 0 < sources[b] < state.slots:
            _reaches(call.hook, "state.state_lens", state.state_lens[sources[b]], positions[b], state.ring_rows, ahead)


def _reaches(hook: str, parameter: str, lens: Tensor, position: int, rows: int, ahead: int) -> None:
    low, high = int(lens.min()), int(lens.max())
    if high > position + ahead or position - low > rows:
        got = f"a checkpoint at {low}..{high} for position {position}"
        hint = "materialize a request before its slot is copied, and before its ring row is given away"
        raise ArgumentError(hook, parameter, got, f"at most {rows} tokens before it, the ring's rows", hint)


@rule(("ssm_draft_extend",), "CS-SSM-DEX-01", reads=True)
def _accepted_drafts_of_an_ssm(call: Call) -> None:
    """`num_accept_tokens` is at most `draft_token_num`."""
    step.accepted_drafts_of_the_metadata(call)


@rule(tuple(hook for hook in SSM if hook != "ssm_target_verify"), "CS-SSM-EXT-04", reads=True)
def _snapshots_of_an_ssm(call: Call) -> None:
    """`mamba_track_tokens` is at most the tokens of its request."""
    step.track_windows(call)


@rule(DRAFTS[:1], "CS-SSM-VER-06", reads=True)
def _parents_of_a_tree(call: Call) -> None:
    """A draft's parent is negative, or one of the drafts before it."""
    if call.retrieve_parent_token is None:
        return
    parents = call.retrieve_parent_token.tolist()
    for b, _ in step.live_rows(call.metadata):
        late = [(t, parent) for t, parent in enumerate(parents[b]) if parent >= t]
        if late:
            got = f"draft {late[0][1]} as the parent of draft {late[0][0]}"
            raise ArgumentError(call.hook, "retrieve_parent_token", got, "a draft before it, or a negative number")


def _storages(pool: StatePool) -> Iterable[SSMStorage]:
    return [storage for storage in pool.states.values() if isinstance(storage, SSMStorage)]


@rule((MATERIALIZE,), "CS-SSM-MAT-03", reads=True)
def _slots_of_a_materialization(call: Call) -> None:
    """Request rows, slots and destinations of rows that are not padded exist; a destination is named once and is no
    other row's slot; positions are at most `LAST_POSITION` and, on `ring`, within the ring's reach."""
    pool, requests, positions = call.pool, call.req_pool_indices.tolist(), call.computed_lens.tolist()
    rows = [b for b, request in enumerate(requests) if request >= 0 and positions[b] >= 0]
    own = dict(zip(rows, step.slots(MATERIALIZE, "req_pool_indices", pool, [requests[b] for b in rows]), strict=True))
    own = {b: slot for b, slot in own.items() if slot > 0}
    step.below(MATERIALIZE, "req_pool_indices", own.values(), pool.num_slots)
    step.between(MATERIALIZE, "computed_lens", [positions[b] for b in own], 0, LAST_POSITION, "tokens")
    goals = own
    if call.destination_indices is not None:
        given = call.destination_indices.tolist()
        kept = [b for b in own if given[b] > 0]
        found = step.physical(MATERIALIZE, "destination_indices", pool, [given[b] for b in kept])
        goals = {b: slot for b, slot in zip(kept, found, strict=True) if slot > 0}
    step.below(MATERIALIZE, "destination_indices", goals.values(), pool.num_slots)
    step.once(MATERIALIZE, "destination_indices", list(goals.values()))
    taken = [slot for b, slot in goals.items() if any(slot == other and c != b for c, other in own.items())]
    if taken:
        got = f"slot {taken[0]}, from which another row's state is made"
        raise SlotError(MATERIALIZE, "destination_indices", got, "slots of their own")
    for storage in _storages(pool):
        for b in goals if storage.state_lens is not None else ():
            lens = storage.state_lens[:, own[b]]  # type: ignore[index]
            rows_of = storage.ring_u.shape[2]  # type: ignore[union-attr]
            if positions[b]:
                _reaches(MATERIALIZE, "computed_lens", lens, positions[b], rows_of, 0)


@rule((COMMIT,), "CS-SSM-COM-01", reads=True)
def _saved_states_of_a_commit(call: Call) -> None:
    """Draft rows of live rows, given or the request rows, exist in every state's intermediate states."""
    given = (call.req_pool_indices if call.draft_indices is None else call.draft_indices).tolist()
    rows = [given[b] for b, _ in step.committed(call)]
    name = "req_pool_indices" if call.draft_indices is None else "draft_indices"
    for storage in _storages(call.pool):
        if storage.intermediate is not None:
            step.below(COMMIT, name, rows, storage.intermediate.shape[1], "the rows of intermediate")
