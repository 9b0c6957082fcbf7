"""Triton kernels of the conv hooks: decode, extend, and verify with draft extend. Device code only; shapes, strides
and launch sizes are chosen where they are launched.

One program serves one request (or a few tokens of it) and one block of channels. Width, strides and layout are
compile-time constants. Every kernel sums in the same order, newest row first, by explicit fused multiply-adds with
contraction switched off: decode, extend, verify and draft extend give the same bits for the same window.

Loads come before arithmetic: the assembler would otherwise place a product between two loads and chain their
latencies.

Dependent launch (PDL). A kernel launched as a programmatic dependent starts while its predecessors still run, and
`gdc_wait` returns when all of them are complete. So before the wait a kernel reads only what no kernel since the
last plain launch can have written: weights, the step's metadata, and the history of its own conv. The launcher
keeps that rule (cuda/dependent.py). Every program waits, also one with nothing to do: a kernel that skipped the wait
could complete before its predecessor and let its own successor start too early.
"""
# Tuples of tensors grow by +: triton's compiler knows neither unpacking nor a conditional expression of tensors.
# ruff: noqa: RUF005, SIM108

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

WINDOW = tl.constexpr(0)
RING = tl.constexpr(1)
LAZY = tl.constexpr(2)
LAST_POSITION = tl.constexpr(2**31 - 33)
"""`hwbackends.step.metadata.LAST_POSITION`: positions are 32 bits wide, and a step's rows are added to them."""


@triton.jit
def _every(condition, d):
    """A scalar condition for every channel of a block."""
    return (tl.zeros_like(d) + condition.to(tl.int32)) != 0


