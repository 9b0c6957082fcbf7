"""Triton kernels of the conv hooks on Ascend: one for the phases with N tokens per request, one for extend. Imports
triton alone, so that the lowering job compiles the very same source in an environment without torch.

Rules of the device that shape the code. Every slot, row and length is a scalar: a vector of addresses becomes a loop
of single loads. No load starts below its pointer. A program walks a stride of work items, because grids beyond 65,535
fail. A tail, or a row that must not be touched, is a channel limit in the mask `d < limit`, 0 for nothing. Rows of
v_b carry compile-time numbers where they can, and outputs are computed before anything is stored: elimination of equal
loads then reads each row and each tap once. A window is read whole before it is written; where rows are written one by
one (ring), none of them is a row that is still to be read.

The sum of an output starts with the newest row's product and goes back in time, in every phase.
"""

from __future__ import annotations

import triton
import triton.language as tl

DECODE = tl.constexpr(0)
VERIFY = tl.constexpr(1)
DRAFT_EXTEND = tl.constexpr(2)
WINDOW = tl.constexpr(0)
RING = tl.constexpr(1)
LAZY = tl.constexpr(2)
LAST_POSITION = tl.constexpr(2**31 - 33)
"""`hwbackends.step.metadata.LAST_POSITION`."""


@triton.jit
def _ring_row(position, rows):
    """Row of an absolute position, from -rows on."""
    return (position + rows) % rows


@triton.jit
def _live(slot, slots):
    """Whether a slot is there; whatever else an index holds is padding."""
    return (slot > 0) & (slot < slots)


@triton.jit
def _position(n, rows, length):
    """A computed length whose rows lie inside of a slot, whatever the metadata holds: no sum leaves 32 bits."""
    return tl.minimum(tl.minimum(tl.maximum(n, 0), LAST_POSITION), 2147483647 - 2 * rows - length)


@triton.jit
def _history(slot, j, n, offset, rows, s_row, s_d, d, limit, S: tl.constexpr, LAYOUT: tl.constexpr):
    """Row j < S of the history as stored; zeros where `limit` is 0, or on the ring where the position is below 0."""
    row = j
    if LAYOUT == LAZY:
        row = j + tl.minimum(tl.maximum(offset, 0), rows - S)
    if LAYOUT == RING:
        row = _ring_row(n - S + j, rows)
        limit = tl.where(n - S + j >= 0, limit, 0)
    return tl.load(slot + row * s_row + d * s_d, mask=d < limit, other=0.0)


@triton.jit
def _fixed_row(slot, x, j: tl.constexpr, n, offset, rows, length, s_row, s_d, x_row, d, past, limit,
               S: tl.constexpr, LAYOUT: tl.constexpr):  # fmt: skip
    """Row j of v_b as stored, j known at compile time; `past` and `limit` are the channel limits of history and x."""
    if j < S:
        row = _history(slot, j, n, offset, rows, s_row, s_d, d, past, S, LAYOUT)
    else:
        row = tl.load(x + (j - S) * x_row + d, mask=d < tl.where(j - S < length, limit, 0), other=0.0)
    return row


@triton.jit
def _row(slot, x, j, n, offset, rows, s_row, s_d, x_row, d, past, limit, S: tl.constexpr, LAYOUT: tl.constexpr):
    """Row j of v_b in the state's dtype, j known at run time: one of the two loads is empty."""
    old = tl.minimum(j, S - 1)
    new = tl.maximum(j - S, 0)
    kept = _history(slot, old, n, offset, rows, s_row, s_d, d, tl.where(j < S, past, 0), S, LAYOUT)
    fresh = tl.load(x + new * x_row + d, mask=d < tl.where(j < S, 0, limit), other=0.0)
    return tl.where(j < S, kept, fresh.to(kept.dtype))


