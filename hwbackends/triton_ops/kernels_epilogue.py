"""Triton kernel of the fused epilogue: conv, add to the residual stream, RMSNorm in one launch, for decode and verify.
Device code only; load order and dependent launch follow the rules in kernels_conv.py."""
# Tuples of tensors grow by +: triton's compiler knows no unpacking.
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hwbackends.triton_ops.kernels_conv import (
    RING,
    WINDOW,
    _at,
    _channels,
    _draft_row,
    _every,
    _first,
    _history_row,
    _live,
    _save_drafts,
    _state_row,
    _sum,
    _weights,
)


@triton.jit
def _earlier_rows(
    x, old, token, i0, d, inside,
    S: tl.constexpr, SX: tl.constexpr, GROUPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The S rows before a program's first token: history, or drafts that stand before it in the same request."""
    rows = ()
    for j in tl.static_range(S):
        row = old[j].to(ACC)
        if GROUPS > 1:
            taken = _every(i0 + j >= S, d)
            new = tl.load(x + (token + j - S).to(tl.int64) * SX + d, mask=taken & inside, other=0.0)
            row = tl.where(taken, new.to(ACC), row)
        rows = rows + (row,)
    return rows


@triton.jit
def _save_one_draft(
    state, drafts, old, row, slot, draft_row, live, first, i0, d, inside,
    S: tl.constexpr, LAYOUT: tl.constexpr, C: tl.constexpr, SS: tl.constexpr, SR: tl.constexpr, SD: tl.constexpr,
    RS: tl.constexpr, RR: tl.constexpr, RD: tl.constexpr,
):  # fmt: skip
    """What verify keeps, where each draft token has its own program: its own row, and from the first program the
    history. No program reads a row that another one writes."""
    if LAYOUT == RING:
        at = state + _state_row(slot, first, S + i0, LAYOUT, C, SS, SR) + _at(d, SD)
        tl.store(at, row.to(state.dtype.element_ty), mask=_every(live, d) & inside)
    else:
        base = drafts + draft_row.to(tl.int64) * RS + _at(d, RD)
        keep = live & (draft_row >= 0)
        at = base + (S + i0).to(tl.int64) * RR
        tl.store(at, row.to(drafts.dtype.element_ty), mask=_every(keep, d) & inside)
        for j in tl.static_range(S):
            mask = _every(keep & (i0 == 0), d) & inside
            tl.store(base + j * RR, old[j].to(drafts.dtype.element_ty), mask=mask)


@triton.jit
def _add_norm(
    acc, residual_stream, out, gain, eps, token, live, exists, d, inside,
    stream_row, D: tl.constexpr, SO: tl.constexpr, SH: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """h = residual stream + y; the stream becomes h, the output h * rsqrt(mean(h * h) + eps) * gain."""
    h = stream_row.to(ACC) + acc.to(out.dtype.element_ty).to(ACC)
    at = residual_stream + token.to(tl.int64) * SH + d
    tl.store(at, h.to(residual_stream.dtype.element_ty), mask=_every(live, d) & inside)
    scale = tl.rsqrt(tl.sum(h * h, axis=0) / D + eps)
    value = tl.where(_every(live, d), h * scale * gain.to(ACC), 0.0)
    tl.store(out + token.to(tl.int64) * SO + d, value.to(out.dtype.element_ty), mask=_every(exists, d) & inside)


@triton.jit(do_not_specialize=["eps", "num_reqs", "num_rows", "num_slots", "num_draft_rows"])
def fused_add_rmsnorm_kernel(
    x, weight, bias, out, residual_stream, norm_weight, state, drafts, cache_indices, positions, draft_indices,
    track_indices, eps, num_reqs, num_rows, num_slots, num_draft_rows,
    D: tl.constexpr, W: tl.constexpr, N: tl.constexpr, LAYOUT: tl.constexpr, C: tl.constexpr,
    SX: tl.constexpr, SO: tl.constexpr, SH: tl.constexpr, SS: tl.constexpr, SR: tl.constexpr, SD: tl.constexpr,
    RS: tl.constexpr, RR: tl.constexpr, RD: tl.constexpr, SWD: tl.constexpr, SWW: tl.constexpr, SB: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, RESIDUAL: tl.constexpr, DECODE: tl.constexpr, TRACK: tl.constexpr,
    PDL: tl.constexpr, ACC: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One program per TOKENS consecutive tokens of one request, all channels: N // TOKENS programs a request."""
    if PDL:
        gdc_launch_dependents()
    S: tl.constexpr = W - 1
    GROUPS: tl.constexpr = N // TOKENS
    d, inside = _channels(0, D, BLOCK_D)
    b = tl.program_id(0) // GROUPS
    i0 = (tl.program_id(0) % GROUPS) * TOKENS
    token = b * N + i0
    known = b < num_reqs
    slot = tl.load(cache_indices + b, mask=known, other=0)
    first = _first(positions, b, known, S, LAYOUT, C)
    draft_row = _draft_row(draft_indices, b, known, num_draft_rows) if (LAYOUT == WINDOW and not DECODE) else first
    live = _live(slot, num_slots)
    w = _weights(weight, d, inside, W, SWD, SWW)
    beta = tl.load(bias + _at(d, SB), mask=inside, other=0.0) if BIAS else 0.0
    gain = tl.load(norm_weight + d, mask=inside, other=0.0)
    old = ()
    for j in tl.static_range(S):
        old = old + (_history_row(state, slot, live & (i0 + j < S), first, i0 + j, d, inside,
                                  LAYOUT, C, SS, SR, SD),)  # fmt: skip
    if TRACK:
        track = tl.load(track_indices + b, mask=known, other=0)
    if PDL:
        gdc_wait()
    here = inside & _every(live & (token + TOKENS <= num_rows), d)
    # the newest row last: the sum starts with it, and a product between two loads would chain their latencies
    stream = ()
    for j in tl.static_range(TOKENS):
        at = residual_stream + (token + j).to(tl.int64) * SH + d
        stream = stream + (tl.load(at, mask=here, other=0.0),)
    earlier = _earlier_rows(x, old, token, i0, d, here, S, SX, GROUPS, ACC)
    raw = ()
    for j in tl.static_range(TOKENS):
        raw = raw + (tl.load(x + (token + j).to(tl.int64) * SX + d, mask=here, other=0.0),)
    rows = earlier + raw
    if LAYOUT != RING:
        # the rows that were read are rewritten: every lane has read before any lane writes
        tl.debug_barrier()
    if DECODE and LAYOUT == WINDOW:
        for j in tl.static_range(S):
            at = state + _state_row(slot, first, j, LAYOUT, C, SS, SR) + _at(d, SD)
            tl.store(at, rows[j + 1].to(state.dtype.element_ty), mask=_every(live, d) & inside)
    elif GROUPS == 1:
        _save_drafts(state, drafts, rows, slot, draft_row, live, first, d, inside,
                     N, S, LAYOUT, C, SS, SR, SD, RS, RR, RD)  # fmt: skip
    else:
        _save_one_draft(state, drafts, old, raw[0], slot, draft_row, live, first, i0, d, inside,
                        S, LAYOUT, C, SS, SR, SD, RS, RR, RD)  # fmt: skip
    if TRACK:
        begin = first + 1 if LAYOUT == RING else first * 0
        for j in tl.static_range(S):
            at = state + _state_row(track, begin, j, LAYOUT, C, SS, SR) + _at(d, SD)
            tl.store(
                at, rows[j + 1].to(state.dtype.element_ty), mask=_every(live & _live(track, num_slots), d) & inside
            )
    for j in tl.static_range(TOKENS):
        acc = _sum(rows, w, beta, j, W, ACC, BIAS, SILU, RESIDUAL)
        _add_norm(acc, residual_stream, out, gain, eps, token + j, live, token + j < num_rows, d, inside,
                  stream[j], D, SO, SH, ACC)  # fmt: skip
