"""The prepare hooks in pure torch: every tensor of a step's metadata from the engine's batch, no state touched."""

from __future__ import annotations

import torch
from torch import Tensor

from hwbackends.conv.layouts import history_rows
from hwbackends.step import checks
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.metadata import LAST_POSITION, PADDED, StepMetadata
from hwbackends.step.pool import StatePool
from hwbackends.torch_ops.rows import within, writing


def prepare_decode_metadata(batch: StepBatch, pool: StatePool, out: StepMetadata) -> None:
    """Slots, lengths and track slots of a decode step. See `hookspecs.prepare_decode_metadata`."""
    checks.prepare("prepare_decode_metadata", batch, pool, out)
    with writing(out.cache_indices):
        live = _write_common(batch, pool, out, tokens=1)
        out.has_initial_state.copy_(live)
        one = torch.ones_like(out.mamba_track_tokens)
        _write_track(batch, pool, out, live, one)


def prepare_extend_metadata(batch: StepBatch, pool: StatePool, out: StepMetadata) -> None:
    """Offsets, owners, prefix flags and track windows of an extend step. See `hookspecs.prepare_extend_metadata`."""
    checks.prepare("prepare_extend_metadata", batch, pool, out)
    with writing(out.cache_indices):
        live = _write_common(batch, pool, out, tokens=None)
        lengths = out.query_start_loc[1:] - out.query_start_loc[:-1]
        given = batch.has_initial_state
        out.has_initial_state.copy_(live & (given if given is not None else out.computed_lens > 0))
        token = torch.arange(out.num_tokens, device=lengths.device, dtype=torch.int32)
        owner = torch.searchsorted(out.query_start_loc[1:].contiguous(), token, right=True, out_int32=True)
        out.seq_idx.copy_(torch.where(token < out.query_start_loc[-1], owner, PADDED))
        taken = torch.full_like(lengths, PADDED)
        if batch.mamba_track_seqlens is not None:
            wanted = batch.mamba_track_seqlens
            interval = pool.track_interval
            aligned = torch.div(wanted - out.computed_lens, interval, rounding_mode="floor") * interval
            inside = (wanted >= 0) & (aligned >= 0) & (aligned <= lengths)
            taken = torch.where(inside, aligned, PADDED)
        _write_track(batch, pool, out, live, taken)


def prepare_target_verify_metadata(batch: StepBatch, pool: StatePool, out: StepMetadata) -> None:
    """Slots, request rows and lengths of a verify step. See `hookspecs.prepare_target_verify_metadata`."""
    checks.prepare("prepare_target_verify_metadata", batch, pool, out)
    with writing(out.cache_indices):
        live = _write_common(batch, pool, out, tokens=batch.draft_token_num)
        out.has_initial_state.copy_(live)
        out.mamba_track_indices.fill_(PADDED)
        out.mamba_track_tokens.fill_(PADDED)


def prepare_draft_extend_metadata(batch: StepBatch, pool: StatePool, out: StepMetadata) -> None:
    """As verify, with accepted counts and track windows. See `hookspecs.prepare_draft_extend_metadata`."""
    checks.prepare("prepare_draft_extend_metadata", batch, pool, out)
    with writing(out.cache_indices):
        assert batch.num_accept_tokens is not None
        live = _write_common(batch, pool, out, tokens=batch.draft_token_num)
        accepted = torch.where(live, batch.num_accept_tokens.clamp(max=batch.draft_token_num), PADDED)
        out.num_accept_tokens.copy_(accepted)
        out.has_initial_state.copy_(live if batch.has_initial_state is None else live & batch.has_initial_state)
        interval = pool.track_interval
        before = out.computed_lens.long()
        after = before + accepted
        boundary = torch.div(after, interval, rounding_mode="floor")
        crossed = boundary != torch.div(before, interval, rounding_mode="floor")
        _write_track(batch, pool, out, live, torch.where(crossed, boundary * interval - before, PADDED))


