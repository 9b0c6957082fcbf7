"""Wrong backends, fourth part: SSM state. Gates, norms and scales; what is read and written where; the ring; the commit
and materializing; what is kept from an earlier call."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from hwbackends.ssm.state import SSMState, SSMStorage
from hwbackends.torch_ops import recurrence
from tests.conformance.mutants import COMMIT, MATERIALIZE, SSM, Call, mutant

VERIFY, DRAFTS = "ssm_target_verify", "ssm_draft_extend"


def spare(state: SSMState) -> SSMState:
    """A copy of a state, to be thrown away."""
    held = {f.name: getattr(state, f.name) for f in fields(state) if f.init}
    return SSMState(**{name: v.clone() if isinstance(v, Tensor) else v for name, v in held.items()})


def take(state: SSMState, other: SSMState, *names: str) -> None:
    """The bytes of another state's tensors."""
    for name in names or ("tensor", "intermediate", "ring_k", "ring_u", "ring_d", "state_lens"):
        mine, theirs = getattr(state, name), getattr(other, name)
        if mine is not None and mine is not theirs:
            mine.copy_(theirs)


def live(c: Call) -> list[tuple[int, int, int, int]]:
    """(batch row, slot, request row, computed length) of live rows."""
    held = c.metadata
    found = zip(held.cache_indices.tolist(), held.draft_indices.tolist(), held.computed_lens.tolist(), strict=True)
    return [(b, slot, row, n) for b, (slot, row, n) in enumerate(found) if slot > 0]


def ready(c: Call) -> bool:
    """Whether the call has what a right one has; a wrong one is the reference's to refuse."""
    tensors = (c.q, c.k, c.v, c.a, c.A_log)
    whole = all(isinstance(t, Tensor) and not t.is_meta for t in tensors) and isinstance(c.state, SSMState)
    return whole and hasattr(c.metadata, "cache_indices") and c.a.shape[:2] == c.v.shape[:2]


def changed(c: Call, **arguments: Any) -> Any:
    return c.run(**arguments) if ready(c) else c.run()


# --- numbers ---


@mutant(*SSM)
def rounds_beta_to_bfloat16(c: Call) -> Tensor:
    if not ready(c) or c.b is None:
        return c.run()
    beta = torch.sigmoid(c.b.float()).bfloat16().float().clamp(1e-6, 1 - 1e-6)
    return c.run(b=torch.where(c.b.abs() < 15, torch.log(beta / (1 - beta)), c.b.float()))


@mutant("ssm_decode")
def rounds_beta_in_decode_alone(c: Call) -> Tensor:
    return rounds_beta_to_bfloat16(c)


@mutant(*SSM)
def swaps_the_gate_and_its_bias(c: Call) -> Tensor:
    if not ready(c) or c.dt_bias is None:
        return c.run()
    bias = c.dt_bias.float()
    return c.run(a=(c.a.float() - bias.reshape(c.a.shape[1:])).to(c.a.dtype))


@mutant(*SSM)
def forgets_the_default_scale(c: Call) -> Tensor:
    return changed(c, scale=1.0 if c.scale is None else c.scale)


@mutant(*SSM)
def scales_twice(c: Call) -> Tensor:
    return changed(c, scale=c.scale * c.scale if isinstance(c.scale, float) else c.scale)


@mutant(*SSM)
def ignores_the_l2norm(c: Call) -> Tensor:
    return changed(c, use_qk_l2norm_in_kernel=False)


@mutant(*SSM)
def ignores_the_safe_gate(c: Call) -> Tensor:
    return changed(c, lower_bound=None)


@mutant(*SSM)
def ignores_the_limits_of_dt(c: Call) -> Tensor:
    return changed(c, dt_limit=None)


@mutant(*SSM)
def leaves_out_the_skip(c: Call) -> Tensor:
    return changed(c, D=None)


