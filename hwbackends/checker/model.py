"""The facts that one source file yields: plain, picklable records and nothing that computes.

An expression is kept as a small nested tuple whose first item says what it is:

==========================  ====================================================
``("n", name)``             a name
``("a", expr, attribute)``  an attribute
``("c", func, args, n, k)`` a call: callee, its first arguments, positional count, keyword names
``("s", text)``             a string
``("k", value)``            another constant
``("i", expr, index)``      a subscript
``("|", left, right)``      one of two values (``or``, union types); a conditional expression adds its condition
``("t", items)``            a tuple, list or set display
``("d", values)``           the values of a dict display
``("e", expr)``             an element of an iterable
``("x", expr, i)``          item ``i`` of an unpacked value
``("w", expr, is_async)``   what entering a context manager gives
``("F", scope)``            a function or lambda of this file
``("K", scope)``            a class of this file
``("m", level, mod, attr)`` an import
``("p", annotation)``       a parameter
``("T", annotation)``       an annotated variable
``("!", condition)``        not
``("&", conditions)``       and
``("V", conditions)``       or
``("=", op, left, right)``  a comparison
==========================  ====================================================
"""

from __future__ import annotations

import marshal
from typing import Any, NamedTuple

Expr = tuple[Any, ...]
DISPLAY = 40  # items that are kept of a tuple, list or set display


class Signature(NamedTuple):
    """Parameters of one definition, ``self`` included; ``defaults`` maps a parameter to its rendered default."""

    posonly: tuple[str, ...]
    args: tuple[str, ...]
    kwonly: tuple[str, ...]
    defaults: dict[str, str]
    vararg: str | None
    kwarg: str | None

    @property
    def positional(self) -> tuple[str, ...]:
        return self.posonly + self.args


# One way in which a name gets a value: line, guard, value (None is unknown).
Binding = tuple[int, int, "Expr | None"]
# A condition that holds (or not) at a place, and the guard around it (-1: none).
Guard = tuple["Expr | None", bool, int]


# ``X.attr = value``: scope, guard, X, attr, value, line.
Assignment = tuple[int, int, Expr, str, "Expr | None", int]


class Call(NamedTuple):
    """One call: ``star`` and ``kwstar`` hold the name behind ``*``/``**`` ("" for another expression)."""

    line: int
    scope: int
    guard: int
    func: Expr
    npos: int
    keywords: tuple[str, ...]
    star: str | None
    kwstar: str | None
    argnames: tuple[str | None, ...]
    perhaps: tuple[str, ...] = ()  # those keywords that are passed only under the conditions of ``guard``


class Scope(NamedTuple):
    """A module, class or function. Lists and dicts are filled while its file is read and then left alone."""

    kind: str  # "m", "c" or "f"
    name: str
    qualname: str
    parent: int
    line: int
    guard: int
    bindings: dict[str, list[Binding]]
    decorators: tuple[Expr | None, ...]
    # classes
    bases: tuple[Expr | None, ...] = ()
    class_keywords: tuple[str, ...] = ()
    # self.x = ...: (function scope, guard, value, line)
    attributes: dict[str, list[tuple[int, int, Expr | None, int]]] = {}  # noqa: RUF012 (replaced by each class)
    fields: tuple[tuple[str, bool, bool, str], ...] = ()  # annotated: (name, has default, init, annotation head)
    # functions
    signature: Signature | None = None
    returns: list[tuple[int, Expr | None]] = []  # noqa: RUF012 (replaced by each function)
    return_annotation: Expr | None = None
    stub: bool = False
    unread: tuple[str, ...] = ()
    kwarg_edited: bool = False
    kwarg_popped: tuple[str, ...] = ()
    is_async: bool = False
    raises: bool = False  # the stub says that it is not implemented


class FileFacts(NamedTuple):
    """All that is known about one file."""

    scopes: list[Scope]
    calls: list[tuple[Any, ...]]  # the fields of Call
    guards: list[Guard]
    patches: list[Assignment]  # X.attr = value
    ignores: dict[int, tuple[str, ...]]  # line -> rule ids named by an inline comment
    generated_from: str = ""  # the source file that the head of this one names as its template


class Problem(NamedTuple):
    """A file that could not be read, and why; ``internal`` where the fault is ours."""

    path: str
    line: int
    reason: str
    internal: bool = False


def dump(facts: FileFacts) -> bytes:
    """Facts as bytes; an order of magnitude cheaper than pickle for this many small tuples."""
    scopes = [
        (*tuple(scope)[:12], tuple(scope.signature) if scope.signature else None, *tuple(scope)[13:])
        for scope in facts.scopes
    ]
    return marshal.dumps((scopes, facts.calls, facts.guards, facts.patches, facts.ignores, facts.generated_from))


def load(data: bytes) -> FileFacts:
    """The inverse of :func:`dump`."""
    raw_scopes, calls, guards, patches, ignores, template = marshal.loads(data)
    scopes = []
    for raw in raw_scopes:
        scope = Scope._make(raw)
        scopes.append(scope._replace(signature=Signature._make(raw[12])) if raw[12] else scope)
    return FileFacts(scopes, calls, guards, patches, ignores, template)
