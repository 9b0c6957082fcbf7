"""Launching kernels: compile-time arguments bound once, later calls with pointers alone, and the rule that makes
dependent launch safe. Nothing here knows what a kernel computes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

LAYOUT_CODES = {"window": 0, "ring": 1, "lazy": 2}


def interpreting() -> bool:
    """Whether triton runs kernels in Python on CPU tensors (`TRITON_INTERPRET=1`)."""
    return bool(triton.knobs.runtime.interpret)


class Launch:
    """One kernel with its compile-time arguments, grid, scalars and unmoving tensors; a call passes the others.

    The first call of each kind goes through triton's own entry point, which compiles. Later calls hand the compiled
    kernel plain addresses, in a fraction of the time. Kernels that read vectors are specialised for addresses that 16
    divides; a call with another address takes triton's entry point again.

    Args:
        kernel: a `triton.jit` function whose parameters are pointers, scalars, compile-time constants, in this order.
        grid: number of programs.
        scalars: run-time scalars behind those that a call passes.
        constants: compile-time arguments by name, in the order of the kernel's parameters.
        num_warps: warps per program.
        fixed: tensors behind those that a call passes; their addresses never move.
        aligned: whether the kernel is specialised on the alignment of its pointers.
    """

    __slots__ = ("_aligned", "_compiled", "_constants", "_fixed", "_grid", "_kernel", "_options", "_scalars")

    def __init__(
        self,
        kernel: Any,
        grid: int,
        scalars: Sequence[int | float],
        constants: dict[str, Any],
        num_warps: int,
        fixed: Sequence[Tensor] = (),
        aligned: bool = True,
    ) -> None:
        self._kernel, self._grid, self._scalars, self._constants = kernel, grid, tuple(scalars), constants
        # contraction is off: every product that is fused with a sum is written so, in every kernel alike
        self._options: dict[str, Any] = {"num_warps": num_warps, "enable_fp_fusion": False}
        self._fixed, self._aligned = tuple(fixed), aligned
        self._compiled: dict[bool, tuple[Any, ...]] = {}

    def __call__(self, tensors: Sequence[Tensor], dependent: bool = False, first: tuple[int, ...] = ()) -> None:
        """Launch on the current stream.

        Args:
            tensors: leading pointers of the kernel.
            dependent: launch as a programmatic dependent of what was launched before.
            first: leading scalars of the kernel.
        """
        ready = self._compiled.get(dependent)
        if ready is not None:
            launch, head, device, pointers, tail = ready
            leading = [tensor.data_ptr() for tensor in tensors]
            if (not self._aligned or not _together(leading) & 15) and torch._C._cuda_getDevice() == device:
                stream = torch._C._cuda_getCurrentRawStream(device)
                launch(self._grid, 1, 1, stream, *head, *leading, *pointers, *first, *tail)
                return
        elif not self._grid:
            return
        self._compile_and_launch(tensors, dependent, first, keep=ready is None)

    def _compile_and_launch(
        self, tensors: Sequence[Tensor], dependent: bool, first: tuple[int, ...], keep: bool
    ) -> None:
        compiled = self._entry(tensors, dependent, first)
        unaligned = self._aligned and any(t.data_ptr() & 15 for t in (*tensors, *self._fixed))
        if not keep or unaligned or interpreting():
            return
        device = tensors[0].get_device()
        self._keep(compiled, dependent, device)
        if "PDL" in self._constants and not dependent and dependent_launch():
            # loading a module is not allowed in a capture, so the other form is made ready now
            self._keep(self._entry(tensors, True, first, warmup=True), True, device)

    def _keep(self, compiled: Any, dependent: bool, device: int) -> None:
        constants = self._constants | ({"PDL": True} if dependent else {})
        pointers = tuple(tensor.data_ptr() for tensor in self._fixed)
        self._compiled[dependent] = (*_entry_of(compiled), device, pointers, (*self._scalars, *constants.values()))

    def _entry(self, tensors: Sequence[Tensor], dependent: bool, first: tuple[int, ...], warmup: bool = False) -> Any:
        arguments = (*tensors, *self._fixed, *first, *self._scalars)
        if interpreting():
            return self._kernel[(self._grid,)](*arguments, **self._constants)
        constants, options = self._constants, self._options
        if dependent:
            constants, options = constants | {"PDL": True}, options | {"launch_pdl": True}
        with torch.cuda.device(tensors[0].device):
            if warmup:
                return self._kernel.warmup(*arguments, grid=(self._grid,), **constants, **options)
            return self._kernel[(self._grid,)](*arguments, **constants, **options)


def _together(pointers: list[int]) -> int:
    every = 0
    for pointer in pointers:
        every |= pointer
    return every


def _entry_of(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """What launches a compiled kernel, and its arguments between stream and kernel arguments.

    `CompiledKernel.run` has one shape in triton 3.6 to 3.9. In 3.6 the C function below it is reached directly, which
    saves the host a third of the call; its shape changed after that release.
    """
    run = compiled.run
    if triton.__version__.startswith("3.6.") and not run.global_scratch_size and not run.profile_scratch_size:
        flags = (run.launch_cooperative_grid, run.launch_pdl, None, None)
        return run.launch, (compiled.function, *flags, compiled.packed_metadata, None, None, None)
    return run, (compiled.function, compiled.packed_metadata, None, None, None)


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

capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing if torch.version.cuda else lambda: False
"""Whether the current stream is being captured; never, where torch is built without CUDA."""


def current_chain() -> Chain | None:
    """The chain of the current stream while it is captured on a device with dependent launch; else None."""
    if not capturing() or not dependent_launch():
        return None
    stream = torch.cuda.current_stream().cuda_stream
    chain = _chains.get(stream)
    if chain is None:
        chain = _chains[stream] = Chain()
    return chain


def may_depend(first: int, last: int) -> bool:
    """Whether a conv over the state at addresses [first, last) may be launched as a dependent of what the current
    capture holds; see `Chain`."""
    chain = current_chain()
    return chain is not None and chain.may_depend(first, last)


def note_change() -> None:
    """Metadata or state was written by a plain launch: the next conv must not depend on it."""
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