@mutant(*SSM)
def interleaves_heads(c: Call) -> Tensor:
    if not ready(c) or c.q.shape[1] == 1 or c.v.shape[1] == c.q.shape[1]:
        return c.run()
    return c.run(q=c.q.flip(1), k=c.k.flip(1))


def _with_eps(eps: float) -> Any:
    def fault(c: Call) -> Tensor:
        held, recurrence.NORM_EPS = recurrence.NORM_EPS, eps
        try:
            return c.run()
        finally:
            recurrence.NORM_EPS = held

    return fault


@mutant(*SSM)
def normalizes_with_another_epsilon(c: Call) -> Tensor:
    return _with_eps(1e-3)(c)


@mutant(*SSM)
def multiplies_decays_in_bfloat16(c: Call) -> Tensor:
    return changed(c, A_log=c.A_log.bfloat16() if isinstance(c.A_log, Tensor) else c.A_log)


@mutant(*SSM)
def takes_softplus_for_linear_too_soon(c: Call) -> Tensor:
    held, recurrence.SOFTPLUS_LINEAR = recurrence.SOFTPLUS_LINEAR, 2.0
    try:
        return c.run()
    finally:
        recurrence.SOFTPLUS_LINEAR = held


@mutant(VERIFY)
def rounds_the_state_at_the_end_of_a_verify_alone(c: Call) -> Tensor:
    held = recurrence.apply
    recurrence.apply = lambda state, d, k, u, dtype: held(state, d, k, u, torch.float32)
    try:
        return c.run()
    finally:
        recurrence.apply = held


@mutant(*SSM)
def rounds_the_state_twice(c: Call) -> Tensor:
    held = recurrence.apply
    recurrence.apply = lambda state, d, k, u, dtype: held(state, d, k, u, torch.bfloat16).to(dtype).float()
    try:
        return c.run()
    finally:
        recurrence.apply = held


@mutant("ssm_decode", VERIFY)
def writes_the_output_before_the_update(c: Call) -> Tensor:
    held = recurrence.output
    kept: list[Tensor] = []
    real = recurrence.apply

    def apply(state: Tensor, d: Tensor, k: Tensor, u: Tensor, dtype: torch.dtype) -> Tensor:
        kept.append(state)
        return real(state, d, k, u, dtype)

    recurrence.apply, recurrence.output = apply, lambda state, token: held(kept[-1], token)
    try:
        return c.run()
    finally:
        recurrence.apply, recurrence.output = real, held


# --- where ---


@mutant("ssm_decode", "ssm_extend")
def writes_the_slot_beside(c: Call) -> Tensor:
    if not ready(c):
        return c.run()
    slots = c.metadata.cache_indices
    return c.with_metadata(cache_indices=torch.where(slots > 1, slots - 1, slots))


@mutant(VERIFY)
def commits_states_in_verify(c: Call) -> Tensor:
    y = c.run()
    if c.state.layout == "intermediate":
        for _, slot, row, _ in live(c):
            c.state.tensor[slot] = c.state.intermediate[row, -1]
    return y


@mutant(VERIFY)
def saves_states_by_batch_row(c: Call) -> Tensor:
    rows = torch.arange(c.metadata.num_reqs, dtype=c.metadata.draft_indices.dtype) if ready(c) else None
    return c.run() if rows is None or c.state.layout == "ring" else c.with_metadata(draft_indices=rows)


@mutant(VERIFY)
def saves_every_draft_one_place_late(c: Call) -> Tensor:
    y = c.run()
    if c.state.layout == "intermediate":
        for _, _, row, _ in live(c):
            c.state.intermediate[row] = c.state.intermediate[row].roll(1, 0)
    return y


@mutant(*SSM)
def writes_padded_rows_to_the_last_slot(c: Call) -> Tensor:
    y = c.run()
    if (c.metadata.cache_indices < 0).any():
        c.state.tensor[-1] = 0
    return y


