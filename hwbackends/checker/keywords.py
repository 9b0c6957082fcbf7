"""The keys of a dict that a function writes out and hands on: ``kw = {"a": 1}``, ``kw["b"] = 2``, ``f(**kw)``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

_Block = list[ast.stmt]


class Passed(NamedTuple):
    """What ``**`` passes: these keys for sure; and perhaps others, where not ``complete``."""

    keys: tuple[str, ...]
    complete: bool
    perhaps: tuple[tuple[str, int], ...] = ()  # keys that are added under a condition, and the lines that add them


def written(node: ast.expr) -> tuple[str, ...] | None:
    """The keys of ``{"a": 1}`` and ``dict(a=1)``; None where some cannot be seen."""
    if isinstance(node, ast.Dict):
        keys = [_text(key) for key in node.keys]
        return None if None in keys else tuple(key for key in keys if key is not None)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        names = [keyword.arg for keyword in node.keywords]
        return None if None in names else tuple(name for name in names if name is not None)
    return None


def handed_on(body: _Block, nodes: list[ast.AST], name: str, call: ast.Call) -> Passed | None:
    """What ``**name`` passes in a call of a function's body; ``nodes`` are all nodes of that body.

    None where the name is not bound once to a dict written out before the call, or where anything else than its
    constant keys is touched: whoever gets the dict can change it.
    """
    found = _bound(body, nodes, name)
    if found is None or not _only_keys(nodes, name):
        return None
    block, start = found
    additions = [node for node in nodes if isinstance(node, ast.stmt) and _added(node, name)]
    keys = list(written(_value(block[start])) or ())
    complete = True
    perhaps: list[tuple[str, int]] = []
    for statement in block[start + 1 :]:
        inside = [addition for addition in additions if _holds(statement, addition)]
        added = _added(statement, name)
        if not added:
            before = (addition for addition in inside if addition.lineno < call.lineno)
            perhaps += ((key, addition.lineno) for addition in before for key in _added(addition, name))
        if _holds(statement, call):
            return Passed(tuple(dict.fromkeys(keys)), complete and not inside, tuple(perhaps))
        keys += added
        complete = complete and (bool(added) or not inside)
    return None


def _holds(outer: ast.stmt, inner: ast.stmt | ast.expr) -> bool:
    """Whether one node stands inside another, or is it."""
    start, end = (outer.lineno, outer.col_offset), (outer.end_lineno or 0, outer.end_col_offset or 0)
    return start <= (inner.lineno, inner.col_offset) and (inner.end_lineno or 0, inner.end_col_offset or 0) <= end


def _bound(body: _Block, nodes: list[ast.AST], name: str) -> tuple[_Block, int] | None:
    """The block and the position in it of the only statement that binds a name, if that writes out a dict."""
    stores = [n for n in nodes if isinstance(n, ast.Name) and n.id == name and _is_store(n)]
    if len(stores) != 1:
        return None
    for block in _blocks(body):
        for position, statement in enumerate(block):
            target = _target(statement)
            if target is stores[0]:
                return (block, position) if written(_value(statement)) is not None else None
    return None


def _blocks(body: _Block) -> Iterator[_Block]:
    """A body and every block inside it, without those of nested functions and classes."""
    yield body
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        for field in ("body", "orelse", "finalbody"):
            inner = getattr(statement, field, None)
            if inner:
                yield from _blocks(inner)
        for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            yield from _blocks(part.body)


def _target(statement: ast.stmt) -> ast.expr | None:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        return statement.targets[0]
    return statement.target if isinstance(statement, ast.AnnAssign) and statement.value is not None else None


def _value(statement: ast.stmt) -> ast.expr:
    assert isinstance(statement, (ast.Assign, ast.AnnAssign))
    assert statement.value is not None
    return statement.value


def _only_keys(nodes: list[ast.AST], name: str) -> bool:
    """Whether each use of a name reads, adds or hands on keys that are written out."""
    uses = sum(isinstance(n, ast.Name) and n.id == name and not _is_store(n) for n in nodes)
    return uses == sum(_is_plain_use(node, name) for node in nodes)


def _is_plain_use(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.keyword):
        return node.arg is None and _is(node.value, name)
    if isinstance(node, ast.Subscript):
        return _is(node.value, name) and _text(node.slice) is not None and not isinstance(node.ctx, ast.Del)
    return isinstance(node, ast.Expr) and bool(_updated(node, name))


def _added(statement: ast.stmt, name: str) -> tuple[str, ...]:
    """The keys that a statement adds by itself, not somewhere inside it."""
    if isinstance(statement, ast.Assign):
        found = [_text(t.slice) for t in statement.targets if isinstance(t, ast.Subscript) and _is(t.value, name)]
        return tuple(key for key in found if key is not None)
    return _updated(statement, name)


def _updated(statement: ast.stmt, name: str) -> tuple[str, ...]:
    """The keys of ``name.update(a=1)`` and ``name.update({"a": 1})``."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "update"):
        return ()
    if not _is(call.func.value, name) or len(call.args) > 1:
        return ()
    given = [written(arg) for arg in call.args]
    names = [keyword.arg for keyword in call.keywords]
    if None in given or None in names:
        return ()
    return tuple(key for keys in (*given, names) for key in keys or () if key is not None)


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_store(node: ast.Name) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
