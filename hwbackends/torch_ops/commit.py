"""What happens between steps, in pure torch: the speculative commit, and clearing and copying slots."""

from __future__ import annotations

import torch
from torch import Tensor

from hwbackends.step import checks
from hwbackends.step.pool import StatePool
from hwbackends.torch_ops import ssm
from hwbackends.torch_ops.metadata import translate
from hwbackends.torch_ops.rows import masked_write, window_rows, within, writing

FAMILIES = ("ssm",)
"""Families whose states are committed, cleared and copied here, beside convs."""


def update_mamba_state_after_mtp_verify(
    pool: StatePool,
    req_pool_indices: Tensor,
    last_correct_step_indices: Tensor,
    mamba_track_indices: Tensor | None = None,
    mamba_steps_to_track: Tensor | None = None,
    computed_lens: Tensor | None = None,
    draft_indices: Tensor | None = None,
) -> None:
    """The slot becomes win_b(j + 1). See `hookspecs.update_mamba_state_after_mtp_verify`."""
    checks.commit(
        pool,
        req_pool_indices,
        last_correct_step_indices,
        mamba_track_indices,
        mamba_steps_to_track,
        computed_lens,
        draft_indices,
        families=FAMILIES,
    )
    with writing(*pool.storages()):
        conv = pool.conv_streams and pool.layout == "window"
        others = any(not storage.positions for storage in pool.states.values())
        if not conv and not others and pool.ssm_state is None and mamba_steps_to_track is None:
            return
        requests = req_pool_indices.long()
        known = (requests >= 0) & (requests < pool.request_rows)
        slots = translate(pool, pool.mamba_index_mapping[torch.where(known, requests, 0)]).long()
        live = known & within(slots, pool.num_slots)
        drafts = requests if draft_indices is None else draft_indices.long()
        if mamba_track_indices is not None and mamba_steps_to_track is not None:
            track = translate(pool, mamba_track_indices).long()
            step = mamba_steps_to_track.long()
            wanted = live & within(track, pool.num_slots) & _drafted(pool, step)
            _commit_windows(pool, slots, track, drafts, step, wanted, computed_lens, tracking=True)
            _commit_ssm(pool, track, drafts, step, wanted)
            _track_states(pool, slots, requests, computed_lens, step, track, drafts, wanted)
        step = last_correct_step_indices.long()
        wanted = live & _drafted(pool, step)
        _commit_windows(pool, slots, slots, drafts, step, wanted, computed_lens, tracking=False)
        _commit_ssm(pool, slots, drafts, step, wanted)
        ssm.commit_states(pool, slots, drafts, step, wanted)


def _drafted(pool: StatePool, step: Tensor) -> Tensor:
    """Steps that a verify has: the others change nothing."""
    return (step >= 0) & (step < max(1, pool.draft_token_num))


def _commit_windows(
    pool: StatePool,
    slots: Tensor,
    target: Tensor,
    drafts: Tensor,
    step: Tensor,
    wanted: Tensor,
    computed_lens: Tensor | None,
    tracking: bool,
) -> None:
    """win_b(step + 1) into `target`, in every layer and stream.

    window: rows step + 1 ... step + S of what verify saved. ring: the rows of positions n_b + step + 1 - S ...
    n_b + step, to the same row numbers. lazy: rows step ... step + S - 1 of the slot, to rows 0 ... S - 1.
    Ring and lazy are committed by the engine's own counts; only a track slot is written there.
    """
    if not pool.conv_streams or (pool.layout != "window" and not tracking):
        return
    history = pool.width - 1
    offsets = torch.arange(history, device=step.device)
    taken = step.clamp(0, max(0, pool.draft_token_num - 1)) + 1
    valid = torch.ones_like(taken, dtype=torch.bool)[:, None].expand(-1, history)
    if pool.layout == "window":
        where, wanted = _rows(drafts, wanted, pool.draft_storages()[0].shape[1])
        source, rows = taken[:, None] + offsets, offsets.expand(len(taken), history)
    elif pool.layout == "ring":
        assert computed_lens is not None
        end = computed_lens.long().clamp(min=0) + taken
        where, rows = torch.where(wanted, slots, 0), window_rows("ring", pool.rows, history, end)
        source, valid = rows, (end[:, None] - history + offsets) >= 0
    else:
        where = torch.where(wanted, slots, 0)
        source, rows = taken[:, None] - 1 + offsets, offsets.expand(len(taken), history)
    for name, stream in pool.conv_streams.items():
        saved = pool.draft_rows[name] if pool.layout == "window" else stream
        found = saved.permute(1, 2, 0, 3)[where[:, None], source]
        found = torch.where(valid[..., None, None], found, torch.zeros((), dtype=found.dtype, device=found.device))
        masked_write(stream.permute(1, 2, 0, 3), target[:, None], rows, found, wanted[:, None].expand_as(rows))


