"""The prepare hooks in the triton tier: one launch per phase."""

from __future__ import annotations

from torch import Tensor

from hwbackends.ascend import kernels_metadata, launch, variants
from hwbackends.conv.layouts import history_rows
from hwbackends.step import checks
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.metadata import StepMetadata
from hwbackends.step.pool import StatePool

EXTEND_PROGRAMS = 32
"""Programs of an extend preparation. Each first sums the lengths before its share, so more programs read more."""


def prepare_decode_metadata(batch: StepBatch, pool: StatePool, out: StepMetadata) -> None:
    """Slots, lengths and track slots of a decode step. See `hookspecs.prepare_decode_metadata`."""
    checks.prepare("prepare_decode_metadata", batch, pool, out)
    _uniform(batch, pool, out, 1, tracks=True)


def prepare_target_verify_metadata(batch: StepBatch, pool: StatePool, out: StepMetadata) -> None:
    """Slots, request rows and lengths of a verify step. See `hookspecs.prepare_target_verify_metadata`."""
    checks.prepare("prepare_target_verify_metadata", batch, pool, out)
    _uniform(batch, pool, out, batch.draft_token_num, tracks=False)


def prepare_draft_extend_metadata(batch: StepBatch, pool: StatePool, out: StepMetadata) -> None:
    """As verify, with accepted counts and track windows. See `hookspecs.prepare_draft_extend_metadata`."""
    checks.prepare("prepare_draft_extend_metadata", batch, pool, out)
    _uniform(batch, pool, out, batch.draft_token_num, tracks=True, draft_extend=True)


def prepare_extend_metadata(batch: StepBatch, pool: StatePool, out: StepMetadata) -> None:
    """Offsets, owners, prefix flags and track windows of an extend step. See `hookspecs.prepare_extend_metadata`."""
    checks.prepare("prepare_extend_metadata", batch, pool, out)
    lens = batch.extend_prefix_lens if batch.computed_lens is None else batch.computed_lens
    track = batch.mamba_track_mask is not None and batch.mamba_track_seqlens is not None
    flags = _flags(batch, pool, track)
    requests, slots, sources, lengths, lens, accepted, track_indices, track_seqlens = launch.indices(
        batch.req_pool_indices, batch.cache_indices, batch.source_indices, batch.extend_seq_lens, lens,
        batch.num_accepted_tokens, batch.mamba_track_indices, batch.mamba_track_seqlens,
    )  # fmt: skip
    kernels_metadata.prepare_extend_kernel[launch.grid(min(EXTEND_PROGRAMS, batch.padded_reqs))](
        requests, pool.mamba_index_mapping.contiguous(), launch.table(pool, requests), slots, sources,
        _or(batch.num_reqs_device, requests), lengths, lens, _bytes(batch.has_initial_state, out), accepted,
        _bytes(batch.mamba_track_mask, out), track_indices, track_seqlens,
        out.cache_indices, out.source_indices, out.query_start_loc, launch.flags(out.has_initial_state),
        out.computed_lens, out.draft_indices, out.seq_idx, out.history_offset, out.mamba_track_indices,
        out.mamba_track_tokens,
        batch.padded_reqs, batch.num_reqs, out.num_tokens, pool.track_interval, *_extents(pool),
        INITIAL=batch.has_initial_state is not None, SCAN=variants.SCAN, **flags,
    )  # fmt: skip


def _uniform(
    batch: StepBatch, pool: StatePool, out: StepMetadata, tokens: int, *, tracks: bool, draft_extend: bool = False
) -> None:
    """Launch the kernel of the phases in which every request has `tokens` tokens."""
    lens = batch.seq_lens if batch.computed_lens is None else batch.computed_lens
    requests, slots, sources, lengths, kept, accepted, track_indices = launch.indices(
        batch.req_pool_indices, batch.cache_indices, batch.source_indices, lens, batch.num_accept_tokens,
        batch.num_accepted_tokens, batch.mamba_track_indices,
    )  # fmt: skip
    kernels_metadata.prepare_uniform_kernel[launch.grid(batch.padded_reqs)](
        requests, pool.mamba_index_mapping.contiguous(), launch.table(pool, requests), slots, sources,
        _or(batch.num_reqs_device, requests), lengths, kept, _bytes(batch.has_initial_state, out), accepted,
        _bytes(batch.mamba_track_mask, out), track_indices,
        out.cache_indices, out.source_indices, out.query_start_loc, launch.flags(out.has_initial_state),
        out.computed_lens, out.draft_indices, out.num_accept_tokens, out.history_offset, out.mamba_track_indices,
        out.mamba_track_tokens,
        batch.padded_reqs, 0 if batch.forward_mode is ForwardMode.IDLE else batch.num_reqs, tokens,
        0 if batch.computed_lens is not None else tokens, pool.track_interval, *_extents(pool),
        DRAFT_EXTEND=draft_extend, LENS=lens is not None, ACCEPT=draft_extend,
        INITIAL=draft_extend and batch.has_initial_state is not None,
        **_flags(batch, pool, tracks and batch.mamba_track_mask is not None),
    )  # fmt: skip


def _flags(batch: StepBatch, pool: StatePool, track: bool) -> dict[str, bool]:
    """The compile-time flags that both kernels take."""
    return {
        "GIVEN": batch.cache_indices is not None,
        "V2P": pool.mamba_v2p_table is not None and batch.cache_indices is None,
        "SOURCE": batch.source_indices is not None,
        "DEVICE_COUNT": batch.num_reqs_device is not None,
        "LAZY": pool.layout == "lazy" and batch.num_accepted_tokens is not None,
        "TRACK": track and batch.mamba_track_indices is not None,
    }


def _extents(pool: StatePool) -> tuple[int, int, int, int]:
    """Rows of the map, entries of the table, slots, and the last row at which a lazy history may begin."""
    table = pool.mamba_v2p_table
    entries = 0 if table is None else table.shape[0]
    return pool.request_rows, entries, pool.num_slots, pool.rows - history_rows(pool.width)


def _or(given: Tensor | None, other: Tensor) -> Tensor:
    return other if given is None else given


def _bytes(given: Tensor | None, out: StepMetadata) -> Tensor:
    return launch.flags(_or(given, out.has_initial_state))
