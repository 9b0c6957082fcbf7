"""The whole product of scenes and chips: compiled in as many runs as it takes, kept by variant, and written down once
a family is complete on a chip."""

from __future__ import annotations

import ast
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from code_object import Resources
from laboratory import Found, Machine, compile_now

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "compile-kernels.json"
Part = tuple[str, str]
"""A chip and a family."""


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
    """What the result says of one family on one chip.

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
    """Of everything that was compiled of one family for one chip."""
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
    nothing = {"triton": "", "sources": "", "owed": [], "chips": {}}
    return json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else nothing


def write(chapters: dict[Part, Chapter], parts: Iterable[Part]) -> None:
    """Renew chapters, and say which parts are owed; the others stay, if the same triton made them.

    Args:
        chapters: complete ones, by chip and family.
        parts: all that a full result has.
    """
    import triton

    old = kept_result()
    kept = old["chips"] if old["triton"] == triton.__version__ else {}
    chips: dict[str, dict[str, Any]] = {chip: dict(families) for chip, families in kept.items()}
    for (chip, family), one in chapters.items():
        chips.setdefault(chip, {})[family] = asdict(one)
    owed = [f"{chip} {family}" for chip, family in parts if family not in chips.get(chip, {})]
    _put({"triton": triton.__version__, "sources": source_digest(), "owed": owed, "chips": dict(sorted(chips.items()))})


def renew_sources() -> None:
    """Write down that the variants of these sources are those of the result."""
    _put(kept_result() | {"sources": source_digest()})


def _put(result: dict[str, Any]) -> None:
    """One line for each kernel."""
    blocks = []
    for chip, families in result["chips"].items():
        parts = []
        for family, one in sorted(families.items()):
            rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in one["kernels"].items())
            head = f'"variants": {one["variants"]}, "digest": "{one["digest"]}"'
            parts.append(f'   "{family}": {{{head}, "kernels": {{\n{rows}\n   }}}}')
        blocks.append(f'  "{chip}": {{\n' + ",\n".join(parts) + "\n  }")
    first = [f' "{name}": {json.dumps(result[name])},' for name in ("triton", "sources", "owed")]
    RESULT.write_text("\n".join(["{", *first, ' "chips": {', ",\n".join(blocks), " }", "}", ""]), encoding="utf-8")


def sources() -> list[Path]:
    """Files that decide what is compiled: kernels, launchers, launch sizes, layouts, and the scenes."""
    ours = [path for folder in ("triton_ops", "cuda", "rocm") for path in (ROOT / "hwbackends" / folder).glob("*.py")]
    ours = [path for path in ours if path.name not in ("__init__.py", "plugin.py", "probe.py", "wheel.py")]
    ours += [ROOT / "hwbackends" / family / "layouts.py" for family in ("conv", "ssm")]
    return sorted([*ours, *(Path(__file__).with_name(f"{name}.py") for name in ("families", "scenes", "ssm_scenes"))])


def source_digest() -> str:
    """Of the code of `sources`, of which comments, docstrings and layout are no part."""
    codes = [(path.relative_to(ROOT).as_posix(), _code_of(path)) for path in sources()]
    return hashlib.sha256(repr(codes).encode()).hexdigest()


def _code_of(path: Path) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not _is_text(one)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
