"""YAML documents with the line of every value, so that a mistake is reported with file, line and path inside the
document. Knows nothing of contracts; manifests and waivers are read with it too."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hwbackends.errors import ContractError

Keys = tuple[str | int, ...]
Kinds = Mapping[str, type | tuple[type, ...]]

# The same loader in C is ten times as fast, and not in every build of PyYAML.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML document and the line of each of its values.

    Attributes:
        path: the file it was read from.
        data: plain Python values.
        lines: 1-based line by path inside the document, `("hooks", "conv_decode", "parameters", 0)`.
    """

    path: Path
    data: Any
    lines: Mapping[Keys, int]

    def error(self, keys: Keys, message: str) -> ContractError:
        """An error that points at `keys`, or at the nearest value above it that is there."""
        place = keys
        while place and place not in self.lines:
            place = place[:-1]
        dotted = ".".join(map(str, keys)) or "the document"
        return ContractError(f"{self.path}:{self.lines.get(place, 1)}: {dotted}: {message}")

    def get(self, keys: Keys) -> Any:
        """The value at `keys`, which must be there."""
        value = self.data
        for key in keys:
            value = value[key]
        return value

    def mapping(self, keys: Keys, required: Kinds, optional: Kinds, *, closed: bool = True) -> dict[str, Any]:
        """The mapping at `keys`, with every required key there, each value of its kind, and no other key.

        Raises:
            ContractError: something is missing, unknown or of another kind.
        """
        value = self.get(keys)
        if not isinstance(value, dict):
            raise self.error(keys, f"got {_kind(value)}, wanted a mapping")
        for name, item in value.items():
            wanted = required.get(name) or optional.get(name)
            if wanted is not None and not _is(item, wanted):
                raise self.error((*keys, name), f"got {_kind(item)}, wanted {_names(wanted)}")
            if wanted is None and closed:
                raise self.error((*keys, name), f"unknown key{nearest(str(name), {*required, *optional})}")
        for name in required:
            if name not in value:
                raise self.error(keys, f"key {name!r} is missing")
        return value


def _is(value: object, wanted: type | tuple[type, ...]) -> bool:
    if isinstance(value, bool):  # a bool is an int to Python, not to a reader
        return bool in (wanted if isinstance(wanted, tuple) else (wanted,))
    return isinstance(value, wanted)


def _kind(value: object) -> str:
    return {dict: "a mapping", list: "a list", type(None): "nothing"}.get(type(value), f"{value!r}")


def _names(wanted: type | tuple[type, ...]) -> str:
    kinds = wanted if isinstance(wanted, tuple) else (wanted,)
    words = {dict: "a mapping", list: "a list", str: "text", int: "a whole number", bool: "true or false"}
    return " or ".join(words.get(kind, "nothing" if kind is type(None) else kind.__name__) for kind in kinds)


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the name most like `name`, or nothing."""
    match = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def read_document(path: Path | str) -> Document:
    """Read one YAML file.

    Raises:
        ContractError: the file is missing, not UTF-8, not YAML, nested too deep, or has a key twice.
    """
    path = Path(path)
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=_LOADER)
        lines: dict[Keys, int] = {}
        data = None if node is None else _Builder(path, lines).build(node, ())
    except OSError as error:
        raise ContractError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ContractError(f"{path}: not UTF-8 at byte {error.start}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ContractError(f"{path}:{line}: not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ContractError(f"{path}: not YAML: {error}") from error
    except RecursionError as error:
        raise ContractError(f"{path}: nested too deep, or a value that contains itself") from error
    return Document(path, data, lines)


class _Builder:
    """Turns YAML nodes into plain values and writes down the line of each."""

    def __init__(self, path: Path, lines: dict[Keys, int]) -> None:
        self.path, self.lines = path, lines
        self.scalars = yaml.constructor.SafeConstructor()

    def build(self, node: yaml.Node, keys: Keys) -> Any:
        self.lines.setdefault(keys, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, keys)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*keys, index)) for index, item in enumerate(node.value)]
        return self.scalars.construct_object(node)

    def _mapping(self, node: yaml.MappingNode, keys: Keys) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self.scalars.construct_object(key_node)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str | int):
                raise ContractError(f"{self.path}:{line}: got a {type(key).__name__} as a key, wanted text")
            if key in result:
                raise ContractError(f"{self.path}:{line}: key {key!r} is there twice")
            self.lines[(*keys, key)] = line
            result[key] = self.build(value_node, (*keys, key))
        return result
