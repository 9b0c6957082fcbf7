"""`hwbackends doctor`: what is installed, what can run here, what would be chosen and why. Reads metadata, manifests
and source, and asks the plugins' probes; imports no torch unless a plugin's own probe does so, or `--load` is given."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from hwbackends import __version__
from hwbackends.contract.model import Contract, Contracts
from hwbackends.contract.reader import installed
from hwbackends.errors import HwBackendsError
from hwbackends.registry.binding import inspect_plugin
from hwbackends.registry.candidates import Candidate, State, import_plugin, light_module
from hwbackends.registry.loading import REFERENCE, backends
from hwbackends.registry.selection import ENVIRONMENT, Request, select

TRITON = ("triton", "pytorch-triton-rocm", "triton-ascend")
PACKAGES = ("torch", *TRITON, "torch_npu", "transformers", "sglang", "vllm", "pluggy")
_COLOURS = {State.AVAILABLE: "green", State.UNAVAILABLE: "yellow"}


def tiers_of(candidate: Candidate, hooks: Iterable[str]) -> dict[str, str]:
    """Which of a plugin's own tiers serves each hook: what `hook_origins()` of its `probe.py` says, if it has one."""
    if candidate.state in (State.BROKEN, State.DUPLICATE, State.INCOMPATIBLE):
        return {}
    tell = getattr(light_module(candidate), "hook_origins", dict)
    try:
        return dict(tell())
    except HwBackendsError as error:
        return dict.fromkeys(hooks, str(error))