@triton.jit
def _output(slot, x, weight, bias, n, offset, rows, length, dim, w_d, w_row, s_row, s_d, x_row, d, past, limit,
            t: tl.constexpr, LAYOUT: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
            RESIDUAL: tl.constexpr):  # fmt: skip
    """y_b[t] in float32."""
    for back in tl.static_range(W):
        row = _fixed_row(slot, x, t + W - 1 - back, n, offset, rows, length, s_row, s_d, x_row, d, past, limit,
                         W - 1, LAYOUT)  # fmt: skip
        tap = tl.load(weight + d * w_d + (W - 1 - back) * w_row, mask=d < dim, other=0.0)
        product = row.to(tl.float32) * tap.to(tl.float32)
        acc = product if back == 0 else acc + product  # noqa: F821
    acc = _epilogue(acc, bias, d, dim, BIAS, SILU)
    if RESIDUAL:
        own = _fixed_row(slot, x, t + W - 1, n, offset, rows, length, s_row, s_d, x_row, d, past, limit, W - 1, LAYOUT)
        acc = acc + own.to(tl.float32)
    return acc


@triton.jit
def _epilogue(acc, bias, d, dim, BIAS: tl.constexpr, SILU: tl.constexpr):
    """Bias and activation; acc ends in the channels d."""
    if BIAS:
        acc = acc + tl.load(bias + d, mask=d < dim, other=0.0).to(tl.float32)
    if SILU:
        acc = acc / (1.0 + tl.exp(-acc))
    return acc