def _write_common(batch: StepBatch, pool: StatePool, out: StepMetadata, tokens: int | None) -> Tensor:
    """Slots, sources, draft rows, lengths and offsets; returns the live rows [B] bool."""
    counted = _counted(batch, pool)
    requests = batch.req_pool_indices
    live = counted & (requests >= 0) & (requests < pool.request_rows)
    if batch.forward_mode is ForwardMode.DRAFT_EXTEND and batch.num_accept_tokens is not None:
        live = live & (batch.num_accept_tokens >= 0)
    slots = _slots(batch, pool, requests, live)
    live = live & within(slots, pool.num_slots)
    out.cache_indices.copy_(torch.where(live, slots, PADDED))
    out.source_indices.copy_(_sources(batch, pool, out.cache_indices, live))
    out.draft_indices.copy_(torch.where(live, requests, PADDED))
    computed = _computed_lens(batch, out, tokens).long().clamp(0, LAST_POSITION)
    out.computed_lens.copy_(torch.where(live, computed, 0))
    _write_offsets(batch, out, tokens, counted)
    out.history_offset.zero_()
    if pool.layout == "lazy" and batch.num_accepted_tokens is not None:
        offset = (batch.num_accepted_tokens.long() - 1).clamp(0, pool.rows - history_rows(pool.width))
        out.history_offset.copy_(torch.where(live, offset, 0))
    return live


def _counted(batch: StepBatch, pool: StatePool) -> Tensor:
    """Rows before the live count [B] bool; none in an idle step."""
    row = torch.arange(batch.padded_reqs, device=pool.device)
    counted = row < (0 if batch.forward_mode is ForwardMode.IDLE else batch.num_reqs)
    return counted if batch.num_reqs_device is None else counted & (row < batch.num_reqs_device)


def _slots(batch: StepBatch, pool: StatePool, requests: Tensor, live: Tensor) -> Tensor:
    """Physical slots [B]; rows that are not live may hold anything."""
    if batch.cache_indices is not None:
        return batch.cache_indices
    found = pool.mamba_index_mapping[torch.where(live, requests, 0).long()]
    return translate(pool, found)


def translate(pool: StatePool, slots: Tensor) -> Tensor:
    """Virtual to physical slots through the pool's table; what is not positive or behind its end is padding."""
    table = pool.mamba_v2p_table
    if table is None:
        return slots
    known = within(slots, table.shape[0])
    return torch.where(known, table[torch.where(known, slots, 0).long()], PADDED)


def _sources(batch: StepBatch, pool: StatePool, slots: Tensor, live: Tensor) -> Tensor:
    if batch.source_indices is None:
        return slots
    given = torch.where(live, batch.source_indices, PADDED)
    found = given if batch.cache_indices is not None else translate(pool, given)
    return torch.where(within(found, pool.num_slots), found, slots)


def _computed_lens(batch: StepBatch, out: StepMetadata, tokens: int | None) -> Tensor:
    """n_b [B], as given, else from the phase's lengths; 0 where the engine told none (no layout then needs it)."""
    if batch.computed_lens is not None:
        return batch.computed_lens
    if tokens is None:
        assert batch.extend_prefix_lens is not None
        return batch.extend_prefix_lens
    if batch.seq_lens is None:
        return torch.zeros_like(out.computed_lens)
    return batch.seq_lens.long() - tokens


def _write_offsets(batch: StepBatch, out: StepMetadata, tokens: int | None, counted: Tensor) -> None:
    if tokens is not None:
        count = batch.padded_reqs + 1
        out.query_start_loc.copy_(torch.arange(count, device=counted.device, dtype=torch.int32) * tokens)
        return
    assert batch.extend_seq_lens is not None
    lengths = torch.where(counted, batch.extend_seq_lens, 0).long().clamp(min=0)
    out.query_start_loc[0].zero_()
    out.query_start_loc[1:].copy_(lengths.cumsum(0).clamp(max=out.num_tokens))


def _write_track(batch: StepBatch, pool: StatePool, out: StepMetadata, live: Tensor, taken: Tensor) -> None:
    """Track slot and window length where the mask, the row and the length are good; else -1 in both."""
    if batch.mamba_track_mask is None or batch.mamba_track_indices is None:
        out.mamba_track_indices.fill_(PADDED)
        out.mamba_track_tokens.fill_(PADDED)
        return
    wanted = live & batch.mamba_track_mask & (taken >= 0)
    given = torch.where(wanted, batch.mamba_track_indices, PADDED)
    slots = given if batch.cache_indices is not None else translate(pool, given)
    wanted = wanted & within(slots, pool.num_slots)
    out.mamba_track_indices.copy_(torch.where(wanted, slots, PADDED))
    out.mamba_track_tokens.copy_(torch.where(wanted, taken, PADDED))
