"""Triton kernels of the prepare hooks on Ascend: one launch per phase. Imports triton alone.

Each work item is one request and works on scalars: a gather through the request map is one load per request, never a
vector of addresses. Rows that are not live load entry 0 in place of whatever they hold.
"""

from __future__ import annotations

import triton
import triton.language as tl

PADDED = tl.constexpr(-1)
LAST_POSITION = tl.constexpr(2**31 - 33)
"""`hwbackends.step.metadata.LAST_POSITION`: positions are 32 bits wide, and a step's rows are added to them."""


@triton.jit
def _translated(slot, v2p_table, virtual_slots, V2P: tl.constexpr):
    """Virtual to physical slot; entry 0 is 0, so padding, and what is behind the table's end, stays padding."""
    if V2P:
        slot = tl.load(v2p_table + tl.where((slot > 0) & (slot < virtual_slots), slot, 0)).to(tl.int64)
    return slot


@triton.jit
def _there(slot, num_slots):
    """Whether a slot is there; whatever else an index holds is padding."""
    return (slot > 0) & (slot < num_slots)


@triton.jit
def _slot(request, ready, given, mamba_index_mapping, v2p_table, request_rows, virtual_slots, num_slots,
          GIVEN: tl.constexpr, V2P: tl.constexpr):  # fmt: skip
    """Physical slot of a request row, 0 where there is none; `given` points at the engine's own slot where it
    translates itself."""
    ready = ready & (request >= 0) & (request < request_rows)
    if GIVEN:
        slot = tl.load(given).to(tl.int64)
    else:
        virtual = tl.load(mamba_index_mapping + tl.where(ready, request, 0)).to(tl.int64)
        slot = _translated(virtual, v2p_table, virtual_slots, V2P)
    return tl.where(ready & _there(slot, num_slots), slot, 0)


@triton.jit
def _counted(b, num_reqs, num_reqs_device, DEVICE_COUNT: tl.constexpr):
    """Whether row b stands before the live count; the smaller of both counts holds."""
    count = num_reqs
    if DEVICE_COUNT:
        count = tl.minimum(count, tl.load(num_reqs_device))
    return b < count


@triton.jit
def _write_slots(b, request, slot, live, source_indices, v2p_table, virtual_slots, num_slots, out_cache, out_source,
                 out_drafts, SOURCE: tl.constexpr, GIVEN: tl.constexpr, V2P: tl.constexpr):  # fmt: skip
    """Destination and source slot and request row; -1 where padded."""
    source = slot
    if SOURCE:
        other = tl.where(live, tl.load(source_indices + b).to(tl.int64), 0)
        if not GIVEN:
            other = _translated(other, v2p_table, virtual_slots, V2P)
        source = tl.where(_there(other, num_slots), other, slot)
    tl.store(out_cache + b, tl.where(live, slot, PADDED).to(out_cache.dtype.element_ty))
    tl.store(out_source + b, tl.where(live, source, PADDED).to(out_source.dtype.element_ty))
    tl.store(out_drafts + b, tl.where(live, request, PADDED).to(tl.int32))


@triton.jit
def _write_track(b, live, k, track_mask, track_indices, v2p_table, virtual_slots, num_slots, out_indices, out_tokens,
                 TRACK: tl.constexpr, GIVEN: tl.constexpr, V2P: tl.constexpr):  # fmt: skip
    """Track slot and window length where the mask, the row, the length and the slot are good; else -1 in both."""
    goal = tl.full([], PADDED, tl.int64)
    tokens = tl.full([], PADDED, tl.int32)
    if TRACK:
        wanted = live & (tl.load(track_mask + b) != 0) & (k >= 0)
        given = tl.where(wanted, tl.load(track_indices + b).to(tl.int64), 0)
        if not GIVEN:
            given = _translated(given, v2p_table, virtual_slots, V2P)
        wanted = wanted & _there(given, num_slots)
        goal = tl.where(wanted, given, PADDED)
        tokens = tl.where(wanted, k, PADDED).to(tl.int32)
    tl.store(out_indices + b, goal.to(out_indices.dtype.element_ty))
    tl.store(out_tokens + b, tokens)


@triton.jit
def _floor_div(value, divisor):
    """Floor division for divisor > 0; `//` truncates."""
    quotient = value // divisor
    return tl.where(value - quotient * divisor < 0, quotient - 1, quotient)


