"""All rules: one module each, from which findings, ``--explain`` and the rules' page are made."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from ..bind import Mismatch
from ..findings import Place
from .record import Rule, Way

RULES: dict[str, Rule] = {
    rule.id: rule
    for rule in (
        import_module(f"{__name__}.{module.name}").RULE
        for module in sorted(iter_modules(__path__), key=lambda module: module.name)
        if module.name.startswith("hwb")
    )
}

# A mismatch belongs to the first of these that claims it; what is lost silently comes before what is refused.
_ORDER = ("HWB108", "HWB101", "HWB105", "HWB102", "HWB106", "HWB103")
# The order in which the parts of a message are said.
_SAYING = ("HWB101", "HWB108", "HWB102", "HWB103")

DECLARATIONS = (
    "A body that only documents, passes (`...`, `pass`) or raises `NotImplementedError` is a declaration: it may\n"
    "accept a call, but it is no finding. In the examples `...` stands for a body that does something."
)


def rule_of(mismatch: Mismatch, others_accept: bool) -> str:
    """The definition is at fault where another one accepts the call; else the call is."""
    return next((name for name in _ORDER if RULES[name].judges(mismatch, others_accept)), "HWB103")


def describe(
    rule: str, definition: Place, call: Place, mismatch: Mismatch, missing: tuple[str, ...], called: str
) -> str:
    """One sentence with both places, and one with the smallest change and its alternative."""
    parts = [part for part in (RULES[name].said(mismatch) for name in _SAYING) if part]
    where = f"{definition.name} ({definition.file}:{definition.line})"
    fix = ", or ".join(way.text for way in RULES[rule].ways(missing, definition.name))
    return f"{where} {' and '.join(parts)}; called as {called} at {call.file}:{call.line}. Fix: {fix}."


def explain(rule: Rule) -> str:
    """A rule as one section of Markdown."""
    state = "on by default" if rule.default else "off unless selected"
    text, _, examples = rule.page.strip().partition("\nBad:\n")
    return (
        f"## {rule.id}: {rule.title}\n\n{text.strip()}\n\nSeverity: {rule.severity}; {state}; {rule.modes}.\n\n"
        f"Bad:\n{examples.rstrip()}\n"
    )


def expand(names: tuple[str, ...]) -> frozenset[str]:
    """Rule ids of a selection; ``ALL`` and prefixes such as ``HWB1`` are allowed.

    Raises:
        ValueError: a name matches no rule.
    """
    found: set[str] = set()
    for name in names:
        matching = {rule for rule in RULES if rule.startswith(name)} if name != "ALL" else set(RULES)
        if not name or not matching:
            raise ValueError(f"no rule is called {name!r}; rules are {', '.join(RULES)}")
        found |= matching
    return frozenset(found)


__all__ = ["DECLARATIONS", "RULES", "Rule", "Way", "describe", "expand", "explain", "rule_of"]
