"""Whether an engine's plugin takes part: switches, supported versions, the contract check of an engine tree whose
version is unknown, the log line at start, and the entries of `hwbackends doctor`. Imports no torch and no engine."""

from __future__ import annotations

import enum
import inspect
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet

from hwbackends.contract.reader import contracts_folder
from hwbackends.errors import ContractError, UnsupportedError
from hwbackends.registry.manifest import module_folders

PLUGIN_NAME = "hwbackends"
"""Name of the plugin's entry point in every engine's group."""

_RELEASE = re.compile(r"(\d+(?:\.\d+)*)(?:\+[A-Za-z0-9.]+)?")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine that a plugin exists for.

    Attributes:
        name: its name, as in `contracts/engines/NAME.yaml`.
        title: its name for people.
        package: top-level package; the tree that the contract check reads.
        distributions: distributions that bring the package, first installed one wins.
        supported: versions that the plugin was tested with.
        switch: environment variable that asks for the plugin (1) or forbids it (0).
        allowlist: the engine's own comma-separated list of plugins to load.
        group: entry-point group in which the engine looks for plugins.
        relies_on: files of the package, relative to it, that the plugin builds on.
    """

    name: str
    title: str
    package: str
    distributions: tuple[str, ...]
    supported: str
    switch: str
    allowlist: str
    group: str
    relies_on: tuple[str, ...]


def engines() -> tuple[Engine, ...]:
    """The record of each engine that has a folder here with a `record.py`."""
    here = Path(__file__).parent
    names = sorted(path.parent.name for path in here.glob("*/record.py"))
    return tuple(import_module(f"hwbackends.engines.{name}.record").ENGINE for name in names)


class PluginState(enum.StrEnum):
    """What becomes of a plugin: it takes part, nobody asked for it, it must not take part, or there is no engine."""

    ACTIVE = "active"
    OFF = "off"
    REFUSED = "refused"
    NO_ENGINE = "engine not installed"


@dataclass(frozen=True, slots=True)
class Decision:
    """The state of one engine's plugin and why, with the engine's version."""

    engine: Engine
    state: PluginState
    reason: str
    version: str | None = None


def installed_version(engine: Engine) -> str | None:
    """Version of the installed engine, None if it is not installed."""
    for name in engine.distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def decide(engine: Engine) -> Decision:
    """Whether the engine's plugin takes part here, from the environment and what is installed. Imports nothing."""
    version = installed_version(engine)
    if version is None:
        return Decision(engine, PluginState.NO_ENGINE, f"no distribution {' or '.join(engine.distributions)}")
    off = _off_reason(engine)
    if off is not None:
        return Decision(engine, PluginState.OFF, off, version)
    problem = version_problem(engine, version)
    if problem is not None:
        return Decision(engine, PluginState.REFUSED, f"{problem}; {engine.title} keeps its own code", version)
    return Decision(engine, PluginState.ACTIVE, f"{engine.title} {version} is supported", version)


def _off_reason(engine: Engine) -> str | None:
    """Why nobody asked for the plugin, None if somebody did. The own switch is heard before the engine's list."""
    switch = os.environ.get(engine.switch, "").strip().lower()
    if switch in ("0", "false", "off", "no"):
        return f"{engine.switch}={switch}"
    listed = os.environ.get(engine.allowlist)
    names = {name.strip() for name in (listed or "").split(",")}
    if listed and PLUGIN_NAME not in names:
        return f"{engine.allowlist}={listed} leaves {PLUGIN_NAME} out"
    if switch or PLUGIN_NAME in names:
        return None
    return f"not asked for; set {engine.switch}=1"


def version_problem(engine: Engine, version: str) -> str | None:
    """Why this version cannot be served, None if it can. A version that names no release has its tree checked."""
    release = _RELEASE.fullmatch(version)
    if release is not None and release[1].strip("0."):
        if release[1] in SpecifierSet(engine.supported):
            return None
        return f"{engine.title} {version} is outside the supported range {engine.supported}"
    findings = contract_findings(engine)
    if not findings:
        return None
    return (
        f"{engine.title} {version} names no release of the supported range {engine.supported}, and its hooks do not "
        f"fit contracts/engines/{engine.name}.yaml: {'; '.join(findings)}"
    )


def contract_findings(engine: Engine, tree: Path | None = None) -> list[str]:
    """What keeps the plugin from an engine's tree, one line each: files that it builds on and that are gone, and what
    `hwbackends check` finds in those that are there. Nothing of the tree is imported.

    Args:
        engine: its file in `contracts/engines` is the contract.
        tree: check this folder instead of the installed package.
    """
    folders = [tree] if tree is not None else module_folders(engine.package)
    if not folders:
        return [f"the tree of package {engine.package} is not there"]
    root = folders[0]
    missing = [f"{name} is not there" for name in engine.relies_on if not (root / name).is_file()]
    if missing:
        return missing
    try:
        contract = contracts_folder() / "engines" / f"{engine.name}.yaml"
    except ContractError as error:
        return [str(error)]
    if not contract.is_file():
        return [f"{contract} is not there, so nothing could be checked"]
    found = _run_checker([str(root), "--contract", str(contract)])
    ours = {str(root / name) for name in engine.relies_on}
    return [text for text, files in found if files is None or ours & files]


