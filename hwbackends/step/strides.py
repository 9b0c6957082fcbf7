"""How a tensor lies in memory, asked by backends that copy whole entries of a pool."""

from __future__ import annotations

from torch import Tensor


def packed(tensor: Tensor, behind: int) -> bool:
    """Whether the elements behind the first `behind` axes lie side by side."""
    expected = 1
    for extent, stride in zip(reversed(tensor.shape[behind:]), reversed(tensor.stride()[behind:]), strict=True):
        if extent > 1 and stride != expected:
            return False
        expected *= extent
    return True
