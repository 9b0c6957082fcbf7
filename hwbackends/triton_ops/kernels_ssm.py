"""Triton kernels of the SSM hooks: decode, verify and draft extend of Gated DeltaNet, KDA and Mamba2 in one, extend,
and the state of a request at a position. Device code only; shapes, strides and launch sizes are chosen where they are
launched.

One program serves some rows of V of one head of one request. It holds these rows of the state in registers as a tuple
of tiles of `KI` columns, replays the tokens that are pending in the ring, then computes its own.

Bits. Every product that joins a sum is an explicit fused multiply-add, contraction is off. The sum of a dot product is
one chain for each of `KI` columns, then one `tl.sum` over a tile of these columns, whose rows lie alike in every launch
shape: `KI` belongs to the dtype of the state, it is no launch size. The norms act on the sums and on u; they are summed
by neighbours, each step a sum of two numbers, which no layout can order otherwise. So decode, verify, draft extend,
extend and replay give the same bits for the same tokens, whatever the launch.
"""
# Tuples of tensors grow by +: triton's compiler knows neither unpacking nor a conditional expression of tensors.
# ruff: noqa: RUF005, SIM108

from __future__ import annotations

import triton
import triton.language as tl

GDN = tl.constexpr(0)
KDA = tl.constexpr(1)
MAMBA2 = tl.constexpr(2)
INTERMEDIATE = tl.constexpr(0)
RING = tl.constexpr(1)
LENS_ROWS = tl.constexpr(8)
"""`hwbackends.ssm.layouts.LENS_ROWS`."""
GATES = tl.constexpr(4)
"""Numbers that a token has beside its rows: see `_gates`."""


