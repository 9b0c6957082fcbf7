"""Does a definition accept exactly what the contract passes? The only comparison of a definition with a hook: the
registry brings functions (`inspected`), the checker brings source (`source.described`), and both get the same verdict,
word for word."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hwbackends.contract.document import nearest
from hwbackends.contract.model import Hook

Parameters = tuple[inspect.Parameter, ...]
_CATCH_ALL = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


class Unknown:
    """A default whose value the source does not tell: it is there, and is not compared."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Definition:
    """What an implementation is, whether it was read from a function or from source.

    Attributes:
        parameters: as a caller sees them, `self` left out; a default that cannot be known is an `Unknown`.
        fault: why it is no plain function that could be compared; empty if it is one.
        location: `file:line`.
        text: its first line of source, or its signature where there is no source.
    """

    parameters: Parameters
    fault: str = ""
    location: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Drift:
    """One way in which an implementation differs from the contract.

    Attributes:
        kind: `missing`, `renamed`, `extra-required`, `hiding-default`, `lost-default`, `other-default`, `order`,
            `keyword-only`, `positional-only`, `catch-all`, `not-a-function`, `unknown-hook`, `unnamed-contract` or
            `unmarked`.
        hook: name of the hook.
        parameters: the parameters it is about.
        message: the sentence to show.
        location: `file:line` of the definition.
        definition: its first line of source, or its signature where there is no source.
    """

    kind: str
    hook: str
    parameters: tuple[str, ...]
    message: str
    location: str
    definition: str

    def __str__(self) -> str:
        return f"{self.location}: {self.hook}: {self.message}\n    {self.definition}"


def location_of(function: Any) -> str:
    """`file:line` where a function is defined; its module where it has no Python source."""
    function = _unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return str(getattr(function, "__module__", None) or type(function).__module__)
    return f"{code.co_filename}:{code.co_firstlineno + _decorators(function)}"


def definition_of(function: Any) -> str:
    """`def name(parameters)` on one line, as the signature says it."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        signature = _signature(function)
    except (TypeError, ValueError):
        return f"{function!r}"
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return f"def {name}{signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)}"


def inspected(function: Any) -> Definition:
    """What a plugin's attribute is."""
    try:
        parameters, fault = tuple(_signature(function).parameters.values()), ""
    except (TypeError, ValueError) as error:
        parameters, fault = (), f"has no readable signature ({error})"
    if not callable(function):
        hint = "; was a failed import swallowed?" if function is None else ""
        fault = f"is {'None' if function is None else f'a {type(function).__name__}'}, wanted a function{hint}"
    elif _is_special(function):
        fault = SPECIAL
    return Definition(parameters, fault, location_of(function), definition_of(function))


SPECIAL = "is a coroutine or generator, wanted a plain function"


def compare(hook: Hook, definition: Definition) -> tuple[Drift, ...]:
    """Every way in which a definition cannot be called as `hook` is, or would hide an argument that was left out.

    Parameters with a default behind all of the hook's are allowed: a backend may keep private tuning knobs.
    """
    if definition.fault:
        return (_drift(hook, definition, "not-a-function", (), definition.fault),)
    got = list(definition.parameters)
    found = [*_catch_alls(got), *_names(hook, got), *_order(hook, got), *_kinds(hook, got), *_defaults(hook, got)]
    return tuple(_drift(hook, definition, *item) for item in found)


_Finding = tuple[str, tuple[str, ...], str]


def _catch_alls(got: list[inspect.Parameter]) -> list[_Finding]:
    return [
        ("catch-all", (p.name,), f"catch-all {_CATCH_ALL[p.kind]}{p.name} hides a drift; name every parameter")
        for p in got
        if p.kind in _CATCH_ALL
    ]


def _names(hook: Hook, got: list[inspect.Parameter]) -> list[_Finding]:
    """Missing, renamed and extra required parameters."""
    named = [p for p in got if p.kind not in _CATCH_ALL]
    names, wanted = [p.name for p in named], [p.name for p in hook.parameters]
    missing = [name for name in wanted if name not in names]
    extra = [p for p in named if p.name not in wanted]
    found: list[_Finding] = []
    for old in list(missing):
        index = wanted.index(old)
        new = names[index] if index < len(names) else ""
        if new and new not in wanted:
            missing.remove(old)
            extra = [p for p in extra if p.name != new]
            found.append(("renamed", (old,), f"parameter {old!r} is called {new!r}"))
    if missing:
        found.append(("missing", tuple(missing), f"parameters missing: {', '.join(missing)}"))
    required = tuple(p.name for p in extra if p.default is p.empty)
    if required:
        found.append(("extra-required", required, f"parameters that nobody passes: {', '.join(required)}"))
    return found


