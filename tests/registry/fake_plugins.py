"""Plugin packages for registry tests: written to a folder as an installer would leave them, with metadata, manifest and
source, so that discovery, import and validation run as they do for a real package."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, distributions
from pathlib import Path

from hwbackends.contract.model import Hook
from hwbackends.contract.reader import installed

MANIFEST = """\
contracts: {step: ">=1.0,<2.0", conv: ">=1.0,<2.0"}
devices: [cpu]
"""
NAMED = ("step", "conv")


def parameters_of(hook: Hook) -> list[str]:
    """The hook's parameters as source."""
    return [p.name if p.required else f"{p.name}={p.default!r}" for p in hook.parameters]


def definition(hook: str, parameters: list[str] | None = None, body: str = "") -> str:
    """Source of one marked implementation, with the contract's own parameters unless others are given."""
    names = parameters_of(installed().hooks[hook]) if parameters is None else parameters
    return f"@hookimpl\ndef {hook}({', '.join(names)}):\n    {body or f'return {hook!r}'}\n"


def plugin_source(replaced: Mapping[str, str] | None = None, extra: str = "", optional: bool = True) -> str:
    """Source of a plugin with every hook of the contracts that `MANIFEST` names; `replaced` gives another
    source for some of them, empty leaves them out."""
    replaced = replaced or {}
    hooks = [hook for hook in installed().only(NAMED).hooks.values() if optional or not hook.optional]
    parts = [replaced.get(hook.name, _default(hook.name)) for hook in hooks]
    return "from hwbackends.contract.hookspecs import ProbeResult, hookimpl\n\n" + "\n\n".join(parts) + "\n" + extra


def _default(hook: str) -> str:
    return definition(hook, body="return ProbeResult(True, 'always there', '')" if hook == "probe" else "")


@dataclass
class Site:
    """A folder on `sys.path` that plugin packages are installed into."""

    folder: Path
    packages: list[str] = field(default_factory=list)

    def install(
        self,
        name: str,
        *,
        source: str | None = None,
        manifest: str | None = MANIFEST,
        package: str | None = None,
        distribution: str | None = None,
        version: str = "3.1",
        probe: str | None = None,
        value: str | None = None,
    ) -> Path:
        """Write one package and its metadata; returns the package's folder."""
        package = package or f"plugin_{name.replace('-', '_')}"
        folder = self.folder / package
        folder.mkdir(exist_ok=True)
        files = {"__init__.py": "", "plugin.py": plugin_source() if source is None else textwrap.dedent(source)}
        if manifest is not None:
            files["manifest.yaml"] = manifest
        if probe is not None:
            files["probe.py"] = textwrap.dedent(probe)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
        self.packages.append(package)
        self._metadata(name, value or f"{package}.plugin", distribution or f"{name}-dist", version)
        return folder

    def _metadata(self, name: str, value: str, distribution: str, version: str) -> None:
        folder = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        points = folder / "entry_points.txt"
        before = points.read_text() if points.exists() else "[hwbackends.backends]\n"
        points.write_text(f"{before}{name} = {value}\n")

    def points(self, group: str = "hwbackends.backends") -> list[EntryPoint]:
        """Entry points of the packages in this folder alone."""
        return [
            point for dist in distributions(path=[str(self.folder)]) for point in dist.entry_points.select(group=group)
        ]


@contextmanager
def site(folder: Path) -> Iterator[Site]:
    """A site that is importable inside the block; its modules are forgotten afterwards."""
    made = Site(folder)
    sys.path.insert(0, str(folder))
    try:
        yield made
    finally:
        sys.path.remove(str(folder))
        for name in list(sys.modules):
            if name.partition(".")[0] in made.packages:
                del sys.modules[name]
