"""Digests of what a certificate stands on: the report itself, the kit with the contracts that it judges by, the
plugin's files. Nothing here imports torch or a plugin."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hwbackends.contract.reader import contracts_folder

KIT = Path(__file__).parent


def digest(data: Mapping[str, Any]) -> str:
    """SHA-256 of a report's content, its own digest left out."""
    content = {key: value for key, value in data.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def sources(folder: Path, pattern: str = "*.py") -> str:
    """SHA-256 over the names and contents of a folder's files."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob(pattern)):
        total.update(path.relative_to(folder).as_posix().encode() + b"\0")
        total.update(path.read_bytes() + b"\0")
    return total.hexdigest()


@functools.cache
def kit_digest() -> str:
    """SHA-256 over the kit's sources, those of the processes that it calls, and the contracts."""
    parts = [sources(KIT), sources(KIT.parent / "remote"), sources(contracts_folder(), "*.yaml")]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def plugin_digests(files: Iterable[str]) -> dict[str, str]:
    """SHA-256 of each of a plugin's files, by its path from the folder that the import system found it in."""
    found = {}
    for name in files:
        path = Path(name)
        if path.is_file():
            found[importable(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return dict(sorted(found.items()))


def importable(path: Path) -> str:
    """`package/module.py`, wherever the package is installed; a file outside of packages by its name."""
    top = path.parent
    while (top / "__init__.py").is_file():
        top = top.parent
    return path.relative_to(top).as_posix()


def installed_file(name: str) -> Path | None:
    """Where a file of `plugin_digests` lies here; None if its package is not installed. Imports nothing."""
    top, _, rest = name.partition("/")
    try:
        spec = importlib.util.find_spec(top.removesuffix(".py"))
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    path = Path(folders[0]) / rest if folders else Path(str(spec.origin))
    return path if path.is_file() else None
