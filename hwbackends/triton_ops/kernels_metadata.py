"""Triton kernels of the prepare hooks: one launch per phase, slot gather and translation included. Device code only.

Uniform phases (decode, verify, draft extend) take one lane per request. Extend adds a running sum of the lengths and
the request of every token without a second launch: some programs serve requests, the others tokens, and each of them
adds up the lengths before its own part. The launcher bounds the number of programs, so that work stays linear in the
number of requests.
"""

from __future__ import annotations

import triton
import triton.language as tl

PADDED = tl.constexpr(-1)
LAST_POSITION = tl.constexpr(2**31 - 33)
"""`hwbackends.step.metadata.LAST_POSITION`."""
DECODE = tl.constexpr(0)
VERIFY = tl.constexpr(1)
DRAFT_EXTEND = tl.constexpr(2)
EXTEND = tl.constexpr(3)


@triton.jit
def _live_count(num_reqs, num_reqs_device, COUNTED: tl.constexpr):
    """Live rows: the smaller of the host's and the device's count."""
    return tl.minimum(num_reqs, tl.load(num_reqs_device)) if COUNTED else num_reqs


@triton.jit
def _slots(
    req_pool_indices, mamba_index_mapping, v2p, cache_indices, b, live, request_rows, virtual_slots, num_slots,
    V2P: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """Request rows and physical slots, -1 both where the row is padded or one of its indices is not there."""
    request = tl.load(req_pool_indices + b, mask=live, other=PADDED)
    live = live & (request >= 0) & (request < request_rows)
    if GIVEN:
        slot = tl.load(cache_indices + b, mask=live, other=PADDED).to(tl.int64)
    else:
        slot = tl.load(mamba_index_mapping + request, mask=live, other=PADDED).to(tl.int64)
        if V2P:
            slot = tl.load(v2p + slot, mask=(slot > 0) & (slot < virtual_slots), other=PADDED)
    live = live & (slot > 0) & (slot < num_slots)
    return tl.where(live, request, PADDED), tl.where(live, slot, PADDED)


@triton.jit
def _translated(v2p, slot, wanted, virtual_slots, num_slots, V2P: tl.constexpr):
    """Physical slots of an optional second index; -1 where unwanted, padded or not there."""
    slot = tl.where(wanted, slot.to(tl.int64), PADDED)
    if V2P:
        slot = tl.load(v2p + slot, mask=(slot > 0) & (slot < virtual_slots), other=PADDED)
    return tl.where((slot > 0) & (slot < num_slots), slot, PADDED)


@triton.jit
def _position(length):
    """Computed lengths as positions: not negative, and with room for a step in 32 bits."""
    return tl.minimum(tl.maximum(length.to(tl.int64), 0), LAST_POSITION).to(tl.int32)


@triton.jit
def _computed(computed_lens, lengths, b, live, tokens: tl.constexpr, COMPUTED: tl.constexpr, LENGTHS: tl.constexpr):
    """Rows consumed before the step: as given, else the length after it less its tokens, else unknown (0)."""
    if COMPUTED:
        return _position(tl.load(computed_lens + b, mask=live, other=0))
    if LENGTHS:
        return _position(tl.load(lengths + b, mask=live, other=tokens).to(tl.int64) - tokens)
    return tl.zeros_like(b)


@triton.jit
def _history_offset(num_accepted_tokens, b, live, LAZY: tl.constexpr, LAST: tl.constexpr):
    """Row at which the history of a lazy slot begins, LAST at most; 0 on other layouts."""
    if LAZY:
        kept = tl.load(num_accepted_tokens + b, mask=live, other=1)
        return tl.minimum(tl.maximum(kept, 1), LAST + 1).to(tl.int32) - 1
    return tl.zeros_like(b)


@triton.jit
def _window_after(n, count, seqlens, b, wanted, PHASE: tl.constexpr, INTERVAL: tl.constexpr):
    """k of the window that a track slot gets, -1 for none; `count` tokens are kept of the step. Lengths and intervals
    are not negative where k counts, so division may truncate."""
    if PHASE == DECODE:
        k = tl.full(b.shape, 1, tl.int32)
    elif PHASE == EXTEND:
        until = tl.load(seqlens + b, mask=wanted, other=PADDED)
        until = tl.minimum(tl.maximum(until, PADDED), 2**31 - 1).to(tl.int32)
        k = (until - n) // INTERVAL * INTERVAL
        k = tl.where((until >= n) & (k <= count), k, PADDED)
    else:
        before = n // INTERVAL
        after = (n + count) // INTERVAL
        k = tl.where(before != after, after * INTERVAL - n, PADDED)
    return tl.where(wanted, k, PADDED)


@triton.jit
def _track_rows(
    v2p, track_mask, track_indices, seqlens, n, count, b, live, virtual_slots, num_slots,
    PHASE: tl.constexpr, INTERVAL: tl.constexpr, TRANSLATE: tl.constexpr, TRACK: tl.constexpr,
):  # fmt: skip
    """Physical track slots and k of the window that each gets; -1 both where nothing is written."""
    k = tl.full(b.shape, PADDED, tl.int32)
    track = tl.full(b.shape, PADDED, tl.int64)
    if TRACK:
        wanted = live & tl.load(track_mask + b, mask=live, other=0).to(tl.int1)
        k = _window_after(n, count, seqlens, b, wanted, PHASE, INTERVAL)
        track = tl.load(track_indices + b, mask=k >= 0, other=PADDED)
        track = _translated(v2p, track, k >= 0, virtual_slots, num_slots, TRANSLATE)
        k = tl.where(track > 0, k, PADDED)
    return track, k


@triton.jit
def _store_rows(
    out_cache, out_source, out_initial, out_computed, out_draft, out_offset, out_track, out_tokens,
    slot, source, initial, n, request, offset, track, k, b, inside,
):  # fmt: skip
    tl.store(out_cache + b, slot.to(out_cache.dtype.element_ty), mask=inside)
    tl.store(out_source + b, source.to(out_source.dtype.element_ty), mask=inside)
    tl.store(out_initial + b, initial, mask=inside)
    tl.store(out_computed + b, n, mask=inside)
    tl.store(out_draft + b, request.to(tl.int32), mask=inside)
    tl.store(out_offset + b, offset, mask=inside)
    tl.store(out_track + b, track.to(out_track.dtype.element_ty), mask=inside)
    tl.store(out_tokens + b, k, mask=inside)


_UNALIGNED = [
    "req_pool_indices", "mamba_index_mapping", "v2p", "cache_indices", "computed_lens", "seq_lens", "extend_seq_lens",
    "has_initial_state", "source_indices", "num_accept_tokens", "num_accepted_tokens", "track_mask", "track_indices",
    "track_seqlens", "num_reqs_device",
]  # fmt: skip
"""The engine's tensors, at whatever address: one lane reads one element, so alignment would gain nothing."""


_COUNTS = [
    "num_reqs", "padded_reqs", "num_tokens", "request_programs", "request_rows", "virtual_slots", "num_slots",
]  # fmt: skip


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_UNALIGNED)
def prepare_uniform_kernel(
    req_pool_indices, mamba_index_mapping, v2p, cache_indices, computed_lens, seq_lens, has_initial_state,
    num_accept_tokens, num_accepted_tokens, track_mask, track_indices, num_reqs_device,
    out_cache, out_source, out_start, out_initial, out_computed, out_draft, out_accept, out_offset, out_track,
    out_tokens, num_reqs, padded_reqs, request_rows, virtual_slots, num_slots,
    PHASE: tl.constexpr, TOKENS: tl.constexpr, INTERVAL: tl.constexpr, V2P: tl.constexpr, GIVEN: tl.constexpr,
    COMPUTED: tl.constexpr, LENGTHS: tl.constexpr, INITIAL: tl.constexpr, LAZY: tl.constexpr, TRACK: tl.constexpr,
    COUNTED: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Metadata of decode, verify and draft extend: TOKENS tokens for every request."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < padded_reqs
    live = inside & (b < _live_count(num_reqs, num_reqs_device, COUNTED))
    accepted = tl.zeros_like(b)
    if PHASE == DRAFT_EXTEND:
        accepted = tl.load(num_accept_tokens + b, mask=live, other=PADDED)
        accepted = tl.minimum(tl.maximum(accepted, PADDED), TOKENS).to(tl.int32)
        live = live & (accepted >= 0)
    request, slot = _slots(
        req_pool_indices, mamba_index_mapping, v2p, cache_indices, b, live, request_rows, virtual_slots, num_slots,
        V2P, GIVEN,
    )  # fmt: skip
    live = slot > 0
    n = _computed(computed_lens, seq_lens, b, live, TOKENS, COMPUTED, LENGTHS)
    initial = live
    if INITIAL:
        initial = live & tl.load(has_initial_state + b, mask=live, other=0).to(tl.int1)
    if PHASE == DRAFT_EXTEND:
        accepted = tl.where(live, accepted, PADDED)
        tl.store(out_accept + b, accepted, mask=inside)
    offset = _history_offset(num_accepted_tokens, b, live, LAZY, LAST)
    track, k = _track_rows(
        v2p, track_mask, track_indices, seq_lens, n, accepted, b, live, virtual_slots, num_slots, PHASE, INTERVAL,
        V2P and not GIVEN, TRACK,
    )  # fmt: skip
    _store_rows(
        out_cache, out_source, out_initial, out_computed, out_draft, out_offset, out_track, out_tokens,
        slot, slot, initial, n, request, offset, track, k, b, inside,
    )  # fmt: skip
    tl.store(out_start + b + 1, (b + 1) * TOKENS, mask=inside)
    tl.store(out_start + b, b * 0, mask=b == 0)


@triton.jit
def _lengths(extend_seq_lens, b, live_count, num_tokens):
    """Tokens of each request, the step's at most; 0 at and behind the live count."""
    given = tl.load(extend_seq_lens + b, mask=b < live_count, other=0)
    return tl.minimum(tl.maximum(given, 0), num_tokens).to(tl.int32)


@triton.jit
def _extend_owners(
    extend_seq_lens, out_owner, live_count, num_tokens, t0,
    BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """The request of BLOCK_T tokens from t0 on. Token t belongs to request #{r : end of r <= t}: the ends are counted
    by place in the tile (histogram), earlier ones at its first token, and summed up. Empty requests end where they
    begin and are passed over; a token that every request ends before has no owner."""
    b = tl.arange(0, BLOCK)
    t = tl.arange(0, BLOCK_T)
    if SINGLE:
        end = tl.cumsum(_lengths(extend_seq_lens, b, live_count, num_tokens), axis=0)
        here = (b < live_count) & (end < t0 + BLOCK_T)
        ends = tl.histogram(tl.where(here, tl.maximum(end - t0, 0), 0), BLOCK_T, mask=here)
    else:
        ends = tl.zeros([BLOCK_T], tl.int32)
        total = 0
        done = 0
        while (done < live_count) & (total < t0 + BLOCK_T):
            length = _lengths(extend_seq_lens, done + b, live_count, num_tokens)
            count = tl.sum(length, axis=0)
            if total + count <= t0:
                ends += tl.where(t == 0, tl.minimum(BLOCK, live_count - done), 0)
            else:
                end = total + tl.cumsum(length, axis=0)
                here = (done + b < live_count) & (end < t0 + BLOCK_T)
                ends += tl.histogram(tl.where(here, tl.maximum(end - t0, 0), 0), BLOCK_T, mask=here)
            total += count
            done += BLOCK
    owner = tl.cumsum(ends, axis=0)
    owner = tl.where(owner < live_count, owner, PADDED)
    tl.store(out_owner + t0 + t, owner, mask=t0 + t < num_tokens)


@triton.jit
def _sum_before(extend_seq_lens, count, num_tokens, TILE: tl.constexpr):
    """Tokens of the first `count` requests."""
    lane = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.int32)
    done = 0
    while done < count:
        total += _lengths(extend_seq_lens, done + lane, count, num_tokens)
        done += TILE
    return tl.sum(total, axis=0)


@triton.jit
def _extend_rows(
    req_pool_indices, mamba_index_mapping, v2p, cache_indices, extend_seq_lens, computed_lens, has_initial_state,
    source_indices, num_accepted_tokens, track_mask, track_indices, track_seqlens,
    out_cache, out_source, out_start, out_initial, out_computed, out_draft, out_offset, out_track, out_tokens,
    live_count, padded_reqs, b0, num_tokens, request_rows, virtual_slots, num_slots,
    INTERVAL: tl.constexpr, V2P: tl.constexpr, GIVEN: tl.constexpr, INITIAL: tl.constexpr, SOURCE: tl.constexpr,
    LAZY: tl.constexpr, TRACK: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Rows of BLOCK requests from b0 on; their offsets follow the sum of all lengths before them, up to the step's
    tokens."""
    b = b0 + tl.arange(0, BLOCK)
    inside = b < padded_reqs
    request, slot = _slots(
        req_pool_indices, mamba_index_mapping, v2p, cache_indices, b, inside & (b < live_count), request_rows,
        virtual_slots, num_slots, V2P, GIVEN,
    )  # fmt: skip
    live = slot > 0
    length = _lengths(extend_seq_lens, b, live_count, num_tokens)
    end = tl.cumsum(length, axis=0)
    if b0 > 0:
        end += _sum_before(extend_seq_lens, tl.minimum(b0, live_count), num_tokens, TILE)
    begin = tl.minimum(end - length, num_tokens)
    end = tl.minimum(end, num_tokens)
    length = end - begin
    tl.store(out_start + b + 1, end, mask=inside)
    tl.store(out_start + b, b * 0, mask=b == 0)
    n = _position(tl.load(computed_lens + b, mask=live, other=0))
    initial = live & (n > 0)
    if INITIAL:
        initial = live & tl.load(has_initial_state + b, mask=live, other=0).to(tl.int1)
    source = slot
    if SOURCE:
        given = tl.load(source_indices + b, mask=live, other=PADDED)
        given = _translated(v2p, given, live, virtual_slots, num_slots, V2P and not GIVEN)
        source = tl.where(given > 0, given, slot)
    offset = _history_offset(num_accepted_tokens, b, live, LAZY, LAST)
    track, k = _track_rows(
        v2p, track_mask, track_indices, track_seqlens, n, length, b, live, virtual_slots, num_slots, EXTEND, INTERVAL,
        V2P and not GIVEN, TRACK,
    )  # fmt: skip
    _store_rows(
        out_cache, out_source, out_initial, out_computed, out_draft, out_offset, out_track, out_tokens,
        slot, source, initial, n, request, offset, track, k, b, inside,
    )  # fmt: skip


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_UNALIGNED)
def prepare_extend_kernel(
    req_pool_indices, mamba_index_mapping, v2p, cache_indices, extend_seq_lens, computed_lens, has_initial_state,
    source_indices, num_accepted_tokens, track_mask, track_indices, track_seqlens, num_reqs_device,
    out_cache, out_source, out_start, out_initial, out_computed, out_draft, out_offset, out_track, out_tokens,
    out_owner, num_reqs, padded_reqs, num_tokens, request_programs, request_rows, virtual_slots, num_slots,
    INTERVAL: tl.constexpr, V2P: tl.constexpr, GIVEN: tl.constexpr, INITIAL: tl.constexpr, SOURCE: tl.constexpr,
    LAZY: tl.constexpr, TRACK: tl.constexpr, COUNTED: tl.constexpr, LAST: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Metadata of extend. The first `request_programs` programs take BLOCK_R requests each, the others BLOCK_T
    tokens each and read the lengths in tiles of BLOCK_B."""
    live_count = tl.minimum(_live_count(num_reqs, num_reqs_device, COUNTED), padded_reqs)
    part = tl.program_id(0)
    if part < request_programs:
        _extend_rows(
            req_pool_indices, mamba_index_mapping, v2p, cache_indices, extend_seq_lens, computed_lens,
            has_initial_state, source_indices, num_accepted_tokens, track_mask, track_indices, track_seqlens,
            out_cache, out_source, out_start, out_initial, out_computed, out_draft, out_offset, out_track, out_tokens,
            live_count, padded_reqs, part * BLOCK_R, num_tokens, request_rows, virtual_slots, num_slots,
            INTERVAL, V2P, GIVEN, INITIAL, SOURCE, LAZY, TRACK, LAST, BLOCK_R, BLOCK_B,
        )  # fmt: skip
    else:
        t0 = (part - request_programs) * BLOCK_T
        _extend_owners(extend_seq_lens, out_owner, live_count, num_tokens, t0, BLOCK_B, BLOCK_T, SINGLE)
