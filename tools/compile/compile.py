"""Compiles what the `cuda` and the `rocm` backend launch to machine code on any x86 CPU, through their own hooks and
launcher, and holds registers, spills, LDS, scratch and barriers of the hot hooks against a committed table. No GPU, no
driver; a stand-in tells triton which chip there is."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import code_object  # noqa: E402
from code_object import Resources  # noqa: E402
from scenes import Scene, play, scenes  # noqa: E402

TABLE = HERE / "registers.json"
AMD = ("gfx942", "gfx950", "gfx1100", "gfx1201")
NVIDIA = ("sm_80", "sm_90", "sm_100", "sm_120")
CHIPS = (*AMD, *NVIDIA)
TURNS = (("gfx942", "gfx950"), ("gfx1100", "gfx1201"), NVIDIA)
"""Chips that take turns."""


@dataclass(frozen=True, slots=True)
class Found:
    """One compiled kernel of a scene."""

    chip: str
    scene: str
    kernel: str
    form: str
    warps: int
    resources: Resources
    assembly: bool

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


class Laboratory:
    """A process whose launches compile and launch nothing.

    Attributes:
        found: what the hooks of the current scene had compiled: launch, whether dependent, and triton's result.
    """

    def __init__(self, compiles: bool = True) -> None:
        import torch
        import triton

        from hwbackends.cuda import dependent
        from hwbackends.triton_ops import conv, epilogue, launch, metadata

        self.chip, self.found, self.known = Chip(), [], {}  # type: ignore[var-annotated]
        triton.runtime.driver.set_active(self.chip)
        torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment, misc]
        dependent.dependent_launch = lambda: self.chip.target.backend == "cuda" and self.chip.target.arch >= 90
        for module in (conv, epilogue, metadata):
            module.check_device = lambda *given: None  # type: ignore[attr-defined]
        self.launching = launch
        entry = launch.Launch._entry

        def compile_only(self_: Any, tensors: Any, dependent_: bool, first: Any, warmup: bool = False) -> Any:
            compiled = entry(self_, tensors, dependent_, first, warmup=True) if compiles else None
            self.found.append((self_, dependent_, compiled))
            return compiled

        launch.Launch._entry = compile_only  # type: ignore[method-assign]
        launch._entry_of = lambda compiled: (lambda *given: None, ())

    def play(self, scene: Scene, chip: str) -> list[Found]:
        """What the machine code of a scene's launches says of itself."""
        return [self.read(scene, chip, *one) for one in self.launches(scene, chip)]

    def launches(self, scene: Scene, chip: str) -> list[tuple[Any, bool, Any]]:
        """What a scene's hooks compile for a chip, less what an earlier scene compiled here; of a hot scene all. Each:
        launch, whether dependent, triton's result."""
        self.chip.choose(chip)
        self.launching._compiled = {} if scene.hot else self.known.setdefault(chip, {})
        backend = "rocm" if chip.startswith("gfx") else "cuda"
        if backend == "rocm":
            importlib.import_module("hwbackends.rocm.traits").DEFAULT = chip
        self.found.clear()
        play(scene, importlib.import_module(f"hwbackends.{backend}.plugin"))
        return list(self.found)

    def read(self, scene: Scene, chip: str, launch: Any, dependent: bool, compiled: Any) -> Found:
        """What the machine code of one launch says of itself."""
        kernel = launch._kernel.__name__
        form = "dependent" if dependent else ""
        return Found(chip, scene.name, kernel, form, launch.num_warps, resources(compiled), has_assembly(compiled))


def has_assembly(compiled: Any) -> bool:
    """Whether the kernel holds instructions as text, which AMD's assembler drops with no more than a message."""
    return "elementwise_inline_asm" in compiled.asm["ttir"]


def resources(compiled: Any) -> Resources:
    """Of triton's result, by the vendor's own record."""
    if "hsaco" in compiled.asm:
        found = code_object.amd(compiled.asm["hsaco"], compiled.asm["amdgcn"])
        # triton asks for its LDS at the launch: the code object's own share does not hold it
        return replace(found, lds=found.lds + compiled.metadata.shared)
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return code_object.nvidia(compiled.asm["cubin"], str(tool))


_laboratory: Laboratory | None = None


def work(task: tuple[str, Scene]) -> tuple[list[Found], str]:
    """One scene for one chip: what was compiled, and what the compiler said where it refused."""
    global _laboratory
    chip, scene = task
    try:
        _laboratory = _laboratory or Laboratory()
        return _laboratory.play(scene, chip), ""
    except Exception as error:
        return [], f"{chip} {scene.name}: {type(error).__name__}: {str(error)[:600]}"


