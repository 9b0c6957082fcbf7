"""Which tests the kit ships and which clauses each of them names, read from the source: no torch, nothing imported."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hwbackends.contract.model import Contracts
from hwbackends.contract.reader import installed

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Coverage:
    """Clauses against tests, both ways.

    Attributes:
        tests: test functions by clause id of the contract, in the contract's order.
        untested: clauses of the contract that no test names.
        unknown: test function to clause ids that the contract does not have.
        silent: test functions that name no clause.
    """

    tests: Mapping[str, tuple[str, ...]]
    untested: tuple[str, ...]
    unknown: Mapping[str, tuple[str, ...]]
    silent: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Every clause has a test, and every test names clauses of the contract."""
        return not (self.untested or self.unknown or self.silent)


def judged(named: Iterable[str] | None = None) -> Contracts:
    """The contracts that the kit has a folder of clause tests for, and, if `named` is given, that a manifest names;
    others are not counted, nor judged."""
    wanted = tuple(installed()) if named is None else tuple(named)
    return installed().only(name for name in installed() if (FOLDER / name).is_dir() and name in wanted)


@functools.cache
def shipped_tests(folder: Path = FOLDER) -> Mapping[str, tuple[str, ...]]:
    """`conv/test_file.py::test_function` to the clause ids that it names."""
    found: dict[str, tuple[str, ...]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[f"{path.relative_to(folder).as_posix()}::{node.name}"] = _clauses(node)
    return found


def _clauses(node: ast.FunctionDef) -> tuple[str, ...]:
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id == "clauses":
            return tuple(ast.literal_eval(argument) for argument in decorator.args)
    return ()


def coverage(tests: Mapping[str, tuple[str, ...]] | None = None) -> Coverage:
    """Hold the clauses of the contract and the shipped tests against each other."""
    known = judged().clauses
    named = shipped_tests() if tests is None else tests
    by_clause = {clause: tuple(test for test, ids in named.items() if clause in ids) for clause in known}
    unknown = {test: tuple(i for i in ids if i not in known) for test, ids in named.items()}
    return Coverage(
        tests=by_clause,
        untested=tuple(clause for clause, found in by_clause.items() if not found),
        unknown={test: ids for test, ids in unknown.items() if ids},
        silent=tuple(test for test, ids in named.items() if not ids),
    )