@mutant(*SSM)
def leaves_padded_ssm_outputs_unwritten(c: Call) -> Tensor:
    before = None if c.out is None else c.out.clone()
    y: Tensor = c.run()
    ends, slots = c.metadata.query_start_loc.tolist(), c.metadata.cache_indices.tolist()
    for slot, start, end in zip(slots, ends[:-1], ends[1:], strict=True):
        if slot <= 0 and before is not None:
            y[start:end] = before[start:end]
    return y


@mutant("ssm_extend", DRAFTS)
def reads_whatever_the_slot_holds(c: Call) -> Tensor:
    return c.with_metadata(has_initial_state=c.metadata.cache_indices > 0) if ready(c) else c.run()


@mutant("ssm_extend")
def reads_its_own_slot_for_the_source(c: Call) -> Tensor:
    return c.with_metadata(source_indices=c.metadata.cache_indices) if ready(c) else c.run()


@mutant("ssm_extend")
def stops_behind_an_empty_request(c: Call) -> Tensor:
    y = c.run()
    if not ready(c):
        return y
    ends = c.metadata.query_start_loc.tolist()
    for b, (start, end) in enumerate(itertools.pairwise(ends)):
        if start == end:
            return y.index_fill_(0, torch.arange(ends[b], len(y)), 0)
    return y


@mutant("ssm_decode", "ssm_extend", DRAFTS)
def snapshots_the_state_behind_the_last_token(c: Call) -> Tensor:
    y = c.run()
    if ready(c) and c.metadata.tracks and c.hook_name != "ssm_decode":
        for b, slot, _, _ in live(c):
            if c.metadata.mamba_track_indices[b] > 0:
                c.state.tensor[c.metadata.mamba_track_indices[b]] = c.state.tensor[slot]
    return y


@mutant("ssm_decode", "ssm_extend", DRAFTS)
def never_snapshots(c: Call) -> Tensor:
    return c.with_metadata(tracks=False) if ready(c) else c.run()


@mutant(DRAFTS)
def extends_drafts_by_all_of_them(c: Call) -> Tensor:
    if not ready(c):
        return c.run()
    counts = c.metadata.num_accept_tokens
    return c.with_metadata(num_accept_tokens=torch.where(counts >= 0, c.metadata.draft_token_num, counts))


@mutant(VERIFY)
def ignores_the_parents_of_a_tree(c: Call) -> Tensor:
    tree = c.retrieve_parent_token is not None and ready(c) and c.state.layout != "ring"
    return c.run(retrieve_parent_token=None) if tree else c.run()


@mutant(VERIFY)
def serves_a_tree_on_a_ring(c: Call) -> Tensor:
    return c.run(retrieve_parent_token=None) if ready(c) and c.state.layout == "ring" else c.run()


# --- the ring ---


def ring(c: Call) -> bool:
    return ready(c) and c.state.layout == "ring"


@mutant(*SSM)
def wraps_the_ring_one_row_early(c: Call) -> Tensor:
    if not ring(c) or c.hook_name == "ssm_extend":
        return c.run()
    short, count = spare(c.state), c.state.ring_rows - 1
    if count < 2 * c.state.draft_token_num:
        return c.run()
    held = {name: getattr(short, name)[:, :count].contiguous() for name in ("ring_k", "ring_u", "ring_d")}
    other = replace(short, **held)
    y = c.run(state=other)
    take(c.state, other, "tensor", "state_lens")
    for name in held:
        getattr(c.state, name)[:, :count] = getattr(other, name)
    return y


@mutant(*SSM)
def replays_no_pending_token(c: Call) -> Tensor:
    if ring(c):
        for _, slot, _, n in live(c):
            c.state.state_lens[slot] = n
    return c.run()


@mutant(*SSM)
def replays_one_pending_token_too_many(c: Call) -> Tensor:
    if ring(c):
        for _, slot, _, n in live(c):
            lens = c.state.state_lens[slot]
            c.state.state_lens[slot] = torch.where((lens > 0) & (lens < n), lens - 1, lens)
    return c.run()


