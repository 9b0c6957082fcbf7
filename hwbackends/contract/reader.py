"""The contract as data: finds, reads and checks the YAML files of `contracts/`, keeping the line of everything it read,
so that a mistake is reported with file, line and path inside the document. Nothing here imports torch."""

from __future__ import annotations

import difflib
import functools
import re
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


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a hook, or one field of a type that hooks take.

    Attributes:
        name: field-standard name.
        type: `Tensor`, a Python type, or a name of the contract's `types`.
        optional: may be None.
        required: has no default; the caller must pass it.
        default: the default where there is one.
        since: contract version that added it.
        dtypes: allowed dtypes of a tensor, spelled out.
        shape: named dimensions of a tensor.
        strides: what memory layout is taken.
        unit: what one count of it is: tokens, rows, slots, bytes.
        padding: the value that marks a padded row, in words where it is more than one value.
        mutated: the hook writes to it.
        doc: anything else.
    """

    name: str
    type: str
    optional: bool = False
    required: bool = True
    default: Any = None
    since: str = "1.0"
    dtypes: tuple[str, ...] = ()
    shape: tuple[str, ...] = ()
    strides: str = ""
    unit: str = ""
    padding: Any = None
    mutated: bool = False
    doc: str = ""


@dataclass(frozen=True, slots=True)
class Clause:
    """One numbered sentence of a hook's meaning."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class Hook:
    """One hook: its parameters in order and what it may do.

    Attributes:
        name: the function's name.
        since: contract version that added it.
        optional: a backend may leave it out.
        summary: one sentence.
        recordable: may be called while a graph is captured.
        may_synchronise: may wait for the device.
        may_allocate: true, false, or `output` for the returned tensor alone.
        parameters: in positional order.
        returns: what it returns.
        clauses: what it means.
    """

    name: str
    since: str
    optional: bool
    summary: str
    recordable: bool
    may_synchronise: bool
    may_allocate: bool | str
    parameters: tuple[Parameter, ...]
    returns: Mapping[str, Any]
    clauses: tuple[Clause, ...]


@dataclass(frozen=True, slots=True)
class Contract:
    """A whole contract; `hooks` keeps the order of the file."""

    name: str
    version: str
    path: Path
    hooks: Mapping[str, Hook]
    types: Mapping[str, tuple[Parameter, ...]]
    dtype_sets: Mapping[str, tuple[str, ...]]
    dimensions: Mapping[str, str]
    layouts: Mapping[str, str]

    @property
    def clauses(self) -> dict[str, Hook]:
        """The hook of each clause id."""
        return {clause.id: hook for hook in self.hooks.values() for clause in hook.clauses}


def contracts_folder() -> Path:
    """The folder of the contract files: package data of a wheel, or `contracts/` of a checkout.

    Raises:
        ContractError: neither is there; the installation is incomplete.
    """
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_contracts", package.parent / "contracts"):
        if (folder / "conv_state.yaml").is_file():
            return folder
    raise ContractError(f"{package}: the contract files are not installed; reinstall hwbackends")


@functools.cache
def load_contract(path: Path | str | None = None) -> Contract:
    """Read and check a contract; the installed `conv_state` contract by default.

    Raises:
        ContractError: the file is malformed; gives file, line and path inside the document.
    """
    return _Reader(read_document(path or contracts_folder() / "conv_state.yaml")).contract()


_PARAMETER: Kinds = {
    "optional": bool,
    "default": (str, int, float, bool, type(None)),
    "since": str,
    "dtypes": str,
    "shape": list,
    "strides": str,
    "unit": str,
    "padding": (str, int, bool),
    "mutated": bool,
    "doc": str,
}
_HOOK: Kinds = {
    "name": str,
    "since": str,
    "optional": bool,
    "summary": str,
    "recordable": bool,
    "may_synchronise": bool,
    "may_allocate": (bool, str),
    "parameters": list,
    "returns": dict,
    "clauses": list,
}
_TOP: Kinds = {
    "contract": str,
    "version": str,
    "dtype_sets": dict,
    "dimensions": dict,
    "layouts": dict,
    "types": dict,
    "hooks": list,
}
_PYTHON_TYPES = {"Tensor", "dict[str, Tensor]", "ForwardMode", "str", "int", "float", "bool", "None"}
_CLAUSE_ID = re.compile(r"[A-Z]+(-[A-Z]+)+-\d\d")
_VERSION = re.compile(r"\d+\.\d+")
_DIMENSION = re.compile(r"[A-Za-z_]\w*")


