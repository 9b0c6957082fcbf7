"""What a bound hook call costs against a plain function call and against a call through pluggy.

    PYTHONPATH=. python benchmarks/registry_call.py [--json]

Two implementations are called: `empty` returns at once, so that nothing but the call is seen; `checking` compares
attributes of its arguments first, the least that any real hook does. Each is called four ways: `plain`, as a function
of the caller's module; `held`, as the function that the caller took from the backend once; `bound`, as an attribute of
the backend; `pluggy`, as a hook call. Nanoseconds per call, the least of many short rounds taken in turn, so that a
busy machine disturbs all alike. Needs no torch."""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import timeit
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pluggy

from hwbackends.contract.hookspecs import PROJECT
from hwbackends.contract.reader import installed
from hwbackends.registry.binding import Backend, bind
from hwbackends.registry.candidates import discover, import_plugin
from tests.registry import fake_plugins

HOOK = "conv_decode"
BODIES = {
    "empty": "return x",
    "checking": "if x.shape != state.shape or x.dtype is not weight.dtype: raise ValueError\n    return x",
}


def bound_plugin(folder: Path, body: str) -> tuple[Backend, ModuleType]:
    """A backend of which `conv_decode` has the given body, installed into `folder`, and its module."""
    source = fake_plugins.plugin_source({HOOK: fake_plugins.definition(HOOK, body=BODIES[body])})
    with fake_plugins.site(folder) as site:
        site.install("instant", source=source)
        (candidate,) = discover(site.points())
        return bind(candidate), import_plugin(candidate)


def measure(backend: Backend, plugin: Any, rounds: int = 200, calls: int = 2_000) -> dict[str, float]:
    """Nanoseconds per call, the least of `rounds` rounds of `calls` calls each."""
    plugins = pluggy.PluginManager(PROJECT)
    plugins.register(plugin, "instant")
    tensor = SimpleNamespace(shape=(3, 5), dtype="float32")
    given = {p.name: tensor for p in installed().hooks[HOOK].parameters}
    scope = {"plain": getattr(plugin, HOOK), "backend": backend, "hook": plugins.hook, "given": given, **given}
    arguments = ", ".join(given)
    timers = {
        "plain": timeit.Timer(f"plain({arguments})", globals=scope),
        "held": timeit.Timer(f"held({arguments})", setup=f"held = backend.{HOOK}", globals=scope),
        "bound": timeit.Timer(f"backend.{HOOK}({arguments})", globals=scope),
        "pluggy": timeit.Timer(f"hook.{HOOK}(**given)", globals=scope),
    }
    least = dict.fromkeys(timers, float("inf"))
    for _ in range(rounds):
        for name, timer in timers.items():
            least[name] = min(least[name], timer.timeit(calls) / calls * 1e9)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = {}
    for body in BODIES:
        with tempfile.TemporaryDirectory() as folder:
            figures[body] = measure(*bound_plugin(Path(folder), body))
    if options.json:
        print(json.dumps({"pluggy": pluggy.__version__, "python": platform.python_version(), "ns": figures}))
        return
    for body, least in figures.items():
        ratios = ", ".join(f"{name} {ns:.0f} ns ({ns / least['plain']:.2f})" for name, ns in least.items())
        print(f"{body:>9}: {ratios}")


if __name__ == "__main__":
    main()