@triton.jit
def _channels(block, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Channel offsets of one block and which of them exist."""
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = tl.full([BLOCK_D], True, tl.int1) if D % BLOCK_D == 0 else d < D
    return d, inside


@triton.jit
def _at(d, STRIDE: tl.constexpr):
    """Element offsets of channels, 64 bits wide where a stride could carry them past 32."""
    return d if STRIDE == 1 else d.to(tl.int64) * STRIDE


@triton.jit
def _live(slot, num_slots):
    """Whether a slot is there: whatever else an index holds is padding, and nothing is read or written for it."""
    return (slot > 0) & (slot < num_slots)


@triton.jit
def _first(positions, b, exists, S: tl.constexpr, LAYOUT: tl.constexpr, C: tl.constexpr):
    """Where the history of a request begins: ring, the position of its oldest row; lazy, a row number; window, 0. Kept
    where rows of a slot can be, whatever the metadata holds."""
    if LAYOUT == WINDOW:
        first = tl.full([], 0, tl.int32)
    else:
        first = tl.maximum(tl.load(positions + b, mask=exists, other=0), 0)
        if LAYOUT == RING:
            # rows of the step and of the slot are added: no sum may leave 32 bits
            first = tl.minimum(tl.minimum(first, LAST_POSITION), 2**31 - 1 - 2 * C) - S
        else:
            first = tl.minimum(first, C - S)
    return first


@triton.jit
def _state_row(slot, first, row, LAYOUT: tl.constexpr, C: tl.constexpr, SS: tl.constexpr, SR: tl.constexpr):
    """Element offset of row `row` of a window that begins at `first`: ring, the absolute position of its oldest row;
    lazy, a row number; window, 0. The position of a ring row may be as low as -C."""
    at = (first + row + C) % C if LAYOUT == RING else first + row
    return slot.to(tl.int64) * SS + at.to(tl.int64) * SR


@triton.jit
def _history_row(
    state, slot, ok, first, row, d, inside,
    LAYOUT: tl.constexpr, C: tl.constexpr, SS: tl.constexpr, SR: tl.constexpr, SD: tl.constexpr,
):  # fmt: skip
    """One row of history; zeros where it must not be read, or lies before position 0 of a ring."""
    if LAYOUT == RING:
        ok = ok & (first + row >= 0)
    at = state + _state_row(tl.where(ok, slot, 0), first, row, LAYOUT, C, SS, SR)
    return tl.load(at + _at(d, SD), mask=_every(ok, d) & inside, other=0.0)


@triton.jit
def _weights(weight, d, inside, W: tl.constexpr, SWD: tl.constexpr, SWW: tl.constexpr):
    w = ()
    for i in tl.static_range(W):
        w = w + (tl.load(weight + _at(d, SWD) + i * SWW, mask=inside, other=0.0),)
    return w


@triton.jit
def _sum(rows, w, bias, START: tl.constexpr, W: tl.constexpr, ACC: tl.constexpr, BIAS: tl.constexpr,
         SILU: tl.constexpr, RESIDUAL: tl.constexpr):  # fmt: skip
    """act(bias + sum w[i] * rows[START + i]) + residual, newest row first. Without an activation the residual joins
    the newest row's product, which saves an addition."""
    newest = rows[START + W - 1].to(ACC)
    if RESIDUAL and not SILU:
        acc = tl.fma(newest, w[W - 1].to(ACC), newest)
    else:
        acc = newest * w[W - 1].to(ACC)
    for i in tl.static_range(1, W):
        acc = tl.fma(rows[START + W - 1 - i].to(ACC), w[W - 1 - i].to(ACC), acc)
    if BIAS:
        acc = acc + bias.to(ACC)
    if SILU:
        acc = acc / (1.0 + tl.exp(-acc))
        if RESIDUAL:
            acc = acc + newest
    return acc


@triton.jit(do_not_specialize=["num_reqs", "num_slots"])
def conv_decode_kernel(
    x, weight, bias, out, state, cache_indices, positions, track_indices, num_reqs, num_slots,
    D: tl.constexpr, W: tl.constexpr, LAYOUT: tl.constexpr, C: tl.constexpr,
    SX: tl.constexpr, SO: tl.constexpr, SS: tl.constexpr, SR: tl.constexpr, SD: tl.constexpr,
    SWD: tl.constexpr, SWW: tl.constexpr, SB: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    RESIDUAL: tl.constexpr, TRACK: tl.constexpr, TAIL: tl.constexpr, PDL: tl.constexpr, ACC: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One token per request: conv, new window into the slot and, with TRACK, into the track slot."""
    if PDL:
        gdc_launch_dependents()
    S: tl.constexpr = W - 1
    BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    d, inside = _channels(tl.program_id(0) % BLOCKS, D, BLOCK_D)
    b = tl.program_id(0) // BLOCKS
    if TAIL:
        exists = b < num_reqs
        slot = tl.load(cache_indices + b, mask=exists, other=0)
    else:
        exists = b >= 0
        slot = tl.load(cache_indices + b)
    first = _first(positions, b, exists, S, LAYOUT, C)
    live = _live(slot, num_slots)
    w = _weights(weight, d, inside, W, SWD, SWW)
    beta = tl.load(bias + _at(d, SB), mask=inside, other=0.0) if BIAS else 0.0
    rows = ()
    for i in tl.static_range(S):
        rows = rows + (_history_row(state, slot, live, first, i, d, inside, LAYOUT, C, SS, SR, SD),)
    if TRACK:
        track = tl.load(track_indices + b, mask=live, other=0)
    if PDL:
        gdc_wait()
    rows = rows + (tl.load(x + b.to(tl.int64) * SX + d, mask=inside, other=0.0),)
    acc = _sum(rows, w, beta, 0, W, ACC, BIAS, SILU, RESIDUAL)
    alive = _every(live, d)
    tl.store(out + b.to(tl.int64) * SO + d, tl.where(alive, acc, 0.0).to(out.dtype.element_ty), mask=inside)
    if LAYOUT == RING:
        at = state + _state_row(slot, first, S, LAYOUT, C, SS, SR)
        tl.store(at + _at(d, SD), rows[S].to(state.dtype.element_ty), mask=alive & inside)
        new = first + 1
    else:
        # the rows that were read are rewritten: every lane has read before any lane writes
        tl.debug_barrier()
        new = first * 0
        for i in tl.static_range(S):
            at = state + _state_row(slot, new, i, LAYOUT, C, SS, SR)
            tl.store(at + _at(d, SD), rows[i + 1].to(state.dtype.element_ty), mask=alive & inside)
    if TRACK:
        wanted = _every(_live(track, num_slots), d) & inside
        for i in tl.static_range(S):
            at = state + _state_row(track, new, i, LAYOUT, C, SS, SR)
            tl.store(at + _at(d, SD), rows[i + 1].to(state.dtype.element_ty), mask=wanted)


@triton.jit
def _virtual_row(
    x, state, slot, ok, first, token, j, length, d, inside,
    S: tl.constexpr, LAYOUT: tl.constexpr, C: tl.constexpr, SX: tl.constexpr,
    SS: tl.constexpr, SR: tl.constexpr, SD: tl.constexpr,
):  # fmt: skip
    """Row j of history ++ x as the state stores it; `token` is the request's first row of x."""
    old = _history_row(state, slot, ok & (j < S), first, j, d, inside, LAYOUT, C, SS, SR, SD)
    taken = _every((j >= S) & (j < length + S), d)
    new = tl.load(x + (token + j - S).to(tl.int64) * SX + d, mask=taken & inside, other=0.0)
    return tl.where(taken, new.to(state.dtype.element_ty), old)


@triton.jit
def _store_window(
    state, rows, slot, ok, first, only_from, d, inside,
    S: tl.constexpr, LAYOUT: tl.constexpr, C: tl.constexpr, SS: tl.constexpr, SR: tl.constexpr, SD: tl.constexpr,
):  # fmt: skip
    """Write the S rows of a window into a slot, those from row `only_from` on."""
    for i in tl.static_range(S):
        at = state + _state_row(slot, first, i, LAYOUT, C, SS, SR)
        mask = _every(ok & (i >= only_from), d) & inside
        tl.store(at + _at(d, SD), rows[i].to(state.dtype.element_ty), mask=mask)


@triton.jit
def _extend_head(
    x, w, beta, state, out, cache_indices, source_indices, query_start_loc, has_initial_state, positions,
    track_indices, track_tokens, b, num_tokens, num_slots, d, inside,
    W: tl.constexpr, LAYOUT: tl.constexpr, C: tl.constexpr, SX: tl.constexpr, SO: tl.constexpr,
    SS: tl.constexpr, SR: tl.constexpr, SD: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    RESIDUAL: tl.constexpr, TRACK: tl.constexpr, PDL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One request: its first S outputs, its new window and its track window. The same program reads the history and
    writes the slot, for its channels, so no other program can see a half-written slot. Offsets behind the step's tokens
    are cut off there."""
    S: tl.constexpr = W - 1
    slot = tl.load(cache_indices + b)
    source = tl.load(source_indices + b)
    start = tl.minimum(tl.maximum(tl.load(query_start_loc + b), 0), num_tokens)
    length = tl.maximum(tl.minimum(tl.load(query_start_loc + b + 1), num_tokens) - start, 0)
    has = tl.load(has_initial_state + b).to(tl.int1)
    first = _first(positions, b, b >= 0, S, LAYOUT, C)
    if LAYOUT == RING:
        first = tl.minimum(first, 2**31 - 1 - 2 * C - length)
    live = _live(slot, num_slots)
    ok = live & has & _live(source, num_slots)
    if TRACK:
        track = tl.load(track_indices + b)
        k = tl.load(track_tokens + b)
    rows = ()
    for i in tl.static_range(S):
        rows = rows + (_history_row(state, source, ok, first, i, d, inside, LAYOUT, C, SS, SR, SD),)
    if PDL:
        gdc_wait()
    for i in tl.static_range(S):
        mask = _every(i < length, d) & inside
        rows = rows + (tl.load(x + (start + i).to(tl.int64) * SX + d, mask=mask, other=0.0),)
    new = ()
    for i in tl.static_range(S):
        new = new + (_virtual_row(x, state, source, ok, first, start, length + i, length, d, inside,
                                  S, LAYOUT, C, SX, SS, SR, SD),)  # fmt: skip
    if TRACK:
        kept = ()
        for i in tl.static_range(S):
            kept = kept + (_virtual_row(x, state, source, ok, first, start, tl.maximum(k, 0) + i, length, d, inside,
                                        S, LAYOUT, C, SX, SS, SR, SD),)  # fmt: skip
    for i in tl.static_range(S):
        acc = _sum(rows, w, beta, i, W, ACC, BIAS, SILU, RESIDUAL)
        value = tl.where(_every(live, d), acc, 0.0).to(out.dtype.element_ty)
        tl.store(out + (start + i).to(tl.int64) * SO + d, value, mask=_every(i < length, d) & inside)
    if LAYOUT != RING:
        # the rows that were read are rewritten: every lane has read before any lane writes
        tl.debug_barrier()
    # a slot that continues in place needs its new tokens alone; another slot, or a fresh one, needs every row
    only_from = tl.where(has & (source == slot), S - length, 0) if LAYOUT == RING else 0
    begin = first + length if LAYOUT == RING else first * 0
    _store_window(state, new, slot, live & (length > 0), begin, only_from, d, inside, S, LAYOUT, C, SS, SR, SD)
    if TRACK:
        begin = first + k if LAYOUT == RING else first * 0
        wanted = live & _live(track, num_slots) & (k >= 0)
        _store_window(state, kept, track, wanted, begin, 0, d, inside, S, LAYOUT, C, SS, SR, SD)


@triton.jit
def _extend_body(
    x, w, beta, out, seq_idx, cache_indices, t, num_rows, num_tokens, num_slots, d, inside,
    W: tl.constexpr, SX: tl.constexpr, SO: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr, ACC: tl.constexpr, BLOCK_T: tl.constexpr, STREAMED: tl.constexpr,
):  # fmt: skip
    """BLOCK_T consecutive tokens: outputs of those whose whole window lies in x, and zeros behind the last token.
    A token stands at least S tokens into its request exactly where the token S before it has the same request; where
    the first and the last row of the block have one owner, so have all."""
    S: tl.constexpr = W - 1
    EVICT: tl.constexpr = "evict_first" if STREAMED else ""
    end = t + BLOCK_T - 1
    owner = tl.load(seq_idx + end, mask=end < num_tokens, other=-1)
    before = tl.load(seq_idx + t - S, mask=(t >= S) & (t - S < num_tokens), other=-1)
    if PDL:
        gdc_wait()
    rows = ()
    for i in tl.static_range(S):
        at = x + (t - S + i).to(tl.int64) * SX + d
        rows = rows + (tl.load(at, mask=_every(t - S + i >= 0, d) & inside, other=0.0, eviction_policy=EVICT),)
    for i in tl.static_range(BLOCK_T):
        at = x + (t + i).to(tl.int64) * SX + d
        rows = rows + (tl.load(at, mask=_every(t + i < num_rows, d) & inside, other=0.0, eviction_policy=EVICT),)
    if (owner >= 0) & (owner == before):
        # in a branch of its own: before it, this load would hold back the loads of x until the owner has come
        if _live(tl.load(cache_indices + owner), num_slots):
            for i in tl.static_range(BLOCK_T):
                acc = _sum(rows, w, beta, i, W, ACC, BIAS, SILU, RESIDUAL)
                value = acc.to(out.dtype.element_ty)
                tl.store(out + (t + i).to(tl.int64) * SO + d, value, mask=inside, eviction_policy=EVICT)
        else:
            nothing = tl.zeros_like(rows[S]).to(out.dtype.element_ty)
            for i in tl.static_range(BLOCK_T):
                tl.store(out + (t + i).to(tl.int64) * SO + d, nothing, mask=inside)
    else:
        for i in tl.static_range(BLOCK_T):
            row = t + i
            mine = tl.load(seq_idx + row, mask=row < num_tokens, other=-1)
            earlier = tl.load(seq_idx + row - S, mask=(row >= S) & (row - S < num_tokens), other=-1)
            alive = _live(tl.load(cache_indices + mine, mask=mine >= 0, other=0), num_slots)
            acc = _sum(rows, w, beta, i, W, ACC, BIAS, SILU, RESIDUAL)
            value = tl.where(_every(alive, d), acc, 0.0).to(out.dtype.element_ty)
            mask = _every((row < num_rows) & ((mine < 0) | (mine == earlier)), d) & inside
            tl.store(out + row.to(tl.int64) * SO + d, value, mask=mask)


@triton.jit(do_not_specialize=["num_reqs", "num_rows", "num_tokens", "num_slots"])
def conv_extend_kernel(
    x, weight, bias, out, state, cache_indices, source_indices, query_start_loc, has_initial_state, positions,
    seq_idx, track_indices, track_tokens, num_reqs, num_rows, num_tokens, num_slots,
    D: tl.constexpr, W: tl.constexpr, LAYOUT: tl.constexpr, C: tl.constexpr,
    SX: tl.constexpr, SO: tl.constexpr, SS: tl.constexpr, SR: tl.constexpr, SD: tl.constexpr,
    SWD: tl.constexpr, SWW: tl.constexpr, SB: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    RESIDUAL: tl.constexpr, TRACK: tl.constexpr, PDL: tl.constexpr, ACC: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr, STREAMED: tl.constexpr,
):  # fmt: skip
    """Any number of tokens per request: the first `num_reqs` programs of a channel block serve the heads of the
    requests with their state, the others the tokens behind the heads."""
    if PDL:
        gdc_launch_dependents()
    BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    d, inside = _channels(tl.program_id(0) % BLOCKS, D, BLOCK_D)
    item = tl.program_id(0) // BLOCKS
    w = _weights(weight, d, inside, W, SWD, SWW)
    beta = tl.load(bias + _at(d, SB), mask=inside, other=0.0) if BIAS else 0.0
    if item < num_reqs:
        _extend_head(
            x, w, beta, state, out, cache_indices, source_indices, query_start_loc, has_initial_state, positions,
            track_indices, track_tokens, item, num_tokens, num_slots, d, inside,
            W, LAYOUT, C, SX, SO, SS, SR, SD, BIAS, SILU, RESIDUAL, TRACK, PDL, ACC,
        )  # fmt: skip
    else:
        _extend_body(
            x, w, beta, out, seq_idx, cache_indices, (item - num_reqs) * BLOCK_T, num_rows, num_tokens, num_slots,
            d, inside, W, SX, SO, BIAS, SILU, RESIDUAL, PDL, ACC, BLOCK_T, STREAMED,
        )  # fmt: skip


@triton.jit
def _draft_row(draft_indices, b, exists, num_draft_rows):
    """Row of the draft buffers that a request saves to; -1 where there is no such row."""
    row = tl.load(draft_indices + b, mask=exists, other=-1)
    return tl.where(row < num_draft_rows, row, -1)


@triton.jit
def _load_draft_window(
    x, state, slot, ok, first, b, d, inside,
    N: tl.constexpr, S: tl.constexpr, LAYOUT: tl.constexpr, C: tl.constexpr,
    SX: tl.constexpr, SS: tl.constexpr, SR: tl.constexpr, SD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The S rows of history, then, after the wait, the N draft rows."""
    rows = ()
    for i in tl.static_range(S):
        rows = rows + (_history_row(state, slot, ok, first, i, d, inside, LAYOUT, C, SS, SR, SD),)
    if PDL:
        gdc_wait()
    for i in tl.static_range(N):
        rows = rows + (tl.load(x + (b * N + i).to(tl.int64) * SX + d, mask=inside, other=0.0),)
    return rows


@triton.jit
def _save_drafts(
    state, drafts, rows, slot, draft_row, ok, first, d, inside,
    N: tl.constexpr, S: tl.constexpr, LAYOUT: tl.constexpr, C: tl.constexpr, SS: tl.constexpr, SR: tl.constexpr,
    SD: tl.constexpr, RS: tl.constexpr, RR: tl.constexpr, RD: tl.constexpr,
):  # fmt: skip
    """Keep what a later commit needs: window, history ++ x in the request's draft rows; ring, the draft rows in the
    slot; lazy, history ++ x less its first row at the front of the slot."""
    if LAYOUT == WINDOW:
        keep = _every(ok & (draft_row >= 0), d) & inside
        for i in tl.static_range(S + N):
            at = drafts + draft_row.to(tl.int64) * RS + i * RR + _at(d, RD)
            tl.store(at, rows[i].to(drafts.dtype.element_ty), mask=keep)
    elif LAYOUT == RING:
        for i in tl.static_range(N):
            at = state + _state_row(slot, first, S + i, LAYOUT, C, SS, SR) + _at(d, SD)
            tl.store(at, rows[S + i].to(state.dtype.element_ty), mask=_every(ok, d) & inside)
    else:
        for i in tl.static_range(S + N - 1):
            at = state + _state_row(slot, first * 0, i, LAYOUT, C, SS, SR) + _at(d, SD)
            tl.store(at, rows[i + 1].to(state.dtype.element_ty), mask=_every(ok, d) & inside)


@triton.jit
def _store_chosen(
    state, rows, slot, ok, first, k, d, inside,
    N: tl.constexpr, S: tl.constexpr, LAYOUT: tl.constexpr, C: tl.constexpr,
    SS: tl.constexpr, SR: tl.constexpr, SD: tl.constexpr,
):  # fmt: skip
    """Write win(k) for a k that is known at run time only: row j of history ++ x is row j - k of the window."""
    for j in tl.static_range(S + N):
        if LAYOUT == RING:
            at = _state_row(slot, first, j, LAYOUT, C, SS, SR)
        else:
            at = _state_row(slot, first * 0, j - k, LAYOUT, C, SS, SR)
        mask = _every(ok & (j >= k) & (j < k + S), d) & inside
        tl.store(state + at + _at(d, SD), rows[j].to(state.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_reqs", "num_rows", "num_slots", "num_draft_rows"])
def conv_draft_kernel(
    x, weight, bias, out, state, drafts, cache_indices, positions, draft_indices, has_initial_state,
    num_accept_tokens, track_indices, track_tokens, num_reqs, num_rows, num_slots, num_draft_rows,
    D: tl.constexpr, W: tl.constexpr, N: tl.constexpr, LAYOUT: tl.constexpr, C: tl.constexpr,
    SX: tl.constexpr, SO: tl.constexpr, SS: tl.constexpr, SR: tl.constexpr, SD: tl.constexpr,
    RS: tl.constexpr, RR: tl.constexpr, RD: tl.constexpr, SWD: tl.constexpr, SWW: tl.constexpr, SB: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, RESIDUAL: tl.constexpr, COMMIT: tl.constexpr, SAVE: tl.constexpr,
    TRACK: tl.constexpr, PDL: tl.constexpr, ACC: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """N draft tokens of one request. Verify: the outputs, and what a commit needs later (SAVE). With COMMIT (draft
    extend) also the window after `num_accept_tokens` into the slot and the track window into the track slot."""
    if PDL:
        gdc_launch_dependents()
    S: tl.constexpr = W - 1
    BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    d, inside = _channels(tl.program_id(0) % BLOCKS, D, BLOCK_D)
    b = tl.program_id(0) // BLOCKS
    exists = b < num_reqs
    slot = tl.load(cache_indices + b, mask=exists, other=0)
    first = _first(positions, b, exists, S, LAYOUT, C)
    draft_row = _draft_row(draft_indices, b, exists, num_draft_rows) if LAYOUT == WINDOW else first
    live = _live(slot, num_slots)
    ok = live
    if COMMIT:
        ok = live & tl.load(has_initial_state + b, mask=exists, other=0).to(tl.int1)
        accepted = tl.minimum(tl.load(num_accept_tokens + b, mask=exists, other=-1), N)
        live = live & (accepted >= 0)
    if TRACK:
        track = tl.load(track_indices + b, mask=exists, other=0)
        k = tl.load(track_tokens + b, mask=exists, other=-1)
    w = _weights(weight, d, inside, W, SWD, SWW)
    beta = tl.load(bias + _at(d, SB), mask=inside, other=0.0) if BIAS else 0.0
    here = inside & _every((b + 1) * N <= num_rows, d)
    rows = _load_draft_window(x, state, slot, ok, first, b, d, here, N, S, LAYOUT, C, SX, SS, SR, SD, PDL)
    for i in tl.static_range(N):
        acc = _sum(rows, w, beta, i, W, ACC, BIAS, SILU, RESIDUAL)
        value = tl.where(_every(live, d), acc, 0.0).to(out.dtype.element_ty)
        mask = _every(b * N + i < num_rows, d) & inside
        tl.store(out + (b * N + i).to(tl.int64) * SO + d, value, mask=mask)
    if LAYOUT != RING:
        # the rows that were read are rewritten: every lane has read before any lane writes
        tl.debug_barrier()
    if SAVE:
        _save_drafts(state, drafts, rows, slot, draft_row, live, first, d, inside,
                     N, S, LAYOUT, C, SS, SR, SD, RS, RR, RD)  # fmt: skip
    if COMMIT:
        write = live & (accepted >= 0)
        if LAYOUT == RING:
            # the drafts are written already; a slot without initial state needs the zeros before them too
            write = write & (ok == 0)
        _store_chosen(state, rows, slot, write, first, accepted, d, inside, N, S, LAYOUT, C, SS, SR, SD)
    if TRACK:
        wanted = live & _live(track, num_slots) & (k >= 0)
        _store_chosen(state, rows, track, wanted, first, k, d, inside, N, S, LAYOUT, C, SS, SR, SD)
