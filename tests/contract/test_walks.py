"""The counts of CONTRIBUTING.md, walked: how many places a new hook touches, and that a family is a file of its own."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path

import pytest

from hwbackends.checker.engine import Options, run
from hwbackends.contract.reader import contracts_folder, installed
from hwbackends.errors import HookNotImplementedError
from hwbackends.registry.binding import bind, inspect_plugin
from hwbackends.registry.candidates import State, discover
from hwbackends.registry.scaffold import files
from tests.registry.fake_plugins import Site, plugin_source

ROOT = Path(__file__).parents[2]
FAMILY = """\
contract: tally
version: "1.0"
imports: [step]
types: {}
hooks:
  - name: tally_decode
    since: "1.0"
    optional: false
    role: compute
    forward_modes: [decode, idle]
    summary: Counts tokens.
    recordable: true
    may_synchronise: false
    may_allocate: false
    parameters:
      - {name: pool, type: StatePool, optional: false, mutated: true, since: "1.0"}
      - {name: metadata, type: StepMetadata, optional: false, since: "1.0"}
    returns: {type: "None"}
    clauses: [{id: TA-DECODE-01, text: Counts them.}]
"""
HOOK = "\n\n@hookimpl\ndef tally_decode(pool, metadata):\n    return 'counted'\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The contracts that are here, and one family more."""
    made = tmp_path / "contracts"
    made.mkdir()
    for path in contracts_folder().glob("*.yaml"):
        shutil.copy(path, made)
    (made / "tally.yaml").write_text(FAMILY, encoding="utf-8")
    return made


def test_a_family_is_bound_where_a_manifest_names_it_and_missing_nowhere_else(site: Site, folder: Path) -> None:
    contracts = installed(folder)
    names = 'contracts: {step: ">=1.0", conv: ">=1.0"}\ndevices: [cpu]\n'
    site.install("without", source=plugin_source(), manifest=names)
    site.install("with_it", source=plugin_source() + HOOK, manifest=names.replace("}", ', tally: ">=1.0"}'))
    found = {c.name: c for c in discover(contracts=contracts)}
    backend = bind(found["with_it"], contracts=contracts)
    assert backend.hooks["tally_decode"](1, 2) == "counted"
    assert backend.contracts == {"step": "1.0", "conv": "1.0", "tally": "1.0"}
    other = bind(found["without"], contracts=contracts)
    assert not other.has("tally_decode")
    with pytest.raises(HookNotImplementedError, match="tally_decode"):
        other.hooks["tally_decode"](1, 2)


def test_a_plugin_that_serves_only_the_new_family_needs_no_hook_of_another(site: Site, folder: Path) -> None:
    contracts = installed(folder)
    conv = dict.fromkeys(contracts["conv"].hooks, "")
    names = "contracts: {step: '>=1', tally: '>=1'}\ndevices: [cpu]\n"
    site.install("alone", source=plugin_source(conv) + HOOK, manifest=names)
    (found,) = discover(contracts=contracts)
    assert found.state is State.FOUND
    assert bind(found, contracts=contracts).has("tally_decode")


def test_a_hook_of_a_family_that_the_manifest_does_not_name_is_refused(site: Site, folder: Path) -> None:
    site.install("odd", source=plugin_source() + HOOK)
    (found,) = discover(contracts=installed(folder))
    plugin = import_module(found.module)
    (drift,) = inspect_plugin(plugin, installed(folder), found.manifest.contracts if found.manifest else None).drifts
    assert drift.message == "a hook of contract tally, which the manifest does not name; add tally under contracts"


def test_checker_and_scaffold_take_a_family_from_its_file(folder: Path, tmp_path: Path) -> None:
    contracts = installed(folder)
    plugin = files("acme", "cpu", contracts)["hwbackends_acme/plugin.py"]
    assert "def tally_decode(\n    pool: StatePool,\n    metadata: StepMetadata,\n) -> None:" in plugin
    source = tmp_path / "plugin.py"
    source.write_text(plugin_source() + HOOK.replace("metadata", "metadata=None"), encoding="utf-8")
    found = run([str(source)], Options(contract=contracts, jobs=1)).findings
    assert [f.missing for f in found if f.rule == "HWB110"] == [("metadata",)]


def test_an_optional_hook_is_named_in_five_places_at_most() -> None:
    """Where the youngest optional hook is written by hand, tests and pages made by tools apart."""
    hook = "fused_target_verify_add_rmsnorm"
    protocol = "FusedTargetVerifyAddRmsnorm"
    folders = ("contracts", "hwbackends/contract", "hwbackends/registry", "hwbackends/step", "hwbackends/conv")
    folders += ("hwbackends/torch_ops", "hwbackends/reference")
    named = {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".yaml") and (hook in (text := path.read_text("utf-8")) or protocol in text)
    }
    must = {
        "contracts/conv.yaml",
        "hwbackends/contract/hookspecs/conv.py",
        "hwbackends/torch_ops/epilogue.py",
        "hwbackends/reference/plugin.py",
    }
    assert named == must
