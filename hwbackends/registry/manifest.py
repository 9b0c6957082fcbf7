"""Manifests: the YAML file beside a plugin module that says, before anything of the plugin is imported, for which
contracts it was written, which devices it serves, with what priority, and which capabilities it claims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from hwbackends.contract.document import Document, read_document
from hwbackends.errors import PluginError

MANIFEST_NAME = "manifest.yaml"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a plugin says about itself.

    Attributes:
        path: the file.
        contracts: range of versions, such as `>=1.0,<2.0`, of each contract that the plugin was written for; a family
            that is not here is not implemented.
        devices: device types that it serves, as in `torch.device(...).type`; `*` for any.
        priority: the larger wins where several backends fit; the reference has 0.
        capabilities: what the plugin claims, as it stands there; `contract.claims` reads it.
        data: the whole document.
    """

    path: Path
    contracts: Mapping[str, str]
    devices: tuple[str, ...]
    priority: int = 0
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict, repr=False)


def module_folders(module: str) -> list[Path]:
    """Folders in which `module` would lie, by the location of its top-level package; nothing is imported."""
    top, *rest = module.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):  # a module that stands in sys.modules without a spec
        return []
    if spec is None:
        return []
    roots = [Path(root) for root in spec.submodule_search_locations or ()]
    if not roots and spec.origin and not rest:
        return [Path(spec.origin).parent]
    folders = [root.joinpath(*rest) for root in roots]
    return [folder if folder.is_dir() else folder.parent for folder in folders]


def module_file(module: str) -> Path | None:
    """Source file of a module, found without importing it or its package."""
    name = module.rpartition(".")[2]
    for folder in module_folders(module):
        for path in (folder / f"{name}.py", folder / "__init__.py"):
            if path.is_file():
                return path
    return None


def find_manifest(module: str) -> Path:
    """Path of the manifest beside `module`.

    Raises:
        PluginError: the package or the manifest is not there; names the folders that were searched.
    """
    folders = module_folders(module)
    for folder in folders:
        if (folder / MANIFEST_NAME).is_file():
            return folder / MANIFEST_NAME
    top = module.partition(".")[0]
    where = ", ".join(map(str, folders)) if folders else f"package {top!r} is not installed"
    raise PluginError(
        f"no {MANIFEST_NAME} beside module {module!r} ({where}); add one with at least: contracts, devices"
    )


def read_manifest(path: Path) -> Manifest:
    """Read and check one manifest.

    Raises:
        ContractError: the file is not a valid manifest; gives file, line and path inside the document.
    """
    document = read_document(path)
    data = document.mapping((), required={"contracts": dict, "devices": list}, optional=_OPTIONAL, closed=False)
    devices = data["devices"]
    if not devices or not all(isinstance(device, str) for device in devices):
        raise document.error(("devices",), f"got {devices!r}, wanted a list of device types such as [cpu]")
    return Manifest(
        path=path,
        contracts={name: _range(document, name) for name in data["contracts"]},
        devices=tuple(devices),
        priority=data.get("priority", 0),
        capabilities=data.get("capabilities", {}),
        data=data,
    )


_OPTIONAL: dict[str, type | tuple[type, ...]] = {"name": str, "priority": int, "capabilities": dict}


def _range(document: Document, name: str) -> str:
    text: str = document.mapping(("contracts",), required={name: str}, optional={}, closed=False)[name]
    try:
        found = SpecifierSet(text)
    except InvalidSpecifier:
        found = SpecifierSet()
    if not found:
        raise document.error(("contracts", name), f"got {text!r}, wanted a range of versions such as >=1.0,<2.0")
    return text
