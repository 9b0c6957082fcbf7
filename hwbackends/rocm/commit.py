"""What happens between steps, over the launchers that GPU backends share: the speculative commit, and clearing and
copying slots."""

from __future__ import annotations

from torch import Tensor

from hwbackends.rocm.traits import traits_of
from hwbackends.step.pool import StatePool
from hwbackends.triton_ops import commit


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
    track = (mamba_track_indices, mamba_steps_to_track)
    commit.commit(traits_of, pool, req_pool_indices, last_correct_step_indices, *track, computed_lens, draft_indices)


def clear_slots(pool: StatePool, cache_indices: Tensor) -> None:
    """Zero slots in every layer and stream. See `hookspecs.clear_slots`."""
    commit.clear(traits_of, pool, cache_indices)


def copy_slots(pool: StatePool, source_indices: Tensor, destination_indices: Tensor) -> None:
    """Copy slots onto others in every layer and stream. See `hookspecs.copy_slots`."""
    commit.copy(traits_of, pool, source_indices, destination_indices)
