"""Triton kernels of decode that also fetch ahead: programs beside those of the conv bring the history and the weights
of the conv that follows into the L2, while the matrix product between the two has not begun. Device code only.

The programs read the step's metadata and write nothing. They do not wait for the launch before: the programs of the
conv do, so the kernel ends no earlier. They stand on multiprocessors of their own, because a fetch between a conv's
loads and its sum costs the conv more than it saves the next one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hwbackends.triton_ops.kernels_conv import RING, WINDOW, conv_decode_kernel
from hwbackends.triton_ops.kernels_epilogue import fused_add_rmsnorm_kernel

LINE_BYTES = tl.constexpr(128)


_SCALARS = [
    "next_dim", "next_slot_stride", "next_row_stride", "fetchers", "eps", "num_reqs", "num_rows", "num_slots",
    "num_draft_rows",
]  # fmt: skip


@triton.jit
def _fetch(at, wanted):
    """Ask for the lines at these addresses, to be kept longer than what merely streams through."""
    tl.inline_asm_elementwise(
        "{ .reg .pred q; setp.ne.b32 q, $2, 0; @q prefetch.global.L2::evict_last [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [at.to(tl.int64), wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _fetch_next(
    next_state, next_weight, cache_indices, positions, item, next_dim, next_slot_stride, next_row_stride, num_reqs,
    num_slots, W: tl.constexpr, LAYOUT: tl.constexpr, C: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Program 0: the weights of the next conv; program 1 + b: the history of request b there."""
    S: tl.constexpr = W - 1
    thread = tl.arange(0, THREADS)
    if item == 0:
        line: tl.constexpr = LINE_BYTES // (next_weight.dtype.element_ty.primitive_bitwidth // 8)
        for i in range(0, next_dim * W, THREADS * line):
            at = i + thread * line
            _fetch(next_weight + at, at < next_dim * W)
    else:
        b = item - 1
        slot = tl.load(cache_indices + b, mask=b < num_reqs, other=0)
        first = tl.load(positions + b, mask=b < num_reqs, other=0) if LAYOUT != WINDOW else slot * 0
        if LAYOUT == RING:
            first = first - S
        line: tl.constexpr = LINE_BYTES // (next_state.dtype.element_ty.primitive_bitwidth // 8)
        base = next_state + slot.to(tl.int64) * next_slot_stride
        for row in tl.static_range(S):
            at = (first + row + C) % C if LAYOUT == RING else first + row
            begin = base + at.to(tl.int64) * next_row_stride
            for i in range(0, next_dim, THREADS * line):
                d = i + thread * line
                _fetch(
                    begin + d,
                    (d < next_dim) & (d * 0 + slot > 0) & (d * 0 + slot < num_slots) & (d * 0 + first + row >= 0),
                )


@triton.jit(do_not_specialize=["next_dim", "next_slot_stride", "next_row_stride", "fetchers", "num_reqs", "num_slots"])
def conv_decode_ahead_kernel(
    x, weight, bias, out, next_state, next_weight, state, cache_indices, positions, track_indices,
    next_dim, next_slot_stride, next_row_stride, fetchers, num_reqs, num_slots,
    D: tl.constexpr, W: tl.constexpr, LAYOUT: tl.constexpr, C: tl.constexpr,
    SX: tl.constexpr, SO: tl.constexpr, SS: tl.constexpr, SR: tl.constexpr, SD: tl.constexpr,
    SWD: tl.constexpr, SWW: tl.constexpr, SB: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    RESIDUAL: tl.constexpr, TRACK: tl.constexpr, TAIL: tl.constexpr, PDL: tl.constexpr, ACC: tl.constexpr,
    BLOCK_D: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """`conv_decode_kernel`, and `fetchers` programs behind it that fetch ahead."""
    item = tl.program_id(0) - (tl.num_programs(0) - fetchers)
    if item < 0:
        conv_decode_kernel(
            x, weight, bias, out, state, cache_indices, positions, track_indices, num_reqs, num_slots,
            D, W, LAYOUT, C, SX, SO, SS, SR, SD, SWD, SWW, SB, BIAS, SILU, RESIDUAL, TRACK, TAIL, PDL, ACC, BLOCK_D,
        )  # fmt: skip
    else:
        _fetch_next(
            next_state, next_weight, cache_indices, positions, item, next_dim, next_slot_stride, next_row_stride,
            num_reqs, num_slots, W, LAYOUT, C, THREADS,
        )  # fmt: skip


@triton.jit(do_not_specialize=_SCALARS)
def fused_add_rmsnorm_ahead_kernel(
    x, weight, bias, out, residual_stream, norm_weight, next_state, next_weight, state, drafts, cache_indices,
    positions, draft_indices, track_indices, next_dim, next_slot_stride, next_row_stride, fetchers, eps, num_reqs,
    num_rows, num_slots, num_draft_rows,
    D: tl.constexpr, W: tl.constexpr, N: tl.constexpr, LAYOUT: tl.constexpr, C: tl.constexpr,
    SX: tl.constexpr, SO: tl.constexpr, SH: tl.constexpr, SS: tl.constexpr, SR: tl.constexpr, SD: tl.constexpr,
    RS: tl.constexpr, RR: tl.constexpr, RD: tl.constexpr, SWD: tl.constexpr, SWW: tl.constexpr, SB: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, RESIDUAL: tl.constexpr, DECODE: tl.constexpr, TRACK: tl.constexpr,
    PDL: tl.constexpr, ACC: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """`fused_add_rmsnorm_kernel`, and `fetchers` programs behind it that fetch ahead."""
    item = tl.program_id(0) - (tl.num_programs(0) - fetchers)
    if item < 0:
        fused_add_rmsnorm_kernel(
            x, weight, bias, out, residual_stream, norm_weight, state, drafts, cache_indices, positions,
            draft_indices, track_indices, eps, num_reqs, num_rows, num_slots, num_draft_rows,
            D, W, N, LAYOUT, C, SX, SO, SH, SS, SR, SD, RS, RR, RD, SWD, SWW, SB, BIAS, SILU, RESIDUAL, DECODE, TRACK,
            PDL, ACC, BLOCK_D, TOKENS,
        )  # fmt: skip
    else:
        _fetch_next(
            next_state, next_weight, cache_indices, positions, item, next_dim, next_slot_stride, next_row_stride,
            num_reqs, num_slots, W, LAYOUT, C, THREADS,
        )  # fmt: skip
