"""Rules that every backend holds its arguments to: how one is declared, found by hook and run. The rules themselves lie
in `checks` (what Python attributes show) and `device_checks` (what needs device memory)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hwbackends.errors import ArgumentError

Call = Any
"""A call under check: `hook` and the arguments of the hook by name, as attributes."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that a call must keep.

    Attributes:
        name: the name of the function that checks it.
        text: what is refused, in one sentence.
        hooks: hooks that it is checked in.
        clause: id of the contract's clause that it stands for.
        reads: whether it reads device memory, and therefore runs in checked mode alone.
        check: raises an `ArgumentError` where a call breaks the rule.
    """

    name: str
    text: str
    hooks: tuple[str, ...]
    clause: str
    reads: bool
    check: Callable[[Call], None]


RULES: list[Rule] = []
"""Every rule, in the order in which a call is held to them."""


def rule(
    hooks: Iterable[str], clause: str, reads: bool = False
) -> Callable[[Callable[[Call], None]], Callable[[Call], None]]:
    """Declare a function, whose docstring is the sentence, as a rule of these hooks."""

    def declare(check: Callable[[Call], None]) -> Callable[[Call], None]:
        text = " ".join((check.__doc__ or "").split())
        RULES.append(Rule(check.__name__.strip("_"), text, tuple(hooks), clause, reads, check))
        return check

    return declare


def rules_of(hook: str, reads: bool) -> tuple[Rule, ...]:
    """The rules of a hook that read device memory, or those that do not."""
    return tuple(found for found in RULES if hook in found.hooks and found.reads is reads)


def hold(rules: Iterable[Rule], call: Call) -> None:
    """Hold a call to rules, in order.

    Raises:
        ArgumentError: the first broken rule's; its attribute `rule` has the rule's name.
    """
    for one in rules:
        try:
            one.check(call)
        except ArgumentError as error:
            error.rule = one.name
            raise
