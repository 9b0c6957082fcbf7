"""Triton kernels of the floor: a launch that does nothing, and a copy. Device code only."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def nothing_kernel(target, DEPENDENT: tl.constexpr):
    """One store; with DEPENDENT behind the wait of a dependent launch."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    tl.store(target, 1)


@triton.jit
def copy_kernel(source, target, BLOCK: tl.constexpr):
    """BLOCK elements per program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at))