def compile_bad(chip: str, name: str, constants: dict[str, int], warps: int, **options: int) -> Found:
    """One kernel of `known_bad`."""
    import known_bad
    from triton.compiler import ASTSource
    from triton.compiler import compile as to_machine_code

    standin = Chip()
    standin.choose(chip)
    function = getattr(known_bad, name)
    signature = {p.name: "constexpr" if p.is_constexpr else "*fp32" for p in function.params}
    signature |= {"out": "*i32"} if name == "speaks_ptx" else {}
    source = ASTSource(function, signature, constants)
    options |= {"num_warps": warps, "enable_fp_fusion": False}
    compiled = to_machine_code(source, target=standin.target, options=options)
    return Found(chip, "known bad", name, "", warps, resources(compiled), has_assembly(compiled))


BAD = {
    "spills": ({"ROWS": 14, "BLOCK": 512}, 1),
    "rewrites_without_a_barrier": ({"ROWS": 3, "BLOCK": 1024}, 4),
    "speaks_ptx": ({"BLOCK": 128}, 1),
}
WAVES = {"gfx942": 8, "gfx1201": 16}
"""Waves that share a processor's registers at most."""


def known_bad_kernels_fail() -> list[str]:
    """What is wrong with the judges: nothing, as long as each kernel of `known_bad` has its finding."""
    wrong, scene = [], Scene("decode", "window")
    for chip, (name, (constants, warps)) in itertools.product(WAVES, BAD.items()):
        found = compile_bad(chip, name, constants, warps, **({"waves_per_eu": WAVES[chip]} if name == "spills" else {}))
        verdict = judge(found, scene)
        print(f"known bad: {verdict[0] if verdict else 'nothing'}", flush=True)
        if len(verdict) != 1:
            wrong.append(f"{chip}: known_bad.{name} has {len(verdict)} findings, wanted 1: {found}")
    return wrong


def judge(found: Found, scene: Scene) -> list[str]:
    """What is wrong with a compiled kernel by itself."""
    wrong, what = [], found.resources
    if found.chip.startswith("gfx") and (what.spills or what.scratch):
        wrong.append(f"{found.chip} {found.key}: {what.spills} spilled registers, {what.scratch} bytes of scratch")
    if scene.hot and what.scalar_spills:
        wrong.append(f"{found.chip} {found.key}: {what.scalar_spills} spilled scalars in a hot kernel")
    if found.chip.startswith("gfx") and found.assembly:
        wrong.append(f"{found.chip} {found.key}: instructions as text, which this chip does not have")
    moves = scene.rewrites and not found.kernel.startswith("prepare")
    if found.chip.startswith("gfx") and moves and found.warps > 1 and not what.barriers:
        wrong.append(f"{found.chip} {found.key}: rewrites the rows that it reads, without a barrier")
    return wrong


def hold(found: Sequence[Found], table: dict[str, Any], whole: bool) -> list[str]:
    """Where a hot kernel differs from the table, under the triton that made it; `whole`: none may be missing."""
    import triton

    if triton.__version__ != table["triton"]:
        print(f"registers are held for triton {table['triton']}, this is {triton.__version__}: only spills are judged")
        return []
    wrong = []
    names = {(one.chip, one.key) for one in found}
    for chip in {one.chip for one in found} if whole else ():
        wrong += [
            f"{chip} {key}: in the table, not compiled" for key in table["kernels"][chip] if (chip, key) not in names
        ]
    for one in found:
        wanted, got = table["kernels"].get(one.chip, {}).get(one.key), list(asdict(one.resources).values())
        if wanted != got:
            wrong.append(f"{one.chip} {one.key}: got {got}, the table has {wanted}; renew it with --write")
    return wrong


