"""Launching kernels: compile-time arguments bound once, later calls with pointers alone, and the rule that makes
dependent launch safe. Nothing here knows what a kernel computes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

LAYOUT_CODES = {"window": 0, "ring": 1, "lazy": 2}


def interpreting() -> bool:
    """Whether triton runs kernels in Python on CPU tensors (`TRITON_INTERPRET=1`)."""
    return bool(triton.knobs.runtime.interpret)


class Launch:
    """One kernel with its compile-time arguments, grid and scalars; a call passes tensors.

    The first call of each kind goes through triton's own entry point, which compiles. Later calls hand the compiled
    kernel plain addresses, at about a third of the time. Pointers that a caller may pass at any alignment are looked
    at on every call: the compiled kernel was specialised for addresses that 16 divides.

    Args:
        kernel: a `triton.jit` function whose parameters are pointers, scalars, compile-time constants, in this order.
        grid: number of programs.
        scalars: run-time scalars, fixed for this launch.
        constants: compile-time arguments by name, in the order of the kernel's parameters.
        num_warps: warps per program.
        aligned: whether the kernel is specialised on the alignment of its pointers.
    """

    __slots__ = ("_aligned", "_compiled", "_constants", "_grid", "_kernel", "_options", "_scalars")

    def __init__(
        self,
        kernel: Any,
        grid: int,
        scalars: Sequence[int | float],
        constants: dict[str, Any],
        num_warps: int,
        aligned: bool = True,
    ) -> None:
        self._kernel, self._grid, self._scalars, self._constants = kernel, grid, tuple(scalars), constants
        # contraction is off: every product that is fused with a sum is written so, in every kernel alike
        self._options: dict[str, Any] = {"num_warps": num_warps, "enable_fp_fusion": False}
        self._aligned = aligned
        self._compiled: dict[bool, tuple[Any, ...]] = {}

    def __call__(
        self, tensors: Sequence[Tensor], dependent: bool = False, scalars: tuple[int | float, ...] | None = None
    ) -> None:
        """Launch on the current stream.

        Args:
            tensors: pointers, in the kernel's order.
            dependent: launch as a programmatic dependent of what was launched before.
            scalars: run-time scalars of this call; None: those of the constructor.
        """
        if not self._grid:
            return
        if scalars is None:
            scalars = self._scalars
        compiled = self._compiled.get(dependent)
        if compiled is None:
            self._first(tensors, dependent, scalars)
            return
        pointers = [tensor.data_ptr() for tensor in tensors]
        if self._aligned:
            every = 0
            for pointer in pointers:
                every |= pointer
            if every & 15:
                self._entry(tensors, dependent, scalars)
                return
        run, function, packed, device, tail = compiled
        if device != torch._C._cuda_getDevice():
            self._entry(tensors, dependent, scalars)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(self._grid, 1, 1, stream, function, packed, None, None, None, *pointers, *scalars, *tail)

    def _first(self, tensors: Sequence[Tensor], dependent: bool, scalars: tuple[int | float, ...]) -> None:
        compiled = self._entry(tensors, dependent, scalars)
        unaligned = self._aligned and any(tensor.data_ptr() & 15 for tensor in tensors)
        if unaligned or interpreting() or not hasattr(compiled, "packed_metadata"):
            return
        self._keep(compiled, dependent, tensors[0].get_device())
        if "PDL" in self._constants and not dependent and dependent_launch():
            # loading a module is not allowed in a capture, so the other form is made ready now
            other = self._entry(tensors, True, scalars, warmup=True)
            self._keep(other, True, tensors[0].get_device())

    def _keep(self, compiled: Any, dependent: bool, device: int) -> None:
        constants = self._constants | ({"PDL": True} if dependent else {})
        handles = (compiled.run, compiled.function, compiled.packed_metadata, device)
        self._compiled[dependent] = (*handles, tuple(constants.values()))

    def _entry(
        self, tensors: Sequence[Tensor], dependent: bool, scalars: tuple[int | float, ...], warmup: bool = False
    ) -> Any:
        if interpreting():
            return self._kernel[(self._grid,)](*tensors, *scalars, **self._constants)
        constants, options = self._constants, self._options
        if dependent:
            constants, options = constants | {"PDL": True}, options | {"launch_pdl": True}
        with torch.cuda.device(tensors[0].device):
            if warmup:
                return self._kernel.warmup(*tensors, *scalars, grid=(self._grid,), **constants, **options)
            return self._kernel[(self._grid,)](*tensors, *scalars, **constants, **options)


class Chain:
    """The rule of dependent launch, kept per stream while a graph is captured.

    A dependent kernel reads weights, metadata and its own history before it waits, while any kernel since the last
    plain launch may still run. So a launch is dependent only where a plain launch of ours lies between it and the
    last preparation or change of state, and where no launch since that plain one writes the state that it reads.
    Everything else is launched plainly, which waits for all before it. Outside a capture every launch is plain:
    there the host is the bottleneck, and state may have been written by code that this class does not see.
    """

    __slots__ = ("changed", "written")

    def __init__(self) -> None:
        self.changed = True
        self.written: list[tuple[int, int]] = []

    def may_depend(self, first: int, last: int) -> bool:
        """Whether a conv over the state at addresses [first, last) may be launched as a dependent; notes the write."""
        clear = not self.changed and not any(first < end and begin < last for begin, end in self.written)
        if not clear:
            self.changed = False
            self.written.clear()
        self.written.append((first, last))
        return clear


_chains: dict[int, Chain] = {}


def current_chain() -> Chain | None:
    """The chain of the current stream while it is captured on a device with dependent launch; else None."""
    if interpreting() or not torch.cuda.is_current_stream_capturing() or not dependent_launch():
        return None
    stream = torch.cuda.current_stream().cuda_stream
    chain = _chains.get(stream)
    if chain is None:
        chain = _chains[stream] = Chain()
    return chain


def note_change() -> None:
    """Metadata or state was written by a plain launch: the next conv must not depend on it."""
    if interpreting() or not torch.cuda.is_current_stream_capturing():
        return
    chain = current_chain()
    if chain is not None:
        chain.changed = True
        chain.written.clear()


def dependent_launch() -> bool:
    """Whether the device has programmatic dependent launch and nobody switched it off (HWBACKENDS_CUDA_PDL=0)."""
    if os.environ.get("HWBACKENDS_CUDA_PDL", "1") == "0":
        return False
    return torch.cuda.get_device_capability()[0] >= 9


def cdiv(a: int, b: int) -> int:
    """Quotient rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Smallest power of two that is at least n, at least 1."""
    return 1 << max(0, n - 1).bit_length()
