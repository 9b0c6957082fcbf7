"""Errors of the checker itself: each is contained to the file or call that it was about, and reported by place."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from .findings import Finding, Place

RULE = "HWB202"
_OWN = os.path.dirname(os.path.abspath(__file__))


class Failures:
    """The places that could not be judged, in the order in which they came up."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    @contextmanager
    def contained(self, path: str, line: int, doing: str) -> Iterator[None]:
        """Go on behind the block where it fails; the report says that it is incomplete here."""
        try:
            yield
        except Exception as error:
            self.add(path, line, doing, error)

    def add(self, path: str, line: int, doing: str, error: Exception) -> None:
        self.findings.append(failure(path, line, doing, error))


def failure(path: str, line: int, doing: str, error: Exception) -> Finding:
    """What to print about one error of ours, with the place in our source that a report to us should name."""
    message = (
        f"{os.path.basename(path)}:{line}: internal error while {doing}: {type(error).__name__}: {error}"
        f"{_where(error)}. The rest of the report stands. Fix: report it with this line of your source."
    )
    return Finding(RULE, "error", "high", message, (), Place(path, line), None)


def _where(error: Exception) -> str:
    """The innermost line of the checker that the error went through."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(_OWN)]
    return f" (at {os.path.basename(own[-1].filename)}:{own[-1].lineno})" if own else ""
