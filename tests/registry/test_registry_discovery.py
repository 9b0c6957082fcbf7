"""What discovery and probing say about installed packages, good and bad, and that they import nothing too early."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

from hwbackends.registry import candidates
from hwbackends.registry.candidates import State, discover, probe
from tests.registry.fake_plugins import MANIFEST, Site, plugin_source


def test_discovery_reads_name_package_version_and_manifest_without_importing_the_plugin(site: Site) -> None:
    site.install("good", source="raise SystemExit('imported')", manifest=MANIFEST + "priority: 7\n", version="2.5")
    (found,) = discover()
    assert (found.name, found.distribution, found.version) == ("good", "good-dist", "2.5")
    assert (found.state, found.priority, found.devices) == (State.FOUND, 7, ("cpu",))
    assert "plugin_good" not in sys.modules


def test_a_plugin_for_another_contract_is_incompatible_and_both_versions_are_named(site: Site) -> None:
    site.install("old", manifest='contracts: {step: ">=0.3,<1.0"}\ndevices: [cpu]\n')
    (found,) = discover()
    assert found.state is State.INCOMPATIBLE
    assert ">=0.3,<1.0" in found.reason
    assert "this is 1.0" in found.reason


def test_a_plugin_for_a_contract_that_is_not_here_is_incompatible_and_the_nearest_is_offered(site: Site) -> None:
    site.install("odd", manifest='contracts: {step: ">=1.0", cnov: ">=1.0"}\ndevices: [cpu]\n')
    (found,) = discover()
    assert found.state is State.INCOMPATIBLE
    assert "contract cnov >=1.0, which is not here; did you mean 'conv'?" in found.reason


@pytest.mark.parametrize("contracts", ["{}", '{conv: ">=1.0"}'])
def test_a_manifest_names_the_step_and_what_its_families_import(site: Site, contracts: str) -> None:
    site.install("odd", manifest=f"contracts: {contracts}\ndevices: [cpu]\n")
    (found,) = discover()
    assert found.state is State.INCOMPATIBLE
    assert "names" in found.reason


def test_an_incompatible_plugin_is_never_imported(site: Site) -> None:
    site.install("old", source="raise SystemExit('imported')", manifest='contracts: {step: ">=2.0"}\ndevices: [cpu]\n')
    (found,) = [probe(candidate) for candidate in discover()]
    assert found.state is State.INCOMPATIBLE
    assert "plugin_old" not in sys.modules


def test_a_missing_manifest_makes_a_plugin_broken_and_says_what_to_add(site: Site) -> None:
    folder = site.install("bare", manifest=None)
    (found,) = discover()
    assert found.state is State.BROKEN
    assert str(folder) in found.reason
    assert "contracts, devices" in found.reason


def test_a_malformed_manifest_is_broken_with_file_and_line(site: Site) -> None:
    folder = site.install("odd", manifest='contracts: {step: ">=1.0"}\ndevices: cpu\n')
    (found,) = discover()
    assert found.state is State.BROKEN
    assert f"{folder / 'manifest.yaml'}:2: devices: got 'cpu', wanted a list" in found.reason


def test_a_package_that_is_gone_is_broken_by_name(site: Site) -> None:
    site.install("ghost", value="no_such_package_here.plugin")
    (found,) = discover()
    assert found.state is State.BROKEN
    assert "'no_such_package_here' is not installed" in found.reason


def test_one_broken_plugin_hides_no_other(site: Site) -> None:
    site.install("a-broken", source="raise RuntimeError('no driver')")
    site.install("b-good")
    site.install("c-exits", source="import sys; sys.exit(3)")
    site.install("d-syntax", source="def :")
    found = {candidate.name: candidate for candidate in map(probe, discover())}
    states = {name: candidate.state for name, candidate in found.items()}
    broken = State.BROKEN
    assert states == {"a-broken": broken, "b-good": State.AVAILABLE, "c-exits": broken, "d-syntax": broken}
    assert "no driver" in found["a-broken"].reason


def test_a_broken_plugin_keeps_its_original_error(site: Site) -> None:
    site.install("broken", source="import a_module_that_is_not_there")
    (found,) = map(probe, discover())
    assert found.cause is not None
    assert isinstance(found.cause.__cause__, ModuleNotFoundError)
    assert "install 'a_module_that_is_not_there'" in found.reason


def test_two_packages_with_one_name_are_both_marked_and_both_shown(site: Site) -> None:
    site.install("twin", package="twin_one", distribution="twin-one", version="1.1")
    site.install("twin", package="twin_two", distribution="twin-two", version="1.2")
    found = discover()
    assert [candidate.state for candidate in found] == [State.DUPLICATE, State.DUPLICATE]
    for candidate in found:
        assert "twin-one 1.1 (twin_one.plugin)" in candidate.reason
        assert "twin-two 1.2 (twin_two.plugin)" in candidate.reason


def test_one_entry_point_that_is_seen_twice_is_one_candidate(site: Site) -> None:
    site.install("once")
    (found,) = discover([*site.points(), *site.points()])
    assert found.state is State.FOUND


def test_a_probe_file_beside_the_manifest_is_asked_without_importing_the_plugin(site: Site) -> None:
    probe_source = """
        def probe(device=None):
            class Answer:
                available, reason, hint = False, f"no {device} here", "buy one"
            return Answer()
    """
    site.install("fast", source="raise SystemExit('imported')", probe=probe_source)
    (found,) = [probe(candidate, "cuda:3") for candidate in discover()]
    assert (found.state, found.reason, found.hint) == (State.UNAVAILABLE, "no cuda:3 here", "buy one")
    assert "plugin_fast.plugin" not in sys.modules


def test_a_probe_that_raises_makes_its_plugin_broken(site: Site) -> None:
    site.install("shaky", probe="def probe(device=None): raise OSError('driver mismatch')")
    (found,) = map(probe, discover())
    assert found.state is State.BROKEN
    assert "OSError: driver mismatch" in found.reason


def test_a_probe_that_returns_something_else_makes_its_plugin_broken(site: Site) -> None:
    site.install("vague", probe="def probe(device=None): return True")
    (found,) = map(probe, discover())
    assert found.state is State.BROKEN


def test_without_a_probe_a_plugin_is_available_when_it_imports(site: Site) -> None:
    site.install("silent", source=plugin_source({"probe": ""}))
    (found,) = map(probe, discover())
    assert found.state is State.AVAILABLE


def test_a_manifest_is_found_beside_a_package_a_module_in_it_and_an_object_of_it(site: Site) -> None:
    site.install("package", value="plugin_package")
    site.install("object", value="plugin_object.plugin:Plugin")
    assert [candidate.state for candidate in discover()] == [State.FOUND, State.FOUND]


def test_a_manifest_is_found_beside_a_single_module(site: Site) -> None:
    (site.folder / "lonely.py").write_text(plugin_source())
    (site.folder / "manifest.yaml").write_text(MANIFEST)
    site.install("lonely", package="unused", value="lonely")
    site.packages.append("lonely")
    (found,) = map(probe, discover())
    assert found.state is State.AVAILABLE


def test_a_package_whose_entry_points_cannot_be_read_hides_no_other(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install("good")
    for name, text in (("damaged", "[hwbackends.backends]\nno equals sign\n"), ("unrelated", "[other]\nnone\n")):
        folder = site.folder / f"{name}-1.5.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        (folder / "entry_points.txt").write_text(text)
    monkeypatch.setattr(candidates, "entry_points", metadata.entry_points)
    found = {candidate.name: candidate for candidate in discover()}
    assert found["good"].state is State.FOUND
    assert found["damaged"].state is State.BROKEN
    assert (found["damaged"].distribution, found["damaged"].version) == ("damaged", "1.5")
    assert "its entry_points.txt cannot be read" in found["damaged"].reason
    assert "unrelated" not in found
    assert "reference" in found


def test_a_package_that_is_twice_on_the_path_counts_once_also_when_read_one_by_one(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install("good")

    def fail(group: str) -> None:
        raise TypeError(group)

    monkeypatch.setattr(candidates, "entry_points", fail)
    monkeypatch.setattr(sys, "path", [*sys.path, str(site.folder)])
    assert [candidate.state for candidate in discover() if candidate.name == "good"] == [State.FOUND]


def test_a_package_without_metadata_is_a_candidate_of_an_unknown_package(site: Site) -> None:
    site.install("good")
    site.install("nameless", distribution="nameless-dist", version="2.5")
    (site.folder / "nameless_dist-2.5.dist-info" / "METADATA").unlink()
    found = {candidate.name: candidate for candidate in discover()}
    assert found["nameless"].package == "unknown distribution"
    assert found["nameless"].state is State.FOUND
