"""Candidates: what is installed in the entry-point group and what state it is in. Discovery reads package metadata and
manifests and imports nothing; a probe runs a plugin's code and turns whatever that raises into a state."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet

from hwbackends.contract.claims import Claims, read_claims
from hwbackends.contract.document import nearest
from hwbackends.contract.hookspecs import ProbeResult
from hwbackends.contract.model import Contracts
from hwbackends.contract.reader import installed
from hwbackends.errors import BrokenPluginError, HwBackendsError, SignatureDriftError
from hwbackends.registry.manifest import Manifest, find_manifest, read_manifest
from hwbackends.registry.origins import hook_origins
from hwbackends.registry.outside import ask

GROUP = "hwbackends.backends"
BUILT_IN = "hwbackends"
"""The distribution whose backends are asked in this process, and whose names no other one can take."""


def canonical(distribution: str) -> str:
    """The name of a distribution as indexes compare it."""
    return distribution.lower().replace("_", "-").replace(".", "-")


class State(enum.StrEnum):
    """What is known about a candidate. Only `AVAILABLE` ones are selected."""

    FOUND = "found"
    AVAILABLE = "available"
    UNAVAILABLE = "unavailable"
    INCOMPATIBLE = "incompatible"
    DUPLICATE = "duplicate"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One entry point of the group and what is known about it.

    Attributes:
        name: entry-point name.
        value: entry-point value, the plugin module.
        distribution: the package that registered it; empty if unknown.
        version: that package's version.
        state: see `State`.
        reason: why it is in that state, in one sentence.
        hint: what the user can do about it.
        manifest: what it says about itself; None where it could not be read.
        missing: hooks that the contracts require and an available plugin does not have, or does not claim; stubs count
            as missing.
        claims: what its manifest's `capabilities` claim; None where it could not be read.
        hooks: every hook of the contracts that are here.
        cause: the original error of a broken one.
    """

    name: str
    value: str
    distribution: str = ""
    version: str = ""
    state: State = State.FOUND
    reason: str = ""
    hint: str = ""
    manifest: Manifest | None = None
    missing: tuple[str, ...] = ()
    claims: Claims | None = dataclasses.field(default=None, repr=False)
    hooks: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    cause: BaseException | None = dataclasses.field(default=None, compare=False)

    @property
    def built_in(self) -> bool:
        """Whether it is a backend of this package, whose probes are known to raise and to leave nothing."""
        return canonical(self.distribution) == BUILT_IN

    @property
    def module(self) -> str:
        """The module of its entry point."""
        return self.value.partition(":")[0].strip()

    @property
    def devices(self) -> tuple[str, ...]:
        """Device types that it serves."""
        return self.manifest.devices if self.manifest else ()

    @property
    def priority(self) -> int:
        """The larger wins."""
        return self.manifest.priority if self.manifest else 0

    @property
    def package(self) -> str:
        """Distribution and version, for messages."""
        return f"{self.distribution} {self.version}".strip() or "unknown distribution"

    @property
    def hook_origins(self) -> dict[str, str | None]:
        """`file:line` of each hook, read from the source; None where it has no such hook."""
        return hook_origins(self.module, self.hooks)

    def __str__(self) -> str:
        text = f"{self.name} ({self.package}): {self.state}: {self.reason}"
        return f"{text}; {self.hint}" if self.hint else text


def discover(points: Iterable[EntryPoint] | None = None, contracts: Contracts | None = None) -> tuple[Candidate, ...]:
    """Every backend that is installed, by name. Reads metadata and manifests; imports no plugin.

    Args:
        points: entry points to look at; those of the installed packages by default.
        contracts: the contracts that manifests are held against; the installed ones by default.
    """
    known = contracts or installed()
    given, unreadable = (list(points), []) if points is not None else _installed()
    unique = {_identity(point): point for point in given}
    found = [_describe(point, known) for point in unique.values()] + unreadable
    names = [candidate.name for candidate in found]
    reserved = {candidate.name for candidate in found if candidate.built_in}
    marked = [
        c if names.count(c.name) == 1 or (c.built_in and c.name in reserved) else _duplicate(c, found) for c in found
    ]
    return tuple(sorted(marked, key=lambda candidate: (candidate.name, candidate.distribution)))