@mutant("ssm_decode", VERIFY, DRAFTS)
def keeps_the_length_of_the_predecessor(c: Call) -> Tensor:
    if not ring(c):
        return c.run()
    before = c.state.state_lens.clone()
    y = c.run()
    for b, slot, _, n in live(c):
        if not n or not c.metadata.has_initial_state[b]:
            c.state.state_lens[slot] = before[slot]
    return y


@mutant("ssm_decode", VERIFY, DRAFTS)
def never_writes_the_checkpoint(c: Call) -> Tensor:
    if not ring(c):
        return c.run()
    other = spare(c.state)
    y = c.run(state=other)
    take(c.state, other, "ring_k", "ring_u", "ring_d")
    return y


@mutant("ssm_decode", VERIFY, DRAFTS)
def writes_the_checkpoint_without_its_length(c: Call) -> Tensor:
    if not ring(c):
        return c.run()
    other = spare(c.state)
    y = c.run(state=other)
    take(c.state, other, "ring_k", "ring_u", "ring_d", "tensor")
    return y


@mutant(VERIFY)
def accepts_every_draft_in_the_checkpoint(c: Call) -> Tensor:
    y = c.run()
    if ring(c):
        for _, slot, _, n in live(c):
            c.state.state_lens[slot] = n + c.metadata.draft_token_num
    return y


@mutant("ssm_decode", VERIFY, DRAFTS)
def keeps_factors_in_bfloat16(c: Call) -> Tensor:
    y = c.run()
    if ring(c):
        for _, _, row, n in live(c):
            place = n % c.state.ring_rows
            c.state.ring_u[row, place] = c.state.ring_u[row, place].bfloat16().float()
    return y


@mutant("ssm_decode")
def decodes_twice_where_it_runs_twice(c: Call) -> Tensor:
    y = c.run()
    if ring(c):
        for _, slot, row, n in live(c):
            positions = torch.tensor([n + 1])
            lens = c.state.state_lens[slot]
            if (lens == n).all() and n % 2:
                from hwbackends.torch_ops.ssm import state_at

                found, _ = state_at(c.state, torch.tensor([slot]), torch.tensor([row]), positions, positions < 0)
                c.state.tensor[slot] = found[0].to(c.state.tensor.dtype)
    return y


@mutant("ssm_extend")
def extends_over_pending_tokens(c: Call) -> Tensor:
    if ring(c):
        for _, slot, _, _ in live(c):
            c.state.state_lens[slot] = 2**30
    return c.run()


@mutant("ssm_extend")
def leaves_the_length_behind_an_extend(c: Call) -> Tensor:
    before = c.state.state_lens.clone() if ring(c) else None
    y = c.run()
    if before is not None:
        c.state.state_lens.copy_(before)
    return y


@mutant("ssm_extend")
def counts_an_empty_extend(c: Call) -> Tensor:
    y = c.run()
    if ring(c):
        for b, slot, _, _ in live(c):
            if c.metadata.query_start_loc[b] == c.metadata.query_start_loc[b + 1]:
                c.state.state_lens[slot] += 1
    return y


@mutant("ssm_decode", VERIFY)
def clears_the_rows_behind_its_tokens(c: Call) -> Tensor:
    y = c.run()
    if ring(c):
        for _, _, row, n in live(c):
            c.state.ring_u[row, (n + c.state.draft_token_num + 1) % c.state.ring_rows] = 0
    return y


# --- slots ---


def storages(c: Call) -> list[SSMStorage]:
    states = getattr(c.pool, "states", {})
    return [storage for storage in states.values() if isinstance(storage, SSMStorage)]


@mutant(MATERIALIZE)
def materializes_the_first_layer_alone(c: Call) -> None:
    held = [(s, [t.clone() for t in s.slot_tensors()]) for s in storages(c)]
    c.run()
    for storage, before in held:
        for tensor, old in zip(storage.slot_tensors(), before, strict=True):
            tensor[1:] = old[1:]


