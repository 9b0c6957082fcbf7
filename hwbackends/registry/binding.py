"""Binding: holds every hook of a plugin against the contract, once, and hands out plain functions, so that a hook call
costs what a function call costs. pluggy marks implementations and traces their calls; it checks nothing that the
comparison with the contract did not."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pluggy

from hwbackends.contract.claims import Claims
from hwbackends.contract.hookspecs import PROJECT, is_unwritten
from hwbackends.contract.hookspecs.conv import ConvHooks
from hwbackends.contract.hookspecs.ssm import SsmHooks
from hwbackends.contract.hookspecs.step import StepHooks
from hwbackends.contract.model import Contracts, Hook
from hwbackends.contract.reader import installed
from hwbackends.contract.signatures import (
    Drift,
    compare,
    inspected,
    location_of,
    unknown_hook,
    unmarked_hook,
    unnamed_contract,
)
from hwbackends.errors import HookNotImplementedError, SignatureDriftError
from hwbackends.registry.candidates import Candidate, import_plugin

Function = Callable[..., Any]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Implementations:
    """What a plugin implements: functions by hook, hooks that it lacks, and how they differ from the contract.

    Attributes:
        functions: implementation by hook name, whether it drifted or not.
        missing: hooks of the contract that are not there, in the contract's order.
        drifts: every difference that makes the plugin unusable.
        errors: what reading a missing hook raised.
    """

    functions: Mapping[str, Callable[..., Any]]
    missing: tuple[str, ...]
    drifts: tuple[Drift, ...]
    errors: Mapping[str, Exception]


def inspect_plugin(plugin: Any, contracts: Contracts, named: Iterable[str] | None = None) -> Implementations:
    """Hold every hook of a plugin against the contracts; runs no hook.

    Args:
        plugin: the plugin module or object.
        contracts: every contract that is here.
        named: contracts that the plugin's manifest names; hooks of others are not missing, and not to be there.
    """
    functions, errors = _marked(plugin)
    hooks = contracts.hooks
    served = contracts.only(contracts if named is None else named).hooks
    aliases = {id(functions[name]) for name in hooks if name in functions}  # `clear_slots = hookimpl(zero)` marks zero
    drifts = [
        unknown_hook(name, inspected(function), list(hooks))
        for name, function in functions.items()
        if name not in hooks and id(function) not in aliases
    ]
    drifts += [
        unnamed_contract(hooks[name], contracts.owners[name].name, inspected(function))
        for name, function in functions.items()
        if name in hooks and name not in served
    ]
    for hook in served.values():
        if hook.name not in functions:
            _read_lazily(plugin, hook.name, functions, errors)
        if hook.name in functions:
            drifts += _differences(hook, functions[hook.name])
    known = {name: function for name, function in functions.items() if name in served}
    missing = tuple(name for name in served if name not in known)
    return Implementations(known, missing, tuple(drifts), errors)


def _marked(plugin: Any) -> tuple[dict[str, Any], dict[str, Exception]]:
    """Attributes that carry the mark of `hookimpl`, by the hook that they implement."""
    functions: dict[str, Any] = {}
    errors: dict[str, Exception] = {}
    for name in dir(plugin):
        try:
            value = getattr(plugin, name)
        except Exception as error:
            errors[name] = error
            continue
        options = _mark(value)
        if options is not None and not is_unwritten(value):
            functions[options.get("specname") or name] = value
    return functions, errors


def _mark(value: Any) -> dict[str, Any] | None:
    """The options that `hookimpl` left on a function."""
    options = getattr(value, f"{PROJECT}_impl", None)
    return options if isinstance(options, dict) else None


def _read_lazily(plugin: Any, name: str, functions: dict[str, Any], errors: dict[str, Exception]) -> None:
    """Look for a hook that has no mark, or that a module's `__getattr__` makes on demand."""
    absent = object()
    try:
        value = getattr(plugin, name, absent)
    except Exception as error:
        errors[name] = error
        return
    if value is not absent and not is_unwritten(value):
        functions[name] = value


def _differences(hook: Hook, function: Any) -> tuple[Drift, ...]:
    if callable(function) and _mark(function) is None:
        return (unmarked_hook(hook, inspected(function)),)
    return compare(hook, inspected(function))


