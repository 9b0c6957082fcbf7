"""Origins: where a plugin module defines each hook, read from the source alone, so that it can be told of a plugin that
cannot be imported here."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from importlib.util import resolve_name
from pathlib import Path

from hwbackends.registry.manifest import module_file


def hook_origins(module: str, hooks: Iterable[str]) -> dict[str, str | None]:
    """`file:line` of each hook in a plugin module; None where it has no such hook."""
    return {hook: static_origin(module, hook) for hook in hooks}


def static_origin(module: str, name: str, depth: int = 5) -> str | None:
    """`file:line` where `module` defines `name`, without importing anything.

    Followed: `from x import name`, `name = other`, `name = hookimpl(other)` and `name = hookimpl(module.other)`.
    """
    path = module_file(module)
    if path is None or depth == 0:
        return None
    for node in _statements(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return None if _unwritten(node) else f"{path}:{node.lineno}"
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return _assigned_origin(module, node.value, depth - 1) or f"{path}:{node.lineno}"
        found = _imported(module, path, node, name)
        if found is not None:
            return static_origin(*found, depth - 1)
    return None


def _unwritten(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is a stub: marked by `hookspecs.unwritten`."""
    return any(isinstance(mark, ast.Name) and mark.id == "unwritten" for mark in node.decorator_list)


def _assigned_origin(module: str, value: ast.expr, depth: int) -> str | None:
    """Origin of what an assignment's right-hand side names, if it names something that can be followed."""
    if isinstance(value, ast.Call) and len(value.args) == 1:
        value = value.args[0]
    if isinstance(value, ast.Name):
        return static_origin(module, value.id, depth)
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
        path = module_file(module)
        for node in _statements(path) if path else ():
            found = _imported(module, path, node, value.value.id)
            if found is not None:
                return static_origin(".".join(found), value.attr, depth)
    return None


def _imported(module: str, path: Path | None, node: ast.AST, name: str) -> tuple[str, str] | None:
    """The module and the name in it that a `from` statement binds to `name`."""
    if path is None or not isinstance(node, ast.ImportFrom):
        return None
    for alias in node.names:
        if (alias.asname or alias.name) == name:
            return _source(module, path, node), alias.name
    return None


def _statements(path: Path) -> Iterator[ast.AST]:
    """Every statement of a file that is not inside a function or class; none if it is not Python."""
    try:
        pending: list[ast.AST] = [*ast.parse(path.read_bytes()).body]
    except (OSError, SyntaxError, ValueError):
        return
    while pending:
        node = pending.pop(0)
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def _source(module: str, path: Path, node: ast.ImportFrom) -> str:
    """Absolute name of the module that a `from` statement reads."""
    if not node.level:
        return node.module or ""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return resolve_name("." * node.level + (node.module or ""), package)
