"""Launching kernels: compile-time arguments bound once, later calls with pointers alone. Nothing here knows what a
kernel computes, or of the device more than `traits.Traits` says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

from hwbackends.errors import UnsupportedError
from hwbackends.triton_ops.traits import Traits


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


class Unsized:
    """A tensor as a compiler may see it that would otherwise compile its size in: address and dtype alone."""

    __slots__ = ("data_ptr", "dtype")

    def __init__(self, tensor: Tensor) -> None:
        self.data_ptr, self.dtype = tensor.data_ptr, tensor.dtype

    def ptr_range(self) -> int:
        """Bytes behind the address, as triton's AMD backend asks for them: too many to promise anything."""
        return 1 << 63


class Launch:
    """One kernel with its compile-time arguments, grid, scalars and unmoving tensors; a call passes the others.

    The first call of each kind goes through triton's own entry point, which compiles. Later calls hand the compiled
    kernel plain addresses, in a fraction of the time. Kernels that read vectors are specialised for addresses that 16
    divides; a call with another address takes triton's entry point again.

    Args:
        traits: of the device that the launch is for.
        kernel: a `triton.jit` function whose parameters are pointers, scalars, compile-time constants, in this order.
        grid: number of programs.
        scalars: run-time scalars behind those that a call passes.
        constants: compile-time arguments by name, in the order of the kernel's parameters.
        num_warps: warps per program.
        fixed: tensors behind those that a call passes; their addresses never move.
        aligned: whether the kernel is specialised on the alignment of its pointers.
        registers: most registers of a thread, where the compiler would take more (NVIDIA's alone); 0: as many as it
            likes.
        waves: of a processor's SIMD that the compiler leaves registers for (AMD's alone); 0: as many as it likes.

    Raises:
        UnsupportedError: a chip that this backend does not serve, or more threads than one launch there can have.

    Attributes:
        traits, grid, num_warps: as given.
        ahead: the form that also fetches ahead, where there is one.
    """

    __slots__ = (
        "_aligned", "_constants", "_dependent", "_fixed", "_kernel", "_options", "_plain", "_scalars", "ahead", "grid",
        "num_warps", "traits",
    )  # fmt: skip

    def __init__(
        self,
        traits: Traits,
        kernel: Any,
        grid: int,
        scalars: Sequence[int | float],
        constants: dict[str, Any],
        num_warps: int,
        fixed: Sequence[Tensor] = (),
        aligned: bool = True,
        registers: int = 0,
        waves: int = 0,
    ) -> None:
        if traits.refused is not None:
            raise UnsupportedError(kernel.__name__, "device", *traits.refused, "load the reference backend for it")
        most = traits.threads_per_launch
        if most is not None and grid * num_warps * traits.lanes > most:
            got, hint = f"{grid} programs of {num_warps * traits.lanes} threads", "split the batch"
            raise UnsupportedError(kernel.__name__, "grid", got, f"at most {most} threads in a launch", hint)
        self.traits = traits
        self._kernel, self.grid, self._scalars, self._constants = kernel, grid, tuple(scalars), constants
        # contraction is off: every product that is fused with a sum is written so, in every kernel alike
        self.num_warps = num_warps
        self._options: dict[str, Any] = {"num_warps": num_warps, "enable_fp_fusion": False}
        if registers:
            self._options["maxnreg"] = registers
        if waves:
            self._options["waves_per_eu"] = waves
        self._fixed, self._aligned = tuple(fixed), aligned
        self._plain: tuple[Any, ...] | None = None
        self._dependent: tuple[Any, ...] | None = None
        self.ahead: Ahead | None = None

    def with_kernel(self, kernel: Any, grid: int, scalars: Sequence[int | float], constants: dict[str, Any]) -> Launch:
        """Another kernel over the same unmoving tensors; its scalars come before those of this launch."""
        scalars = (*scalars, *self._scalars)
        return Launch(self.traits, kernel, grid, scalars, constants, self.num_warps, self._fixed, self._aligned)

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
        key = (self._kernel, device, *self._options.values(), dtypes, *self._constants.values())
        return device, _compiled.setdefault(key, {})

    def _make_ready(self, tensors: Sequence[Tensor], dependent: bool, first: tuple[int, ...]) -> None:
        """Launch by a kernel that another launch compiled, or compile it, and keep it for later calls."""
        device, known = self._known(tensors)
        compiled = dependent in known
        if not compiled:
            known[dependent] = _entry_of(self._entry(tensors, dependent, first))
            if "PDL" in self._constants and not dependent and self._may_depend():
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

    def _may_depend(self) -> bool:
        dependents = self.traits.dependents
        return dependents is not None and dependents.dependent_launch()

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
        if interpreting():
            return self._kernel[(self.grid,)](*tensors, *self._fixed, *first, *self._scalars, **self._constants)
        pointers: Sequence[Any] = (*tensors, *self._fixed)
        if self.traits.sizes_compiled_in:
            pointers = [Unsized(tensor) for tensor in pointers]
        arguments = (*pointers, *first, *self._scalars)
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

    `CompiledKernel.run` has one shape in triton 3.6 to 3.9. CUDA's in 3.6 lets the C function below it be reached
    directly, which saves the host a third of the call; its shape changed after that release.
    """
    run = compiled.run
    direct = triton.__version__.startswith("3.6.") and hasattr(run, "launch_pdl")
    if direct and not run.global_scratch_size and not run.profile_scratch_size:
        flags = (run.launch_cooperative_grid, run.launch_pdl, None, None)
        return run.launch, (compiled.function, *flags, compiled.packed_metadata, None, None, None)
    return run, (compiled.function, compiled.packed_metadata, None, None, None)


BUILT = torch.version.cuda is not None or torch.version.hip is not None
capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing if BUILT else lambda: False
"""Whether the current stream is being captured; never, where torch is built for neither CUDA nor
ROCm, which goes by the same names."""
_current_device: Callable[[], int] = torch._C._cuda_getDevice if BUILT else lambda: -1
_current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream if BUILT else lambda device: 0


def ordered(kernel: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The compile-time arguments of a kernel, in the order of its parameters."""
    return {name: options[name] for name in kernel.arg_names if name in options}


def cdiv(a: int, b: int) -> int:
    """Quotient rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Smallest power of two that is at least n, at least 1."""
    return 1 << max(0, n - 1).bit_length()