@triton.jit
def _write_offset(b, live, num_accepted_tokens, last_offset, out_offset, LAZY: tl.constexpr):
    """First row of a lazy slot's history: one less than what the previous step kept, `last_offset` at most."""
    offset = tl.full([], 0, tl.int32)
    if LAZY:
        kept = tl.load(num_accepted_tokens + b).to(tl.int64)
        offset = tl.where(live, tl.minimum(tl.maximum(kept - 1, 0), last_offset), 0).to(tl.int32)
    tl.store(out_offset + b, offset)


@triton.jit(do_not_specialize=[
    "reqs", "num_reqs", "tokens", "less", "interval", "request_rows", "virtual_slots", "num_slots", "last_offset",
])  # fmt: skip
def prepare_uniform_kernel(
    req_pool_indices, mamba_index_mapping, v2p_table, cache_indices, source_indices, num_reqs_device, lens,
    num_accept_tokens, has_initial_state, num_accepted_tokens, track_mask, track_indices,
    out_cache, out_source, out_start, out_initial, out_computed, out_drafts, out_accept, out_offset, out_track,
    out_track_tokens,
    reqs, num_reqs, tokens, less, interval, request_rows, virtual_slots, num_slots, last_offset,
    DRAFT_EXTEND: tl.constexpr, GIVEN: tl.constexpr, V2P: tl.constexpr, SOURCE: tl.constexpr,
    DEVICE_COUNT: tl.constexpr, LENS: tl.constexpr, ACCEPT: tl.constexpr, INITIAL: tl.constexpr, LAZY: tl.constexpr,
    TRACK: tl.constexpr,
):  # fmt: skip
    """Decode, target verify and draft extend: `tokens` per request; `less` turns the given lengths into n_b."""
    for b in range(tl.program_id(0), reqs, tl.num_programs(0)):
        request = tl.load(req_pool_indices + b).to(tl.int64)
        live = _counted(b, num_reqs, num_reqs_device, DEVICE_COUNT) & (request >= 0)
        accepted = tl.full([], 1, tl.int64)
        if ACCEPT:
            accepted = tl.load(num_accept_tokens + b).to(tl.int64)
            live = live & (accepted >= 0)
        slot = _slot(request, live, cache_indices + b, mamba_index_mapping, v2p_table, request_rows, virtual_slots,
                     num_slots, GIVEN, V2P)  # fmt: skip
        live = live & (slot > 0)
        _write_slots(b, request, slot, live, source_indices, v2p_table, virtual_slots, num_slots, out_cache, out_source,
                     out_drafts, SOURCE, GIVEN, V2P)  # fmt: skip
        n = tl.full([], 0, tl.int64)
        if LENS:
            n = tl.where(live, tl.load(lens + b).to(tl.int64) - less, 0)
            n = tl.minimum(tl.maximum(n, 0), LAST_POSITION)
        tl.store(out_computed + b, n.to(tl.int32))
        tl.store(out_start + b + 1, (b + 1) * tokens)
        initial = live
        if INITIAL:
            initial = live & (tl.load(has_initial_state + b) != 0)
        tl.store(out_initial + b, initial.to(tl.int8))
        _write_offset(b, live, num_accepted_tokens, last_offset, out_offset, LAZY)
        k = tl.full([], 1, tl.int64)
        if DRAFT_EXTEND:
            accepted = tl.where(live, tl.minimum(accepted, tokens), PADDED)
            tl.store(out_accept + b, accepted.to(tl.int32))
            boundary = _floor_div(n + accepted, interval)
            crossed = boundary != _floor_div(n, interval)
            k = tl.where(crossed, boundary * interval - n, PADDED)
        _write_track(b, live, k, track_mask, track_indices, v2p_table, virtual_slots, num_slots, out_track,
                     out_track_tokens, TRACK, GIVEN, V2P)  # fmt: skip
    if tl.program_id(0) == 0:
        tl.store(out_start, 0)