@mutant(MATERIALIZE)
def materializes_the_first_state_alone(c: Call) -> None:
    held = [(s, [t.clone() for t in s.slot_tensors()]) for s in storages(c)[1:]]
    c.run()
    for storage, before in held:
        for tensor, old in zip(storage.slot_tensors(), before, strict=True):
            tensor.copy_(old)


@mutant(MATERIALIZE)
def materializes_in_place_too(c: Call) -> None:
    c.run()
    if c.destination_indices is not None:
        c.run(destination_indices=None)


@mutant(MATERIALIZE)
def materializes_one_token_short(c: Call) -> None:
    good = isinstance(c.computed_lens, Tensor)
    c.run(computed_lens=torch.where(c.computed_lens > 0, c.computed_lens - 1, c.computed_lens) if good else None)


@mutant(MATERIALIZE)
def materializes_without_lengths(c: Call) -> None:
    held = [(s, s.state_lens.clone()) for s in storages(c) if s.state_lens is not None]
    c.run()
    for storage, before in held:
        storage.state_lens.copy_(before)  # type: ignore[union-attr]


@mutant(MATERIALIZE)
def takes_a_negative_position_for_zero(c: Call) -> None:
    good = isinstance(c.computed_lens, Tensor) and not c.computed_lens.is_floating_point()
    c.run(computed_lens=c.computed_lens.clamp(min=0) if good else c.computed_lens)


@mutant(MATERIALIZE)
def takes_virtual_destinations_for_physical(c: Call) -> None:
    table = getattr(c.pool, "mamba_v2p_table", None)
    goals = c.destination_indices
    if table is None or goals is None:
        c.run()
        return
    back = torch.argsort(table)
    c.run(destination_indices=torch.where(goals > 0, back[goals.long().clamp(min=0)].to(goals.dtype), goals))


@mutant(COMMIT)
def commits_the_draft_before(c: Call) -> None:
    steps = c.last_correct_step_indices
    if storages(c) and isinstance(steps, Tensor):
        c.run(last_correct_step_indices=torch.where(steps > 0, steps - 1, steps))
        return
    c.run()


@mutant(COMMIT)
def commits_up_to_the_first_that_accepted_nothing(c: Call) -> None:
    steps = c.last_correct_step_indices
    if storages(c) and isinstance(steps, Tensor):
        seen = (steps < 0).to(torch.int64).cumsum(0) > 0
        c.run(last_correct_step_indices=torch.where(seen, -1, steps))
        return
    c.run()


@mutant(COMMIT)
def commits_the_first_layer_of_states(c: Call) -> None:
    held = [(s.tensor, s.tensor.clone()) for s in storages(c)]
    c.run()
    for tensor, before in held:
        tensor[1:] = before[1:]


@mutant(COMMIT)
def commits_nothing_without_saved_states(c: Call) -> None:
    if storages(c) and any(s.refuse_commit() for s in storages(c)):
        return
    c.run()


@mutant(COMMIT)
def materializes_at_every_commit(c: Call) -> None:
    c.run()
    for storage in storages(c):
        if storage.state_lens is not None:
            storage.state_lens.add_(0)


@mutant("clear_slots")
def clears_no_state(c: Call) -> None:
    held = [(t, t.clone()) for s in storages(c) for t in s.slot_tensors()]
    c.run()
    for tensor, before in held:
        tensor.copy_(before)


@mutant("clear_slots", "copy_slots")
def forgets_lengths(c: Call) -> None:
    held = [(s.state_lens, s.state_lens.clone()) for s in storages(c) if s.state_lens is not None]
    c.run()
    for tensor, before in held:
        tensor.copy_(before)


@mutant("clear_slots")
def clears_rings_by_slot(c: Call) -> None:
    c.run()
    for storage in storages(c):
        for tensor in (storage.ring_u, storage.intermediate):
            for slot in c.cache_indices.tolist() if tensor is not None else ():
                if 0 < slot < tensor.shape[1]:  # type: ignore[union-attr]
                    tensor[:, slot] = 0  # type: ignore[index]