def _installed() -> tuple[list[EntryPoint], list[Candidate]]:
    """Entry points of the installed packages, and a broken candidate for each package whose list cannot be read."""
    try:
        return list(entry_points(group=GROUP)), []
    except Exception:  # one malformed entry_points.txt makes the whole call fail: read them one by one
        return _one_by_one()


def _one_by_one() -> tuple[list[EntryPoint], list[Candidate]]:
    points: list[EntryPoint] = []
    unreadable: list[Candidate] = []
    seen: set[str] = set()
    for package in distributions():
        name, version = _package(package)
        if name.lower() in seen:  # the first on the path hides the others, as in an import
            continue
        seen.add(name.lower())
        try:
            points += package.entry_points.select(group=GROUP)
        except Exception as error:
            if GROUP in (package.read_text("entry_points.txt") or ""):
                reason = f"its entry_points.txt cannot be read: {type(error).__name__}: {error}"
                hint = "reinstall or uninstall the package"
                unreadable.append(_broken(Candidate(name, "", name, version), reason, hint, error))
    return points, unreadable


def _package(distribution: Distribution | None) -> tuple[str, str]:
    """Name and version of a distribution; empty where its metadata is damaged."""
    metadata: Any = distribution.metadata if distribution is not None else {}
    return str(metadata.get("Name") or ""), str(metadata.get("Version") or "")


def _identity(point: EntryPoint) -> tuple[str, str, str]:
    return point.name, point.value, _package(point.dist)[0]


def _describe(point: EntryPoint, contracts: Contracts) -> Candidate:
    """What the entry point and the manifest alone say."""
    name, version = _package(point.dist)
    candidate = Candidate(point.name, point.value, name, version, hooks=tuple(contracts.hooks))
    try:
        manifest = read_manifest(find_manifest(candidate.module))
    except HwBackendsError as error:
        return _broken(candidate, str(error), "", error)
    candidate = dataclasses.replace(candidate, manifest=manifest)
    reason = _mismatch(manifest, contracts)
    if not reason:
        return _claiming(candidate, manifest, contracts.only(manifest.contracts))
    hint = f"install a release of {name or point.name!r} for {contracts}, or another hwbackends"
    return dataclasses.replace(candidate, state=State.INCOMPATIBLE, reason=reason, hint=hint)


def _claiming(candidate: Candidate, manifest: Manifest, served: Contracts) -> Candidate:
    """With the claims of its manifest; of the hooks that the contracts require, those left out are missing."""
    try:
        claims = read_claims(manifest.capabilities, served, tuple(served.hooks))
    except HwBackendsError as error:
        return _broken(candidate, f"{manifest.path}: {error}", "repair the manifest", error)
    unclaimed = (name for name, hook in served.hooks.items() if not hook.optional and name not in claims.hooks)
    return dataclasses.replace(candidate, claims=claims, missing=tuple(unclaimed))


def _mismatch(manifest: Manifest, contracts: Contracts) -> str:
    """Why a manifest does not fit the contracts that are here; empty where it does."""
    for name, wanted in manifest.contracts.items():
        if name not in contracts:
            return f"written for contract {name} {wanted}, which is not here{nearest(name, contracts)}"
        if not SpecifierSet(wanted).contains(contracts[name].version):
            return f"written for contract {name} {wanted}, this is {contracts[name].version}"
        lacking = [other for other in contracts[name].imports if other not in manifest.contracts]
        if lacking:
            return f"its manifest names contract {name} and not {', '.join(lacking)}, which {name} imports"
    return "" if manifest.contracts else "its manifest names no contract"


def _duplicate(candidate: Candidate, found: Sequence[Candidate]) -> Candidate:
    if any(c.name == candidate.name and c.built_in for c in found):
        reason = f"name {candidate.name!r} belongs to {BUILT_IN}, whose own backend is used"
        return dataclasses.replace(candidate, state=State.DUPLICATE, reason=reason, hint="uninstall or rename it")
    owners = ", ".join(f"{c.package} ({c.value})" for c in found if c.name == candidate.name)
    reason = f"name {candidate.name!r} is registered more than once: {owners}"
    return dataclasses.replace(candidate, state=State.DUPLICATE, reason=reason, hint="uninstall all but one of them")


def _broken(candidate: Candidate, reason: str, hint: str, cause: BaseException) -> Candidate:
    return dataclasses.replace(candidate, state=State.BROKEN, reason=reason, hint=hint, cause=cause)


