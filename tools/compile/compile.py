"""Compiles what the `cuda` and the `rocm` backend launch to machine code on any x86 CPU, through their own hooks and
launcher, and holds registers, spills, LDS, scratch and barriers of the hot hooks against a committed table. No GPU, no
driver; a stand-in tells triton which chip there is."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import whole  # noqa: E402
from code_object import Resources  # noqa: E402
from cover import Task, cover  # noqa: E402
from families import FAMILIES, AnyScene, family_of, hot  # noqa: E402
from laboratory import Chip, Found, Laboratory, compile_now, machine_of, only_named  # noqa: E402
from scenes import Scene  # noqa: E402
from whole import Chapter, Kept, Part  # noqa: E402

TABLE = HERE / "registers.json"
AMD = ("gfx942", "gfx950", "gfx1100", "gfx1201")
NVIDIA = ("sm_80", "sm_90", "sm_100", "sm_120")
CHIPS = (*AMD, *NVIDIA)
KEPT = HERE.parents[1] / "build" / "compile-kernels"
RENEW = "run `make compile-kernels-whole`"


_laboratory: Laboratory | None = None
_deadline = float("inf")


def begin(make: Any, deadline: float) -> None:
    """Makes this process a worker: what it does with a variant, and when it stops taking tasks."""
    global _laboratory, _deadline
    _laboratory, _deadline = Laboratory(make), deadline


def work(task: Task) -> tuple[list[Found] | None, str]:
    """One scene for one chip: what was compiled, and what the compiler said where it refused; None: out of time."""
    chip, scene = task
    if time.time() > _deadline:
        return None, ""
    assert _laboratory is not None
    try:
        return _laboratory.play(scene, chip), ""
    except Exception as error:
        return [], f"{chip} {scene.name}: {type(error).__name__}: {str(error)[:600]}"


def compile_bad(chip: str, name: str, constants: dict[str, int], warps: int, **options: int) -> Found:
    """One kernel of `known_bad`."""
    import known_bad
    from triton.compiler import ASTSource
    from triton.compiler.compiler import compile as to_machine_code

    standin = Chip()
    standin.choose(chip)
    function = getattr(known_bad, name)
    signature = {p.name: "constexpr" if p.is_constexpr else "*fp32" for p in function.params}
    signature |= {"out": "*i32"} if name == "speaks_ptx" else {}
    source = ASTSource(function, signature, constants)
    options |= {"num_warps": warps, "enable_fp_fusion": False}
    compiled = to_machine_code(source, target=standin.target, options=options)
    return Found(chip, "known bad", name, "", warps, "", {}, machine_of(compiled))


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


def judge(found: Found, scene: AnyScene) -> list[str]:
    """What is wrong with a compiled kernel by itself."""
    assert found.machine is not None
    wrong, what = [], found.machine.resources
    if found.chip.startswith("gfx") and (what.spills or what.scratch):
        wrong.append(f"{found.chip} {found.key}: {what.spills} spilled registers, {what.scratch} bytes of scratch")
    if scene.hot and what.scalar_spills:
        wrong.append(f"{found.chip} {found.key}: {what.scalar_spills} spilled scalars in a hot kernel")
    if found.chip.startswith("gfx") and found.machine.assembly:
        wrong.append(f"{found.chip} {found.key}: instructions as text, which this chip does not have")
    moves = scene.rewrites and not found.kernel.startswith("prepare")
    if found.chip.startswith("gfx") and moves and found.warps > 1 and not what.barriers:
        wrong.append(f"{found.chip} {found.key}: rewrites the rows that it reads, without a barrier")
    return wrong


def row(found: Found) -> list[int]:
    """Resources as the table has them."""
    assert found.machine is not None
    return list(asdict(found.machine.resources).values())


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
        wanted, got = table["kernels"].get(one.chip, {}).get(one.key), row(one)
        if wanted != got:
            wrong.append(f"{one.chip} {one.key}: got {got}, the table has {wanted}; renew it with --write")
    return wrong


def write(found: Sequence[Found], whole: bool) -> None:
    """Renew the table's chips that were asked for, of these all rows if `whole`; everything, if another triton made
    it."""
    import triton

    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    kept = table["kernels"] if table.get("triton") == triton.__version__ else {}
    asked = {one.chip for one in found}
    kernels: dict[str, dict[str, list[int]]] = {c: rows for c, rows in kept.items() if not (whole and c in asked)}
    for one in found:
        kernels.setdefault(one.chip, {})[one.key] = row(one)
    lines = [f' "triton": {json.dumps(triton.__version__)},', f' "columns": {json.dumps(list(Resources.__slots__))},']
    blocks = []
    for chip, rows in sorted(kernels.items()):
        body = ",\n".join(f"   {json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(rows.items()))
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
        mine = {one.variant: one.machine.resources for one in found if one.chip == chip and one.machine is not None}
        kernels = {one.kernel for one in found if one.chip == chip}
        if mine:
            most = max(what.vectors for what in mine.values())
            spilled = sum(bool(what.spills) for what in mine.values())
            print(f"{chip}: {len(mine)} variants of {len(kernels)} kernels, at most {most} registers, {spilled} spill")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--chip", action="append", help="this one only; may be repeated")
    parser.add_argument("--family", action="append", choices=list(FAMILIES), help="this one only; may be repeated")
    parser.add_argument("--only", default="", help="scenes whose name contains this")
    parser.add_argument("--hot", action="store_true", help="the hot kernels of AMD's chips alone")
    parser.add_argument("--whole", action="store_true", help="every scene for every chip; goes on where it was stopped")
    parser.add_argument("--keep", action="store_true", help="keep what is compiled for --whole, and take what it kept")
    parser.add_argument("--check", action="store_true", help="compile nothing; the cover, and the whole's result")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="take no more tasks after this")
    parser.add_argument("--list", action="store_true", help="compile nothing; print the whole, one line a variant")
    parser.add_argument("--verbose", action="store_true", help="what each scene's kernels hold")
    parser.add_argument("--write", action="store_true", help="renew the table of the hot kernels")
    given = parser.parse_args()
    given.chip, given.family = given.chip or list(CHIPS), given.family or list(FAMILIES)
    if platform.machine() != "x86_64":
        parser.error(f"triton's wheels compile on x86-64, not on {platform.machine()}")
    return given


def ci_tasks() -> list[Task]:
    """For either vendor and family every pair of values that the whole has, and the hot scenes for each of AMD's chips
    and, in every form, for one of NVIDIA's."""
    tasks: list[Task] = []
    for (family, scenes), chips in itertools.product(FAMILIES.items(), (AMD, NVIDIA)):
        kept = [scene for scene in hot() if family_of(scene) == family]
        shown = AMD if chips is AMD else ("sm_90",)
        tasks += cover(list(itertools.product(chips, scenes())), list(itertools.product(shown, kept)))
    return tasks


