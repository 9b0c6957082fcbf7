"""Registry and checker give the same verdict on the same plugin: one imports it, the other reads its source. Every kind
of wrong signature, at every parameter of every hook, and every form in which a definition can be written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from hwbackends.checker.contract import _RULES
from hwbackends.checker.engine import Options, run
from hwbackends.contract.reader import installed
from hwbackends.registry.binding import inspect_plugin

CONTRACTS = installed()
HEAD = "import functools\nfrom hwbackends.contract.hookspecs import hookimpl\n\n"

Parameters = list[tuple[str, str]]
"""Name and default, as source; no default is empty."""


def parameters_of(hook: str) -> Parameters:
    return [(p.name, "" if p.required else repr(p.default)) for p in CONTRACTS.hooks[hook].parameters]


def definition(hook: str, parameters: Parameters | str) -> str:
    if isinstance(parameters, str):
        text = parameters
    else:
        text = ", ".join(f"{name}={default}" if default else name for name, default in parameters)
    return f"@hookimpl\ndef {hook}({text}):\n    return locals()\n"


def plugin(changed: dict[str, str]) -> str:
    """A plugin's source with every hook as the contract has it, but for those in `changed`."""
    whole = {hook: definition(hook, parameters_of(hook)) for hook in CONTRACTS.hooks}
    return HEAD + "\n\n".join({**whole, **changed}.values())