def probe(candidate: Candidate, device: str | None = None) -> Candidate:
    """Ask a found candidate whether it can run here; whatever its code does makes it broken, never the caller.

    A backend of this package is asked here. One of another distribution is asked in a process of its own, which also
    imports the plugin where the probe says yes: raising, exiting, crashing and hanging end there.
    """
    if candidate.state is not State.FOUND:
        return candidate
    if candidate.built_in or candidate.manifest is None:
        return _probe_here(candidate, device)
    found = ask(candidate.name, candidate.value, candidate.manifest.path, device)
    cause = None
    if found.state == State.BROKEN:
        cause = BrokenPluginError(f"{candidate.name!r} ({candidate.package}) {found.reason}")
        cause.__cause__ = found.cause
    missing = tuple(dict.fromkeys((*candidate.missing, *found.missing)))
    return dataclasses.replace(
        candidate, state=State(found.state), reason=found.reason, hint=found.hint, missing=missing, cause=cause
    )


def question(name: str, value: str, device: str | None) -> Candidate:
    """Probe, import and inspect one plugin here: what `outside` runs in a process of its own."""
    from hwbackends.registry.binding import validate

    contracts = installed()
    found = _describe(EntryPoint(name, value, GROUP), contracts)
    found = _probe_here(found, device) if found.state is State.FOUND else found
    if found.state is not State.AVAILABLE:
        return found
    try:
        lacking = validate(found, import_plugin(found), contracts).missing
    except SignatureDriftError:
        return found  # binding it says how each hook drifted
    except HwBackendsError as error:
        return _broken(found, f"cannot be imported: {_told(error)}", "repair or uninstall the package", error)
    required = tuple(hook for hook in lacking if not contracts.hooks[hook].optional)
    return dataclasses.replace(found, missing=required)


def _told(error: BaseException) -> str:
    cause = error.__cause__ or error
    hint = f"; install {cause.name!r}" if isinstance(cause, ModuleNotFoundError) and cause.name else ""
    return f"{type(cause).__name__}: {cause}{hint}"


def _probe_here(candidate: Candidate, device: str | None) -> Candidate:
    """Ask the file `probe.py` beside the manifest, so that the plugin itself, which may need torch, is not imported for
    it; where there is none, the plugin."""
    try:
        result = _probe_function(candidate)(device)
        available, reason, hint = bool(result.available), str(result.reason), str(result.hint)
    except (Exception, SystemExit) as error:
        hint = "repair or uninstall the package"
        what = "cannot be imported" if isinstance(error, BrokenPluginError) else "probing it failed"
        return _broken(candidate, f"{what}: {_told(error)}", hint, error)
    state = State.AVAILABLE if available else State.UNAVAILABLE
    return dataclasses.replace(candidate, state=state, reason=reason, hint=hint)


def light_module(candidate: Candidate) -> ModuleType | None:
    """The module `probe.py` beside the manifest: what a plugin can say about itself without importing its hooks."""
    if candidate.manifest is None or not (candidate.manifest.path.parent / "probe.py").is_file():
        return None
    package = candidate.module
    if candidate.manifest.path.parent.name != package.rpartition(".")[2]:
        package = package.rpartition(".")[0]
    return import_module(f"{package}.probe")


def _probe_function(candidate: Candidate) -> Callable[[str | None], ProbeResult]:
    owner = light_module(candidate) or import_plugin(candidate)
    function: Callable[[str | None], ProbeResult] = getattr(owner, "probe", _always)
    return function


def _always(device: str | None = None) -> ProbeResult:
    return ProbeResult(True, "the plugin could be imported; it has no probe", "")


def import_plugin(candidate: Candidate) -> Any:
    """The plugin of a candidate: the module, or the object in it, that its entry point names.

    Raises:
        BrokenPluginError: importing it failed; the original error is the cause.
    """
    try:
        return EntryPoint(candidate.name, candidate.value, GROUP).load()
    except (Exception, SystemExit) as error:
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        hint = f"install {missing!r}" if missing else "repair or uninstall the package"
        raise BrokenPluginError(
            f"backend {candidate.name!r} ({candidate.package}): importing {candidate.value} failed, so none of its "
            f"hooks can be used: {type(error).__name__}: {error}; {hint}"
        ) from error
