"""``[tool.hwbackends.check]`` of the nearest ``pyproject.toml``."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

_KINDS: dict[str, type] = {
    "trees": list, "drift": bool, "contract": str, "select": list, "ignore": list, "exclude": list, "baseline": str,
    "confidence": str, "format": str, "cache-dir": str, "with-package": bool,
}  # fmt: skip
_PATHS = ("trees", "contract", "baseline", "cache-dir")


class ConfigError(ValueError):
    """A configuration that cannot be used."""


def read_config(start: Path, explicit: str | None = None) -> dict[str, Any]:
    """Options of the table; paths in it are relative to its file.

    Raises:
        ConfigError: the file is no TOML, or an option is unknown or of another kind.
    """
    path = Path(explicit) if explicit is not None else _nearest(start)
    if path is None:
        return {}
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    table = raw.get("tool", {}).get("hwbackends", {}).get("check", {})
    for name, value in table.items():
        if name not in _KINDS:
            raise ConfigError(
                f"{path}: unknown option {name!r} in [tool.hwbackends.check]; options are {', '.join(_KINDS)}"
            )
        if not isinstance(value, _KINDS[name]):
            raise ConfigError(f"{path}: {name} wants a {_KINDS[name].__name__}, got {value!r}")
    return {name: _placed(path.parent, value) if name in _PATHS else value for name, value in table.items()}


def _placed(folder: Path, value: Any) -> Any:
    if isinstance(value, list):
        return [_placed(folder, item) for item in value]
    placed = Path(folder, value)
    try:
        return str(placed.resolve().relative_to(Path.cwd().resolve()))
    except ValueError:
        return str(placed)


def _nearest(start: Path) -> Path | None:
    for folder in (start, *start.parents):
        path = folder / "pyproject.toml"
        if path.is_file():
            return path
    return None