def _run_checker(arguments: list[str]) -> list[tuple[str, set[str] | None]]:
    """Findings of `hwbackends check` with the files that each names (None: it could not run), from a process of its
    own: an engine's process is no place to read 4,000 files in."""
    command = [sys.executable, "-m", "hwbackends", "check", *arguments, "--format", "json", "--no-cache"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        findings = json.loads(done.stdout)["findings"]
    except (ValueError, KeyError):
        return [(f"hwbackends check stopped with status {done.returncode}: {done.stderr.strip()[-500:]}", None)]
    return [
        (
            f"{item['rule']} {item['message'].splitlines()[0]}",
            {place["file"] for place in (item["definition"], item["call"]) if place},
        )
        for item in findings
    ]


def hold_overrides(replacement: type, base: type, own: Iterable[str] = ()) -> None:
    """Check, before a class goes into an engine, that every method which it overrides is still there and is still
    called with parameters that the override takes. An override of a method that was renamed would never run.

    Args:
        replacement: our class.
        base: the engine's class that it replaces.
        own: methods that are ours and override nothing.

    Raises:
        UnsupportedError: a method is gone, or has a parameter that the override does not take.
    """
    for name, function in vars(replacement).items():
        if name in own or not inspect.isfunction(function):
            continue
        original = getattr(base, name, None)
        where = f"{base.__module__}.{base.__qualname__}.{name}"
        if not callable(original):
            raise UnsupportedError("engine plugin", where, "nothing", "the method that the plugin overrides", _HINT)
        taken = inspect.signature(function).parameters
        if any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            continue
        passed = [n for n, p in inspect.signature(original).parameters.items() if p.kind not in (_STAR, _STARS)]
        unknown = [n for n in passed if n not in taken]
        if unknown and not any(p.kind is _STAR for p in taken.values()):
            raise UnsupportedError("engine plugin", where, f"parameters {unknown}", f"{list(taken)}", _HINT)


_STAR, _STARS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
_HINT = "this release of the engine is not the one that the plugin was written for"


_ACTIVATED: dict[str, str] = {}


def activate(engine: Engine, install: Callable[[], str]) -> bool:
    """Run `install` if the plugin takes part; say in one log line what became of it. Called by the engine, in each of
    its processes; nothing that goes wrong here stops the engine.

    Args:
        engine: the engine that called.
        install: puts the plugin's classes in; returns what they serve, for the log.

    Returns:
        Whether the plugin is active.
    """
    decision = decide(engine)
    if decision.state is not PluginState.ACTIVE:
        level = logging.WARNING if decision.state is PluginState.REFUSED else logging.INFO
        _log.log(level, "hwbackends: %s plugin %s: %s", engine.title, decision.state, decision.reason)
        return False
    try:
        served = f"{install()}, backend {_backend_name()}"
    except Exception as error:  # whatever it is, an engine that could serve must not die of its plugin
        _log.warning(
            "hwbackends: %s plugin failed, %s keeps its own code: %s: %s",
            engine.title,
            engine.title,
            type(error).__name__,
            error,
        )
        return False
    _ACTIVATED[engine.name] = served
    # a warning, because engines set up their own loggers and leave the root logger at its default level
    _log.warning("hwbackends: %s %s: %s", engine.title, decision.version, served)
    return True


def _backend_name() -> str:
    """The backend that `load()` takes here; a machine without one keeps the engine's own code."""
    from hwbackends.registry.loading import load

    return load().name


def require_active(engine: Engine) -> str:
    """What the plugin serves in this process; for programs that must not run on the engine's own code by accident.

    Raises:
        UnsupportedError: the plugin is not active here; says why.
    """
    served = _ACTIVATED.get(engine.name)
    if served is None:
        decision = decide(engine)
        hint = f"load {engine.title}'s plugins first, and see its log" if decision.state is PluginState.ACTIVE else ""
        raise UnsupportedError(f"{engine.title} plugin", "state", decision.reason, "an active plugin", hint)
    return served


def status() -> list[dict[str, str]]:
    """One entry per engine for `hwbackends doctor`."""
    entries = []
    for engine in engines():
        decision = decide(engine)
        entries.append(
            {
                "engine": engine.name,
                "state": str(decision.state),
                "reason": _with_entry_point(decision),
                "version": decision.version or "-",
                "supported": engine.supported,
                "switch": engine.switch,
            }
        )
    return entries


def _with_entry_point(decision: Decision) -> str:
    """The reason, and whether the engine can find the plugin at all."""
    group = metadata.entry_points(group=decision.engine.group)
    if any(point.name == PLUGIN_NAME for point in group):
        return decision.reason
    return f"{decision.reason}; no entry point {PLUGIN_NAME} in {decision.engine.group}: reinstall hwbackends"
