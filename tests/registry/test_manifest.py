"""Manifests and version ranges: what is read, and what is refused where."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwbackends.errors import ContractError, PluginError
from hwbackends.registry.manifest import (
    VersionRange,
    find_manifest,
    module_file,
    module_folders,
    parse_version,
    read_manifest,
)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        (">=1.0,<2.0", ["1.0", "1.9", "1"], ["0.9", "2.0", "2"]),
        ("==1.3", ["1.3", "1.3.0"], ["1.2", "1.4", "1.3.1"]),
        (">1.0, !=1.2 , <=1.5", ["1.1", "1.5"], ["1.0", "1.2", "1.6"]),
    ],
)
def test_a_range_holds_where_every_clause_holds(text: str, inside: list[str], outside: list[str]) -> None:
    versions = VersionRange.parse(text)
    assert all(version in versions for version in inside)
    assert not any(version in versions for version in outside)


@pytest.mark.parametrize("text", ["", "1.0", "~=1.0", ">=1.0,", ">=a", ">=1.0 <2.0"])
def test_a_range_that_is_not_one_is_refused(text: str) -> None:
    with pytest.raises(ContractError, match=r"wanted clauses such as >=1.0,<2.0"):
        VersionRange.parse(text)


def test_a_version_that_is_not_one_is_refused() -> None:
    with pytest.raises(ContractError, match=r"'1\.x': wanted numbers with dots"):
        parse_version("1.x")


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.lists(st.integers(0, 30), min_size=1, max_size=4))
def test_versions_compare_as_numbers_and_trailing_zeros_do_not_count(one: list[int], other: list[int]) -> None:
    def padded(parts: list[int]) -> list[int]:
        return parts + [0] * (4 - len(parts))

    first, second = (".".join(map(str, parts)) for parts in (one, other))
    assert (first in VersionRange.parse(f">={second}")) == (padded(one) >= padded(other))
    assert (first in VersionRange.parse(f"=={second}")) == (padded(one) == padded(other))


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "manifest.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_everything_that_a_manifest_says_is_kept(tmp_path: Path) -> None:
    text = (
        'name: vendor\ncontract: ">=1.0"\ndevices: [npu, cpu]\npriority: 13\ncapabilities: {layouts: [ring]}\nmore: 7\n'
    )
    manifest = read_manifest(written(tmp_path, text))
    assert (manifest.devices, manifest.priority) == (("npu", "cpu"), 13)
    assert manifest.capabilities == {"layouts": ["ring"]}
    assert manifest.data["more"] == 7
    assert "1.5" in manifest.contract


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"manifest.yaml:1: the document: got nothing, wanted a mapping"),
        ("devices: [cpu]", r":1: the document: key 'contract' is missing"),
        ('contract: ">=1.0"', r":1: the document: key 'devices' is missing"),
        ("contract: 1.0\ndevices: [cpu]", r":1: contract: got 1.0, wanted text"),
        ('devices: [cpu]\ncontract: "1.0"', r":2: contract: version range '1.0': wanted clauses"),
        ('contract: ">=1.0"\ndevices: []', r":2: devices: got \[\], wanted a list of device types"),
        ('contract: ">=1.0"\ndevices: [1]', r":2: devices: got \[1\], wanted a list of device types"),
        ('contract: ">=1.0"\ndevices: [cpu]\npriority: high', r":3: priority: got 'high', wanted a whole number"),
        ('contract: ">=1.0"\ndevices: [cpu]\npriority: true', r":3: priority: got True, wanted a whole number"),
        ('contract: ">=1.0"\ndevices: [cpu]\ncapabilities: all', r":3: capabilities: got 'all', wanted a mapping"),
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
    assert module_file("hwbackends.registry.manifest") == Path(module_folders("hwbackends.registry")[0]) / "manifest.py"
    assert module_file("hwbackends.reference") == Path(module_folders("hwbackends.reference")[0]) / "__init__.py"
    assert module_file("sys") is None
