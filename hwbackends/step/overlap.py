"""Whether two tensors share memory, told from addresses, shapes and strides alone. Nothing here reads an element."""

from __future__ import annotations

from math import gcd

from torch import Tensor


def overlap(one: Tensor, two: Tensor) -> bool:
    """Whether an element of `one` may lie where an element of `two` does.

    Exact for slices of one buffer that have the same or multiple row strides (columns of a fused projection, streams of
    a pool, every other row). Where two patterns of one buffer interleave in no common stride, the answer is yes.
    """
    if not (one.numel() and two.numel()) or one.device != two.device or one.device.type == "meta":
        return False
    first, second = one.data_ptr(), two.data_ptr()
    if not first < second + _span(two) or not second < first + _span(one):
        return False
    width, strides = _pattern(one)
    other, others = _pattern(two)
    period = gcd(*strides, *others)
    if not period:
        return True
    distance = (second - first) % period
    return distance < width or period - distance < other


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of a tensor may lie in one place, as in an expanded one."""
    reach = tensor.element_size()
    for stride, extent in sorted(_steps(tensor)):
        if stride < reach:
            return True
        reach = stride * (extent - 1) + reach
    return False


def _steps(tensor: Tensor) -> list[tuple[int, int]]:
    """Stride in bytes and extent of each dimension that has more than one element."""
    size = tensor.element_size()
    return [(s * size, e) for s, e in zip(tensor.stride(), tensor.shape, strict=True) if e > 1]


def _span(tensor: Tensor) -> int:
    """Bytes from the first element to behind the last one."""
    return sum(stride * (extent - 1) for stride, extent in _steps(tensor)) + tensor.element_size()


def _pattern(tensor: Tensor) -> tuple[int, list[int]]:
    """Width in bytes of the runs that a tensor consists of, and the strides between them."""
    width, strides = tensor.element_size(), []
    for stride, extent in sorted(_steps(tensor)):
        if stride <= width:
            width = stride * (extent - 1) + width
        else:
            strides.append(stride)
    return width, strides
