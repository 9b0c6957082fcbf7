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


Site = tuple[Path, ast.stmt]
"""A statement that defines a name, and its file."""


def static_origin(module: str, name: str, depth: int = 5) -> str | None:
    """`file:line` where `module` defines `name`, without importing anything.

    Followed: `from x import name`, `name = other`, `name = hookimpl(other)`, `name = hookimpl(module.other)`, and
    `name = factory(...)` to the function that the factory makes.
    """
    site = _site(module, name, depth)
    if site is None or _unwritten(site[1]):
        return None
    return f"{site[0]}:{site[1].lineno}"


def _site(module: str, name: str, depth: int) -> Site | None:
    path = module_file(module)
    if path is None or depth == 0:
        return None
    for node in _statements(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return path, node
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return _assigned(module, node.value, depth - 1) or (path, node)
        found = _imported(module, path, node, name)
        if found is not None:
            return _site(*found, depth - 1)
    return None


def _unwritten(node: ast.stmt) -> bool:
    """Whether a function is a stub: marked by `hookspecs.unwritten`."""
    marks = node.decorator_list if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else []
    return any(isinstance(mark, ast.Name) and mark.id == "unwritten" for mark in marks)


def _assigned(module: str, value: ast.expr, depth: int) -> Site | None:
    """What an assignment's right-hand side names, if it names something that can be followed."""
    if isinstance(value, ast.Call):
        made = _made(_assigned(module, value.func, depth))
        if made is not None or len(value.args) != 1:
            return made
        return _assigned(module, value.args[0], depth)
    if isinstance(value, ast.Name):
        return _site(module, value.id, depth)
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
        path = module_file(module)
        for node in _statements(path) if path else ():
            found = _imported(module, path, node, value.value.id)
            if found is not None:
                return _site(".".join(found), value.attr, depth)
    return None


def _made(factory: Site | None) -> Site | None:
    """The function inside of a factory that it returns; none of a decorator, whose function takes anything."""
    if factory is None or not isinstance(factory[1], ast.FunctionDef):
        return None
    returned = {n.value.id for n in factory[1].body if isinstance(n, ast.Return) and isinstance(n.value, ast.Name)}
    for node in factory[1].body:
        if isinstance(node, ast.FunctionDef) and node.name in returned and node.args.vararg is None:
            return factory[0], node
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
