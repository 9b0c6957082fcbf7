"""The whole product of scenes and chips: compiled in as many runs as it takes, kept by variant, and written down once
a chip is complete."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from code_object import Resources
from laboratory import Found, Machine, compile_now

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "compile-kernels.json"


class Kept:
    """Variants that were compiled before, by their names and the version of triton.

    Args:
        folder: of this machine; one file for each process that wrote.
    """

    def __init__(self, folder: Path) -> None:
        import triton

        self.folder = folder / triton.__version__
        self.folder.mkdir(parents=True, exist_ok=True)
        self.known: dict[str, Machine] = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("\n"):  # else a run was stopped while it wrote
                    variant, resources, assembly = json.loads(line)
                    self.known[variant] = Machine(Resources(*resources), assembly)

    def make(self, variant: str, source: Any, target: Any, options: dict[str, Any]) -> Machine:
        """As kept; else compiled, and kept."""
        if variant not in self.known:
            found = self.known[variant] = compile_now(variant, source, target, options)
            line = json.dumps([variant, list(asdict(found.resources).values()), found.assembly])
            with (self.folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        return self.known[variant]


@dataclass(frozen=True, slots=True)
class Chapter:
    """What the result says of one chip.

    Attributes:
        variants: how many.
        digest: of their names: any change of kernels, launchers, launch sizes or scenes makes another one.
        kernels: by kernel: variants, and of each resource the most, of spills and scratch how many have any.
    """

    variants: int
    digest: str
    kernels: dict[str, dict[str, int]]


def digest_of(variants: Iterable[str]) -> str:
    """Of a set of variants."""
    return hashlib.sha256("\n".join(sorted(set(variants))).encode()).hexdigest()


def chapter(found: Sequence[Found]) -> Chapter:
    """Of everything that was compiled for one chip."""
    unique = {one.variant: one for one in found}
    kernels: dict[str, list[Resources]] = {}
    for one in unique.values():
        assert one.machine is not None
        kernels.setdefault(one.kernel, []).append(one.machine.resources)
    return Chapter(len(unique), digest_of(unique), {name: _worst(rows) for name, rows in sorted(kernels.items())})


def _worst(rows: Sequence[Resources]) -> dict[str, int]:
    most = {name: max(getattr(row, name) for row in rows) for name in ("vectors", "scalars", "lds")}
    some = {name: sum(getattr(row, name) > 0 for row in rows) for name in ("spills", "scalar_spills", "scratch")}
    return {"variants": len(rows), **most, **some}


def kept_result() -> dict[str, Any]:
    """What is written down; no chips where there is nothing yet."""
    import triton

    nothing = {"triton": triton.__version__, "chips": {}}
    return json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else nothing


def write(chapters: dict[str, Chapter]) -> None:
    """Renew the chapters of these chips; all of them, if another triton made the others."""
    import triton

    if not chapters:
        return
    old = kept_result()
    kept = old["chips"] if old["triton"] == triton.__version__ else {}
    chips = dict(sorted({**kept, **{chip: asdict(one) for chip, one in chapters.items()}}.items()))
    lines = []
    for chip, one in chips.items():
        rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in one["kernels"].items())
        head = f'"variants": {one["variants"]}, "digest": "{one["digest"]}"'
        lines.append(f'  "{chip}": {{{head}, "kernels": {{\n{rows}\n  }}}}')
    body = ",\n".join(lines)
    RESULT.write_text(f'{{\n "triton": "{triton.__version__}",\n "chips": {{\n{body}\n }}\n}}\n', encoding="utf-8")
