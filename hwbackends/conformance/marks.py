"""How a conformance test says what it is about: the clauses that it proves, and which of its cases the quick lane
keeps. Read by the plugin, by the worker and, as text, by `inventory`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., None])

FRESH_PROCESS = "fresh_process"


def clauses(*ids: str) -> Callable[[Test], Test]:
    """The clause ids that a test proves; literal strings, because `inventory` reads them from the source."""

    def mark(test: Test) -> Test:
        test.clauses = ids  # type: ignore[attr-defined]
        return test

    return mark


def cases(names: str, values: Sequence[Any], quick: int = 1) -> pytest.MarkDecorator:
    """Parametrize a test; the quick lane keeps the first `quick` values."""
    params = [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), id=_name(value), marks=_marks(i, quick))
        for i, value in enumerate(values)
    ]
    return pytest.mark.parametrize(names, params)


def full(test: Test) -> Test:
    """Leave a test out of the quick lane."""
    marked: Test = pytest.mark.full(test)
    return marked


def fresh_process(test: Test) -> Test:
    """Run a test in a process that has not called the backend before."""
    setattr(test, FRESH_PROCESS, True)
    return test


def _marks(index: int, quick: int) -> tuple[pytest.MarkDecorator, ...]:
    return () if index < quick else (pytest.mark.full,)


def _name(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(_name(item) for item in value)
    return {True: "yes", False: "no", None: "none"}[value] if value is None or isinstance(value, bool) else str(value)
