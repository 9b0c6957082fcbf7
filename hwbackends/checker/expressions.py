"""Questions about one written expression that need nothing but itself."""

from __future__ import annotations

from collections.abc import Iterator

from .infer import last_name
from .model import Expr

_ASKS_NOTHING = frozenset({"isinstance", "type", "issubclass", "len", "bool", "id", "callable", "hasattr"})


def asks_signature(expr: Expr | None) -> bool:
    """``inspect.signature(f).parameters``, also through ``set(...)``, ``.keys()`` or ``getfullargspec``."""
    if expr is None or expr[0] not in "acin":
        return False
    if expr[0] == "c":
        name = last_name(expr[1])
        if name in ("signature", "getfullargspec", "_signature"):
            return True
        inner = [expr[1], *expr[2]]
        return any(asks_signature(item) for item in inner)
    return expr[0] in "ai" and asks_signature(expr[1])


def reads_attribute(test: Expr, receiver: Expr) -> bool:
    """``receiver.kind == ...`` and ``receiver.can_x()``, but not ``receiver is not None`` or ``isinstance``."""
    if test[0] == "a" and test[1] == receiver:
        return True
    if test[0] == "c" and test[3]:
        if (test[1][0] != "n" or test[1][1] not in _ASKS_NOTHING) and receiver in test[2]:
            return True  # a question about the receiver: shards(allocator) > 1
        return any(reads_attribute(arg, receiver) for arg in test[2] if arg is not None and arg[0] != "n")
    return any(reads_attribute(part, receiver) for part in _parts(test))


def has_string(test: Expr) -> bool:
    return test[0] == "s" or any(has_string(part) for part in _parts(test))


def mentions(test: Expr, names: tuple[str, ...]) -> bool:
    """Whether a condition holds one of these keywords as a string: some check of what the callee accepts."""
    if test[0] == "s":
        return test[1] in names
    return any(mentions(part, names) for part in _parts(test))


def _parts(test: Expr) -> Iterator[Expr]:
    for item in test[1:]:
        if isinstance(item, tuple) and item and isinstance(item[0], str):
            yield item
        elif isinstance(item, tuple):
            yield from (part for part in item if isinstance(part, tuple) and part)


def asks_code(test: Expr | None, func: Expr) -> bool:
    """Whether a condition looks at what a callee takes: ``self.read.__code__.co_argcount > 2``."""
    if not isinstance(test, tuple) or not test:
        return False
    if test[0] == "a" and test[2] in ("__code__", "__defaults__", "__kwdefaults__", "__signature__"):
        return bool(test[1] == func or (test[1][0] == "a" and test[1][1] == func))
    return any(asks_code(part, func) for part in test)


def own_names(expr: Expr | None) -> Iterator[str]:
    """The attributes of ``self`` in an expression."""
    if expr is None:
        return
    if expr[0] == "a" and expr[1] == ("n", "self"):
        yield str(expr[2])
    for part in _parts(expr):
        yield from own_names(part)


def holds(expr: Expr | None, part: Expr) -> bool:
    """Whether one expression is part of another."""
    return expr is not None and (expr == part or any(holds(inner, part) for inner in _parts(expr)))
