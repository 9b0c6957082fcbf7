"""Preparation: slots, offsets, flags and track windows of a step, written into the step's buffers."""

from __future__ import annotations

import numpy as np

from hwbackends.step import checks
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.metadata import StepMetadata
from hwbackends.step.pool import StatePool
from hwbackends_numpy.arrays import Array, only_window, translate


def prepare_decode_metadata(batch: StepBatch, pool: StatePool, out: StepMetadata) -> None:
    """Decode and idle steps."""
    _prepare("prepare_decode_metadata", batch, pool, out)


def prepare_extend_metadata(batch: StepBatch, pool: StatePool, out: StepMetadata) -> None:
    """Prefill, chunked prefill, mixed batches."""
    _prepare("prepare_extend_metadata", batch, pool, out)


def prepare_target_verify_metadata(batch: StepBatch, pool: StatePool, out: StepMetadata) -> None:
    """Verify steps."""
    _prepare("prepare_target_verify_metadata", batch, pool, out)


def prepare_draft_extend_metadata(batch: StepBatch, pool: StatePool, out: StepMetadata) -> None:
    """Draft-extend steps."""
    _prepare("prepare_draft_extend_metadata", batch, pool, out)


def _prepare(hook: str, batch: StepBatch, pool: StatePool, out: StepMetadata) -> None:
    checks.prepare(hook, batch, pool, out)
    only_window(hook, pool.layout)
    mode, rows = batch.forward_mode, batch.req_pool_indices.numpy()
    accept = np.full(len(rows), -1)
    if mode is ForwardMode.DRAFT_EXTEND and batch.num_accept_tokens is not None:
        accept = np.minimum(batch.num_accept_tokens.numpy(), batch.draft_token_num)
    found = _slots(batch, pool, rows)
    counted = np.arange(len(rows)) < _count(batch)
    live = _live(batch, counted & (rows >= 0), accept) & (found > 0)
    slots = np.where(live, found, -1)
    tokens = _tokens(batch, counted)
    computed = np.where(live, _computed(batch, tokens), 0)
    source = slots
    if mode is ForwardMode.EXTEND and batch.source_indices is not None:
        given = _given(batch, pool, batch.source_indices.numpy())
        source = np.where(live & (given > 0), given, slots)
    starts = np.concatenate([[0], np.cumsum(tokens)])
    owners = np.full(out.num_tokens, -1)
    owned = np.repeat(np.arange(len(rows)), np.where(mode is ForwardMode.EXTEND, tokens, 0))
    owners[: len(owned)] = owned
    track_slots, track_tokens = _track(batch, pool, live, tokens, computed, accept)
    written = {
        "cache_indices": slots, "source_indices": source, "query_start_loc": starts, "computed_lens": computed,
        "has_initial_state": live & _filled(batch, computed), "seq_idx": owners, "history_offset": 0 * slots,
        "draft_indices": np.where(live, rows, -1), "num_accept_tokens": np.where(live, accept, -1),
        "mamba_track_indices": track_slots, "mamba_track_tokens": track_tokens,
    }  # fmt: skip
    for name, values in written.items():
        getattr(out, name).numpy()[...] = values


def _count(batch: StepBatch) -> int:
    """Rows that are counted: the smaller of both counts."""
    device = batch.num_reqs_device
    return batch.num_reqs if device is None else min(batch.num_reqs, int(device[0]))


def _live(batch: StepBatch, live: Array, accept: Array) -> Array:
    if batch.forward_mode is ForwardMode.IDLE:
        return live & False
    return live & (accept >= 0) if batch.forward_mode is ForwardMode.DRAFT_EXTEND else live


def _slots(batch: StepBatch, pool: StatePool, rows: Array) -> Array:
    if batch.cache_indices is not None:
        return batch.cache_indices.numpy()
    return translate(pool.mamba_v2p_table, pool.mamba_index_mapping.numpy()[np.maximum(rows, 0)])


def _given(batch: StepBatch, pool: StatePool, slots: Array) -> Array:
    """Source and track slots: an engine that brings `cache_indices` has translated these too."""
    return slots if batch.cache_indices is not None else translate(pool.mamba_v2p_table, slots)


def _tokens(batch: StepBatch, counted: Array) -> Array:
    """Tokens of each request; a padded row inside the count keeps its own, whose outputs are 0."""
    if batch.forward_mode is ForwardMode.EXTEND and batch.extend_seq_lens is not None:
        return np.where(counted, np.maximum(batch.extend_seq_lens.numpy(), 0), 0)
    return np.full(len(counted), batch.tokens_per_req)


def _computed(batch: StepBatch, tokens: Array) -> Array:
    if batch.computed_lens is not None:
        return batch.computed_lens.numpy()
    if batch.forward_mode is ForwardMode.EXTEND and batch.extend_prefix_lens is not None:
        return batch.extend_prefix_lens.numpy()
    return 0 * tokens if batch.seq_lens is None else batch.seq_lens.numpy() - tokens


def _filled(batch: StepBatch, computed: Array) -> Array:
    """Whether a request has history, before padding is looked at."""
    if batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND):
        return computed >= 0
    if batch.has_initial_state is not None:
        return batch.has_initial_state.numpy()
    return computed > 0 if batch.forward_mode is ForwardMode.EXTEND else computed >= 0


def _track(
    batch: StepBatch, pool: StatePool, live: Array, tokens: Array, computed: Array, accept: Array
) -> tuple[Array, Array]:
    """(track slot, k of the window that it gets), -1 where nothing is tracked."""
    nothing = np.full(len(live), -1)
    if batch.mamba_track_mask is None or batch.mamba_track_indices is None:
        return nothing, nothing
    interval, wanted = pool.track_interval, live & batch.mamba_track_mask.numpy()
    if batch.forward_mode is ForwardMode.DECODE:
        taken = 0 * tokens + 1
    elif batch.forward_mode is ForwardMode.EXTEND and batch.mamba_track_seqlens is not None:
        lengths = batch.mamba_track_seqlens.numpy()
        taken = (lengths - computed) // interval * interval
        wanted = wanted & (lengths >= 0) & (taken >= 0) & (taken <= tokens)
    elif batch.forward_mode is ForwardMode.DRAFT_EXTEND:
        boundary = (computed + accept) // interval
        taken = boundary * interval - computed
        wanted = wanted & (boundary != computed // interval)
    else:
        return nothing, nothing
    slots = _given(batch, pool, batch.mamba_track_indices.numpy())
    wanted = wanted & (slots > 0)
    return np.where(wanted, slots, -1), np.where(wanted, taken, -1)