@triton.jit
def _every(condition, like):
    """A scalar condition for every element of a tensor."""
    return (tl.zeros(like.shape, tl.int32) + condition.to(tl.int32)) != 0


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), accurate for small results too; x above 20."""
    e = tl.exp(x)
    y = 1.0 + e
    small = tl.log(y) * (e / tl.where(y == 1.0, 1.0, y - 1.0))
    return tl.where(x <= 20.0, tl.where(y == 1.0, e, small), x)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _halves(x, N: tl.constexpr, M: tl.constexpr):
    """Sum of each row of [N, M], M a power of two up to 1024, neighbours first: every step adds two numbers."""
    for i in tl.static_range(1, 11):
        if (M >> i) > 0:
            x = tl.sum(tl.reshape(x, [N, M >> i, 2]), axis=2)
    return tl.reshape(x, [N])


@triton.jit
def _decay(a, bias, A, lower_bound, SAFE: tl.constexpr):
    """exp(g)."""
    if SAFE:
        g = lower_bound * _sigmoid(-A * (a + bias))
    else:
        g = A * _softplus(a + bias)
    return tl.exp(g)


@triton.jit
def _load_tile(at, rows, cols, K: tl.constexpr):
    """[BV, K] as float32, a tuple of [BV, KI]. Zeros where `rows` is false and behind K."""
    KI: tl.constexpr = cols.shape[0]
    tiles = ()
    for j in tl.static_range((K + KI - 1) // KI):
        mask = rows[:, None] & (cols + j * KI < K)[None, :]
        tiles = tiles + (tl.load(at + j * KI, mask=mask, other=0.0).to(tl.float32),)
    return tiles


@triton.jit
def _store_tile(at, h, rows, cols, K: tl.constexpr):
    KI: tl.constexpr = cols.shape[0]
    for j in tl.static_range((K + KI - 1) // KI):
        mask = rows[:, None] & (cols + j * KI < K)[None, :]
        tl.store(at + j * KI, h[j].to(at.dtype.element_ty), mask=mask)


@triton.jit
def _load_row(at, cols, K: tl.constexpr):
    """[K] as float32, a tuple of [KI]; zeros behind K."""
    KI: tl.constexpr = cols.shape[0]
    row = ()
    for j in tl.static_range((K + KI - 1) // KI):
        if K // KI * KI == K:
            row = row + (tl.load(at + j * KI + cols).to(tl.float32),)
        else:
            row = row + (tl.load(at + j * KI + cols, mask=cols + j * KI < K, other=0.0).to(tl.float32),)
    return row


@triton.jit
def _dot(h, k, KO: tl.constexpr):
    """sum over K of h * k, for each row of the tile."""
    acc = h[0] * k[0][None, :]
    for j in tl.static_range(1, KO):
        acc = tl.fma(h[j], tl.broadcast_to(k[j][None, :], acc.shape), acc)
    return tl.sum(acc, axis=1)


@triton.jit
def _decayed(h, d, KO: tl.constexpr, KIND: tl.constexpr):
    """d * h, d a scalar or one number per column."""
    new = ()
    for j in tl.static_range(KO):
        if KIND == KDA:
            new = new + (h[j] * d[j][None, :],)
        else:
            new = new + (h[j] * d,)
    return new


@triton.jit
def _rounded(x, ST: tl.constexpr, PTX: tl.constexpr):
    """Float32 numbers that the dtype of the state holds. PTX: two at a time; sm_90 converts single numbers on a unit
    eight times slower."""
    if tl.float32 == ST:
        return x
    if PTX and tl.bfloat16 == ST:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000; }",
            "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    if PTX and tl.float16 == ST:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; cvt.rn.f16x2.f32 t, $3, $2; mov.b32 {a, b}, t; cvt.f32.f16 $0, a; "
            "cvt.f32.f16 $1, b; }",
            "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return x.to(ST).to(tl.float32)


@triton.jit
def _added(hd, k, u, KO: tl.constexpr, ST: tl.constexpr, PTX: tl.constexpr):
    """round(hd + u (x) k)."""
    new = ()
    for j in tl.static_range(KO):
        column, row = tl.broadcast_to(u[:, None], hd[j].shape), tl.broadcast_to(k[j][None, :], hd[j].shape)
        new = new + (_rounded(tl.fma(row, column, hd[j]), ST, PTX),)
    return new


@triton.jit
def _gates(
    a, b, A_log, dt_bias, tokens, there, hv, sum_k, sum_q, scale, low, high, lower_bound,
    SA: tl.constexpr, SB: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """Four numbers of each token: its decay (not kda), what acts on the sum, on u, and on the output. gdn and kda: d,
    rk, beta * rk, rq * scale; mamba2: d, 0, dt, scale."""
    one = tl.zeros_like(sum_k) + 1.0
    first = one
    if KIND != KDA:
        A = -tl.exp(tl.load(A_log + hv).to(tl.float32))
        x = tl.load(a + tokens * SA + hv, mask=there, other=0.0).to(tl.float32)
        if BIAS:
            x = x + tl.load(dt_bias + hv).to(tl.float32)
        if KIND == MAMBA2:
            dt = _softplus(x)
            if LIMIT:
                dt = tl.minimum(tl.maximum(dt, low), high)
            first = tl.exp(A * dt)
        else:
            first = tl.exp(A * _softplus(x))
    if KIND == MAMBA2:
        return first, one * 0.0, dt, one * scale
    beta = _sigmoid(tl.load(b + tokens * SB + hv, mask=there, other=0.0).to(tl.float32))
    if NORM:
        rk, rq = 1.0 / tl.sqrt(sum_k + 1e-6), 1.0 / tl.sqrt(sum_q + 1e-6)
        return first, rk, beta * rk, rq * scale
    return first, one, beta, one * scale


@triton.jit
def _stage(
    q, k, a, b, A_log, dt_bias, work_rows, work_gates, first, num_rows, h, hv, scale, low, high, lower_bound,
    N: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, NP: tl.constexpr, KP: tl.constexpr,
    SQ: tl.constexpr, SK: tl.constexpr, SA: tl.constexpr, SB: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr,
    BIAS: tl.constexpr, LIMIT: tl.constexpr, SAFE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What the N tokens of a request need beside the state, once for all rows of V: gates and norms, with ROWS also k
    and q as float32. Every program of a head writes the same numbers to the same places, and reads them behind a
    barrier of its own, so it never reads another's."""
    t, c = tl.arange(0, NP), tl.arange(0, KP)
    tokens = first + t
    there = (t < N) & (tokens < num_rows)
    tokens = tokens.to(tl.int64)
    mask = there[:, None] & (c < K)[None, :]
    G: tl.constexpr = GATES + K if KIND == KDA else GATES
    sum_k, sum_q = tl.zeros([NP], tl.float32), tl.zeros([NP], tl.float32)
    if NORM or ROWS:
        kx = tl.load(k + tokens[:, None] * SK + h * K + c[None, :], mask=mask, other=0.0).to(tl.float32)
        qx = tl.load(q + tokens[:, None] * SQ + h * K + c[None, :], mask=mask, other=0.0).to(tl.float32)
        if ROWS:
            at = work_rows + (tokens * H + h)[:, None] * (2 * K) + c[None, :]
            tl.store(at, kx, mask=mask)
            tl.store(at + K, qx, mask=mask)
        if NORM:
            sum_k, sum_q = _halves(kx * kx, NP, KP), _halves(qx * qx, NP, KP)
    d, on_sum, on_u, on_out = _gates(
        a, b, A_log, dt_bias, tokens, there, hv, sum_k, sum_q, scale, low, high, lower_bound,
        SA, SB, KIND, NORM, BIAS, LIMIT,
    )  # fmt: skip
    gates = work_gates + (tokens * HV + hv) * G
    tl.store(gates, d, mask=there)
    tl.store(gates + 1, on_sum, mask=there)
    tl.store(gates + 2, on_u, mask=there)
    tl.store(gates + 3, on_out, mask=there)
    if KIND == KDA:
        A = -tl.exp(tl.load(A_log + hv).to(tl.float32))
        x = tl.load(a + tokens[:, None] * SA + hv * K + c[None, :], mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            bias = tl.load(dt_bias + hv * K + c, mask=c < K, other=0.0).to(tl.float32)
        else:
            bias = tl.zeros([KP], tl.float32)
        tl.store(gates[:, None] + GATES + c[None, :], _decay(x, bias[None, :], A, lower_bound, SAFE), mask=mask)


@triton.jit
def _replay(
    h, ring_k, ring_u, ring_d, row, start, end, hd, hv, o_v, rows, cols,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, SRK: tl.constexpr,
    SRU: tl.constexpr, SRD: tl.constexpr, KIND: tl.constexpr, ST: tl.constexpr, UNROLL: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """The state at position `end` from the one at `start`, by the tokens of the ring of request row `row`."""
    KI: tl.constexpr = cols.shape[0]
    KO: tl.constexpr = (K + KI - 1) // KI
    D: tl.constexpr = K if KIND == KDA else 1
    at_k = ring_k + row * SRK + hd * K
    at_u = ring_u + row * SRU + hv * V + o_v
    at_d = ring_d + row * SRD + hv * D
    for p in tl.range(start, end, loop_unroll_factor=UNROLL):
        r = p % C
        k = _load_row(at_k + r * (H * K), cols, K)
        u = tl.load(at_u + r * (HV * V), mask=rows, other=0.0)
        if KIND == KDA:
            d = _load_row(at_d + r * (HV * K), cols, K)
        else:
            d = tl.load(at_d + r * HV)
        h = _added(_decayed(h, d, KO, KIND), k, u, KO, ST, PTX)
    return h


@triton.jit
def _token(
    h, k, v, d, on_sum, on_u, KO: tl.constexpr, KIND: tl.constexpr, ST: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """One token: the new state, and u."""
    hd = _decayed(h, d, KO, KIND)
    if KIND == MAMBA2:
        u = v * on_u
    else:
        u = tl.fma(_dot(hd, k, KO), tl.zeros_like(v) - on_sum, v) * on_u
    return _added(hd, k, u, KO, ST, PTX), u


@triton.jit
def _output(h, q, v, on_out, passed, KO: tl.constexpr, KIND: tl.constexpr):
    """What a token gives, from the state with it."""
    o = _dot(h, q, KO) * on_out
    if KIND == MAMBA2:
        o = tl.fma(v, passed + tl.zeros_like(v), o)
    return o


@triton.jit
def _store_lens(state_lens, slot, hv, i_v, n, HV: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """The position that these rows of a slot's checkpoint stand at."""
    TILES: tl.constexpr = (V + LENS_ROWS - 1) // LENS_ROWS
    tile = i_v * (BV // LENS_ROWS) + tl.arange(0, BV // LENS_ROWS)
    tl.store(state_lens + (slot * HV + hv) * TILES + tile, n + tl.zeros_like(tile), mask=tile < TILES)


@triton.jit
def _keep(
    k, work_gates, ring_k, ring_u, ring_d, token, row, n, h, hv, i_v, u, o_v, rows, d,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KP: tl.constexpr,
    SK: tl.constexpr, SRK: tl.constexpr, SRU: tl.constexpr, SRD: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The factors of the token at position n into the ring: u by every program, d by one of a head, k by one of a group
    of heads."""
    r = n % C
    tl.store(ring_u + row * SRU + r * (HV * V) + hv * V + o_v, u, mask=rows)
    if i_v == 0:
        c = tl.arange(0, KP)
        if KIND == KDA:
            at = work_gates + (token * HV + hv) * (GATES + K) + GATES
            value = tl.load(at + c, mask=c < K, other=0.0)
            tl.store(ring_d + row * SRD + r * (HV * K) + hv * K + c, value, mask=c < K)
        else:
            tl.store(ring_d + row * SRD + r * HV + hv, d)
        if hv % (HV // H) == 0:
            value = tl.load(k + token * SK + h * K + c, mask=c < K, other=0.0).to(ring_k.dtype.element_ty)
            tl.store(ring_k + row * SRK + r * (H * K) + h * K + c, value, mask=c < K)


@triton.jit
def _gates_at(work_gates, token, hv, cols, HV: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr):
    """What `_stage` left for a token: decay, and what acts on the sum, on u and on the output."""
    at = work_gates + (token * HV + hv) * (GATES + K if KIND == KDA else GATES)
    if KIND == KDA:
        d = _load_row(at + GATES, cols, K)
    else:
        d = tl.load(at)
    return d, tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def _k_at(
    k, work_rows, token, h, cols, H: tl.constexpr, K: tl.constexpr, S: tl.constexpr, PART: tl.constexpr,
    STAGED: tl.constexpr,
):  # fmt: skip
    """Row of k (PART 0) or q (1) of a token."""
    if STAGED:
        return _load_row(work_rows + (token * H + h) * (2 * K) + PART * K, cols, K)
    return _load_row(k + token * S + h * K, cols, K)


@triton.jit
def _store_out(out, token, hv, o_v, o, mask, HV: tl.constexpr, V: tl.constexpr):
    tl.store(out + (token * HV + hv) * V + o_v, o.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _store_slot(
    state, state_lens, slot, hv, i_v, h, n, inner, rows, cols, write, HV: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, SS: tl.constexpr, LAYOUT: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The state at position n into a slot, where `write`."""
    if write:
        _store_tile(state + slot * SS + inner, h, rows, cols, K)
        if LAYOUT == RING:
            _store_lens(state_lens, slot, hv, i_v, n, HV, V, BV)


@triton.jit
def _request(
    cache_indices, draft_indices, computed_lens, has_initial_state, num_accept_tokens, i_b, num_reqs, num_rows,
    num_slots, num_request_rows,
    N: tl.constexpr, LAYOUT: tl.constexpr, COMMIT: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Slot and request row of a request, whether it starts from zeros, its position, what it accepts (draft extend),
    whether its request row is there, and whether it is no padding."""
    exists = i_b < num_reqs
    slot = tl.load(cache_indices + i_b, mask=exists, other=0).to(tl.int64)
    row = tl.load(draft_indices + i_b, mask=exists, other=-1).to(tl.int64)
    fresh = tl.load(has_initial_state + i_b, mask=exists, other=0) == 0
    saved = (row >= 0) & (row < num_request_rows)
    live = (slot > 0) & (slot < num_slots) & (i_b * N + N <= num_rows)
    n = 0
    if LAYOUT == RING:
        n = tl.load(computed_lens + i_b, mask=exists, other=0)
        fresh = fresh | (n <= 0)
    if LAYOUT == RING or TREE:
        live = live & saved
    accepted = 0
    if COMMIT:
        accepted = tl.minimum(tl.load(num_accept_tokens + i_b, mask=exists, other=-1), N)
        live = live & (accepted >= 0)
    return slot, row, n, fresh, accepted, saved, live


@triton.jit
def _track_of(track_indices, track_tokens, i_b, num_slots, TRACK: tl.constexpr, DRAFTS: tl.constexpr):
    """The track slot, and behind how many tokens it gets the state; -1 for never."""
    track, taken = i_b.to(tl.int64), i_b * 0 - 1
    if TRACK:
        track = tl.load(track_indices + i_b).to(tl.int64)
        taken = taken + 2
        if DRAFTS:
            taken = tl.load(track_tokens + i_b)
        taken = tl.where((track > 0) & (track < num_slots), taken, -1)
    return track, taken


@triton.jit
def _behind_token(
    state, intermediate, state_lens, h, t, n, slot, row, saved, accepted, track, taken, hv, i_v, inner, rows, cols,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SS: tl.constexpr, SI: tl.constexpr, SIN: tl.constexpr,
    LAYOUT: tl.constexpr, DRAFTS: tl.constexpr, COMMIT: tl.constexpr, TRACK: tl.constexpr, TREE: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """What a step keeps of the state behind token t: the draft's, the accepted one, the snapshot."""
    if LAYOUT == INTERMEDIATE and DRAFTS and not COMMIT:
        at = intermediate + tl.where(saved, row, 0) * SI + t * SIN + inner
        _store_tile(at, h, rows & _every(saved, rows), cols, K)
        if TREE:
            tl.debug_barrier()
    if COMMIT and LAYOUT == INTERMEDIATE:
        _store_slot(state, state_lens, slot, hv, i_v, h, n, inner, rows, cols, accepted == t + 1,
                    HV, K, V, SS, LAYOUT, BV)  # fmt: skip
    if TRACK:
        _store_slot(state, state_lens, track, hv, i_v, h, n + t + 1, inner, rows, cols, taken == t + 1,
                    HV, K, V, SS, LAYOUT, BV)  # fmt: skip


@triton.jit(do_not_specialize=["num_reqs", "num_rows", "num_slots", "num_request_rows"])
def ssm_step_kernel(
    q, k, v, a, b, A_log, dt_bias, skip, out, work_rows, work_gates, parents,
    state, intermediate, ring_k, ring_u, ring_d, state_lens, cache_indices, computed_lens, draft_indices,
    has_initial_state, num_accept_tokens, track_indices, track_tokens,
    scale, low, high, lower_bound, num_reqs, num_rows, num_slots, num_request_rows,
    KIND: tl.constexpr, LAYOUT: tl.constexpr, N: tl.constexpr, NMAX: tl.constexpr, H: tl.constexpr, HV: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, SQ: tl.constexpr, SK: tl.constexpr, SV: tl.constexpr,
    SA: tl.constexpr, SB: tl.constexpr, SS: tl.constexpr, SI: tl.constexpr, SIN: tl.constexpr,
    SRK: tl.constexpr, SRU: tl.constexpr, SRD: tl.constexpr, THROUGH: tl.constexpr, DRAFTS: tl.constexpr,
    COMMIT: tl.constexpr, TRACK: tl.constexpr, TREE: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    LIMIT: tl.constexpr, SAFE: tl.constexpr, SKIP: tl.constexpr, KP: tl.constexpr, NP: tl.constexpr,
    STAGED: tl.constexpr, LATE: tl.constexpr, UNROLL: tl.constexpr, PTX: tl.constexpr, KI: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """N tokens of each request behind a replay of what is pending.

    THROUGH: the state with the tokens in it is written (decode; always so on intermediate). Else on a ring: the tokens
    go to the ring, and the state before them is written where the ring would run out. DRAFTS: verify and draft extend;
    on intermediate the state after each token is kept by verify. COMMIT: draft extend. TREE: each token follows its
    parent. LATE: outputs and ring rows are stored behind the last token, so that no store holds back a load.
    """
    KO: tl.constexpr = (K + KI - 1) // KI
    NV: tl.constexpr = (V + BV - 1) // BV
    ST: tl.constexpr = state.dtype.element_ty
    KEEP: tl.constexpr = LAYOUT == RING and not THROUGH
    i_v = tl.program_id(0) % NV
    hv = tl.program_id(0) // NV % HV
    i_b = tl.program_id(0) // (NV * HV)
    h_k = hv // (HV // H)
    cols = tl.arange(0, KI)
    o_v = i_v * BV + tl.arange(0, BV)
    rows = o_v < V
    first = i_b * N
    slot, row, n, fresh, accepted, saved, live = _request(
        cache_indices, draft_indices, computed_lens, has_initial_state, num_accept_tokens, i_b, num_reqs, num_rows,
        num_slots, num_request_rows, N, LAYOUT, COMMIT, TREE,
    )  # fmt: skip
    if live == 0:
        for t in tl.static_range(N):
            _store_out(out, (first + t).to(tl.int64), hv, o_v, tl.zeros([BV], tl.float32),
                       rows & _every(first + t < num_rows, o_v), HV, V)  # fmt: skip
        return
    track, taken = _track_of(track_indices, track_tokens, i_b, num_slots, TRACK, DRAFTS)
    # ---- the state, and beside it what does not hang on it
    base = n
    if LAYOUT == RING:
        base = tl.load(state_lens + (slot * HV + hv) * ((V + LENS_ROWS - 1) // LENS_ROWS) + i_v * (BV // LENS_ROWS))
        base = tl.where(fresh, n, base)
    inner = hv * (V * K) + o_v[:, None] * K + cols[None, :]
    h = _load_tile(state + slot * SS + inner, rows & _every(fresh == 0, o_v), cols, K)
    _stage(
        q, k, a, b, A_log, dt_bias, work_rows, work_gates, first, num_rows, h_k, hv, scale, low, high, lower_bound,
        N, H, HV, K, NP, KP, SQ, SK, SA, SB, KIND, NORM, BIAS, LIMIT, SAFE, STAGED,
    )  # fmt: skip
    tl.debug_barrier()
    passed = 0.0
    if SKIP:
        passed = tl.load(skip + hv).to(tl.float32)
    if LAYOUT == RING and not DRAFTS:  # noqa: SIM102
        if base > n:
            # this decode ran before and wrote the state through: its token is in there already
            token = first.to(tl.int64)
            qq = _k_at(q, work_rows, token, h_k, cols, H, K, SQ, 1, STAGED)
            vv = tl.load(v + token * SV + hv * V + o_v, mask=rows, other=0.0).to(tl.float32)
            d, on_sum, on_u, on_out = _gates_at(work_gates, token, hv, cols, HV, K, KIND)
            _store_out(out, token, hv, o_v, _output(h, qq, vv, on_out, passed, KO, KIND), rows, HV, V)
            _behind_token(
                state, intermediate, state_lens, h, 0, n, slot, row, saved, accepted, track, taken, hv, i_v, inner,
                rows, cols, HV, K, V, SS, SI, SIN, LAYOUT, DRAFTS, COMMIT, TRACK, TREE, BV,
            )  # fmt: skip
            return
    if LAYOUT == RING:
        h = _replay(h, ring_k, ring_u, ring_d, row, base, n, h_k, hv, o_v, rows, cols,
                    H, HV, K, V, C, SRK, SRU, SRD, KIND, ST, UNROLL, PTX)  # fmt: skip
    if KEEP:
        runs_out = fresh | ((n > base) & (n - base + 2 * NMAX > C))
        _store_slot(state, state_lens, slot, hv, i_v, h, n, inner, rows, cols, runs_out,
                    HV, K, V, SS, LAYOUT, BV)  # fmt: skip
    elif COMMIT:
        _store_slot(state, state_lens, slot, hv, i_v, h, n, inner, rows, cols, fresh & (accepted == 0),
                    HV, K, V, SS, LAYOUT, BV)  # fmt: skip
    if TRACK and DRAFTS:
        _store_slot(state, state_lens, track, hv, i_v, h, n, inner, rows, cols, taken == 0,
                    HV, K, V, SS, LAYOUT, BV)  # fmt: skip
    # ---- the tokens
    us, os, ds = (), (), ()
    for t in tl.static_range(N):
        token = (first + t).to(tl.int64)
        if TREE:
            parent = tl.load(parents + i_b * N + t).to(tl.int64)
            origin = intermediate + row * SI + tl.maximum(parent, 0) * SIN
            h = _load_tile(tl.where(_every(parent < 0, inner), state + slot * SS + inner, origin + inner),
                           rows & _every((fresh == 0) | (parent >= 0), o_v), cols, K)  # fmt: skip
        d, on_sum, on_u, on_out = _gates_at(work_gates, token, hv, cols, HV, K, KIND)
        kk = _k_at(k, work_rows, token, h_k, cols, H, K, SK, 0, STAGED)
        qq = _k_at(q, work_rows, token, h_k, cols, H, K, SQ, 1, STAGED)
        vv = tl.load(v + token * SV + hv * V + o_v, mask=rows, other=0.0).to(tl.float32)
        h, u = _token(h, kk, vv, d, on_sum, on_u, KO, KIND, ST, PTX)
        us, os, ds = us + (u,), os + (_output(h, qq, vv, on_out, passed, KO, KIND),), ds + (d,)
        if not LATE:
            _store_out(out, token, hv, o_v, os[t], rows, HV, V)
            if KEEP:
                _keep(k, work_gates, ring_k, ring_u, ring_d, token, row, n + t, h_k, hv, i_v, u, o_v, rows, d,
                      H, HV, K, V, C, KP, SK, SRK, SRU, SRD, KIND)  # fmt: skip
        _behind_token(state, intermediate, state_lens, h, t, n, slot, row, saved, accepted, track, taken, hv, i_v,
                      inner, rows, cols, HV, K, V, SS, SI, SIN, LAYOUT, DRAFTS, COMMIT, TRACK, TREE, BV)  # fmt: skip
    if LATE:
        for t in tl.static_range(N):
            token = (first + t).to(tl.int64)
            _store_out(out, token, hv, o_v, os[t], rows, HV, V)
            if KEEP:
                _keep(k, work_gates, ring_k, ring_u, ring_d, token, row, n + t, h_k, hv, i_v, us[t], o_v, rows, ds[t],
                      H, HV, K, V, C, KP, SK, SRK, SRU, SRD, KIND)  # fmt: skip
    if THROUGH:
        _store_slot(state, state_lens, slot, hv, i_v, h, n + N, inner, rows, cols, True, HV, K, V, SS, LAYOUT, BV)


@triton.jit
def _zero_rows(out, first, last, hv, o_v, rows, HV: tl.constexpr, V: tl.constexpr):
    """Zeros of one head in the rows [first, last) of the output."""
    for token in tl.range(first, last):
        # the interpreter counts in Python's numbers
        at = first.to(tl.int64) * 0 + token
        _store_out(out, at, hv, o_v, tl.zeros(o_v.shape, tl.float32), rows, HV, V)


@triton.jit
def _scalar(x):
    return tl.sum(x, axis=0)


@triton.jit
def _gates_of(
    q, k, a, b, A_log, dt_bias, token, h, hv, cols, scale, low, high, lower_bound,
    K: tl.constexpr, KP: tl.constexpr, SQ: tl.constexpr, SK: tl.constexpr, SA: tl.constexpr, SB: tl.constexpr,
    KIND: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, LIMIT: tl.constexpr, SAFE: tl.constexpr,
):  # fmt: skip
    """What `_stage` and `_gates_at` give, for one token and without a place to keep it."""
    c = tl.arange(0, KP)[None, :]
    tokens = tl.zeros([1], tl.int64) + token
    there = tl.full([1], True, tl.int1)
    sum_k, sum_q = tl.zeros([1], tl.float32), tl.zeros([1], tl.float32)
    if NORM:
        kx = tl.load(k + token * SK + h * K + c, mask=c < K, other=0.0).to(tl.float32)
        qx = tl.load(q + token * SQ + h * K + c, mask=c < K, other=0.0).to(tl.float32)
        sum_k, sum_q = _halves(kx * kx, 1, KP), _halves(qx * qx, 1, KP)
    d, on_sum, on_u, on_out = _gates(
        a, b, A_log, dt_bias, tokens, there, hv, sum_k, sum_q, scale, low, high, lower_bound,
        SA, SB, KIND, NORM, BIAS, LIMIT,
    )  # fmt: skip
    if KIND == KDA:
        KI: tl.constexpr = cols.shape[0]
        A = -tl.exp(tl.load(A_log + hv).to(tl.float32))
        row = ()
        for j in tl.static_range((K + KI - 1) // KI):
            at = hv * K + j * KI + cols
            x = tl.load(a + token * SA + at, mask=cols + j * KI < K, other=0.0).to(tl.float32)
            if BIAS:
                bias = tl.load(dt_bias + at, mask=cols + j * KI < K, other=0.0).to(tl.float32)
            else:
                bias = tl.zeros([KI], tl.float32)
            row = row + (_decay(x, bias, A, lower_bound, SAFE),)
        return row, _scalar(on_sum), _scalar(on_u), _scalar(on_out)
    return _scalar(d), _scalar(on_sum), _scalar(on_u), _scalar(on_out)


@triton.jit(do_not_specialize=["num_reqs", "num_rows", "num_tokens", "num_slots", "num_request_rows"])
def ssm_extend_kernel(
    q, k, v, a, b, A_log, dt_bias, skip, out,
    state, ring_k, ring_u, ring_d, state_lens, cache_indices, source_indices, query_start_loc, computed_lens,
    draft_indices, has_initial_state, track_indices, track_tokens,
    scale, low, high, lower_bound, num_reqs, num_rows, num_tokens, num_slots, num_request_rows,
    KIND: tl.constexpr, LAYOUT: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, SQ: tl.constexpr, SK: tl.constexpr, SV: tl.constexpr, SA: tl.constexpr, SB: tl.constexpr,
    SS: tl.constexpr, SRK: tl.constexpr, SRU: tl.constexpr, SRD: tl.constexpr, TRACK: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, LIMIT: tl.constexpr, SAFE: tl.constexpr, SKIP: tl.constexpr,
    KP: tl.constexpr, UNROLL: tl.constexpr, PTX: tl.constexpr, KI: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Requests of any length, token by token in the order of decode. The last program of a head zeroes the rows behind
    the last request."""
    KO: tl.constexpr = (K + KI - 1) // KI
    NV: tl.constexpr = (V + BV - 1) // BV
    ST: tl.constexpr = state.dtype.element_ty
    i_v = tl.program_id(0) % NV
    hv = tl.program_id(0) // NV % HV
    i_b = tl.program_id(0) // (NV * HV)
    h_k = hv // (HV // H)
    cols = tl.arange(0, KI)
    o_v = i_v * BV + tl.arange(0, BV)
    rows = o_v < V
    exists = i_b < num_reqs
    first = tl.minimum(tl.maximum(tl.load(query_start_loc + i_b), 0), num_tokens)
    last = tl.load(query_start_loc + i_b + 1, mask=exists, other=num_rows)
    last = tl.where(exists, tl.minimum(last, num_tokens), num_rows)
    slot = tl.load(cache_indices + i_b, mask=exists, other=0).to(tl.int64)
    if (slot <= 0) | (slot >= num_slots):
        _zero_rows(out, first, last, hv, o_v, rows, HV, V)
        return
    source = tl.load(source_indices + i_b).to(tl.int64)
    fresh = (tl.load(has_initial_state + i_b) == 0) | (source <= 0) | (source >= num_slots)
    n = tl.load(computed_lens + i_b)
    if LAYOUT == RING:
        fresh = fresh | (n <= 0)
    source = tl.where(fresh, slot, source)
    inner = hv * (V * K) + o_v[:, None] * K + cols[None, :]
    h = _load_tile(state + source * SS + inner, rows & _every(fresh == 0, o_v), cols, K)
    if LAYOUT == RING:
        base = tl.load(state_lens + (source * HV + hv) * ((V + LENS_ROWS - 1) // LENS_ROWS) + i_v * (BV // LENS_ROWS))
        row = tl.load(draft_indices + i_b).to(tl.int64)
        known = (row >= 0) & (row < num_request_rows) & (fresh == 0)
        h = _replay(h, ring_k, ring_u, ring_d, tl.where(known, row, 0), tl.where(known, base, n), n, h_k, hv, o_v,
                    rows, cols, H, HV, K, V, C, SRK, SRU, SRD, KIND, ST, UNROLL, PTX)  # fmt: skip
    track, track_at = slot, -1
    if TRACK:
        track, track_at = tl.load(track_indices + i_b).to(tl.int64), tl.load(track_tokens + i_b)
        track_at = tl.where((track > 0) & (track < num_slots), track_at, -1)
        _store_slot(state, state_lens, track, hv, i_v, h, n, inner, rows, cols, track_at == 0,
                    HV, K, V, SS, LAYOUT, BV)  # fmt: skip
    passed = 0.0
    if SKIP:
        passed = tl.load(skip + hv).to(tl.float32)
    for t in tl.range(first, last):
        token = first.to(tl.int64) * 0 + t
        d, on_sum, on_u, on_out = _gates_of(
            q, k, a, b, A_log, dt_bias, token, h_k, hv, cols, scale, low, high, lower_bound,
            K, KP, SQ, SK, SA, SB, KIND, NORM, BIAS, LIMIT, SAFE,
        )  # fmt: skip
        kk, qq = _load_row(k + token * SK + h_k * K, cols, K), _load_row(q + token * SQ + h_k * K, cols, K)
        vv = tl.load(v + token * SV + hv * V + o_v, mask=rows, other=0.0).to(tl.float32)
        h, _ = _token(h, kk, vv, d, on_sum, on_u, KO, KIND, ST, PTX)
        _store_out(out, token, hv, o_v, _output(h, qq, vv, on_out, passed, KO, KIND), rows, HV, V)
        if TRACK:
            _store_slot(state, state_lens, track, hv, i_v, h, n + t - first + 1, inner, rows, cols,
                        track_at == t - first + 1, HV, K, V, SS, LAYOUT, BV)  # fmt: skip
    _store_slot(state, state_lens, slot, hv, i_v, h, n + last - first, inner, rows, cols, last > first,
                HV, K, V, SS, LAYOUT, BV)  # fmt: skip


@triton.jit
def _physical(slot, table, entries, V2P: tl.constexpr):
    """What a slot of the map is in the pool; 0 for one that is not there."""
    slot = slot.to(tl.int64)
    if V2P:
        known = (slot > 0) & (slot < entries)
        slot = tl.load(table + tl.where(known, slot, 0), mask=known, other=0).to(tl.int64)
    return slot


@triton.jit(do_not_specialize=["num_request_rows", "num_entries", "num_slots", "ring_request_rows"])
def ssm_materialize_kernel(
    state, ring_k, ring_u, ring_d, state_lens, requests, mapping, table, lengths, destinations, steps,
    num_request_rows, num_entries, num_slots, ring_request_rows,
    KIND: tl.constexpr, LAYOUT: tl.constexpr, LAYERS: tl.constexpr, N: tl.constexpr, H: tl.constexpr,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, SL: tl.constexpr, SS: tl.constexpr,
    SLK: tl.constexpr, SRK: tl.constexpr, SLU: tl.constexpr, SRU: tl.constexpr, SLD: tl.constexpr,
    SRD: tl.constexpr, SLL: tl.constexpr, V2P: tl.constexpr, OWN: tl.constexpr, STEPS: tl.constexpr,
    UNROLL: tl.constexpr, PTX: tl.constexpr, KI: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Every layer at once: the state of a request at a position into a slot, its own (OWN) or another. STEPS: the
    position lies `steps + 1` tokens behind the length, and a negative step is left out."""
    NV: tl.constexpr = (V + BV - 1) // BV
    TILES: tl.constexpr = (V + LENS_ROWS - 1) // LENS_ROWS
    ST: tl.constexpr = state.dtype.element_ty
    i_v = tl.program_id(0) % NV
    hv = tl.program_id(0) // NV % HV
    layer = (tl.program_id(0) // (NV * HV) % LAYERS).to(tl.int64)
    i_b = tl.program_id(0) // (NV * HV * LAYERS)
    row = tl.load(requests + i_b).to(tl.int64)
    known = (row >= 0) & (row < num_request_rows)
    own = _physical(tl.load(mapping + tl.where(known, row, 0)), table, num_entries, V2P)
    goal = own if OWN else _physical(tl.load(destinations + i_b), table, num_entries, V2P)
    n = tl.load(lengths + i_b)
    wanted = known & (own > 0) & (own < num_slots) & (goal > 0) & (goal < num_slots)
    if STEPS:
        step = tl.load(steps + i_b)
        wanted = wanted & (step >= 0) & (step < N)
        n = tl.maximum(n, 0) + step.to(n.dtype) + 1
    if (wanted == 0) | (n < 0):
        return
    n = n.to(tl.int32)
    base, fresh = n, own < 0
    if LAYOUT == RING:
        p_lens = state_lens + layer * SLL
        base = tl.load(p_lens + (own * HV + hv) * TILES + i_v * (BV // LENS_ROWS))
        fresh = n == 0
        base = tl.where(fresh, n, base)
    if (base >= n) & (own == goal) & (fresh == 0):
        return
    cols = tl.arange(0, KI)
    o_v = i_v * BV + tl.arange(0, BV)
    rows = o_v < V
    inner = hv * (V * K) + o_v[:, None] * K + cols[None, :]
    at = state + layer * SL + inner
    h = _load_tile(at + own * SS, rows & _every(fresh == 0, o_v), cols, K)
    if LAYOUT == RING:
        if row < ring_request_rows:
            rings = ring_k + layer * SLK, ring_u + layer * SLU, ring_d + layer * SLD
            h = _replay(h, rings[0], rings[1], rings[2], row, base, n, hv // (HV // H), hv, o_v, rows, cols,
                        H, HV, K, V, C, SRK, SRU, SRD, KIND, ST, UNROLL, PTX)  # fmt: skip
        _store_lens(p_lens, goal, hv, i_v, tl.maximum(base, n), HV, V, BV)
    _store_tile(at + goal * SS, h, rows, cols, K)
