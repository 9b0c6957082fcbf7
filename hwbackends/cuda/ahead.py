"""Which conv follows which, and the launches that fetch ahead for it. In a captured decode step a conv's programs are
few and the memory stands idle; programs beside them bring what the next conv reads first into the L2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hwbackends.conv.state import ConvState
from hwbackends.cuda import tuning
from hwbackends.cuda.dependent import dependent_launch
from hwbackends.cuda.kernels_ahead import conv_decode_ahead_kernel, fused_add_rmsnorm_ahead_kernel
from hwbackends.step.metadata import StepMetadata
from hwbackends.triton_ops.kernels_conv import conv_decode_kernel
from hwbackends.triton_ops.kernels_epilogue import fused_add_rmsnorm_kernel
from hwbackends.triton_ops.launch import Launch, interpreting, ordered

FORMS = {
    conv_decode_kernel: (conv_decode_ahead_kernel, False),
    fused_add_rmsnorm_kernel: (fused_add_rmsnorm_ahead_kernel, True),
}
"""The kernel with fetching programs of each kernel, and whether it pays directly behind another launch of ours, too: a
plain conv there is shorter than what it would fetch takes."""


class Trail:
    """The conv of a step that was planned last. Plans are made in the order of the step's convs, in its warm-up."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: FetchAhead | None = None


class FetchAhead:
    """The form of one decode conv's launch that fetches ahead for the conv behind it.

    What follows is what was planned next over the same metadata. Where a later run of the step takes another order,
    some lines of cache are fetched for nothing and no result changes.

    Args:
        state: the conv's state.
        weight: its weights.
        launch: the conv with fetching programs.
        trail: of the step's metadata.
        chained: see `launch.Ahead`.
    """

    __slots__ = ("_launch", "_next", "_state", "_weight", "chained")

    def __init__(self, state: ConvState, weight: Tensor, launch: Launch, trail: Trail, chained: bool) -> None:
        self._state, self._weight, self._launch, self.chained = state, weight, launch, chained
        self._next: FetchAhead | None = None
        if trail.last is not None and _same_rows(trail.last._state, state):
            trail.last._next = self
        trail.last = self

    def compile(self, tensors: Sequence[Tensor]) -> None:
        """See `launch.Ahead`."""
        self._launch.compile_dependent([*tensors, self._state.tensor, self._weight], (0, 0, 0))

    def __call__(self, tensors: Sequence[Tensor]) -> bool:
        """See `launch.Ahead`."""
        if self._next is None:
            return False
        state, weight = self._next._state, self._next._weight
        pointers = [tensor.data_ptr() for tensor in (*tensors, state.tensor, weight)]
        if any(pointer & 15 for pointer in pointers):
            return False
        return self._launch.at(pointers, True, (state.dim, state.tensor.stride(0), state.tensor.stride(1)))


def _same_rows(one: ConvState, other: ConvState) -> bool:
    """Whether slots and positions of one state mean the same rows in another."""
    return (
        one is not other
        and (one.layout, one.rows, one.width) == (other.layout, other.rows, other.width)
        and (one.tensor.dtype, one.slots) == (other.tensor.dtype, other.slots)
    )


def attach(
    launch: Launch,
    kernel: Any,
    state: ConvState,
    weight: Tensor,
    metadata: StepMetadata,
    options: dict[str, Any],
) -> None:
    """Give a decode conv's launch the form that fetches ahead, where that pays and the tensors lie as it needs.

    Args:
        launch: the conv's.
        kernel: what it launches.
        state, weight, metadata: the conv's.
        options: compile-time arguments of the launch.
    """
    rows, tensor = metadata.cache_indices.shape[0], state.tensor
    if rows > tuning.AHEAD_ROWS or interpreting() or not dependent_launch():
        return
    dense = tensor.stride(2) == 1 and (weight.is_contiguous() or weight.t().is_contiguous())
    if not dense or tensor.stride(0) >= 1 << 31:
        return
    kernel, chained = FORMS[kernel]
    fetchers = 1 + rows
    constants = ordered(kernel, options | {"THREADS": launch.traits.lanes * launch.num_warps})
    form = launch.with_kernel(kernel, launch.grid + fetchers, [fetchers], constants)
    trail = metadata.cache.setdefault(Trail, Trail())
    assert isinstance(trail, Trail)
    launch.ahead = FetchAhead(state, weight, form, trail, chained)