@triton.jit
def _store_window(target, slot, x, k, n, offset, rows, s_row, s_d, x_row, d, past, limit, kept,
                  LAYOUT: tl.constexpr, S: tl.constexpr, S_TILE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """win_b(k) into `target`, k known at run time. `limit` is the channel limit of the write, `kept` that of rows that
    come from the history: a ring that already holds them writes none."""
    if LAYOUT == RING:
        for r in tl.static_range(S):
            row = _row(slot, x, k + r, n, offset, rows, s_row, s_d, x_row, d, past, limit, S, LAYOUT)
            place = target + _ring_row(n + k - S + r, rows) * s_row + d * s_d
            tl.store(place, row, mask=d < tl.where(k + r < S, kept, limit))
    else:
        r = tl.arange(0, S_TILE)
        tile = tl.zeros([S_TILE, BLOCK], target.dtype.element_ty)
        for i in tl.static_range(S):
            row = _row(slot, x, k + i, n, offset, rows, s_row, s_d, x_row, d, past, limit, S, LAYOUT)
            tile = tl.where((r == i)[:, None], row[None, :], tile)
        tl.store(target + r[:, None] * s_row + d[None, :] * s_d, tile, mask=(r < S)[:, None] & (d < limit)[None, :])


@triton.jit
def _rows_tile(like, slot, x, n, offset, rows, length, s_row, s_d, x_row, d, past, limit, FIRST: tl.constexpr,
               COUNT: tl.constexpr, TILE: tl.constexpr, LAYOUT: tl.constexpr, S: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """Rows FIRST .. FIRST + COUNT - 1 of v_b as a tile of the state's dtype."""
    r = tl.arange(0, TILE)
    tile = tl.zeros([TILE, BLOCK], like.dtype.element_ty)
    for i in tl.static_range(COUNT):
        row = _fixed_row(slot, x, FIRST + i, n, offset, rows, length, s_row, s_d, x_row, d, past, limit, S, LAYOUT)
        tile = tl.where((r == i)[:, None], row.to(tile.dtype)[None, :], tile)
    return tile


@triton.jit
def _store_ring_drafts(slot, x, n, rows, s_row, s_d, x_row, d, limit, N: tl.constexpr):
    """Row t of x into row (n + t) mod C, for each of the N tokens."""
    for t in tl.static_range(N):
        row = tl.load(x + t * x_row + d, mask=d < limit, other=0.0)
        tl.store(slot + _ring_row(n + t, rows) * s_row + d * s_d, row.to(slot.dtype.element_ty), mask=d < limit)


@triton.jit(do_not_specialize=[
    "items", "blocks", "reqs", "tokens", "dim", "rows", "x_row", "w_d", "w_row", "out_row", "s_slot", "s_row", "s_d",
    "q_req", "q_row", "q_d", "slots", "draft_count",
])  # fmt: skip
def conv_uniform_kernel(
    x, weight, bias, state, draft_rows, out,
    cache_indices, source_indices, has_initial_state, computed_lens, draft_indices, num_accept_tokens, history_offset,
    mamba_track_indices, mamba_track_tokens,
    items, blocks, reqs, tokens, dim, rows, x_row, w_d, w_row, out_row, s_slot, s_row, s_d, q_req, q_row, q_d,
    slots, draft_count,
    MODE: tl.constexpr, LAYOUT: tl.constexpr, W: tl.constexpr, N: tl.constexpr, BIAS: tl.constexpr,
    SILU: tl.constexpr, RESIDUAL: tl.constexpr, TRACK: tl.constexpr, W_UNIT: tl.constexpr, S_UNIT: tl.constexpr,
    S_TILE: tl.constexpr, N_TILE: tl.constexpr, V_TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decode, target verify and draft extend: N tokens per request. A work item is a request and a channel block;
    requests at or behind `reqs` are rows of x behind the batch, whose outputs are zeros."""
    S: tl.constexpr = W - 1
    FIRST: tl.constexpr = 0 if MODE == VERIFY and LAYOUT == WINDOW else 1
    COUNT: tl.constexpr = S if MODE == DECODE else S + N - FIRST
    wd = 1 if W_UNIT else w_d
    sd = 1 if S_UNIT else s_d
    qd = 1 if S_UNIT else q_d
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        b = item // blocks
        d = (item % blocks) * BLOCK + tl.arange(0, BLOCK)
        known = tl.minimum(b, reqs - 1)
        slot = tl.load(cache_indices + known).to(tl.int64)
        source = tl.load(source_indices + known).to(tl.int64)
        n = _position(tl.load(computed_lens + known), rows, 0)
        offset = tl.load(history_offset + known)
        live = _live(slot, slots) & (b < reqs)
        if MODE == DRAFT_EXTEND:
            keep = tl.minimum(tl.load(num_accept_tokens + known), N)
            live = live & (keep >= 0)
        limit = tl.where(live, dim, 0)
        begun = tl.load(has_initial_state + known) != 0
        past = tl.where(begun & _live(source, slots), limit, 0)
        old = state + tl.maximum(source, 0) * s_slot
        new = state + tl.maximum(slot, 0) * s_slot
        first = b.to(tl.int64) * N
        xb = x + first * x_row
        length = tl.minimum(tokens - first, N).to(tl.int32)
        r = tl.arange(0, N_TILE)
        y = tl.zeros([N_TILE, BLOCK], tl.float32)
        for t in tl.static_range(N):
            row = _output(old, xb, weight, bias, n, offset, rows, length, dim, wd, w_row, s_row, sd, x_row, d, past,
                          limit, t, LAYOUT, W, BIAS, SILU, RESIDUAL)  # fmt: skip
            y = tl.where((r == t)[:, None], row[None, :], y)
        y = tl.where(live, y, 0.0)
        v = tl.arange(0, V_TILE)
        if LAYOUT != RING and MODE != DRAFT_EXTEND:
            tile = _rows_tile(state, old, xb, n, offset, rows, length, s_row, sd, x_row, d, past, limit,
                              FIRST, COUNT, V_TILE, LAYOUT, S, BLOCK)  # fmt: skip
        if TRACK:
            k = tl.load(mamba_track_tokens + known)
            goal = tl.load(mamba_track_indices + known).to(tl.int64)
            wanted = tl.where(_live(goal, slots) & (k >= 0), limit, 0)
            _store_window(state + tl.maximum(goal, 0) * s_slot, old, xb, tl.maximum(k, 0), n, offset, rows, s_row, sd,
                          x_row, d, past, wanted, wanted, LAYOUT, S, S_TILE, BLOCK)  # fmt: skip
        if LAYOUT == RING:
            _store_ring_drafts(new, xb, n, rows, s_row, sd, x_row, d, limit, N)
            if MODE == DRAFT_EXTEND:  # the rows are in place, but a history of zeros must be written
                for i in tl.static_range(S):
                    place = new + _ring_row(n + keep - S + i, rows) * s_row + d * sd
                    void = tl.where(begun | (keep + i >= S), 0, limit)
                    tl.store(place, tl.zeros([BLOCK], state.dtype.element_ty), mask=d < void)
        elif MODE == DRAFT_EXTEND:
            _store_window(new, old, xb, keep, n, offset, rows, s_row, sd, x_row, d, past, limit, limit,
                          LAYOUT, S, S_TILE, BLOCK)  # fmt: skip
        elif MODE == VERIFY and LAYOUT == WINDOW:
            saved = tl.load(draft_indices + known).to(tl.int64)
            place = draft_rows + tl.maximum(saved, 0) * q_req + v[:, None] * q_row + d[None, :] * qd
            tl.store(
                place,
                tile,
                mask=(v < COUNT)[:, None] & (d < tl.where((saved >= 0) & (saved < draft_count), limit, 0))[None, :],
            )
        else:
            place = new + v[:, None] * s_row + d[None, :] * sd
            tl.store(place, tile, mask=(v < COUNT)[:, None] & (d < limit)[None, :])
        tl.store(out + first * out_row + r[:, None] * out_row + d[None, :], y.to(out.dtype.element_ty),
                 mask=(r < length)[:, None] & (d < dim)[None, :])  # fmt: skip


@triton.jit
def _extend_head(
    x, weight, bias, state, out,
    cache_indices, source_indices, query_start_loc, has_initial_state, computed_lens, history_offset,
    mamba_track_indices, mamba_track_tokens,
    b, d, dim, rows, step_tokens, slots, x_row, w_d, w_row, out_row, s_slot, s_row, s_d,
    LAYOUT: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, RESIDUAL: tl.constexpr,
    TRACK: tl.constexpr, S_TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first S outputs of request b, which alone read its history, then its windows: whoever writes a slot's rows
    is whoever read them."""
    S: tl.constexpr = W - 1
    slot = tl.load(cache_indices + b).to(tl.int64)
    source = tl.load(source_indices + b).to(tl.int64)
    start = tl.minimum(tl.maximum(tl.load(query_start_loc + b), 0), step_tokens)
    length = tl.maximum(tl.minimum(tl.load(query_start_loc + b + 1), step_tokens) - start, 0)
    n = _position(tl.load(computed_lens + b), rows, length)
    offset = tl.load(history_offset + b)
    begun = tl.load(has_initial_state + b) != 0
    limit = tl.where(_live(slot, slots), dim, 0)
    past = tl.where(begun & _live(source, slots), limit, 0)
    old = state + tl.maximum(source, 0) * s_slot
    xb = x + start.to(tl.int64) * x_row
    r = tl.arange(0, S_TILE)
    y = tl.zeros([S_TILE, BLOCK], tl.float32)
    for t in tl.static_range(S):
        row = _output(old, xb, weight, bias, n, offset, rows, length, dim, w_d, w_row, s_row, s_d, x_row, d, past,
                      limit, t, LAYOUT, W, BIAS, SILU, RESIDUAL)  # fmt: skip
        y = tl.where((r == t)[:, None], row[None, :], y)
    y = tl.where(_live(slot, slots), y, 0.0)
    if TRACK:
        k = tl.load(mamba_track_tokens + b)
        goal = tl.load(mamba_track_indices + b).to(tl.int64)
        wanted = tl.where(_live(goal, slots) & (k >= 0), limit, 0)
        _store_window(state + tl.maximum(goal, 0) * s_slot, old, xb, tl.maximum(k, 0), n, offset, rows, s_row, s_d,
                      x_row, d, past, wanted, wanted, LAYOUT, S, S_TILE, BLOCK)  # fmt: skip
    written = tl.where(length > 0, limit, 0)
    kept = tl.where(begun & (source == slot), 0, written)
    _store_window(state + tl.maximum(slot, 0) * s_slot, old, xb, length, n, offset, rows, s_row, s_d, x_row, d, past,
                  written, kept, LAYOUT, S, S_TILE, BLOCK)  # fmt: skip
    tl.store(out + start.to(tl.int64) * out_row + r[:, None] * out_row + d[None, :], y.to(out.dtype.element_ty),
             mask=(r < tl.minimum(length, S))[:, None] & (d < dim)[None, :])  # fmt: skip


@triton.jit
def _extend_body(
    x, weight, bias, out, cache_indices, query_start_loc, b, low, high, d, dim, slots, x_row, w_d, w_row,
    out_row, W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Outputs of request b inside tokens low .. high - 1 whose window holds no history."""
    S: tl.constexpr = W - 1
    from_ = tl.maximum(tl.load(query_start_loc + b) + S, low)
    count = tl.minimum(tl.load(query_start_loc + b + 1), high) - from_
    live = _live(tl.load(cache_indices + b), slots)
    r = tl.arange(0, ROWS)
    if count > 0:
        inside = (r < count)[:, None] & (d < dim)[None, :]
        spread = r[:, None] * x_row + d[None, :]
        for back in tl.static_range(W):
            at = x + (from_ - back).to(tl.int64) * x_row
            row = tl.load(at + spread, mask=inside, other=0.0).to(tl.float32)
            tap = tl.load(weight + d * w_d + (S - back) * w_row, mask=d < dim, other=0.0).to(tl.float32)
            acc = row * tap[None, :] if back == 0 else acc + row * tap[None, :]  # noqa: F821
        acc = _epilogue_rows(acc, bias, d, dim, BIAS, SILU)
        if RESIDUAL:
            own = tl.load(x + from_.to(tl.int64) * x_row + spread, mask=inside, other=0.0)
            acc = acc + own.to(tl.float32)
        acc = tl.where(live, acc, 0.0)
        tl.store(out + from_.to(tl.int64) * out_row + r[:, None] * out_row + d[None, :],
                 acc.to(out.dtype.element_ty), mask=inside)  # fmt: skip


@triton.jit
def _epilogue_rows(acc, bias, d, dim, BIAS: tl.constexpr, SILU: tl.constexpr):
    """Bias and activation of a tile [ROWS, BLOCK]."""
    if BIAS:
        acc = acc + tl.load(bias + d, mask=d < dim, other=0.0).to(tl.float32)[None, :]
    if SILU:
        acc = acc / (1.0 + tl.exp(-acc))
    return acc


@triton.jit(do_not_specialize=[
    "heads", "items", "blocks", "reqs", "tokens", "dim", "rows", "x_row", "w_d", "w_row", "out_row", "s_slot", "s_row",
    "s_d", "step_tokens", "slots",
])  # fmt: skip
def conv_extend_kernel(
    x, weight, bias, state, out,
    cache_indices, source_indices, query_start_loc, seq_idx, has_initial_state, computed_lens, history_offset,
    mamba_track_indices, mamba_track_tokens,
    heads, items, blocks, reqs, tokens, dim, rows, x_row, w_d, w_row, out_row, s_slot, s_row, s_d,
    step_tokens, slots,
    LAYOUT: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, RESIDUAL: tl.constexpr,
    TRACK: tl.constexpr, W_UNIT: tl.constexpr, S_UNIT: tl.constexpr, S_TILE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Extend. Work items below `heads` are a request's head and windows; the others are tiles of ROWS tokens, which
    walk the requests that cross them; rows of x behind the last request give zeros."""
    wd = 1 if W_UNIT else w_d
    sd = 1 if S_UNIT else s_d
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        d = (item % blocks) * BLOCK + tl.arange(0, BLOCK)
        if item < heads:
            _extend_head(x, weight, bias, state, out, cache_indices, source_indices, query_start_loc,
                         has_initial_state, computed_lens, history_offset, mamba_track_indices, mamba_track_tokens,
                         item // blocks, d, dim, rows, step_tokens, slots, x_row, wd, w_row, out_row, s_slot, s_row, sd,
                         LAYOUT, W, BIAS, SILU, RESIDUAL, TRACK, S_TILE, BLOCK)  # fmt: skip
        else:
            low = ((item - heads) // blocks) * ROWS
            total = tl.minimum(tl.maximum(tl.load(query_start_loc + reqs), 0), step_tokens)
            high = tl.minimum(low + ROWS, total)
            first = tl.load(seq_idx + tl.minimum(low, tl.maximum(total - 1, 0)))
            last = tl.load(seq_idx + tl.maximum(high - 1, 0))
            for b in range(first, tl.where(low < total, last + 1, first)):
                _extend_body(x, weight, bias, out, cache_indices, query_start_loc, b, low, high, d, dim, slots, x_row,
                             wd, w_row, out_row, W, BIAS, SILU, RESIDUAL, ROWS)  # fmt: skip
            r = tl.arange(0, ROWS)
            start = tl.maximum(total, low)
            count = tl.minimum(low + ROWS, tokens) - start
            tl.store(out + start.to(tl.int64) * out_row + r[:, None] * out_row + d[None, :],
                     tl.zeros([ROWS, BLOCK], out.dtype.element_ty),
                     mask=(r < count)[:, None] & (d < dim)[None, :])  # fmt: skip