def write(found: Sequence[Found]) -> None:
    """Renew the table's chips that were asked for; all of them, if another triton made it."""
    import triton

    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    kept = table["kernels"] if table.get("triton") == triton.__version__ else {}
    asked = {one.chip for one in found}
    kernels: dict[str, dict[str, list[int]]] = {c: rows for c, rows in sorted(kept.items()) if c not in asked}
    for one in sorted(found, key=lambda one: (one.chip, one.key)):
        kernels.setdefault(one.chip, {})[one.key] = list(asdict(one.resources).values())
    lines = [f' "triton": {json.dumps(triton.__version__)},', f' "columns": {json.dumps(list(Resources.__slots__))},']
    blocks = []
    for chip, rows in sorted(kernels.items()):
        body = ",\n".join(f"   {json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items())
        blocks.append(f'  "{chip}": {{\n{body}\n  }}')
    lines.append(' "kernels": {\n' + ",\n".join(blocks) + "\n }")
    TABLE.write_text("{\n" + "\n".join(lines) + "\n}\n")


@contextlib.contextmanager
def own_cache() -> Iterator[None]:
    """A cache of this run alone: what is found in it was compiled here and now."""
    folder = tempfile.mkdtemp(prefix="compile-kernels-")
    os.environ["TRITON_CACHE_DIR"] = folder
    os.environ.pop("TRITON_INTERPRET", None)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def summary(found: Sequence[Found]) -> None:
    """One line for each chip."""
    for chip in CHIPS:
        mine = [one for one in found if one.chip == chip]
        kernels = Counter(one.kernel for one in mine)
        if mine:
            most = max(one.resources.vectors for one in mine)
            spilled = sum(bool(one.resources.spills) for one in mine)
            print(f"{chip}: {len(mine)} variants of {len(kernels)} kernels, at most {most} registers, {spilled} spill")


def every(chosen: Sequence[Scene]) -> list[tuple[str, Scene]]:
    """Every scene for every chip."""
    return list(itertools.product(CHIPS, chosen))


def in_turns(chosen: Sequence[Scene]) -> list[tuple[str, Scene]]:
    """Hot scenes for each of AMD's chips; every other one for one chip of each width of wave, and of NVIDIA's."""
    found = []
    for index, scene in enumerate(chosen):
        found += [(chip, scene) for chip in AMD] if scene.hot else []
        found += [(chips[index % len(chips)], scene) for chips in TURNS if not scene.hot or chips is NVIDIA]
    return sorted(found, key=lambda task: CHIPS.index(task[0]))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--chip", action="append", help="this one only; may be repeated")
    parser.add_argument("--only", default="", help="scenes whose name contains this")
    parser.add_argument("--hot", action="store_true", help="the hot kernels of AMD's chips alone")
    parser.add_argument("--all", action="store_true", help="every scene for every chip; else hot ones, others in turns")
    parser.add_argument("--cross", action="store_true", help="every scene, and options and dtypes against each other")
    parser.add_argument("--list", action="store_true", help="compile nothing; print what would be, one line a variant")
    parser.add_argument("--verbose", action="store_true", help="what each scene's kernels hold")
    parser.add_argument("--write", action="store_true", help="renew the table of the hot kernels")
    given = parser.parse_args()
    if platform.machine() != "x86_64":
        parser.error(f"triton's wheels compile on x86-64, not on {platform.machine()}")
    return given


def tasks_of(given: argparse.Namespace) -> list[tuple[str, Scene]]:
    """What is to be compiled for which chip."""
    asked = every(scenes(given.cross)) if given.all or given.cross else in_turns(scenes(False))
    if given.hot:
        asked = [(chip, scene) for chip, scene in asked if scene.hot and chip in AMD]
    return [(chip, scene) for chip, scene in asked if given.only in scene.name and chip in (given.chip or CHIPS)]


def compile_all(given: argparse.Namespace) -> tuple[list[tuple[Scene, Found]], list[str]]:
    """Every kernel of every task, and what compilers refused or bad kernels passed."""
    found: list[tuple[Scene, Found]] = []
    tasks = tasks_of(given)
    with own_cache(), ProcessPoolExecutor(given.workers, mp_context=get_context("spawn")) as pool:
        wrong = pool.submit(known_bad_kernels_fail).result()
        for task, (compiled, refused) in zip(tasks, pool.map(work, tasks, chunksize=4), strict=True):
            found += [(task[1], one) for one in compiled]
            wrong += [refused] if refused else []
            if given.verbose:
                print(f"{task[0]} {task[1].name}", *(one.resources for one in compiled), sep="\n  ", flush=True)
    return found, wrong


def print_variants(given: argparse.Namespace) -> None:
    """What the chosen scenes would compile: chip, kernel, form, warps, constants."""
    os.environ.pop("TRITON_INTERPRET", None)
    laboratory = Laboratory(compiles=False)
    for chip, scene in tasks_of(given):
        for launch, dependent, _ in laboratory.launches(scene, chip):
            constants = {name: str(value) for name, value in launch._constants.items()}
            line = {"chip": chip, "scene": scene.name, "kernel": launch._kernel.__name__, "dependent": dependent}
            print(json.dumps(line | {"warps": launch.num_warps, "constants": constants}))


def main() -> int:
    """Compile, judge, and compare with the table.

    Returns:
        0 if everything compiles and nothing is wrong, else 1.
    """
    given, start = arguments(), time.monotonic()
    if given.list:
        print_variants(given)
        return 0
    found, wrong = compile_all(given)
    wrong += [line for scene, one in found for line in judge(one, scene)]
    hot = [one for scene, one in found if scene.hot and one.chip in AMD]
    if given.write:
        write(hot)
    wrong += hold(hot, json.loads(TABLE.read_text()), whole=not given.only)
    summary([one for _, one in found])
    for line in wrong[:40]:
        print(line, file=sys.stderr)
    print(f"{len(found)} kernels in {time.monotonic() - start:.0f} s, {len(wrong)} faults")
    return 1 if wrong or not found else 0


if __name__ == "__main__":
    sys.exit(main())
