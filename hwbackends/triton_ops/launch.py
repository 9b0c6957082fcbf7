"""Launching kernels: compile-time arguments bound once, later calls with pointers alone, and the rule that makes
dependent launch safe. Nothing here knows what a kernel computes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

LAYOUT_CODES = {"window": 0, "ring": 1, "lazy": 2}


def interpreting() -> bool:
    """Whether triton runs kernels in Python on CPU tensors (`TRITON_INTERPRET=1`)."""
    return bool(triton.knobs.runtime.interpret)


class Ahead(Protocol):
    """A second form of a launch, dependent and inside captures alone, that also fetches for what follows.

    Attributes:
        chained: whether it pays directly behind another launch of ours, too.
    """

    chained: bool

    def compile(self, tensors: Sequence[Tensor]) -> None:
        """Make it ready, launching nothing: a capture allows neither compiling nor loading."""

    def __call__(self, tensors: Sequence[Tensor]) -> bool:
        """Launch; false, and nothing launched, where it is not known what follows."""


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

    Attributes:
        grid, num_warps: as given.
        ahead: the form that also fetches ahead, where there is one.
    """

    __slots__ = (
        "_aligned", "_constants", "_dependent", "_fixed", "_kernel", "_options", "_plain", "_scalars", "ahead", "grid",
        "num_warps",
    )  # fmt: skip

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
        self._kernel, self.grid, self._scalars, self._constants = kernel, grid, tuple(scalars), constants
        # contraction is off: every product that is fused with a sum is written so, in every kernel alike
        self.num_warps = num_warps
        self._options: dict[str, Any] = {"num_warps": num_warps, "enable_fp_fusion": False}
        self._fixed, self._aligned = tuple(fixed), aligned
        self._plain: tuple[Any, ...] | None = None
        self._dependent: tuple[Any, ...] | None = None
        self.ahead: Ahead | None = None

    def with_kernel(self, kernel: Any, grid: int, scalars: Sequence[int | float], constants: dict[str, Any]) -> Launch:
        """Another kernel over the same unmoving tensors; its scalars come before those of this launch."""
        return Launch(kernel, grid, (*scalars, *self._scalars), constants, self.num_warps, self._fixed, self._aligned)

    def at(self, pointers: Sequence[int], dependent: bool = False, first: tuple[int, ...] = ()) -> bool:
        """A warm launch on the current stream; false where the call must be made with tensors.

        Args:
            pointers: addresses of the leading tensors.
            dependent: launch as a programmatic dependent of what was launched before.
            first: leading scalars of the kernel.
        """
        ready = self._dependent if dependent else self._plain
        if ready is None:
            return False
        launch, head, device, fixed, tail = ready
        if _current_device() != device:
            return False
        launch(self.grid, 1, 1, _current_stream(device), *head, *pointers, *fixed, *first, *tail)
        return True

    def __call__(self, tensors: Sequence[Tensor], dependent: bool = False, first: tuple[int, ...] = ()) -> None:
        """Launch on the current stream with the leading tensors; see `at`."""
        if not self.grid:
            return
        unaligned = self._aligned and any(tensor.data_ptr() & 15 for tensor in (*tensors, *self._fixed))
        if not unaligned and self.at([tensor.data_ptr() for tensor in tensors], dependent, first):
            return
        if unaligned or interpreting():
            self._entry(tensors, dependent, first)
        else:
            self._make_ready(tensors, dependent, first)

    def compile_dependent(self, tensors: Sequence[Tensor], first: tuple[int, ...] = ()) -> None:
        """Make the dependent form ready for `at`, launching nothing. Inside a capture, which allows neither compiling
        nor loading, only what was compiled before becomes ready."""
        device, known = self._known(tensors)
        if True not in known and not capturing():
            known[True] = _entry_of(self._entry(tensors, True, first, warmup=True))
        self._keep(known, device)

    def _known(self, tensors: Sequence[Tensor]) -> tuple[int, dict[bool, tuple[Any, tuple[Any, ...]]]]:
        """Device, and the compiled forms of this kernel with these constants and dtypes."""
        device = tensors[0].get_device()
        dtypes = tuple(tensor.dtype for tensor in (*tensors, *self._fixed))
        key = (self._kernel, device, self._options["num_warps"], dtypes, *self._constants.values())
        return device, _compiled.setdefault(key, {})

    def _make_ready(self, tensors: Sequence[Tensor], dependent: bool, first: tuple[int, ...]) -> None:
        """Launch by a kernel that another launch compiled, or compile it, and keep it for later calls."""
        device, known = self._known(tensors)
        compiled = dependent in known
        if not compiled:
            known[dependent] = _entry_of(self._entry(tensors, dependent, first))
            if "PDL" in self._constants and not dependent and dependent_launch():
                # loading a module is not allowed in a capture, so the other form is made ready now
                known[True] = _entry_of(self._entry(tensors, True, first, warmup=True))
        self._keep(known, device)
        if self.ahead is not None:
            self.ahead.compile(tensors)
        if compiled:
            self._entry_or_at(tensors, dependent, first)

    def _entry_or_at(self, tensors: Sequence[Tensor], dependent: bool, first: tuple[int, ...]) -> None:
        if not self.at([tensor.data_ptr() for tensor in tensors], dependent, first):
            self._entry(tensors, dependent, first)

    def _keep(self, known: dict[bool, tuple[Any, tuple[Any, ...]]], device: int) -> None:
        pointers = tuple(tensor.data_ptr() for tensor in self._fixed)
        for dependent, entry in known.items():
            constants = self._constants | ({"PDL": True} if dependent else {})
            ready = (*entry, device, pointers, (*self._scalars, *constants.values()))
            if dependent:
                self._dependent = ready
            else:
                self._plain = ready

    def _entry(self, tensors: Sequence[Tensor], dependent: bool, first: tuple[int, ...], warmup: bool = False) -> Any:
        arguments = (*tensors, *self._fixed, *first, *self._scalars)
        if interpreting():
            return self._kernel[(self.grid,)](*arguments, **self._constants)
        constants, options = self._constants, self._options
        if dependent:
            constants, options = constants | {"PDL": True}, options | {"launch_pdl": True}
        with torch.cuda.device(tensors[0].device):
            if warmup:
                return self._kernel.warmup(*arguments, grid=(self.grid,), **constants, **options)
            return self._kernel[(self.grid,)](*arguments, **constants, **options)


