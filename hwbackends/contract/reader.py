"""The one reader of contract files: finds, reads and checks the YAML of `contracts/` and gives `Contracts`. Imports no
torch."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hwbackends.contract.document import Document, Keys, Kinds, nearest, read_document
from hwbackends.contract.model import ROLES, Clause, Contract, Contracts, Hook, Parameter
from hwbackends.errors import ContractError


def contracts_folder() -> Path:
    """The folder of the contract files: package data of a wheel, or `contracts/` of a checkout.

    Raises:
        ContractError: neither is there; the installation is incomplete.
    """
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_contracts", package.parent / "contracts"):
        if any(folder.glob("*.yaml")):
            return folder
    raise ContractError(f"{package}: the contract files are not installed; reinstall hwbackends")


@functools.cache
def installed(folder: Path | None = None) -> Contracts:
    """Every contract of a folder, each behind what it imports; the installed ones by default.

    Raises:
        ContractError: a file is malformed; gives file, line and path inside the document.
    """
    return _together(sorted((folder or contracts_folder()).glob("*.yaml")))


def read(path: Path | str) -> Contracts:
    """The contract of one file with what it imports, or a description of somebody else's hooks.

    A file without `types` and `imports` is such a description: names of hooks and parameters are enough.

    Raises:
        ContractError: the file is malformed; gives file, line and path inside the document.
    """
    document = read_document(path)
    top = document.data if isinstance(document.data, dict) else {}
    if "types" in top or "imports" in top:
        return _together([Path(path)])
    return Contracts([_Description(document).contract()])


def _together(paths: Iterable[Path]) -> Contracts:
    """Contracts in an order in which each comes behind its imports."""
    found: dict[str, Contract] = {}

    def add(path: Path, importers: tuple[Path, ...]) -> None:
        document = read_document(path)
        names = _imports(document)
        for index, name in enumerate(names):
            other = path.with_name(f"{name}.yaml")
            if not other.is_file():
                known = [p.stem for p in path.parent.glob("*.yaml")]
                raise document.error(("imports", index), f"no contract {name!r} beside it{nearest(name, known)}")
            if other in (*importers, path):
                raise document.error(("imports", index), f"contract {name!r} imports this one")
            if name not in found:
                add(other, (*importers, path))
        if path.stem not in found:
            found[path.stem] = _Reader(document, [found[name] for name in names]).contract()

    for path in paths:
        add(path, ())
    return _apart(found)


def _imports(document: Document) -> list[str]:
    top = document.mapping((), required={"contract": str}, optional={"imports": list}, closed=False)
    return [str(name) for name in top.get("imports", ())]


def _apart(found: Mapping[str, Contract]) -> Contracts:
    """Contracts that share no hook and no clause."""
    contracts = Contracts(found.values())
    total = sum(len(contract.hooks) for contract in found.values())
    if len(contracts.hooks) != total:
        owners = [(name, c.name) for c in found.values() for name in c.hooks if contracts.owners[name] is not c]
        name, owner = owners[0]
        raise ContractError(f"{contracts.owners[name].path}: hook {name!r} is also in contract {owner}")
    seen: dict[str, str] = {}
    for hook in contracts.hooks.values():
        for clause in hook.clauses:
            if clause.id in seen:
                raise ContractError(
                    f"{contracts.owners[hook.name].path}: clause {clause.id} is also in {seen[clause.id]}"
                )
            seen[clause.id] = hook.name
    return contracts


PARAMETER: Kinds = {
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
HOOK: Kinds = {
    "name": str,
    "since": str,
    "optional": bool,
    "role": str,
    "summary": str,
    "recordable": bool,
    "may_synchronise": bool,
    "may_allocate": (bool, str),
    "parameters": list,
    "returns": dict,
    "clauses": list,
}
TABLES: Kinds = {"dtype_sets": dict, "dimensions": dict, "layouts": dict, "forward_modes": dict}
TOP: Kinds = {"contract": str, "version": str, "types": dict, "hooks": list}
_PYTHON_TYPES = {"Tensor", "ForwardMode", "str", "int", "float", "bool", "None", "tuple[float, float]"}
_TABLE = re.compile(r"dict\[str, (\w+)\]")
CLAUSE_ID = re.compile(r"[A-Z]+(-[A-Z]+)+-\d\d")
_VERSION = re.compile(r"\d+\.\d+")
_DIMENSION = re.compile(r"[A-Za-z_]\w*")


class _Reader:
    """Builds a `Contract` from a document and refuses whatever the schema does not know."""

    def __init__(self, document: Document, imported: Iterable[Contract] = ()) -> None:
        self.document = document
        self.error = document.error
        self.imported = tuple(imported)

    def contract(self) -> Contract:
        top = self.document.mapping((), required=TOP, optional={**TABLES, "imports": list})
        self.top = {**top, **{name: self._visible(name, top.get(name, {})) for name in (*TABLES, "types")}}
        self._version(("version",), top["version"])
        if top["contract"] != self.document.path.stem:
            raise self.error(("contract",), f"got {top['contract']!r}, wanted {self.document.path.stem!r}, as the file")
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
            imports=tuple(top.get("imports", ())),
            hooks=hooks,
            types={**self._visible("types", {}), **types},
            dtype_sets={name: tuple(items) for name, items in self.top["dtype_sets"].items()},
            **{name: self.top[name] for name in ("dimensions", "layouts", "forward_modes")},
        )

    def _visible(self, table: str, own: Mapping[str, Any]) -> dict[str, Any]:
        """A table of words with what the imported contracts have in theirs; a word means one thing."""
        found: dict[str, Any] = {}
        for contract in self.imported:
            found |= getattr(contract, table)
        for name in () if table == "types" else own:
            if name in found:
                raise self.error((table, name), "an imported contract has this word already")
        return {**found, **own}

    def _fields(self, name: str) -> tuple[Parameter, ...]:
        """The fields of a type; those that an imported contract gives it come first."""
        keys: Keys = ("types", name)
        fields = self.document.mapping(keys, required={"fields": list}, optional={"doc": str})["fields"]
        found = self._parameters((*keys, "fields"), len(fields), required={"name": str, "type": str})
        before = [p for contract in self.imported for p in contract.types.get(name, ())]
        for index, p in enumerate(found):
            if p.name in {old.name for old in before}:
                raise self.error((*keys, "fields", index, "name"), f"{p.name!r} is in an imported contract already")
        return (*before, *found)

    def _hook(self, keys: Keys) -> Hook:
        data = self.document.mapping(keys, required=HOOK, optional={"doc": str, "forward_modes": list})
        if not data["name"].isidentifier():
            raise self.error((*keys, "name"), f"got {data['name']!r}, wanted a Python name")
        if data["may_allocate"] not in (True, False, "output"):
            raise self.error((*keys, "may_allocate"), f"got {data['may_allocate']!r}, wanted true, false or output")
        if data["role"] not in ROLES:
            raise self.error((*keys, "role"), f"unknown role {data['role']!r}{nearest(data['role'], ROLES)}")
        self._version((*keys, "since"), data["since"])
        needed: Kinds = {"name": str, "type": str, "since": str, "optional": bool}
        parameters = self._parameters((*keys, "parameters"), len(data["parameters"]), required=needed)
        self._defaults_last((*keys, "parameters"), parameters)
        self._returns((*keys, "returns"))
        flags = {name: data[name] for name in HOOK if name not in ("parameters", "clauses")}
        clauses = self._clauses((*keys, "clauses"), len(data["clauses"]))
        return Hook(**flags, forward_modes=self._modes(keys, data), parameters=parameters, clauses=clauses)

    def _modes(self, keys: Keys, data: Mapping[str, Any]) -> tuple[str, ...]:
        known = self.top["forward_modes"]
        for index, mode in enumerate(data.get("forward_modes", ())):
            if mode not in known:
                raise self.error(
                    (*keys, "forward_modes", index), f"unknown forward mode {mode!r}{nearest(mode, known)}"
                )
        return tuple(data.get("forward_modes", ()))

    def _parameters(self, keys: Keys, count: int, required: Kinds) -> tuple[Parameter, ...]:
        optional = {name: kind for name, kind in PARAMETER.items() if name not in required}
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
        left_out = "default" in data
        extra = {"required": not left_out, "omittable": left_out, "shape": shape, "dtypes": self._dtypes(keys, data)}
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
            if not CLAUSE_ID.fullmatch(data["id"]):
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
        table = _TABLE.fullmatch(name)
        if (table[1] if table else name) not in known:
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


class _Description:
    """Reads hooks of another project: what callers pass, and nothing about tensors."""

    def __init__(self, document: Document) -> None:
        self.document = document

    def contract(self) -> Contract:
        top = self.document.mapping((), required={"hooks": list}, optional={"contract": str, "name": str}, closed=False)
        if not top["hooks"]:
            raise self.document.error(("hooks",), "wants at least one hook")
        hooks = [self._hook(("hooks", index)) for index in range(len(top["hooks"]))]
        path = self.document.path
        name = top.get("contract") or top.get("name") or path.stem
        empty: dict[str, Any] = {}
        tables = dict.fromkeys(("types", "dtype_sets", "dimensions", "layouts", "forward_modes"), empty)
        return Contract(name, str(top.get("version", "")), path, (), {hook.name: hook for hook in hooks}, **tables)

    def _hook(self, keys: Keys) -> Hook:
        optional: Kinds = {"optional": bool, "summary": str, "parameters": list}
        data = self.document.mapping(keys, required={"name": str}, optional=optional, closed=False)
        count = len(data.get("parameters", ()))
        parameters = tuple(self._parameter((*keys, "parameters", index)) for index in range(count))
        optional_hook = data.get("optional", True)
        return Hook(
            data["name"], optional=optional_hook, summary=data.get("summary", ""), parameters=parameters, closed=False
        )

    def _parameter(self, keys: Keys) -> Parameter:
        kinds: Kinds = {"optional": bool, "default": PARAMETER["default"], "any_name": bool}
        data = self.document.mapping(keys, required={"name": str}, optional=kinds, closed=False)
        has_default = "default" in data
        optional = data.get("optional", has_default)
        return Parameter(
            data["name"],
            optional=optional,
            required=not has_default,
            default=data.get("default"),
            omittable=optional,
            any_name=data.get("any_name", False),
        )


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
