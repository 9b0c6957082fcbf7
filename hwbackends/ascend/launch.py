"""What every launch on Ascend shares: grids, index tensors as kernels take them, and the limits of the kernels' own
address arithmetic. Holds no kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from hwbackends.step.pool import StatePool

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of rows that the kernels take."""
MAX_PROGRAMS = 32_768
"""Programs of one launch; the device refuses more than 65,535, and each program walks a stride of work items."""
MAX_OFFSET = 2**31
"""Offsets inside one slot, tile or channel block are 32 bits wide in the kernels; bases are 64 bits wide."""


def grid(items: int) -> tuple[int]:
    """Programs for so many work items, at least one."""
    return (max(1, min(items, MAX_PROGRAMS)),)


def blocks(dim: int, block: int) -> int:
    """Channel blocks that cover `dim` channels, at least one."""
    return max(1, -(-dim // block))


def indices(first: Tensor, *others: Tensor | None) -> list[Tensor]:
    """Index tensors as one kernel takes them: contiguous and of one dtype, int64 where they are mixed. The first stands
    in for missing ones, which a flag of the kernel keeps from being read."""
    dtypes = {tensor.dtype for tensor in (first, *others) if tensor is not None}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.int64
    lead = first.to(dtype).contiguous()
    return [lead, *(lead if tensor is None else tensor.to(dtype).contiguous() for tensor in others)]


def table(pool: StatePool, other: Tensor) -> Tensor:
    """The pool's table of physical slots; `other` stands in where it has none."""
    return other if pool.mamba_v2p_table is None else pool.mamba_v2p_table.contiguous()


def flags(given: Tensor) -> Tensor:
    """A bool tensor as bytes over the same memory; a copy only where it is not contiguous."""
    return given.contiguous().view(torch.int8)


def fits(*tensors: Tensor, behind: int = 1) -> bool:
    """Whether every offset behind the first `behind` axes of each tensor stays below `MAX_OFFSET`."""
    return all(
        sum((extent - 1) * stride for extent, stride in zip(t.shape[behind:], t.stride()[behind:], strict=True))
        < MAX_OFFSET
        for t in tensors
    )