def whole_tasks() -> Iterator[Task]:
    """The whole product, one vendor's chips and one family behind the other."""
    for chips, scenes in itertools.product((AMD, NVIDIA), FAMILIES.values()):
        yield from itertools.product(chips, scenes())


def tasks_of(given: argparse.Namespace) -> list[Task]:
    """What is to be compiled for which chip."""
    product = whole_tasks() if given.whole else itertools.product(AMD, hot()) if given.hot else iter(ci_tasks())
    return [(chip, scene) for chip, scene in product if asked(given, chip, scene)]


def asked(given: argparse.Namespace, chip: str, scene: AnyScene) -> bool:
    """Whether the command line names a scene and a chip."""
    return given.only in scene.name and chip in given.chip and family_of(scene) in given.family


Result = list[tuple[AnyScene, Found]]


def compile_all(given: argparse.Namespace) -> tuple[Result, list[str], set[Part]]:
    """Every kernel of every task, what compilers refused or bad kernels passed, and the parts that are complete."""
    found: Result = []
    tasks, complete = tasks_of(given), set(itertools.product(given.chip, given.family))
    make = Kept(KEPT).make if given.whole or given.keep else compile_now
    setting = (make, time.time() + given.seconds)
    with (
        own_cache(),
        ProcessPoolExecutor(given.workers, get_context("spawn"), initializer=begin, initargs=setting) as pool,
    ):
        wrong = [] if given.whole else pool.submit(known_bad_kernels_fail).result()
        for (chip, scene), (compiled, refused) in zip(tasks, pool.map(work, tasks, chunksize=4), strict=True):
            found += [(scene, one) for one in compiled or ()]
            wrong += [refused] if refused else []
            if compiled is None or refused:
                complete.discard((chip, family_of(scene)))
            if given.verbose:
                print(f"{chip} {scene.name}", *(one.machine for one in compiled or ()), sep="\n  ", flush=True)
    return found, wrong, complete


def named(chip: str, only: str = "") -> list[Found]:
    """Every variant of the whole for a chip by name, nothing compiled."""
    os.environ.pop("TRITON_INTERPRET", None)
    laboratory = Laboratory(only_named)
    wanted = (scene for scenes in FAMILIES.values() for scene in scenes() if only in scene.name)
    return [one for scene in wanted for one in laboratory.play(scene, chip)]


DERIVED = {
    "SS", "SD", "SR", "SL", "RS", "RR", "RL", "RD", "C", "ENTRY", "SA", "SI", "SRD", "SRK", "SRU", "E", "IL", "IN",
    "IR", "ML", "MS",
}  # fmt: skip
"""Sizes and strides that follow from layout, width, heads and channels together: no branch hangs on a single value."""