def _commit_ssm(pool: StatePool, target: Tensor, drafts: Tensor, step: Tensor, wanted: Tensor) -> None:
    """The SSM state after draft `step` into `target`, in every layer."""
    if pool.ssm_state is None or pool.intermediate_ssm is None:
        return
    last = pool.intermediate_ssm.shape[2] - 1
    where, wanted = _rows(drafts, wanted, pool.intermediate_ssm.shape[1])
    found = pool.intermediate_ssm.movedim(0, 2)[where, step.clamp(0, last)]
    state = pool.ssm_state.movedim(0, 1).unsqueeze(1)
    masked_write(state, target, torch.zeros_like(target), found, wanted)


def _track_states(
    pool: StatePool,
    slots: Tensor,
    requests: Tensor,
    computed_lens: Tensor | None,
    step: Tensor,
    track: Tensor,
    drafts: Tensor,
    wanted: Tensor,
) -> None:
    """The states behind draft `step` into the track slots: saved ones on `intermediate`, replayed ones on `ring`."""
    ssm.commit_states(pool, track, drafts, step, wanted)
    if computed_lens is not None:
        reached = computed_lens.long().clamp(min=0) + step + 1
        rings = [name for name, storage in pool.states.items() if storage.positions]
        ssm.move_states(pool, rings, slots, requests, reached, track, wanted)


def _rows(drafts: Tensor, wanted: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Draft rows to read, and the requests whose draft row is there."""
    wanted = wanted & (drafts >= 0) & (drafts < count)
    return torch.where(wanted, drafts, 0), wanted


def clear_slots(pool: StatePool, cache_indices: Tensor) -> None:
    """Zero slots in every layer and stream. See `hookspecs.clear_slots`."""
    checks.slots("clear_slots", pool, FAMILIES, cache_indices=cache_indices)
    with writing(*pool.storages()):
        slots = cache_indices.long()
        for state in _by_slot(pool):
            zeros = torch.zeros(len(slots), *state.shape[2:], dtype=state.dtype, device=state.device)
            masked_write(state, slots, torch.zeros_like(slots), zeros, within(slots, pool.num_slots))


def copy_slots(pool: StatePool, source_indices: Tensor, destination_indices: Tensor) -> None:
    """Copy slots onto others in every layer and stream. See `hookspecs.copy_slots`."""
    checks.slots("copy_slots", pool, FAMILIES, source_indices=source_indices, destination_indices=destination_indices)
    with writing(*pool.storages()):
        source, destination = source_indices.long(), destination_indices.long()
        mask = within(source, pool.num_slots) & within(destination, pool.num_slots)
        for state in _by_slot(pool):
            found = state[torch.where(mask, source, 0), torch.zeros_like(source)]
            masked_write(state, destination, torch.zeros_like(destination), found, mask)


def _by_slot(pool: StatePool) -> list[Tensor]:
    """Every state tensor as a view [slots, 1, ...]."""
    return [tensor.movedim(0, 1).unsqueeze(1) for tensor in pool.slot_tensors()]
