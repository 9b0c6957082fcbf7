"""Manifests and version ranges: what is read, and what is refused where."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from hwbackends.errors import ContractError, PluginError
from hwbackends.registry.manifest import find_manifest, module_file, module_folders, read_manifest


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "manifest.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_everything_that_a_manifest_says_is_kept(tmp_path: Path) -> None:
    text = 'name: vendor\ncontracts: {step: ">=1.0", conv: ">=1.0,<2.0"}\ndevices: [npu, cpu]\npriority: 13\n'
    text += "capabilities: {layouts: [ring]}\nmore: 7\n"
    manifest = read_manifest(written(tmp_path, text))
    assert (manifest.devices, manifest.priority) == (("npu", "cpu"), 13)
    assert manifest.capabilities == {"layouts": ["ring"]}
    assert manifest.data["more"] == 7
    assert manifest.contracts == {"step": ">=1.0", "conv": ">=1.0,<2.0"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"manifest.yaml:1: the document: got nothing, wanted a mapping"),
        ("devices: [cpu]", r":1: the document: key 'contracts' is missing"),
        ('contracts: {step: ">=1.0"}', r":1: the document: key 'devices' is missing"),
        ("contracts: 1.0\ndevices: [cpu]", r":1: contracts: got 1.0, wanted a mapping"),
        ("contracts: {step: 1.0}\ndevices: [cpu]", r":1: contracts.step: got 1.0, wanted text"),
        ('contracts: {step: ""}\ndevices: [cpu]', r":1: contracts.step: got '', wanted a range of versions"),
        ('contracts: {step: ">=a"}\ndevices: [cpu]', r":1: contracts.step: got '>=a', wanted a range of versions"),
        ('devices: [cpu]\ncontracts: {step: "1.0"}', r":2: contracts.step: got '1.0', wanted a range of versions"),
        ('contracts: {step: ">=1.0"}\ndevices: []', r":2: devices: got \[\], wanted a list of device types"),
        ('contracts: {step: ">=1.0"}\ndevices: [1]', r":2: devices: got \[1\], wanted a list of device types"),
        (
            'contracts: {step: ">=1.0"}\ndevices: [cpu]\npriority: high',
            r":3: priority: got 'high', wanted a whole number",
        ),
        (
            'contracts: {step: ">=1.0"}\ndevices: [cpu]\npriority: true',
            r":3: priority: got True, wanted a whole number",
        ),
        (
            'contracts: {step: ">=1.0"}\ndevices: [cpu]\ncapabilities: all',
            r":3: capabilities: got 'all', wanted a mapping",
        ),
    ],
)
def test_a_malformed_manifest_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        read_manifest(written(tmp_path, text))


def test_a_manifest_is_found_without_importing_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "outer_pkg" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "outer_pkg" / "__init__.py").write_text("raise SystemExit('imported')")
    (inner / "manifest.yaml").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_manifest("outer_pkg.inner") == inner / "manifest.yaml"
    assert find_manifest("outer_pkg.inner.plugin") == inner / "manifest.yaml"
    with pytest.raises(PluginError, match=r"no manifest.yaml beside module 'outer_pkg.other'"):
        find_manifest("outer_pkg.other")
    assert "outer_pkg" not in sys.modules


def test_a_namespace_package_is_searched_in_all_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("left", "right"):
        (tmp_path / part / "spaced_pkg" / part).mkdir(parents=True)
        monkeypatch.syspath_prepend(tmp_path / part)
    (tmp_path / "left" / "spaced_pkg" / "left" / "manifest.yaml").write_text("")
    assert find_manifest("spaced_pkg.left.plugin").parent.name == "left"


def test_a_module_without_a_spec_has_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("specless_module")
    module.__spec__ = None
    monkeypatch.setitem(sys.modules, "specless_module", module)
    assert module_folders("specless_module") == []


def test_the_source_of_a_module_is_found_or_not() -> None:
    assert (
        module_file("hwbackends.registry.manifest")
        == Path(module_folders("hwbackends")[0]) / "registry" / "manifest.py"
    )
    assert module_file("hwbackends.reference") == Path(module_folders("hwbackends.reference")[0]) / "__init__.py"
    assert module_file("sys") is None