def values(found: Sequence[Found]) -> set[tuple[str, str, str, str]]:
    """Each kernel and form with each value of its compile-time arguments, and with each number of warps."""
    each = {(one.kernel, one.form, *item) for one in found for item in one.constants.items() if item[0] not in DERIVED}
    return each | {(one.kernel, one.form, "warps", str(one.warps)) for one in found}


def uncovered(chip: str, found: Sequence[Found], tasks: Sequence[Task]) -> list[str]:
    """Values of compile-time arguments that the whole compiles for a chip, and `tasks` for no chip of its vendor."""
    shown = {scene.name for other, scene in tasks if (other in AMD) == (chip in AMD)}
    missing = values(found) - values([one for one in found if one.scene in shown])
    return [f"{chip}: no task compiles {' '.join(filter(None, one))}" for one in sorted(missing)]


def stale(chip: str, found: Sequence[Found]) -> list[str]:
    """Where the result of the whole is of other sources, or lacks a part that it does not own to lack."""
    result, wrong = whole.kept_result(), []
    for family in FAMILIES:
        mine = {one.variant for one in found if one.scene in names_of(family)}
        kept = result["chips"].get(chip, {}).get(family)
        if kept is None and f"{chip} {family}" in result["owed"]:
            print(f"{chip} {family}: {len(mine)} variants, which were never all compiled in one tree")
        elif kept is None:
            wrong.append(f"{chip} {family}: {len(mine)} variants, of which the result has none: {RENEW}")
        elif kept["digest"] != whole.digest_of(mine):
            wrong.append(f"{chip} {family}: the result is of {kept['variants']} variants, not of these: {RENEW}")
    return wrong


@cache
def names_of(family: str) -> frozenset[str]:
    """Names of the scenes of a family."""
    return frozenset(scene.name for scene in FAMILIES[family]())


def check(given: argparse.Namespace) -> list[str]:
    """Whether what `make compile-kernels` compiles shows every value, and the whole's result is of these sources."""
    import triton

    result = whole.kept_result()
    if triton.__version__ != result["triton"]:
        print(f"the whole's result is of triton {result['triton'] or '(none)'}, this is {triton.__version__}")
        return []
    wrong, tasks = [], ci_tasks()
    with ProcessPoolExecutor(given.workers, get_context("spawn")) as pool:
        for chip, found in zip(given.chip, pool.map(named, given.chip), strict=True):
            wrong += uncovered(chip, found, tasks) + stale(chip, found)
    if not wrong and given.write:
        whole.renew_sources()
    elif not wrong and result["sources"] != whole.source_digest():
        wrong.append("the variants are those of the result, its sources are not: add --write")
    return wrong


def conclude(given: argparse.Namespace, found: Result, wrong: list[str], complete: set[Part]) -> list[str]:
    """Everything that is wrong with what was compiled; writes what was asked for."""
    wrong = wrong + [line for scene, one in found for line in judge(one, scene)]
    if given.whole:
        parts = {} if given.only else {part: chapter_of(part, found) for part in complete}
        if parts:
            whole.write(parts, itertools.product(CHIPS, FAMILIES))
        print("complete:", ", ".join(" ".join(part) for part in sorted(parts)) or "nothing", flush=True)
        return wrong
    held = set(hot())
    table = [one for scene, one in found if scene in held and one.chip in AMD]
    everything = not given.only and len(given.family) == len(FAMILIES)
    if given.write:
        write(table, everything)
    return wrong + hold(table, json.loads(TABLE.read_text()), everything)


def chapter_of(part: Part, found: Result) -> Chapter:
    """What was compiled of one family for one chip."""
    return whole.chapter([one for scene, one in found if (one.chip, family_of(scene)) == part])


def main() -> int:
    """Compile, judge, and compare with the table.

    Returns:
        0 if everything compiles and nothing is wrong, else 1.
    """
    given, start = arguments(), time.monotonic()
    if given.list:
        for one in itertools.chain.from_iterable(named(chip, given.only) for chip in given.chip):
            print(json.dumps({name: value for name, value in asdict(one).items() if name != "machine"}))
        return 0
    if given.check:
        wrong = check(given)
        print(*wrong, f"{len(wrong)} faults in {time.monotonic() - start:.0f} s", sep="\n")
        return 1 if wrong else 0
    found, wrong, complete = compile_all(given)
    wrong = conclude(given, found, wrong, complete)
    summary([one for _, one in found])
    for line in wrong[:40]:
        print(line, file=sys.stderr)
    count = len({one.variant for _, one in found})
    print(f"{count} variants in {time.monotonic() - start:.0f} s, {len(wrong)} faults")
    return 1 if wrong or not found else 0


if __name__ == "__main__":
    sys.exit(main())
