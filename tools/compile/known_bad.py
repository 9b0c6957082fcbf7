"""Kernels that break a rule on purpose, so that the compile job shows that it can fail."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def spills(x, out, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """All rows of a block live at once, told to leave room for 16 waves: more than a thread then has registers."""
    d = tl.arange(0, BLOCK)
    rows = ()
    for i in tl.static_range(ROWS):
        rows = rows + (tl.load(x + i * BLOCK + d),)  # noqa: RUF005
    tl.debug_barrier()
    for i in tl.static_range(ROWS):
        tl.store(out + i * BLOCK + d, rows[ROWS - 1 - i])


@triton.jit
def rewrites_without_a_barrier(state, out, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows move up by one, and nothing keeps a thread from writing a row that another one has yet to read."""
    d = tl.arange(0, BLOCK)
    rows = ()
    for i in tl.static_range(ROWS):
        rows = rows + (tl.load(state + i * BLOCK + d),)  # noqa: RUF005
    for i in tl.static_range(ROWS - 1):
        tl.store(state + i * BLOCK + d, rows[i + 1])
    tl.store(out + d, rows[0])


@triton.jit
def speaks_ptx(x, out, BLOCK: tl.constexpr):
    """NVIDIA's instructions, which no assembler of AMD's takes."""
    d = tl.arange(0, BLOCK)
    value = tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [(x + d).to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(out + d, value)
