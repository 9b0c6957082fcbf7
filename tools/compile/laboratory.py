"""A process whose launches compile and launch nothing: the backends' own hooks and launcher over a stand-in for the
driver, which tells triton which chip there is."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import code_object
from code_object import Resources
from families import AnyScene, play


@dataclass(frozen=True, slots=True)
class Machine:
    """What is known of one compiled kernel: its resources, and whether it holds instructions as text."""

    resources: Resources
    assembly: bool


@dataclass(frozen=True, slots=True)
class Found:
    """One kernel of a scene.

    Attributes:
        variant: names everything that the compiler is given: source, signature, constants, options, chip.
        constants: compile-time arguments, in words.
        machine: what came out; None where nothing was compiled.
    """

    chip: str
    scene: str
    kernel: str
    form: str
    warps: int
    variant: str
    constants: dict[str, str]
    machine: Machine | None

    @property
    def key(self) -> str:
        """What names it in the table."""
        return f"{self.scene}: {self.kernel}{' ' + self.form if self.form else ''}"


class Chip:
    """What triton asks of a driver before it compiles."""

    def __init__(self) -> None:
        self.target: Any = None

    def choose(self, name: str) -> None:
        """Be this chip from now on."""
        from triton.backends.compiler import GPUTarget

        if name.startswith("gfx"):
            from hwbackends.rocm.architectures import lanes

            self.target = GPUTarget("hip", name, lanes(name))
        else:
            self.target = GPUTarget("cuda", int(name.removeprefix("sm_")), 32)

    def get_current_device(self) -> Any:
        """Kernels are kept by device: one for each chip."""
        return self.target.arch

    def get_current_stream(self, device: Any) -> int:
        """Any."""
        return 0

    def get_current_target(self) -> Any:
        """The chip."""
        return self.target


@dataclass(frozen=True, slots=True)
class Made:
    """What stands in for triton's result."""

    variant: str
    machine: Machine | None


def compile_now(variant: str, source: Any, target: Any, options: dict[str, Any]) -> Machine:
    """Down to machine code, by triton."""
    from triton.compiler.compiler import compile as to_machine_code

    return machine_of(to_machine_code(source, target=target, options=options))


def only_named(variant: str, source: Any, target: Any, options: dict[str, Any]) -> None:
    """Nothing: the variant's name is all that is wanted."""


class Laboratory:
    """Plays scenes for chips.

    Args:
        make: what is to be done with a variant: `compile_now`, `only_named`, or one that remembers.
    """

    def __init__(self, make: Callable[[str, Any, Any, dict[str, Any]], Machine | None] = compile_now) -> None:
        import torch
        import triton

        from hwbackends.cuda import dependent
        from hwbackends.triton_ops import conv, epilogue, launch, metadata, ssm, ssm_moves

        self.chip, self.made, self.known, self.make = Chip(), [], {}, make  # type: ignore[var-annotated]
        triton.runtime.driver.set_active(self.chip)
        triton.compiler.compile = self._compile  # where a kernel looks once for each device
        torch.zeros = torch.empty  # nothing reads what nothing computes, and pools are large
        torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment, misc]
        dependent.dependent_launch = lambda: self.chip.target.backend == "cuda" and self.chip.target.arch >= 90
        for module in (conv, epilogue, metadata, ssm, ssm_moves):
            module.check_device = lambda *given: None  # type: ignore[attr-defined]
        self.launching = launch
        entry = launch.Launch._entry

        def compile_only(self_: Any, tensors: Any, dependent_: bool, first: Any, warmup: bool = False) -> Any:
            made = entry(self_, tensors, dependent_, first, warmup=True)
            self.made.append((self_, dependent_, made))
            return made

        launch.Launch._entry = compile_only  # type: ignore[method-assign]
        launch._entry_of = lambda made: (lambda *given: None, ())

    def _compile(self, source: Any, target: Any, options: dict[str, Any]) -> Made:
        """In place of triton's own: what a kernel asks for once per specialisation and chip."""
        variant = name_of(source, target, options)
        return Made(variant, self.make(variant, source, target, options))

    def play(self, scene: AnyScene, chip: str) -> list[Found]:
        """What a scene's hooks compile for a chip, less what an earlier scene compiled here; of a hot scene all."""
        self.chip.choose(chip)
        self.launching._compiled = {} if scene.hot else self.known.setdefault(chip, {})
        backend = "rocm" if chip.startswith("gfx") else "cuda"
        if backend == "rocm":
            importlib.import_module("hwbackends.rocm.traits").DEFAULT = chip
        self.made.clear()
        play(scene, importlib.import_module(f"hwbackends.{backend}.plugin"))
        return [self._found(scene, chip, *one) for one in self.made]

    def _found(self, scene: AnyScene, chip: str, launch: Any, dependent: bool, made: Made) -> Found:
        kernel, form = launch._kernel.__name__, "dependent" if dependent else ""
        constants = {name: str(value) for name, value in launch._constants.items()}
        return Found(chip, scene.name, kernel, form, launch.num_warps, made.variant, constants, made.machine)


GIVEN = ("num_warps", "enable_fp_fusion", "launch_pdl", "maxnreg", "waves_per_eu")
"""Options that launches set."""


def name_of(source: Any, target: Any, options: dict[str, Any]) -> str:
    """A digest of everything that a compiler of one version is given, of which line numbers, comments and this
    machine are no part."""
    # AMD's backend says 0 waves where none were asked for
    chosen = [(n, options[n]) for n in GIVEN if options.get(n) is not None and (n, options[n]) != ("waves_per_eu", 0)]
    constants = sorted((at, str(value)) for at, value in source.constants.items())
    given = (source_digest(source.fn), source.name, source.signature, constants, sorted(source.attrs.items()), chosen)
    return hashlib.sha256(repr((given, target.backend, target.arch)).encode()).hexdigest()[:20]


@cache
def source_digest(kernel: Any) -> str:
    """Of the module of a kernel and every module of ours that device code in it comes from."""
    modules, waiting = {}, [inspect.getmodule(kernel.fn)]
    while waiting:
        module: Any = waiting.pop()
        if module.__name__ not in modules:
            modules[module.__name__] = _text_digest(module)
            names = {getattr(value, "__module__", None) or "" for value in vars(module).values()}
            waiting += [sys.modules[name] for name in names if name.startswith("hwbackends.")]
    return hashlib.sha256(repr(sorted(modules.items())).encode()).hexdigest()


def _text_digest(module: ModuleType) -> str:
    """Of its code alone."""
    text = Path(str(module.__file__)).read_text(encoding="utf-8")
    return hashlib.sha256(ast.dump(ast.parse(text)).encode()).hexdigest()


def machine_of(compiled: Any) -> Machine:
    """Of triton's result, by the vendor's own record."""
    assembly = "elementwise_inline_asm" in compiled.asm["ttir"]  # AMD's assembler drops it with no more than a message
    if "hsaco" in compiled.asm:
        found = code_object.amd(compiled.asm["hsaco"], compiled.asm["amdgcn"])
        # triton asks for its LDS at the launch: the code object's own share does not hold it
        return Machine(replace(found, lds=found.lds + compiled.metadata.shared), assembly)
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return Machine(code_object.nvidia(compiled.asm["cubin"], str(tool)), assembly)
