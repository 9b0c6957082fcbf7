"""Kernels that break a rule of the device on purpose, so that the lowering job shows that it can fail."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slots_as_vector(state, slots, out, count, dim, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A vector of slots as addresses: lowers to one load per element."""
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK)
    mask = (r < count)[:, None] & (d < dim)[None, :]
    slot = tl.load(slots + r, mask=r < count, other=0)
    row = tl.load(state + slot[:, None] * dim + d[None, :], mask=mask, other=0.0)
    tl.store(out + r[:, None] * dim + d[None, :], row, mask=mask)


@triton.jit
def below_pointer(out, lens, count, BLOCK: tl.constexpr):
    """A load that starts one element below its pointer: refused."""
    at = tl.arange(0, BLOCK)
    before = tl.load(lens + at - 1, mask=(at > 0) & (at < count), other=0)
    tl.store(out + at, before, mask=at < count)