def validate(candidate: Candidate, plugin: Any, contracts: Contracts) -> Implementations:
    """The implementations of a plugin that fits the contracts.

    Raises:
        SignatureDriftError: an implementation cannot accept what the contract passes; shows every definition.
    """
    found = inspect_plugin(plugin, contracts, candidate.manifest.contracts if candidate.manifest else None)
    if found.drifts:
        listed = "\n".join(f"  {drift}" for drift in found.drifts)
        raise SignatureDriftError(
            f"backend {candidate.name!r} ({candidate.package}) does not fit the contract:\n{listed}\n"
            f"  correct these definitions, or use a release of {candidate.distribution or candidate.name!r} that fits"
        )
    return found


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a bound hook comes from: the backend that owns it and `file:line` of its definition."""

    backend: str
    location: str

    def __str__(self) -> str:
        return f"{self.backend} {self.location}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Backend(StepHooks, ConvHooks, SsmHooks):
    """A bound backend: one plain function per hook of every contract, looked up once.

    A hook that the backend does not have raises `HookNotImplementedError` when called and is not in `hook_origins`.

    Attributes:
        name: the backend's name.
        device_types: device types that it serves.
        capabilities: what its manifest claims, as it says it.
        claims: the same, read against the contract: what is claimed, with what the manifest leaves out. The backend
            offers no hook beyond it.
        hook_origins: origin of each hook that is there; a hook from the reference names the reference.
        distribution: package that registered it.
        version: that package's version.
        contracts: version of each contract that its hooks were held against: the step and the families it serves.
        hooks: its functions by hook name, which are its attributes too.
    """

    name: str
    device_types: tuple[str, ...]
    capabilities: Mapping[str, Any]
    claims: Claims
    hook_origins: Mapping[str, Origin]
    distribution: str
    version: str
    contracts: Mapping[str, str]
    hooks: Mapping[str, Function] = field(repr=False)

    def __post_init__(self) -> None:
        for name, function in self.hooks.items():
            object.__setattr__(self, name, function)

    def has(self, hook: str) -> bool:
        """Whether the hook is there, from the backend itself or from the reference."""
        return hook in self.hook_origins


def bind(
    candidate: Candidate,
    *,
    contracts: Contracts | None = None,
    fallback: Candidate | None = None,
    partial: bool = False,
    checked: bool = False,
    traced: bool = False,
) -> Backend:
    """Import, validate and bind one candidate.

    Args:
        candidate: the backend; hooks of the contracts that its manifest names are bound.
        contracts: every contract that is here; the installed ones by default.
        fallback: a backend, in practice the reference, that lends the hooks which `candidate` does not have.
        partial: bind although required hooks are missing; calling one of them raises.
        checked: wrap each hook with the checks that read device memory.
        traced: write one line per hook call to the log, through pluggy's tracer.

    Raises:
        BrokenPluginError, SignatureDriftError: the plugin cannot be imported or does not fit the contract.
        HookNotImplementedError: a required hook is missing, and neither `fallback` nor `partial` was asked for.
    """
    known = contracts or installed()
    served = known.only(candidate.manifest.contracts) if candidate.manifest else known
    found = validate(candidate, import_plugin(candidate), known)
    claims = candidate.claims or Claims(tuple(served.hooks))
    owners = {name: (candidate.name, made) for name, made in found.functions.items() if name in claims.hooks}
    missing = [name for name in served.hooks if name not in owners]
    if fallback is not None and missing:
        lent = validate(fallback, import_plugin(fallback), known).functions
        owners |= {name: (fallback.name, lent[name]) for name in missing if name in lent}
    required = [name for name in missing if name not in owners and not served.hooks[name].optional]
    if required and not partial:
        raise _not_implemented(candidate, required, found)
    hooks = {name: owners[name][1] if name in owners else _stub(candidate, name) for name in known.hooks}
    origins = {name: Origin(owner, location_of(function)) for name, (owner, function) in owners.items()}
    for wrap in [_checked] * checked + [_traced] * traced:
        hooks = {name: wrap(name, function, candidate) for name, function in hooks.items()}
    return Backend(  # type: ignore[abstract]  # __post_init__ gives it its hooks
        name=candidate.name,
        device_types=candidate.devices,
        capabilities=candidate.manifest.capabilities if candidate.manifest else {},
        claims=claims,
        hook_origins=origins,
        distribution=candidate.distribution,
        version=candidate.version,
        contracts={name: contract.version for name, contract in served.items()},
        hooks=hooks,
    )


def _not_implemented(candidate: Candidate, hooks: Sequence[str], found: Implementations) -> HookNotImplementedError:
    """The error for hooks that are not there or not claimed, caused by the first import error that hid one of them."""
    errors = found.errors
    reasons = [f"{name} ({type(errors[name]).__name__}: {errors[name]})" if name in errors else name for name in hooks]
    reasons = [f"{name} (not claimed in its manifest)" if name in found.functions else name for name in reasons]
    error = HookNotImplementedError(
        f"backend {candidate.name!r} ({candidate.package}) does not have: {', '.join(reasons)}; "
        f"repair the package, or allow hooks of the reference with load({candidate.name!r}, fallback=True)"
    )
    error.__cause__ = next((errors[name] for name in hooks if name in errors), None)
    return error


def _stub(candidate: Candidate, hook: str) -> Function:
    def missing(*args: object, **kwargs: object) -> None:
        raise HookNotImplementedError(
            f"{hook}: backend {candidate.name!r} does not have this hook; ask Backend.has({hook!r}) first, "
            f"or allow the reference's with load({candidate.name!r}, fallback=True)"
        )

    missing.__name__ = missing.__qualname__ = hook
    return missing


def _checked(hook: str, function: Function, candidate: Candidate) -> Function:
    from hwbackends.step.checks import checked

    wrapped: Function = checked(hook, function)
    return wrapped


def _traced(hook: str, function: Function, candidate: Candidate) -> Function:
    plugins = pluggy.PluginManager(PROJECT)
    plugins.trace.root.setwriter(lambda text: _log.info("%s", text.rstrip()))
    trace = plugins.trace.root.get("hook")

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Any:
        trace(candidate.name, hook)
        return function(*args, **kwargs)

    return call
