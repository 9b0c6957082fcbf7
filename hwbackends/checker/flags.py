"""Conditions compared by what they are called: ``flag``, ``self.flag`` and ``self.config.flag`` are one switch."""

from __future__ import annotations

from collections.abc import Iterable

from .model import Expr

Conditions = Iterable[tuple[Expr | None, bool]]
# The parts of a dotted name without ``self``; for a comparison, with its operator and what it is compared with.
Key = tuple[str, ...]

_OPPOSITE = {"IsNot": "Is", "NotEq": "Eq", "NotIn": "In"}
_QUOTES = frozenset("'\"")
# ``kind.lower() == "a"`` asks for ``kind``.
_SAME_TEXT = frozenset({"lower", "upper", "strip"})
_OPERATORS = frozenset({"Is", "Eq", "In", "Lt", "LtE", "Gt", "GtE"})


def told(conditions: Conditions) -> dict[Expr, bool]:
    """Each single test that these conditions decide: ``not (a or b)`` says that neither holds."""
    found: dict[Expr, bool] = {}
    stack = [(test, holds) for test, holds in conditions if test is not None]
    while stack:
        test, holds = stack.pop()
        if test[0] == "!" and test[1] is not None:
            stack.append((test[1], not holds))
        elif (test[0] == "&" and holds) or (test[0] == "V" and not holds):
            stack += [(part, holds) for part in test[1] if part is not None]
        else:
            found.setdefault(test, holds)
    return found


def contradict(left: Conditions, right: Conditions) -> bool:
    """Whether two places can never be reached with the same switches."""
    ours = _switches(left)
    if not ours:
        return False
    theirs = _switches(right)
    return any(
        (_same(key, other) and holds != held) or (holds and held and _two_values(key, other))
        for key, holds in ours.items()
        for other, held in theirs.items()
    )


def switches(conditions: Conditions) -> set[Key]:
    """The names of all switches that conditions ask for, whatever they decide about each."""
    found: set[Key] = set()
    stack = [test for test, _ in conditions if test is not None]
    while stack:
        test = stack.pop()
        if test[0] == "!" and test[1] is not None:
            stack.append(test[1])
        elif test[0] in "&V":
            stack += [part for part in test[1] if part is not None]
        elif (key := _key(test)) is not None:
            found.add(_positive(key, True)[0])
    return found


def subjects(conditions: Conditions) -> set[Key]:
    """What conditions ask about, whatever they compare it with."""
    return {key[:-2] if len(key) > 2 and key[-2] in _OPERATORS else key for key in switches(conditions)}


def _switches(conditions: Conditions) -> dict[Key, bool]:
    found: dict[Key, bool] = {}
    for test, holds in told(conditions).items():
        key = _key(test)
        if key is not None:
            found.setdefault(*_positive(key, holds))
    return found


def _positive(key: Key, holds: bool) -> tuple[Key, bool]:
    """``x is not None`` and ``x`` are one switch; so are ``x != "a"`` and ``x == "a"``, turned around."""
    if len(key) > 2 and key[-2] in _OPPOSITE:
        key, holds = (*key[:-2], _OPPOSITE[key[-2]], key[-1]), not holds
    if key[-2:] == ("Is", "None"):
        return key[:-2], not holds
    return key, holds


def _key(test: Expr) -> Key | None:
    if test[0] == "=":
        left, right = dotted(test[2]), _literal(test[3])
        return (*left, test[1], right) if left and right is not None else None
    if test[0] == "c" and test[1] == ("n", "getattr") and len(test[2]) > 1 and test[2][1] and test[2][1][0] == "s":
        return dotted(("a", test[2][0], test[2][1][1])) or None
    if test[0] == "c" and not test[2]:
        return dotted(test[1]) or None
    return dotted(test) or None


def dotted(expr: Expr | None) -> Key:
    """``("config", "flag")`` of ``self.config._flag``; empty for what is no dotted name."""
    parts: list[str] = []
    while expr is not None and expr[0] == "c" and not expr[2] and expr[1][0] == "a" and expr[1][2] in _SAME_TEXT:
        expr = expr[1][1]
    while expr is not None and expr[0] == "a":
        parts.append(str(expr[2]).lstrip("_"))
        expr = expr[1]
    if expr is None or expr[0] != "n":
        return ()
    if expr[1] not in ("self", "cls") or not parts:
        parts.append(str(expr[1]).lstrip("_"))
    return tuple(reversed(parts))


def _literal(expr: Expr) -> str | None:
    if expr[0] in "sk":
        return repr(expr[1])
    return ".".join(dotted(expr)) or None


def _two_values(left: Key, right: Key) -> bool:
    """``kind == "a"`` and ``kind == "b"``."""
    both = len(left) > 2 and len(right) > 2 and left[-2] == right[-2] == "Eq" and left[-1] != right[-1]
    return both and left[-1][:1] in _QUOTES and right[-1][:1] in _QUOTES and _same(left[:-2], right[:-2])


def _same(left: Key, right: Key) -> bool:
    """One switch by its full name, or by its last part where one of the two places has it as a plain name."""
    short, long = sorted((left, right), key=len)
    return bool(short) and long[-len(short) :] == short
