"""What a rule is: its record, when it applies, what it says, and the ways out of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..bind import Mismatch


class Way(NamedTuple):
    """One change that ends a finding: where (``"definition"`` or ``"call"``), and what to do there."""

    where: str
    text: str


def _never(mismatch: Mismatch, others_accept: bool) -> bool:
    return False


def _nothing(mismatch: Mismatch) -> str:
    return ""


def _no_way(names: tuple[str, ...], definition: str) -> tuple[Way, ...]:
    return (Way("definition", "make both agree"),)


class Rule(NamedTuple):
    """One rule. ``page`` is Markdown: what it finds and why that matters, then a bad and a good example.

    ``judges`` says whether a mismatch is this rule's, given whether another definition accepts the call; ``said`` is
    its part of the message; ``ways`` names the smallest change first.
    """

    id: str
    title: str
    severity: str
    default: bool
    modes: str
    page: str
    judges: Callable[[Mismatch, bool], bool] = _never
    said: Callable[[Mismatch], str] = _nothing
    ways: Callable[[tuple[str, ...], str], tuple[Way, ...]] = _no_way

    @property
    def text(self) -> str:
        """What the rule finds, in one line."""
        return " ".join(self.page.partition("\nBad:\n")[0].split())

    @property
    def bad(self) -> str:
        return _block(self.page, "Bad:")

    @property
    def good(self) -> str:
        return _block(self.page, "Good:")


def _block(page: str, label: str) -> str:
    return page.partition(f"\n{label}\n")[2].partition("```python\n")[2].partition("\n```")[0]


def listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"'{name}'" for name in names)
