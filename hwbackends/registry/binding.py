"""Binding: holds every hook of a plugin against the contract, once, and hands out plain functions, so that a hook call
costs what a function call costs. pluggy checks the same implementations a second time, in its own way."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pluggy

from hwbackends.contract import hookspecs
from hwbackends.contract.hookspecs import PROJECT
from hwbackends.contract.reader import Contract, Hook, load_contract
from hwbackends.contract.signatures import Drift, compare, location_of, unknown_hook, unmarked_hook
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


def inspect_plugin(plugin: Any, contract: Contract | None = None) -> Implementations:
    """Hold every hook of a plugin against the contract; runs no hook."""
    contract = contract or load_contract()
    functions, errors = _marked(plugin)
    drifts = [unknown_hook(n, f, list(contract.hooks)) for n, f in functions.items() if n not in contract.hooks]
    for hook in contract.hooks.values():
        if hook.name not in functions:
            _read_lazily(plugin, hook.name, functions, errors)
        if hook.name in functions:
            drifts += _differences(hook, functions[hook.name])
    known = {name: function for name, function in functions.items() if name in contract.hooks}
    missing = tuple(name for name in contract.hooks if name not in known)
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
        if options is not None:
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
    if value is not absent:
        functions[name] = value


def _differences(hook: Hook, function: Any) -> tuple[Drift, ...]:
    if callable(function) and _mark(function) is None:
        return (unmarked_hook(hook, function),)
    return compare(hook, function)


def validate(candidate: Candidate, plugin: Any, contract: Contract | None = None) -> Implementations:
    """The implementations of a plugin that fits the contract.

    Raises:
        SignatureDriftError: an implementation cannot accept what the contract passes; shows every definition.
    """
    found = inspect_plugin(plugin, contract)
    if found.drifts:
        listed = "\n".join(f"  {drift}" for drift in found.drifts)
        raise SignatureDriftError(
            f"backend {candidate.name!r} ({candidate.package}) does not fit the contract:\n{listed}\n"
            f"  correct these definitions, or use a release of {candidate.distribution or candidate.name!r} that fits"
        )
    if contract is None or contract is load_contract():
        _pluggy_accepts(candidate, found.functions)
    return found


def manager() -> pluggy.PluginManager:
    """A pluggy manager that knows the hooks of the contract."""
    plugins = pluggy.PluginManager(PROJECT)
    plugins.add_hookspecs(hookspecs)
    return plugins


def _pluggy_accepts(candidate: Candidate, functions: Mapping[str, Function]) -> None:
    """Register the functions that were found, not the plugin: some versions of pluggy read every attribute of it."""
    plugins = manager()
    try:
        plugins.register(SimpleNamespace(**functions), candidate.name)
        plugins.check_pending()
    except pluggy.PluginValidationError as error:
        raise SignatureDriftError(f"backend {candidate.name!r} ({candidate.package}): {error}") from error


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a bound hook comes from: the backend that owns it and `file:line` of its definition."""

    backend: str
    location: str

    def __str__(self) -> str:
        return f"{self.backend} {self.location}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Backend:
    """A bound backend: one plain function per hook of the contract, looked up once.

    A hook that the backend does not have raises `HookNotImplementedError` when called and is not in `hook_origins`.

    Attributes:
        name: the backend's name.
        device_types: device types that it serves.
        capabilities: what its manifest claims.
        hook_origins: origin of each hook that is there; a hook from the reference names the reference.
        distribution: package that registered it.
        version: that package's version.
        contract_version: contract that the hooks were held against.
    """

    name: str
    device_types: tuple[str, ...]
    capabilities: Mapping[str, Any]
    hook_origins: Mapping[str, Origin]
    distribution: str
    version: str
    contract_version: str
    probe: Function
    prepare_decode_metadata: Function
    prepare_extend_metadata: Function
    prepare_target_verify_metadata: Function
    prepare_draft_extend_metadata: Function
    conv_decode: Function
    conv_extend: Function
    conv_target_verify: Function
    conv_draft_extend: Function
    update_mamba_state_after_mtp_verify: Function
    clear_slots: Function
    copy_slots: Function
    fused_decode_add_rmsnorm: Function
    fused_target_verify_add_rmsnorm: Function

    def has(self, hook: str) -> bool:
        """Whether the hook is there, from the backend itself or from the reference."""
        return hook in self.hook_origins


def bind(
    candidate: Candidate,
    *,
    fallback: Candidate | None = None,
    partial: bool = False,
    checked: bool = False,
    traced: bool = False,
) -> Backend:
    """Import, validate and bind one candidate.

    Args:
        candidate: the backend.
        fallback: a backend, in practice the reference, that lends the hooks which `candidate` does not have.
        partial: bind although required hooks are missing; calling one of them raises.
        checked: wrap each hook with the checks that read device memory.
        traced: write one line per hook call to the log, through pluggy's tracer.

    Raises:
        BrokenPluginError, SignatureDriftError: the plugin cannot be imported or does not fit the contract.
        HookNotImplementedError: a required hook is missing, and neither `fallback` nor `partial` was asked for.
    """
    contract = load_contract()
    found = validate(candidate, import_plugin(candidate))
    owners = {name: (candidate.name, function) for name, function in found.functions.items()}
    if fallback is not None and found.missing:
        lent = validate(fallback, import_plugin(fallback)).functions
        owners |= {name: (fallback.name, lent[name]) for name in found.missing if name in lent}
    required = [name for name in found.missing if name not in owners and not contract.hooks[name].optional]
    if required and not partial:
        raise _not_implemented(candidate, required, found.errors)
    hooks = {name: owners[name][1] if name in owners else _stub(candidate, name) for name in contract.hooks}
    origins = {name: Origin(owner, location_of(function)) for name, (owner, function) in owners.items()}
    for wrap in [_checked] * checked + [_traced] * traced:
        hooks = {name: wrap(name, function, candidate) for name, function in hooks.items()}
    return Backend(
        name=candidate.name,
        device_types=candidate.devices,
        capabilities=candidate.manifest.capabilities if candidate.manifest else {},
        hook_origins=origins,
        distribution=candidate.distribution,
        version=candidate.version,
        contract_version=contract.version,
        **hooks,
    )


def _not_implemented(
    candidate: Candidate, hooks: Sequence[str], errors: Mapping[str, Exception]
) -> HookNotImplementedError:
    """The error for missing hooks, caused by the first import error that hid one of them."""
    reasons = [f"{name} ({type(errors[name]).__name__}: {errors[name]})" if name in errors else name for name in hooks]
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
    plugins = manager()
    plugins.trace.root.setwriter(lambda text: _log.info("%s", text.rstrip()))
    trace = plugins.trace.root.get("hook")

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Any:
        trace(candidate.name, hook)
        return function(*args, **kwargs)

    return call
