"""The speculative commit in the triton tier: one launch per conv storage where the layout needs any, one for SSM."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from hwbackends.ascend import kernels_commit, launch, variants
from hwbackends.step import checks
from hwbackends.step.pool import StatePool
from hwbackends.step.strides import packed
from hwbackends.torch_ops import commit as torch_commit


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
    given = (
        req_pool_indices,
        last_correct_step_indices,
        mamba_track_indices,
        mamba_steps_to_track,
        computed_lens,
        draft_indices,
    )
    checks.commit(pool, *given, families=torch_commit.FAMILIES)
    tracks = mamba_track_indices is not None
    conv = pool.layout == "window" or tracks
    if not req_pool_indices.shape[0] or not (conv or pool.ssm_state is not None or pool.states):
        return
    if pool.states or not _served(pool):
        torch_commit.update_mamba_state_after_mtp_verify(pool, *given)
        return
    indices = launch.indices(*given)
    flags = {"V2P": pool.mamba_v2p_table is not None, "DRAFTS": draft_indices is not None, "TRACK": tracks}
    if conv:
        drafts = pool.draft_storages() if pool.layout == "window" else pool.storages()
        for state, rows in zip(pool.storages(), drafts, strict=True):
            _commit_conv(pool, state, rows, indices, flags)
    if pool.ssm_state is not None and pool.intermediate_ssm is not None:
        _commit_ssm(pool, pool.ssm_state, pool.intermediate_ssm, indices, flags)


def _commit_conv(
    pool: StatePool, state: Tensor, draft_rows: Tensor, indices: list[Any], flags: dict[str, bool]
) -> None:
    requests, last, track, track_steps, lens, drafts = indices
    tiles = variants.commit_tiles(pool.width)
    channels = launch.blocks(state.shape[-1], tiles["BLOCK"])
    items = channels * requests.shape[0] * pool.num_layers
    kernels_commit.commit_conv_kernel[launch.grid(items)](
        state, draft_rows, requests, pool.mamba_index_mapping.contiguous(), launch.table(pool, requests), drafts, last,
        track, track_steps, lens,
        items, channels, requests.shape[0], state.shape[-1], state.shape[2], max(1, pool.draft_token_num),
        *state.stride(), *draft_rows.stride(), *_extents(pool), draft_rows.shape[1],
        LAYOUT=variants.LAYOUTS[pool.layout], S_UNIT=state.stride(-1) == 1 and draft_rows.stride(-1) == 1,
        **flags, **tiles,
    )  # fmt: skip


def _commit_ssm(pool: StatePool, state: Tensor, steps: Tensor, indices: list[Any], flags: dict[str, bool]) -> None:
    requests, last, track, track_steps, _, drafts = indices
    size = math.prod(state.shape[2:])
    channels = launch.blocks(size, variants.SSM_BLOCK)
    items = channels * requests.shape[0] * pool.num_layers
    kernels_commit.commit_ssm_kernel[launch.grid(items)](
        state, steps, requests, pool.mamba_index_mapping.contiguous(), launch.table(pool, requests), drafts, last,
        track, track_steps,
        items, channels, requests.shape[0], size, max(1, steps.shape[2]), *state.stride()[:2], *steps.stride()[:3],
        *_extents(pool), steps.shape[1],
        BLOCK=variants.SSM_BLOCK, **flags,
    )  # fmt: skip


def _extents(pool: StatePool) -> tuple[int, int, int]:
    """Rows of the map, entries of the table, slots: what an index must stay below."""
    table = pool.mamba_v2p_table
    return pool.request_rows, 0 if table is None else table.shape[0], pool.num_slots


def _served(pool: StatePool) -> bool:
    """Whether the kernels have variants for this pool and its offsets fit their arithmetic."""
    conv = [*pool.storages(), *pool.draft_storages()]
    ssm = [tensor for tensor in (pool.ssm_state, pool.intermediate_ssm) if tensor is not None]
    return (
        pool.width in variants.WIDTHS
        and all(tensor.dtype in launch.FLOATS for tensor in [*conv, *ssm])
        and launch.fits(*conv, behind=2)
        and all(packed(tensor, behind) for tensor, behind in zip(ssm, (2, 3), strict=False))
    )
