"""Which files belong to a tree, reading them, and parsing them. Unreadable ones become problems, never silence."""

from __future__ import annotations

import ast
import os
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path

from .model import Problem

MAX_BYTES = 16 * 1024 * 1024
SKIPPED = frozenset({".git", ".hg", ".venv", "venv", "__pycache__", "node_modules", ".tox", ".mypy_cache", ".nox"})


def discover(roots: list[str], exclude: tuple[str, ...] = ()) -> tuple[list[str], list[Problem]]:
    """All Python files below the roots, sorted, each once; links are not followed out of their tree.

    Returns:
        The paths as given (a relative root yields relative paths), and what could not be listed.

    Raises:
        ValueError: a root has nothing to check.
    """
    found: dict[str, None] = {}
    problems: list[Problem] = []
    for root in roots:
        before = len(problems)
        below = [root] if os.path.isfile(root) else list(_walk(root, os.path.realpath(root), problems, exclude))
        if not below and len(problems) == before:
            left = f" that --exclude leaves ({', '.join(exclude)})" if exclude else ""
            raise ValueError(f"{root}: no Python file{left}; name a folder that has some")
        found.update(dict.fromkeys(below))
    return list(found), problems


def _walk(root: str, real_root: str, problems: list[Problem], exclude: tuple[str, ...]) -> Iterator[str]:
    """Depth first, without recursion and without following links to folders."""
    stack = [root]
    while stack:
        directory = stack.pop()
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError as error:
            problems.append(Problem(directory, 1, f"directory cannot be listed: {error.strerror}"))
            continue
        for entry in entries:
            if exclude and any(Path(entry.path).match(pattern) for pattern in exclude):
                continue
            if entry.is_symlink():
                linked = _link(entry, real_root, problems)
                if linked is not None:
                    yield linked
            elif entry.is_dir(follow_symlinks=False):
                if entry.name not in SKIPPED:
                    stack.append(entry.path)
            elif entry.name.endswith(".py"):
                yield entry.path


def _link(entry: os.DirEntry[str], real_root: str, problems: list[Problem]) -> str | None:
    """A link's path where it must be read here; what it names inside the tree is listed at its own place."""
    is_python = entry.name.endswith(".py")
    target = os.path.realpath(entry.path)
    try:
        is_folder = stat.S_ISDIR(os.stat(entry.path).st_mode)
    except OSError as error:
        if is_python or not os.path.splitext(entry.name)[1]:
            problems.append(Problem(entry.path, 1, f"symbolic link cannot be followed: {error.strerror}"))
        return None
    if target != real_root and not target.startswith(real_root + os.sep):
        if is_folder or is_python:
            problems.append(Problem(entry.path, 1, "symbolic link leads out of the tree; not followed"))
        return None
    if is_folder:
        here = os.path.realpath(os.path.dirname(entry.path))
        if here == target or here.startswith(target + os.sep):
            problems.append(Problem(entry.path, 1, "symbolic link loop; not followed"))
        return None
    return entry.path if is_python and not target.endswith(".py") else None


def read(path: str) -> bytes | Problem:
    """The bytes of one regular file, or why there are none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        return Problem(path, 1, f"cannot be opened: {error.strerror}")
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return Problem(path, 1, "is not a regular file")
        if status.st_size > MAX_BYTES:
            return Problem(path, 1, f"is {status.st_size} bytes; the limit is {MAX_BYTES}")
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            return stream.read(MAX_BYTES + 1)
    except OSError as error:
        return Problem(path, 1, f"cannot be read: {error.strerror}")
    finally:
        os.close(descriptor)


def parse(path: str, source: bytes) -> ast.Module | Problem:
    """The tree of one file, or why there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source, filename=path)
    except SyntaxError as error:
        return Problem(path, error.lineno or 1, f"syntax error: {error.msg}")
    except ValueError as error:  # null bytes on Python 3.11
        return Problem(path, 1, f"cannot be parsed: {error}")
    except (RecursionError, MemoryError):
        return Problem(path, 1, "is nested too deeply for the parser")
