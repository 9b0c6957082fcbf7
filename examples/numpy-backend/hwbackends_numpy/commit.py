"""Between steps: the speculative commit, clearing and copying slots."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from hwbackends.step import checks
from hwbackends.step.pool import StatePool
from hwbackends_numpy.arrays import Array, only_window, translate, view

COMMIT = "update_mamba_state_after_mtp_verify"


def update_mamba_state_after_mtp_verify(
    pool: StatePool,
    req_pool_indices: Tensor,
    last_correct_step_indices: Tensor,
    mamba_track_indices: Tensor | None = None,
    mamba_steps_to_track: Tensor | None = None,
    computed_lens: Tensor | None = None,
    draft_indices: Tensor | None = None,
) -> None:
    """The slot becomes the window after the last correct draft, from what verify saved."""
    checks.commit(
        pool,
        req_pool_indices,
        last_correct_step_indices,
        mamba_track_indices,
        mamba_steps_to_track,
        computed_lens,
        draft_indices,
    )
    only_window(COMMIT, pool.layout)
    rows = req_pool_indices.numpy()
    slots = translate(pool.mamba_v2p_table, pool.mamba_index_mapping.numpy()[np.maximum(rows, 0)])
    live = (rows >= 0) & (slots > 0)
    drafts = rows if draft_indices is None else draft_indices.numpy()
    if mamba_track_indices is not None and mamba_steps_to_track is not None:
        track = translate(pool.mamba_v2p_table, mamba_track_indices.numpy())
        _move(pool, np.where(live, track, -1), drafts, mamba_steps_to_track.numpy())
    _move(pool, np.where(live, slots, -1), drafts, last_correct_step_indices.numpy())


def _move(pool: StatePool, targets: Array, drafts: Array, steps: Array) -> None:
    """win(step + 1) and the SSM state of that step into the target slots, where both are there."""
    history = pool.width - 1
    for slot, row, step in zip(targets.tolist(), drafts.tolist(), steps.tolist(), strict=True):
        if slot <= 0 or step < 0:
            continue
        for name, stream in pool.conv_streams.items():
            saved = view(COMMIT, "draft_rows", pool.draft_rows[name])
            view(COMMIT, "conv_streams", stream)[:, slot] = saved[:, row, step + 1 : step + 1 + history]
        if pool.ssm_state is not None and pool.intermediate_ssm is not None:
            pool.ssm_state[:, slot] = pool.intermediate_ssm[:, row, step]


def clear_slots(pool: StatePool, cache_indices: Tensor) -> None:
    """Zero the named slots."""
    checks.slots("clear_slots", pool, cache_indices=cache_indices)
    for state in _states("clear_slots", pool):
        state[:, [slot for slot in cache_indices.tolist() if slot > 0]] = 0


def copy_slots(pool: StatePool, source_indices: Tensor, destination_indices: Tensor) -> None:
    """Copy slots onto others."""
    checks.slots("copy_slots", pool, source_indices=source_indices, destination_indices=destination_indices)
    pairs = zip(source_indices.tolist(), destination_indices.tolist(), strict=True)
    kept = [(source, destination) for source, destination in pairs if source > 0 and destination > 0]
    for state in _states("copy_slots", pool):
        for source, destination in kept:
            state[:, destination] = state[:, source]


def _states(hook: str, pool: StatePool) -> list[Array]:
    only_window(hook, pool.layout)
    tensors = [*pool.conv_streams.values(), *([] if pool.ssm_state is None else [pool.ssm_state])]
    return [view(hook, "pool", tensor) for tensor in tensors]
