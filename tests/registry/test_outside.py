"""A plugin whose import or probe raises, exits, crashes or hangs hides no other and takes no caller along."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

import hwbackends
from hwbackends.cli import main
from hwbackends.errors import BrokenPluginError
from hwbackends.registry import candidates, outside
from hwbackends.registry.candidates import BUILT_IN, State
from tests.registry.fake_plugins import Site, plugin_source

HIGH = 'contracts: {step: ">=1.0,<2.0", conv: ">=1.0,<2.0"}\ndevices: [cpu]\npriority: 50\n'
GOOD = 'contracts: {step: ">=1.0,<2.0", conv: ">=1.0,<2.0"}\ndevices: [cpu]\npriority: 1\n'
YES = (
    "from hwbackends.contract.hookspecs import ProbeResult\ndef probe(device=None): return ProbeResult(True, 'here')\n"
)
FAULTS = {
    "raises": ("1 / 0", "ZeroDivisionError"),
    "exits": ("import sys; sys.exit(3)", "SystemExit"),
    "ends the process": ("import os; os._exit(7)", "exit code 7"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "signal SIGSEGV"),
    "hangs": ("import time; time.sleep(600)", "did not answer within 12 s"),
    "lacks a package": ("import a_vendors_driver", "install 'a_vendors_driver'"),
}


@pytest.mark.parametrize("where", ["import", "probe"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_plugin_that_fails_is_passed_over_and_told_of(
    site: Site, monkeypatch: pytest.MonkeyPatch, fault: str, where: str
) -> None:
    # time enough for the good one on a busy machine; only what hangs waits until it is over
    monkeypatch.setenv(outside.TIMEOUT, "12" if fault == "hangs" else "300")
    source, told = FAULTS[fault]
    body = f"def probe(device=None):\n    {source}\n"
    site.install("bad", manifest=HIGH, **({"source": source} if where == "import" else {"probe": body}))
    site.install("good", manifest=GOOD)
    assert hwbackends.load(device="cpu").name == "good"
    found = {candidate.name: candidate for candidate in hwbackends.backends("cpu")}
    assert found["bad"].state is State.BROKEN
    assert told in f"{found['bad'].reason}; {found['bad'].hint}"
    monkeypatch.setenv("HWBACKENDS_BACKEND", "bad,good")
    assert hwbackends.load().name == "good"
    with pytest.raises(BrokenPluginError, match="bad"):
        hwbackends.load("bad")


def test_a_plugin_is_imported_outside_even_where_its_probe_says_yes(site: Site) -> None:
    site.install("bad", manifest=HIGH, probe=YES, source="import os; os._exit(1)")
    (found,) = map(candidates.probe, candidates.discover())
    assert found.reason.startswith("cannot be imported: it ended the process with exit code 1")


def test_the_doctor_says_cannot_be_imported_without_being_asked_to_load(site: Site) -> None:
    site.install("bad", manifest=HIGH, probe=YES, source="raise RuntimeError('driver 3 is too old')")
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    assert "cannot be imported: RuntimeError: driver 3 is too old" in result.output


def test_an_answer_is_asked_for_once(site: Site, tmp_path: Path) -> None:
    noted = tmp_path / "asked"
    probe = f"open({str(noted)!r}, 'a').write('x')\n{YES}"
    site.install("good", manifest=GOOD, probe=probe)
    for _ in range(3):
        assert hwbackends.backends("cpu")[0].state is State.AVAILABLE
    assert noted.read_text() == "x"


def test_backends_of_this_package_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    own = [candidate for candidate in candidates.discover() if candidate.built_in]
    assert {candidate.name for candidate in map(candidates.probe, own)} >= {"reference", "cuda", "ascend"}


def test_the_names_of_this_package_belong_to_it(site: Site) -> None:
    site.install("reference", package="own", distribution=BUILT_IN, manifest=GOOD)
    site.install("reference", package="taken", distribution="somebody-else", manifest=HIGH)
    found = {candidate.distribution: candidate for candidate in hwbackends.backends()}
    assert found[BUILT_IN].state is State.AVAILABLE
    assert found["somebody-else"].state is State.DUPLICATE
    assert "belongs to hwbackends" in found["somebody-else"].reason
    assert hwbackends.load("reference").distribution == BUILT_IN


def test_a_backend_that_only_its_binding_shows_to_be_unusable_is_passed_over(site: Site) -> None:
    drifted = plugin_source({"clear_slots": "@hookimpl\ndef clear_slots(pool): pass\n"})
    site.install("bad", manifest=HIGH, source=drifted)
    site.install("good", manifest=GOOD)
    assert hwbackends.load().name == "good"
    with pytest.raises(hwbackends.HwBackendsError, match="cache_indices"):
        hwbackends.load("bad")