class _Reader:
    """Builds a `Contract` from a document and refuses whatever the schema does not know."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.error = document.error

    def contract(self) -> Contract:
        top = self.document.mapping((), required=_TOP, optional={})
        self.top = top
        self._version(("version",), top["version"])
        types = {name: self._fields(name) for name in top["types"]}
        hooks: dict[str, Hook] = {}
        for index in range(len(top["hooks"])):
            hook = self._hook(("hooks", index))
            if hook.name in hooks:
                raise self.error(("hooks", index, "name"), f"hook {hook.name!r} is there twice")
            hooks[hook.name] = hook
        self._unique_clauses(hooks.values())
        return Contract(
            name=top["contract"],
            version=top["version"],
            path=self.document.path,
            hooks=hooks,
            types=types,
            dtype_sets={name: tuple(items) for name, items in top["dtype_sets"].items()},
            dimensions=top["dimensions"],
            layouts=top["layouts"],
        )

    def _fields(self, name: str) -> tuple[Parameter, ...]:
        keys: Keys = ("types", name)
        fields = self.document.mapping(keys, required={"fields": list}, optional={"doc": str})["fields"]
        return self._parameters((*keys, "fields"), len(fields), required={"name": str, "type": str})

    def _hook(self, keys: Keys) -> Hook:
        data = self.document.mapping(keys, required=_HOOK, optional={"doc": str})
        if not data["name"].isidentifier():
            raise self.error((*keys, "name"), f"got {data['name']!r}, wanted a Python name")
        if data["may_allocate"] not in (True, False, "output"):
            raise self.error((*keys, "may_allocate"), f"got {data['may_allocate']!r}, wanted true, false or output")
        self._version((*keys, "since"), data["since"])
        needed: Kinds = {"name": str, "type": str, "since": str, "optional": bool}
        parameters = self._parameters((*keys, "parameters"), len(data["parameters"]), required=needed)
        self._defaults_last((*keys, "parameters"), parameters)
        self._returns((*keys, "returns"))
        flags = {name: data[name] for name in _HOOK if name not in ("parameters", "clauses")}
        return Hook(**flags, parameters=parameters, clauses=self._clauses((*keys, "clauses"), len(data["clauses"])))

    def _parameters(self, keys: Keys, count: int, required: Kinds) -> tuple[Parameter, ...]:
        optional = {name: kind for name, kind in _PARAMETER.items() if name not in required}
        found: dict[str, Parameter] = {}
        for index in range(count):
            place = (*keys, index)
            parameter = self._parameter(place, self.document.mapping(place, required, optional))
            if parameter.name in found:
                raise self.error((*place, "name"), f"{parameter.name!r} is there twice")
            found[parameter.name] = parameter
        return tuple(found.values())

    def _parameter(self, keys: Keys, data: dict[str, Any]) -> Parameter:
        self._type((*keys, "type"), data["type"])
        if not data["name"].isidentifier():
            raise self.error((*keys, "name"), f"got {data['name']!r}, wanted a Python name")
        if "since" in data:
            self._version((*keys, "since"), data["since"])
        if data.get("default", 0) is None and not data.get("optional", False):
            raise self.error((*keys, "default"), "the default is null: wanted optional: true")
        shape = tuple(map(str, data.get("shape", ())))
        self._shape((*keys, "shape"), shape)
        extra = {"required": "default" not in data, "shape": shape, "dtypes": self._dtypes(keys, data)}
        return Parameter(**{**data, **extra})

    def _returns(self, keys: Keys) -> None:
        kinds: Kinds = {"dtypes": str, "shape": list, "doc": str}
        data = self.document.mapping(keys, required={"type": str}, optional=kinds)
        self._type((*keys, "type"), data["type"])
        self._dtypes(keys, data)
        self._shape((*keys, "shape"), tuple(map(str, data.get("shape", ()))))

    def _clauses(self, keys: Keys, count: int) -> tuple[Clause, ...]:
        clauses = []
        for index in range(count):
            data = self.document.mapping((*keys, index), required={"id": str, "text": str}, optional={})
            if not _CLAUSE_ID.fullmatch(data["id"]):
                raise self.error((*keys, index, "id"), f"got {data['id']!r}, wanted an id such as CS-VERIFY-03")
            clauses.append(Clause(**data))
        return tuple(clauses)

    def _unique_clauses(self, hooks: Iterable[Hook]) -> None:
        seen: dict[str, str] = {}
        for number, hook in enumerate(hooks):
            for index, clause in enumerate(hook.clauses):
                if clause.id in seen:
                    keys: Keys = ("hooks", number, "clauses", index, "id")
                    raise self.error(keys, f"clause {clause.id} is also in {seen[clause.id]}")
                seen[clause.id] = hook.name

    def _type(self, keys: Keys, name: str) -> None:
        known = {*_PYTHON_TYPES, *self.top["types"]}
        if name not in known:
            raise self.error(keys, f"unknown type {name!r}{nearest(name, known)}")

    def _dtypes(self, keys: Keys, data: Mapping[str, Any]) -> tuple[str, ...]:
        name, sets = data.get("dtypes"), self.top["dtype_sets"]
        if name is None:
            return ()
        if name not in sets:
            raise self.error((*keys, "dtypes"), f"unknown dtype set {name!r}{nearest(name, sets)}")
        return tuple(sets[name])

    def _shape(self, keys: Keys, shape: tuple[str, ...]) -> None:
        known = self.top["dimensions"]
        for index, extent in enumerate(shape):
            for name in _DIMENSION.findall(extent):
                if name not in known:
                    raise self.error((*keys, index), f"unknown dimension {name!r}{nearest(name, known)}")

    def _version(self, keys: Keys, text: str) -> None:
        if not _VERSION.fullmatch(text):
            raise self.error(keys, f"got {text!r}, wanted a version such as 1.0")
        if _number(text) > _number(self.top["version"]):
            raise self.error(keys, f"version {text} is newer than the contract's own {self.top['version']}")

    def _defaults_last(self, keys: Keys, parameters: tuple[Parameter, ...]) -> None:
        seen_default = ""
        for index, parameter in enumerate(parameters):
            if parameter.required and seen_default:
                raise self.error((*keys, index), f"{parameter.name!r} has no default but follows {seen_default!r}")
            seen_default = seen_default or ("" if parameter.required else parameter.name)


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