def _order(hook: Hook, got: list[inspect.Parameter]) -> list[_Finding]:
    wanted = [p.name for p in hook.parameters]
    common = [p.name for p in got if p.name in wanted]
    expected = [name for name in wanted if name in common]
    positions = [index for index, p in enumerate(got) if p.name in wanted]
    if common != expected:
        return [("order", tuple(common), f"positional order is {', '.join(common)}, wanted {', '.join(expected)}")]
    early = [p.name for index, p in enumerate(got) if positions and index < positions[-1] and p.name not in wanted]
    if early and len(common) == len(wanted):
        return [("order", tuple(early), f"{', '.join(early)} stands before parameters of the contract")]
    return []


def _kinds(hook: Hook, got: list[inspect.Parameter]) -> list[_Finding]:
    wanted = {p.name for p in hook.parameters}
    words = {
        inspect.Parameter.KEYWORD_ONLY: ("keyword-only", "cannot be passed by position"),
        inspect.Parameter.POSITIONAL_ONLY: ("positional-only", "cannot be passed by name"),
    }
    return [
        (words[p.kind][0], (p.name,), f"parameter {p.name!r} {words[p.kind][1]}")
        for p in got
        if p.name in wanted and p.kind in words
    ]


def _defaults(hook: Hook, got: list[inspect.Parameter]) -> list[_Finding]:
    found: list[_Finding] = []
    implemented = {p.name: p for p in got}
    for wanted in hook.parameters:
        p = implemented.get(wanted.name)
        if p is None:
            continue
        has_default = p.default is not p.empty
        if wanted.required and has_default:
            text = f"default {p.default!r} of {p.name!r} hides an argument that was left out; remove it"
            found.append(("hiding-default", (p.name,), text))
        elif not wanted.required and not has_default:
            found.append(("lost-default", (p.name,), f"{p.name!r} needs the default {wanted.default!r}"))
        elif has_default and not _same(p.default, wanted.default):
            text = f"default of {p.name!r} is {p.default!r}, wanted {wanted.default!r}"
            found.append(("other-default", (p.name,), text))
    return found


def _same(one: object, other: object) -> bool:
    return isinstance(one, Unknown) or (type(one) is type(other) and one == other)


def _drift(hook: Hook, definition: Definition, kind: str, parameters: tuple[str, ...], message: str) -> Drift:
    return Drift(kind, hook.name, parameters, message, definition.location, definition.text)


def unknown_hook(name: str, definition: Definition, known: list[str]) -> Drift:
    """A function that is marked as an implementation of a hook that the contract does not have."""
    message = f"no such hook in the contract{nearest(name, known)}"
    return Drift("unknown-hook", name, (), message, definition.location, definition.text)


def unnamed_contract(hook: Hook, contract: str, definition: Definition) -> Drift:
    """An implementation of a hook whose contract the plugin's manifest does not name."""
    message = f"a hook of contract {contract}, which the manifest does not name; add {contract} under contracts"
    return _drift(hook, definition, "unnamed-contract", (), message)


def unmarked_hook(hook: Hook, definition: Definition) -> Drift:
    """A function that has a hook's name but is not marked as its implementation."""
    return _drift(
        hook, definition, "unmarked", (), "has the name of a hook but no @hookimpl; add the mark or rename it"
    )


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature as a call sees it: wrappers are not looked through, since it is they that are called."""
    plain = function.__func__ if isinstance(function, staticmethod) else function
    return inspect.signature(plain, follow_wrapped=False)


def _unwrap(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__func__", function)


def _decorators(function: Any) -> int:
    """Lines between the first decorator, where a code object starts, and the `def`."""
    try:
        lines, _ = inspect.getsourcelines(function)
    except (OSError, TypeError):
        return 0
    return next((index for index, line in enumerate(lines) if line.lstrip().startswith(("def ", "async def "))), 0)


def _is_special(function: Any) -> bool:
    return any(
        check(function)
        for check in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    )