def by_the_registry(path: Path) -> set[tuple[str, str, str]]:
    """Hook, rule and words of each drift that importing and inspecting finds."""
    spec = spec_from_file_location("judged_plugin", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules.pop("judged_plugin", None)
    spec.loader.exec_module(module)
    drifts = inspect_plugin(module, CONTRACTS).drifts
    return {(drift.hook, _RULES.get(drift.kind, "HWB110"), drift.message) for drift in drifts}


def by_the_checker(path: Path) -> set[tuple[str, str, str]]:
    """The same, from the source alone."""
    findings = run([str(path)], Options(contract=CONTRACTS, jobs=1)).findings
    found = set()
    for finding in findings:
        _, mark, rest = finding.message.partition(", hook ")
        if mark:
            hook, _, words = (
                rest.removesuffix(" Fix: define it as the contract does.").removesuffix(".").partition(": ")
            )
            found.add((hook, finding.rule, words))
    return found


def verdicts(folder: Path, source: str) -> tuple[set[Any], set[Any]]:
    path = folder / "plugin.py"
    path.write_text(source, encoding="utf-8")
    return by_the_registry(path), by_the_checker(path)


def renamed(parameters: Parameters, index: int) -> Parameters:
    name, default = parameters[index]
    return [*parameters[:index], (f"{name}_2", default), *parameters[index + 1 :]]


def defaulted(parameters: Parameters, index: int, default: str) -> Parameters:
    """A default at `index`, and behind it wherever Python wants one."""
    later = [(name, value or "None") for name, value in parameters[index + 1 :]]
    return [*parameters[:index], (parameters[index][0], default), *later]


def written(parameters: Parameters, index: int, mark: str, before: bool) -> str:
    texts = [f"{name}={default}" if default else name for name, default in parameters]
    return ", ".join([*texts[: index + (not before)], mark, *texts[index + (not before) :]])


def without_default(parameters: Parameters, index: int) -> Parameters:
    return [(name, "" if place <= index else default) for place, (name, default) in enumerate(parameters)]


CHANGES: dict[str, Callable[[Parameters, int], Parameters | str]] = {
    "a parameter is missing": lambda p, i: [*p[:i], *p[i + 1 :]],
    "a parameter has another name": renamed,
    "an extra one is required": lambda p, i: [*without_default(p[:i], i), ("extra", ""), *p[i:]],
    "an extra one with a default stands before the contract's": lambda p, i: [
        *p[:i],
        ("_extra", "7"),
        *[(name, default or "None") for name, default in p[i:]],
    ],
    "a default hides a missing argument": lambda p, i: defaulted(p, i, "None"),
    "the default is another one": lambda p, i: defaulted(p, i, "'other'"),
    "the default has another type": lambda p, i: defaulted(p, i, "0"),
    "the default is lost": without_default,
    "the order is another one": lambda p, i: [*[(n, "") for n, _ in reversed(p[: i + 1])], *p[i + 1 :]],
    "the rest is taken by name only": lambda p, i: written(p, i, "*", True),
    "what stands before is taken by position only": lambda p, i: written(p, i, "/", False),
    "the rest goes into **kwargs": lambda p, i: ", ".join([*[f"{n}={d}" if d else n for n, d in p[:i]], "**kwargs"]),
    "the rest goes into *args": lambda p, i: ", ".join([*[f"{n}={d}" if d else n for n, d in p[:i]], "*args"]),
    "a default is a constant of the module": lambda p, i: defaulted(p, i, "NOTHING"),
}
LONGEST = max(len(hook.parameters) for hook in CONTRACTS.hooks.values())


@pytest.mark.parametrize("index", range(LONGEST))
@pytest.mark.parametrize("change", CHANGES)
def test_a_wrong_parameter_gets_the_same_verdict_from_both_in_the_same_words(
    tmp_path: Path, change: str, index: int
) -> None:
    hooks = [hook for hook in CONTRACTS.hooks if len(parameters_of(hook)) > index]
    changed = {hook: definition(hook, CHANGES[change](parameters_of(hook), index)) for hook in hooks}
    source = plugin(changed).replace(HEAD, f"{HEAD}NOTHING = None\n\n")
    registry, checker = verdicts(tmp_path, source)
    assert checker == registry
    harmless = {"the default is lost", "the order is another one", "a default is a constant of the module"}
    own = all(p[index][1] == "None" for p in map(parameters_of, hooks))
    assert registry or change in harmless or own, "nothing was wrong with it"


def test_the_case_that_passed_the_check_is_refused_with_the_registrys_words(tmp_path: Path) -> None:
    hidden = "x, weight, bias=None, state=None, metadata=None, activation=None, residual=False, out=None"
    registry, checker = verdicts(tmp_path, plugin({"conv_decode": definition("conv_decode", hidden)}))
    words = "default None of {!r} hides an argument that was left out; remove it"
    hides = {("conv_decode", "HWB110", words.format(name)) for name in ("bias", "state", "metadata")}
    assert (registry, checker) == (hides, hides)


PLAIN = "def plain(pool, cache_indices): ...\n"
FORMS = {
    "as the contract says": definition("clear_slots", "pool, cache_indices"),
    "with a private knob behind": definition("clear_slots", "pool, cache_indices, _block=128, *, _warps=4"),
    "a knob that is required": definition("clear_slots", "pool, cache_indices, *, stream"),
    "a lambda": "clear_slots = hookimpl(lambda pool, cache_indices: None)\n",
    "a lambda that lacks one": "clear_slots = hookimpl(lambda pool: None)\n",
    "an assignment": PLAIN + "clear_slots = hookimpl(plain)\n",
    "an assignment that hides one": "def plain(pool, cache_indices=None): ...\nclear_slots = hookimpl(plain)\n",
    "a coroutine": "@hookimpl\nasync def clear_slots(pool, cache_indices): ...\n",
    "a generator": "@hookimpl\ndef clear_slots(pool, cache_indices):\n    yield pool\n",
    "a generator that delegates": "@hookimpl\ndef clear_slots(pool, cache_indices):\n    yield from pool\n",
    "a function with a generator inside": (
        "@hookimpl\ndef clear_slots(pool, cache_indices):\n    def inner():\n        yield pool\n    return inner\n"
    ),
    "a static method": "@hookimpl\n@staticmethod\ndef clear_slots(pool, cache_indices): ...\n",
    "a wrapper that takes anything": (
        PLAIN
        + "@hookimpl\n@functools.wraps(plain)\ndef clear_slots(*args, **kwargs):\n    return plain(*args, **kwargs)\n"
    ),
    "a decorator that puts a wrapper in its place": (
        "def logged(function):\n    @functools.wraps(function)\n    def call(*args, **kwargs):\n"
        "        return function(*args, **kwargs)\n    return call\n\n"
        "@hookimpl\n@logged\ndef clear_slots(pool, cache_indices): ...\n"
    ),
    "a decorator with options": (
        "def logged(level):\n    def decorate(function):\n        def call(pool, cache_indices=None):\n"
        "            return function(pool, cache_indices)\n        return call\n    return decorate\n\n"
        "@hookimpl\n@logged(3)\ndef clear_slots(pool, cache_indices): ...\n"
    ),
    "a decorator that returns what it got": (
        "def same(function):\n    return function\n\n@hookimpl\n@same\ndef clear_slots(pool, cache_indices=None): ...\n"
    ),
    "a wrapper with the contract's parameters": (
        "def checked(function):\n    @functools.wraps(function)\n    def call(pool, cache_indices):\n"
        "        return function(pool, cache_indices)\n    return call\n\n"
        "@hookimpl\n@checked\ndef clear_slots(*args): ...\n"
    ),
    "a mark under the decorator": (
        "def logged(function):\n    @functools.wraps(function)\n    def call(*args):\n"
        "        return function(*args)\n    return call\n\n"
        "@logged\n@hookimpl\ndef clear_slots(pool, cache_indices): ...\n"
    ),
    "another name in the source": "@hookimpl(specname='clear_slots')\ndef zero(pool, cache_indices): ...\n",
    "another name in the source, and one missing": "@hookimpl(specname='clear_slots')\ndef zero(pool): ...\n",
    "a name that no hook has": (
        definition("clear_slots", "pool, cache_indices") + "\n@hookimpl\ndef clear_slot(pool, cache_indices): ...\n"
    ),
    "no mark": "def clear_slots(pool, cache_indices): ...\n",
    "None from a failed import": "clear_slots = None\n",
    "a number": "clear_slots = 5\n",
    "under a condition": "if True:\n    @hookimpl\n    def clear_slots(pool): ...\n",
    "under try": "try:\n    @hookimpl\n    def clear_slots(pool): ...\nexcept ImportError:\n    pass\n",
    "a partial": ("def tuned(scale, pool, cache_indices): ...\nclear_slots = hookimpl(functools.partial(tuned, 3))\n"),
    "a partial that fills too much": (
        "def tuned(pool, cache_indices): ...\nclear_slots = hookimpl(functools.partial(tuned, 3))\n"
    ),
    "a default that is computed": (
        "def nothing(): ...\n@hookimpl\ndef clear_slots(pool, cache_indices, _knob=nothing()): ...\n"
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_definition_gets_the_same_verdict_from_both_in_the_same_words(tmp_path: Path, form: str) -> None:
    registry, checker = verdicts(tmp_path, plugin({"clear_slots": FORMS[form]}))
    assert checker == registry


@pytest.mark.parametrize("decorator", ["functools.lru_cache", "functools.cache", "functools.lru_cache(maxsize=None)"])
def test_a_cache_in_a_hooks_place_is_refused_by_both(tmp_path: Path, decorator: str) -> None:
    """What stands there has no signature; each says so in its own words."""
    cached = f"@hookimpl\n@{decorator}\ndef clear_slots(pool, cache_indices): ...\n"
    registry, checker = verdicts(tmp_path, plugin({"clear_slots": cached}))
    assert [item[:2] for item in checker] == [item[:2] for item in registry] == [("clear_slots", "HWB110")]


@pytest.mark.parametrize("decorator", ["torch.no_grad()", "torch.inference_mode()", "contextlib.contextmanager"])
def test_a_wrapper_of_a_known_library_is_seen_by_both(tmp_path: Path, decorator: str) -> None:
    source = f"import contextlib\nimport torch\n@hookimpl\n@{decorator}\ndef clear_slots(pool, cache_indices): ...\n"
    registry, checker = verdicts(tmp_path, plugin({"clear_slots": source}))
    rules = {(hook, rule) for hook, rule, _ in registry}
    assert {(hook, rule) for hook, rule, _ in checker} == rules
    assert ("clear_slots", "HWB110") in rules


def test_an_object_that_is_the_plugin_is_judged_without_its_receiver(tmp_path: Path) -> None:
    methods = {
        hook: ", ".join(["self", *[f"{name}={default}" if default else name for name, default in parameters_of(hook)]])
        for hook in CONTRACTS.hooks
    }
    methods["clear_slots"] = "self, pool, cache_indices=None"
    body = "".join(f"    @hookimpl\n    def {hook}({text}): ...\n" for hook, text in methods.items())
    path = tmp_path / "plugin.py"
    path.write_text(f"{HEAD}class Plugin:\n{body}", encoding="utf-8")
    scope: dict[str, Any] = {}
    exec(path.read_text(), scope)
    drifts = inspect_plugin(scope["Plugin"](), CONTRACTS).drifts
    words = {(drift.hook, _RULES.get(drift.kind, "HWB110"), drift.message) for drift in drifts}
    assert words == by_the_checker(path)
    assert {hook for hook, *_ in words} == {"clear_slots"}