def report(device: str | None = None, *, load: bool = False, contracts: Contracts | None = None) -> dict[str, Any]:
    """Everything that the doctor knows, as JSON-ready data.

    Args:
        device: probe and choose for this device.
        load: also import every available plugin and hold its hooks against the contracts.
        contracts: the contracts; the installed ones by default.
    """
    contracts = contracts or installed()
    candidates = backends(device)
    return {
        "hwbackends": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "contracts": {name: {"version": c.version, "path": str(c.path)} for name, c in contracts.items()},
        "packages": {name: _version(name) for name in PACKAGES},
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("HWBACKENDS_")},
        "selection": _selection(device, candidates),
        "backends": [_describe(candidate, contracts, load) for candidate in candidates],
        "engines": _engines(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _selection(device: str | None, candidates: tuple[Candidate, ...]) -> dict[str, str | None]:
    request = Request(None, device, os.environ.get(ENVIRONMENT, ""))
    try:
        chosen = select(request, candidates)
    except HwBackendsError as error:
        return {"device": device, "name": None, "rule": None, "error": str(error)}
    return {"device": device, "name": chosen.candidate.name, "rule": chosen.rule, "error": None}


def _describe(candidate: Candidate, contracts: Contracts, load: bool) -> dict[str, Any]:
    manifest = candidate.manifest
    return {
        "name": candidate.name,
        "state": str(candidate.state),
        "reason": candidate.reason,
        "hint": candidate.hint,
        "distribution": candidate.distribution,
        "version": candidate.version,
        "module": candidate.value,
        "manifest": str(manifest.path) if manifest else None,
        "contracts": dict(manifest.contracts) if manifest else {},
        "devices": list(candidate.devices),
        "priority": candidate.priority,
        "hooks": candidate.hook_origins,
        "tiers": tiers_of(candidate, contracts.hooks),
        "drifts": _drifts(candidate, contracts) if load else None,
    }


def _drifts(candidate: Candidate, contracts: Contracts) -> list[str]:
    """What importing and validating an available plugin finds."""
    if candidate.state is not State.AVAILABLE:
        return []
    named = candidate.manifest.contracts if candidate.manifest else None
    try:
        return [str(drift) for drift in inspect_plugin(import_plugin(candidate), contracts, named).drifts]
    except HwBackendsError as error:
        return [str(error)]


def _engines() -> list[dict[str, Any]]:
    """State of the engine plugins, as they tell it themselves."""
    if find_spec("hwbackends.engines") is None or find_spec("hwbackends.engines.activation") is None:
        return []
    from importlib import import_module

    states: list[dict[str, Any]] = import_module("hwbackends.engines.activation").status()
    return states


def render(data: dict[str, Any], contracts: Contracts, console: Console) -> None:
    """Print a report for people."""
    console.print(f"hwbackends {data['hwbackends']}, Python {data['python']}, {data['platform']}", highlight=False)
    for contract in contracts.values():
        console.print(f"contract {contract.name} {contract.version}: {contract.path}", highlight=False)
    installed = ", ".join(f"{name} {version or '-'}" for name, version in data["packages"].items())
    console.print(f"packages: {installed}", highlight=False)
    for name, value in data["environment"].items():
        console.print(f"{name}={value}", highlight=False, markup=False)
    console.print(_backend_table(data))
    for contract in contracts.values():
        console.print(_hook_table(contract, data))
    for item in data["backends"]:
        _render_details(item, console)
    for engine in data["engines"]:
        text = f"engine plugin {engine['engine']}: {engine['state']}: {engine['reason']}"
        console.print(text, highlight=False, markup=False)
    selection = data["selection"]
    where = f" for {selection['device']}" if selection["device"] else ""
    chosen = f"load(){where} takes {selection['name']} ({selection['rule']})"
    console.print(selection["error"] or chosen, highlight=False, markup=False)


def _backend_table(data: dict[str, Any]) -> Table:
    table = Table(title="backends")
    for column in ("name", "state", "devices", "priority", "package", "hooks"):
        table.add_column(column)
    for item in data["backends"]:
        colour = _COLOURS.get(State(item["state"]), "red")
        hooks = item["hooks"]
        count = f"{sum(origin is not None for origin in hooks.values())}/{len(hooks)}"
        package = f"{item['distribution']} {item['version']}"
        state = f"[{colour}]{item['state']}[/]"
        table.add_row(item["name"], state, " ".join(item["devices"]), str(item["priority"]), package, count)
    return table


def _render_details(item: dict[str, Any], console: Console) -> None:
    hint = f"; {item['hint']}" if item["hint"] else ""
    console.print(f"{item['name']}: {item['reason']}{hint}", highlight=False, markup=False)
    for drift in item["drifts"] or ():
        console.print(f"  drift: {drift}", highlight=False, markup=False)


def _hook_table(contract: Contract, data: dict[str, Any]) -> Table:
    """A contract's hooks by backend, for the backends that have any; the caption explains the marks."""
    items = [item for item in data["backends"] if any(item["hooks"].values())]
    caption = f"-: not there, the {REFERENCE} lends it with load(..., fallback=True); *: optional hook"
    table = Table(title=f"hooks of {contract.name}, and where each comes from", caption=caption)
    table.add_column("hook", no_wrap=True)
    for item in items:
        table.add_column(item["name"], overflow="fold")
    for name, hook in contract.hooks.items():
        table.add_row(f"{name}{' *' if hook.optional else ''}", *[_cell(item, name) for item in items])
    return table


def _cell(item: dict[str, Any], hook: str) -> str:
    """The tier, where there are tiers, and the file and line of an origin; --json has the whole path."""
    origin, tier = item["hooks"][hook], item["tiers"].get(hook)
    place = "-" if origin is None else Path(origin).name
    return f"{tier}: {place}" if tier else place


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the whole report as JSON.")
@click.option("--device", default=None, metavar="DEVICE", help="Probe and choose for this device, such as cuda:0.")
@click.option("--load", is_flag=True, help="Also import every available plugin and check its hooks.")
def command(as_json: bool, device: str | None, load: bool) -> None:
    """Show every installed backend, whether it can run here and why, and which one would be chosen."""
    contracts = installed()
    data = report(device, load=load, contracts=contracts)
    if as_json:
        click.echo(json.dumps(data, indent=2))
        return
    render(data, contracts, Console(width=None if sys.stdout.isatty() else 120))
