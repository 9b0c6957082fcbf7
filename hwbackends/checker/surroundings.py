"""What a tree imports from the package that it is a folder of: files read for their definitions where
`--with-package` asks for it, and not checked."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .model import FileFacts

STEPS = 3  # a name may come through the __init__ of a package, and its class have a base behind that


class Package(NamedTuple):
    """The package around a tree: its name, its folder, and the trees, which are read anyway."""

    name: str
    folder: str
    trees: tuple[str, ...]
    absolute: bool  # how the trees were named


def packages(roots: list[str]) -> list[Package]:
    """The top packages that hold the roots which are folders inside of one."""
    given = [root for root in roots if os.path.isdir(root)]
    folders = tuple(os.path.abspath(root) for root in given)
    absolute = any(os.path.isabs(root) for root in given)
    found: dict[str, Package] = {}
    for root in folders:
        top, folder = None, os.path.dirname(root)
        while os.path.isfile(os.path.join(folder, "__init__.py")):
            top, folder = folder, os.path.dirname(folder)
        if top is not None:
            found[top] = Package(os.path.basename(top), top, folders, absolute)
    return list(found.values())


def imported(around: list[Package], files: list[tuple[str, FileFacts]]) -> list[str]:
    """Paths that would hold what these files import from the rest of the packages, whether they exist or not."""
    return [path for package in around for path in _imported(package, files)]


def _imported(package: Package, files: list[tuple[str, FileFacts]]) -> list[str]:
    names: set[tuple[str, ...]] = set()
    for path, facts in files:
        for level, module, attribute in _imports(facts):
            parts = _resolved(package, path, level, module)
            if parts is not None:
                names.add(parts)
                if attribute:
                    names.add((*parts, attribute))
    found = []
    for parts in sorted(names):
        base = os.path.join(package.folder, *parts)
        if not any(base == tree or base.startswith(tree + os.sep) for tree in package.trees):
            found += [os.path.join(base, "__init__.py"), *([f"{base}.py"] if parts else [])]
    return found


def existing(around: list[Package], paths: Iterable[str]) -> list[str]:
    """Those that are files of the packages themselves, as the trees were named; links out of them are not followed."""
    real = tuple(os.path.realpath(package.folder) + os.sep for package in around)
    found = (path for path in paths if os.path.isfile(path) and os.path.realpath(path).startswith(real))
    return [path if any(p.absolute for p in around) else os.path.relpath(path) for path in found]


def _imports(facts: FileFacts) -> Iterator[tuple[int, str, str | None]]:
    for scope in facts.scopes:
        for bindings in scope.bindings.values():
            for _, _, value in bindings:
                if value is not None and value[0] == "m":
                    yield value[1], value[2], value[3]


def _resolved(package: Package, path: str, level: int, module: str) -> tuple[str, ...] | None:
    """The module below the package, as parts; None for what lies outside."""
    named = tuple(part for part in module.split(".") if part)
    if not level:
        return named[1:] if named[:1] == (package.name,) else None
    folder = os.path.abspath(path)
    for _ in range(level):
        folder = os.path.dirname(folder)
    if folder != package.folder and not folder.startswith(package.folder + os.sep):
        return None
    inside = os.path.relpath(folder, package.folder)
    return (*(() if inside == "." else tuple(inside.split(os.sep))), *named)
