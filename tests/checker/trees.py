"""Writes small source trees and checks them in this process."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

from hwbackends.checker.engine import Options, run
from hwbackends.checker.findings import Finding
from hwbackends.checker.suppress import Selection, apply
from hwbackends.contract.reader import read


def write(root: Path, files: dict[str, str]) -> Path:
    """Each entry of `files` as a file below `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text), encoding="utf-8")
    return root


def shown(
    *roots: Path, contract: Path | None = None, selection: Selection | None = None, package: bool = False
) -> list[Finding]:
    """What a run with default settings reports; `package`: with what the trees import from the package around them."""
    loaded = read(contract) if contract is not None else None
    outcome = run([str(root) for root in roots], Options(contract=loaded, jobs=1, package=package))
    return apply(outcome.findings, selection or Selection(), outcome.ignores, {}).findings  # type: ignore[arg-type]


def line_of(path: Path, text: str) -> int:
    """The line of a file that holds `text` first."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


def brief(findings: list[Finding]) -> set[tuple[str, str, tuple[str, ...]]]:
    """Rule, definition and missing names of each finding."""
    return {(f.rule, f.definition.name if f.definition else "", f.missing) for f in findings}
