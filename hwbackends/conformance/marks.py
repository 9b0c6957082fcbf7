"""How a conformance test says what it is about: the clauses that it proves, its own cases, and over which of the
backend's claims it runs. The session makes the items; `inventory` reads the clauses from the source. No pytest here."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hwbackends.contract.claims import Claims

Test = TypeVar("Test", bound=Callable[..., None])

FRESH_PROCESS = "fresh_process"
DIMENSIONS = ("layout", "dtype", "width", "index")


@dataclass(frozen=True, slots=True)
class Point:
    """The claimed values that one run of a test is made for.

    Attributes:
        layout, dtype, width: of the pool; the dtype is that of x and of the state.
        index: dtype of index tensors.
        missing: what is not claimed, where no claimed value serves the test.
    """

    layout: str
    dtype: str
    width: int
    index: str
    missing: str = ""

    def at(self, **values: Any) -> Point:
        """This point with other values."""
        return replace(self, **values)

    def named(self, dimensions: Sequence[str]) -> str:
        """Its part of a test's id."""
        if self.missing:
            return "unclaimed"
        texts = {"layout": self.layout, "dtype": self.dtype, "width": f"w{self.width}", "index": self.index}
        return "-".join(texts[name] for name in dimensions)


@dataclass(frozen=True, slots=True)
class Item:
    """One case of a test at one point: the end of its id, arguments, and whether the quick lane keeps it."""

    id: str
    arguments: dict[str, Any]
    point: Point
    quick: bool


def clauses(*ids: str) -> Callable[[Test], Test]:
    """The clause ids that a test proves; literal strings, because `inventory` reads them from the source."""

    def mark(test: Test) -> Test:
        test.clauses = ids  # type: ignore[attr-defined]
        return test

    return mark


def cases(names: str, values: Sequence[Any] | Callable[..., Sequence[Any]], quick: int = 1) -> Callable[[Test], Test]:
    """Cases of a test's own, or a function of claims and seed that draws them; the quick lane keeps `quick`."""

    def mark(test: Test) -> Test:
        test.cases = [name.strip() for name in names.split(",")], values, quick  # type: ignore[attr-defined]
        return test

    return mark


def over(*dimensions: str, quick: int = 1, **only: Sequence[Any]) -> Callable[[Test], Test]:
    """The claims that a test runs over: every claimed value of each of `dimensions`, in changing company.

    Args:
        dimensions: of layout, dtype, width, index.
        quick: points per case that the quick lane keeps.
        only: the values of a dimension that the test is about; the others are left out.
    """

    def mark(test: Test) -> Test:
        test.over = dimensions, quick, only  # type: ignore[attr-defined]
        return test

    return mark


def full(test: Test) -> Test:
    """Leave a test out of the quick lane."""
    test.full = True  # type: ignore[attr-defined]
    return test


def fresh_process(test: Test) -> Test:
    """Run a test in a process that has not called the backend before."""
    setattr(test, FRESH_PROCESS, True)
    return test


def items(test: Callable[..., None], claims: Claims, seed: int = 0) -> list[Item]:
    """Every case of a test at every point of the claims that it must run at."""
    names, values, quick_cases = getattr(test, "cases", ([], [()], 1))
    dimensions, quick_points, only = getattr(test, "over", ((), 1, {}))
    found: list[Item] = []
    for number, value in enumerate(values(claims, seed) if callable(values) else values):
        given = value if isinstance(value, tuple) else (value,)
        arguments = dict(zip(names, given, strict=True))
        start = number + zlib.crc32(test.__name__.encode()) % 12
        for place, point in enumerate(points(claims, dimensions, only, start)):
            parts = [_name(item) for item in given] + ([point.named(dimensions)] if dimensions else [])
            quick = not getattr(test, "full", False) and number < quick_cases and place < quick_points
            found.append(Item("-".join(parts), arguments, point, quick))
    return found


def points(claims: Claims, dimensions: Sequence[str], only: dict[str, Sequence[Any]], start: int) -> list[Point]:
    """Points at which every claimed value of each dimension occurs; `start` changes which values meet."""
    claimed: dict[str, tuple[Any, ...]] = {
        "layout": claims.layouts, "dtype": claims.dtypes, "width": claims.widths, "index": claims.index_dtypes,
    }  # fmt: skip
    values = {name: tuple(v for v in claimed[name] if v in only.get(name, claimed[name])) for name in DIMENSIONS}
    for name, found in values.items():
        if not found:
            wanted = f"{name} {' or '.join(map(str, only.get(name, ())))}".strip()
            return [Point("window", "float32", 4, "int64", wanted)]
    count = max([1, *(len(values[name]) for name in dimensions)])
    return [Point(**{name: _pick(values[name], name, i, start) for name in DIMENSIONS}) for i in range(count)]


def _pick(values: Sequence[Any], name: str, place: int, start: int) -> Any:
    """Dimensions turn at different speeds, so that over a lane's tests every pair meets."""
    speed = {"layout": 1, "dtype": 1, "width": 2, "index": 3}[name]
    shift = {"layout": 0, "dtype": start // 3, "width": start // 2, "index": start // 5}[name]
    return values[(place + start * speed + shift) % len(values)]


def product(**values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Combinations, the last name turning fastest."""
    return itertools.product(*values.values())


def _name(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(_name(item) for item in value)
    return {True: "yes", False: "no", None: "none"}[value] if value is None or isinstance(value, bool) else str(value)