@triton.jit
def _tokens_before(end, num_reqs, extend_seq_lens, tokens, SCAN: tl.constexpr):
    """Tokens of the live rows before row `end`; a row has the step's at most."""
    total = tl.full([], 0, tl.int32)
    for low in range(0, tl.minimum(end, num_reqs), SCAN):
        at = low + tl.arange(0, SCAN)
        lens = tl.load(extend_seq_lens + at, mask=at < tl.minimum(end, num_reqs), other=0)
        total += tl.sum(tl.minimum(tl.maximum(lens, 0), tokens).to(tl.int32), axis=0)
    return total


@triton.jit
def _fill(out, start, end, value, SCAN: tl.constexpr):
    """out[start : end] = value."""
    for low in range(start, end, SCAN):
        at = low + tl.arange(0, SCAN)
        tl.store(out + at, tl.full([SCAN], 0, tl.int32) + value, mask=at < end)


@triton.jit(do_not_specialize=[
    "reqs", "num_reqs", "tokens", "interval", "request_rows", "virtual_slots", "num_slots", "last_offset",
])  # fmt: skip
def prepare_extend_kernel(
    req_pool_indices, mamba_index_mapping, v2p_table, cache_indices, source_indices, num_reqs_device,
    extend_seq_lens, lens, has_initial_state, num_accepted_tokens, track_mask, track_indices, track_seqlens,
    out_cache, out_source, out_start, out_initial, out_computed, out_drafts, out_seq_idx, out_offset, out_track,
    out_track_tokens,
    reqs, num_reqs, tokens, interval, request_rows, virtual_slots, num_slots, last_offset,
    GIVEN: tl.constexpr, V2P: tl.constexpr, SOURCE: tl.constexpr, DEVICE_COUNT: tl.constexpr, INITIAL: tl.constexpr,
    LAZY: tl.constexpr, TRACK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Extend. A program owns neighbouring requests: it sums the lengths before its first one in blocks of SCAN, then
    carries the offset. The program behind the last request owns the tail of `seq_idx`."""
    share = tl.cdiv(reqs, tl.num_programs(0))
    begin = tl.program_id(0) * share
    count = num_reqs
    if DEVICE_COUNT:
        count = tl.minimum(count, tl.load(num_reqs_device))
    start = tl.minimum(_tokens_before(begin, count, extend_seq_lens, tokens, SCAN), tokens)
    for b in range(begin, tl.minimum(begin + share, reqs)):
        request = tl.load(req_pool_indices + b).to(tl.int64)
        live = (b < count) & (request >= 0)
        length = tl.minimum(tl.maximum(tl.load(extend_seq_lens + b).to(tl.int64), 0), tokens - start).to(tl.int32)
        length = tl.where(b < count, length, 0)
        slot = _slot(request, live, cache_indices + b, mamba_index_mapping, v2p_table, request_rows, virtual_slots,
                     num_slots, GIVEN, V2P)  # fmt: skip
        live = live & (slot > 0)
        _write_slots(b, request, slot, live, source_indices, v2p_table, virtual_slots, num_slots, out_cache, out_source,
                     out_drafts, SOURCE, GIVEN, V2P)  # fmt: skip
        n = tl.where(live, tl.minimum(tl.maximum(tl.load(lens + b).to(tl.int64), 0), LAST_POSITION), 0)
        tl.store(out_computed + b, n.to(tl.int32))
        initial = n > 0
        if INITIAL:
            initial = tl.load(has_initial_state + b) != 0
        tl.store(out_initial + b, (live & initial).to(tl.int8))
        _write_offset(b, live, num_accepted_tokens, last_offset, out_offset, LAZY)
        k = tl.full([], PADDED, tl.int64)
        if TRACK:
            wanted = tl.load(track_seqlens + b).to(tl.int64)
            aligned = _floor_div(wanted - n, interval) * interval
            k = tl.where((wanted >= 0) & (aligned >= 0) & (aligned <= length), aligned, PADDED)
        _write_track(b, live, k, track_mask, track_indices, v2p_table, virtual_slots, num_slots, out_track,
                     out_track_tokens, TRACK, GIVEN, V2P)  # fmt: skip
        _fill(out_seq_idx, start, start + length, b, SCAN)
        start += length
        tl.store(out_start + b + 1, start)
    if begin == 0:
        tl.store(out_start, 0)
    if (begin + share >= reqs) & ((begin < reqs) | (reqs == 0)):
        _fill(out_seq_idx, start, tokens, PADDED, SCAN)