_compiled: dict[tuple[Any, ...], dict[bool, tuple[Any, tuple[Any, ...]]]] = {}
"""What launches each compiled kernel, plain and dependent, by everything that it was compiled for."""


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


BUILT = torch.version.cuda is not None
capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing if BUILT else lambda: False
"""Whether the current stream is being captured; never, where torch is built without CUDA."""
_current_device: Callable[[], int] = torch._C._cuda_getDevice if BUILT else lambda: -1
_current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream if BUILT else lambda device: 0

PLAIN_ROWS = 128
"""Rows of x from which on a launch behind somebody else's kernel is plain. Behind a large matrix product a dependent
launch of this size costs more than it hides (docs/cuda.md)."""


class Chain:
    """The rule of dependent launch, kept per stream while a graph is captured.

    A dependent kernel reads weights, metadata and its own history before it waits, while any kernel since the last
    plain launch may still run. So a launch is dependent only where a plain launch of ours lies between it and the
    last preparation or change of state, and where no launch since that plain one writes the state that it reads.
    Everything else is launched plainly, which waits for all before it. Outside a capture every launch is plain:
    there the host is the bottleneck, and state may have been written by code that this class does not see.

    Attributes:
        changed: metadata or state was written since the last plain conv.
        written: addresses of the states that were written since the last plain conv.
        last: node of our last launch in the captured graph; 0: unknown.
    """

    __slots__ = ("changed", "last", "written")

    def __init__(self) -> None:
        self.changed = True
        self.written: list[tuple[int, int]] = []
        self.last = 0

    def may_depend(self, first: int, last: int, wanted: bool = True) -> bool:
        """Whether a conv over the state at addresses [first, last) may be launched as a dependent; notes the write.
        `wanted` false asks for a plain launch."""
        clear = not self.changed and not any(first < end and begin < last for begin, end in self.written)
        if not (clear and wanted):
            self.changed = False
            self.written.clear()
        self.written.append((first, last))
        return clear and wanted


_chains: dict[int, Chain] = {}


def chain_of_capture() -> Chain | None:
    """The chain of the current stream, which is being captured; None without dependent launch."""
    if not dependent_launch():
        return None
    return _chains.setdefault(torch.cuda.current_stream().cuda_stream, Chain())


def launch_in_capture(launch: Launch, tensors: Sequence[Tensor], span: tuple[int, int], rows: int) -> None:
    """A conv launch while the current stream is captured: dependent where `Chain` allows it and it pays.

    Args:
        launch: the conv.
        tensors: its leading tensors.
        span: addresses of the state that the launch reads early and writes.
        rows: rows of x.
    """
    chain = chain_of_capture()
    if chain is None:
        launch(tensors)
        return
    behind_ours = chain.last in (0, last_node())
    dependent = chain.may_depend(*span, wanted=rows < PLAIN_ROWS or behind_ours)
    ahead = launch.ahead if dependent else None
    if ahead is None or (behind_ours and not ahead.chained) or not ahead(tensors):
        launch(tensors, dependent)
    chain.last = last_node()


def last_node() -> int:
    """Address of the node that the next launch of the captured stream will follow; 0 where it cannot be told."""
    try:
        runtime: Any = import_module("cuda.bindings.runtime")
    except ModuleNotFoundError:
        return 0
    found = runtime.cudaStreamGetCaptureInfo(torch.cuda.current_stream().cuda_stream)
    nodes = found[4] if not int(found[0]) and len(found) > 4 else None
    return int(nodes[0]) if nodes and len(nodes) == 1 else 0


def note_change() -> None:
    """While the current stream is captured: metadata or state was written by a plain launch of ours."""
    chain = chain_of_capture()
    if chain is not None:
        chain.changed = True
        chain.written.clear()


def dependent_launch() -> bool:
    """Whether the device has programmatic dependent launch and nobody switched it off (HWBACKENDS_CUDA_PDL=0)."""
    if os.environ.get("HWBACKENDS_CUDA_PDL", "1") == "0":
        return False
    return torch.cuda.get_device_capability()[0] >= 9


def ordered(kernel: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The compile-time arguments of a kernel, in the order of its parameters."""
    return {name: options[name] for name in kernel.arg_names if name in options}


def cdiv(a: int, b: int) -> int:
    """Quotient rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Smallest power of two that is at least n, at least 1."""
    return 1 << max(0, n - 1).bit_length()
