"""`hwbackends doctor`: every candidate with state, reason, hint, package and the origin of each hook, for people and as
JSON, whatever is wrong with the others."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from hwbackends import doctor
from hwbackends.cli import main
from hwbackends.contract.reader import installed
from tests.registry.fake_plugins import MANIFEST, Site, definition, plugin_source

HOOKS = list(installed().hooks)
ANSWER = """
    from hwbackends.contract.hookspecs import ProbeResult
    def probe(device=None): return ProbeResult({})
"""


def report(*arguments: str) -> dict:  # type: ignore[type-arg]
    result = CliRunner().invoke(main, ["doctor", "--json", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)  # type: ignore[no-any-return]


def by_name(*arguments: str) -> dict:  # type: ignore[type-arg]
    return {item["name"]: item for item in report(*arguments)["backends"]}


def test_every_state_is_shown_with_reason_and_hint(site: Site) -> None:
    site.install("good", version="1.3")
    site.install("broken", source="1 / 0")
    site.install("old", manifest='contracts: {step: "<1.0"}\ndevices: [cpu]\n')
    site.install(
        "gone",
        probe=ANSWER.format("False, 'no device', 'plug one in'"),
    )
    site.install("twin", package="twin_a", distribution="twin-a")
    site.install("twin", package="twin_b", distribution="twin-b")
    found = by_name()
    states = {name: item["state"] for name, item in found.items()}
    assert states == {
        "good": "available",
        "broken": "broken",
        "old": "incompatible",
        "gone": "unavailable",
        "twin": "duplicate",
    }
    assert (found["gone"]["reason"], found["gone"]["hint"]) == ("no device", "plug one in")
    assert (found["good"]["distribution"], found["good"]["version"]) == ("good-dist", "1.3")
    assert all(item["reason"] for item in found.values())


def test_the_choice_and_its_rule_are_shown(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("good", manifest=MANIFEST + "priority: 7\n")
    assert report()["selection"] == {"device": None, "name": "good", "rule": "priority 7", "error": None}
    monkeypatch.setenv("HWBACKENDS_BACKEND", "good")
    assert report()["selection"]["rule"] == "HWBACKENDS_BACKEND=good"
    assert report()["environment"]["HWBACKENDS_BACKEND"] == "good"


def test_a_choice_that_fails_is_shown_as_its_error(site: Site) -> None:
    site.install("good")
    selection = report("--device", "npu:1")["selection"]
    assert selection["name"] is None
    assert selection["error"].startswith("no backend is usable for device 'npu:1'")


def test_each_hook_is_shown_with_file_and_line_without_an_import(site: Site) -> None:
    source = plugin_source({"copy_slots": ""})
    folder = site.install("good", source=source, probe="def probe(device=None): raise SystemExit")
    hooks = by_name()["good"]["hooks"]
    line = 1 + source.splitlines().index("def clear_slots(pool, cache_indices):")
    assert hooks["clear_slots"] == f"{folder / 'plugin.py'}:{line}"
    assert hooks["copy_slots"] is None
    assert list(hooks) == HOOKS


def test_a_hook_is_followed_to_the_file_that_defines_it(site: Site) -> None:
    source = """
        import os
        from . import conv as convs
        from .conv import conv_decode
        from .conv import zero as clear_slots
        from plugin_good.conv import copy_slots
        from hwbackends.contract.hookspecs import hookimpl
        if os.name:
            conv_extend = hookimpl(convs.conv_extend)
        conv_target_verify = hookimpl(conv_extend)
        conv_draft_extend = hookimpl(convs.not_there)
        probe = hookimpl(os.path.join)
        prepare_extend_metadata = 5
    """
    folder = site.install("good", source=source)
    (folder / "conv.py").write_text(
        "def conv_decode(): ...\ndef conv_extend(): ...\nasync def zero(): ...\nfrom .deeper import copy_slots\n"
    )
    (folder / "deeper.py").write_text("\n\ndef copy_slots(): ...\n")
    hooks = by_name()["good"]["hooks"]
    places = {name: Path(origin).name for name, origin in hooks.items() if origin}
    assert places == {
        "conv_decode": "conv.py:1",
        "conv_extend": "conv.py:2",
        "conv_target_verify": "conv.py:2",
        "clear_slots": "conv.py:3",
        "copy_slots": "deeper.py:3",
        "conv_draft_extend": "plugin.py:11",
        "probe": "plugin.py:12",
        "prepare_extend_metadata": "plugin.py:13",
    }


def test_a_hook_that_a_factory_makes_is_followed_to_the_function_inside_and_through_a_decorator_to_what_it_wraps(
    site: Site,
) -> None:
    source = """
        from plugin_good import made
        from plugin_good.made import traced
        from hwbackends.contract.hookspecs import hookimpl
        conv_decode = hookimpl(made.conv_decode)
        conv_extend = hookimpl(traced(made.written))
    """
    folder = site.install("good", source=source)
    (folder / "made.py").write_text(
        "def of_phase(hook, traits):\n    def call(x): ...\n    return call\n"
        "def traced(function):\n    def call(*given): ...\n    return call\n"
        "def traits_of(): ...\ndef written(x): ...\n"
        "conv_decode = of_phase('conv_decode', traits_of)\n"
    )
    hooks = by_name()["good"]["hooks"]
    places = {name: Path(origin).name for name, origin in hooks.items() if origin}
    assert places == {"conv_decode": "made.py:2", "conv_extend": "made.py:8"}


def test_imports_that_go_round_in_a_circle_end(site: Site) -> None:
    folder = site.install("round", source="from .other import conv_decode")
    (folder / "other.py").write_text("from .plugin import conv_decode")
    assert by_name()["round"]["hooks"]["conv_decode"] is None


def test_source_that_is_not_python_has_no_hooks(site: Site) -> None:
    site.install("odd", source="def :")
    assert set(by_name()["odd"]["hooks"].values()) == {None}


def test_the_tiers_that_a_plugin_tells_are_shown(site: Site) -> None:
    probe = """
        from hwbackends.contract.hookspecs import ProbeResult
        def probe(device=None): return ProbeResult(True, 'here', '')
        def hook_origins(): return {'conv_decode': 'triton'}
    """
    site.install("tiered", probe=probe)
    assert by_name()["tiered"]["tiers"] == {"conv_decode": "triton"}
    assert "triton: plugin.py" in CliRunner().invoke(main, ["doctor"]).output


def test_a_setting_that_names_no_tier_is_shown_and_stops_nothing(site: Site) -> None:
    probe = """
        from hwbackends.errors import HwBackendsError
        from hwbackends.contract.hookspecs import ProbeResult
        def probe(device=None): return ProbeResult(True, 'here', '')
        def hook_origins(): raise HwBackendsError('no such tier')
    """
    site.install("tiered", probe=probe)
    assert by_name()["tiered"]["tiers"]["conv_decode"] == "no such tier"


def test_load_also_imports_and_shows_drift(site: Site) -> None:
    site.install("drifted", source=plugin_source({"clear_slots": definition("clear_slots", ["pool"])}))
    site.install(
        "late",
        source="1 / 0",
        probe=ANSWER.format("True, 'here', ''"),
    )
    site.install("old", manifest='contracts: {step: "<1.0"}\ndevices: [cpu]\n')
    assert by_name()["drifted"]["drifts"] is None
    found = by_name("--load")
    assert "parameters missing: cache_indices" in found["drifted"]["drifts"][0]
    assert found["late"]["state"] == "broken"
    assert "cannot be imported: ZeroDivisionError" in found["late"]["reason"]
    assert found["old"]["drifts"] == []


def test_the_page_for_people_says_the_same(site: Site) -> None:
    site.install("good", source=plugin_source({"fused_decode_add_rmsnorm": ""}))
    site.install("drifted", source=plugin_source({"clear_slots": definition("clear_slots", ["pool"])}))
    result = CliRunner().invoke(main, ["doctor", "--load", "--device", "cpu"], env={"HWBACKENDS_BACKEND": "good"})
    assert result.exit_code == 0
    for wanted in ("good-dist 3.1", "available", "13/19", "parameters missing: cache_indices", "update_mamba_state"):
        assert wanted in result.output
    assert "load() for cpu takes good (HWBACKENDS_BACKEND=good)" in result.output
    assert "HWBACKENDS_BACKEND=good" in result.output


def test_nothing_installed_is_a_page_too(site: Site) -> None:
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    assert "none is installed" in result.output


def test_the_engines_plugins_are_shown(site: Site) -> None:
    engines = {engine["engine"]: engine for engine in report()["engines"]}
    assert set(engines) == {"sglang", "vllm"}
    assert all(engine["state"] and engine["reason"] for engine in engines.values())


def test_an_installation_without_engine_adapters_shows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert doctor.report()["engines"] == []


def test_the_own_backends_tell_every_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HWBACKENDS_")]:
        monkeypatch.delenv(name)
    found = by_name()
    assert {"reference", "cuda", "rocm", "ascend"} <= set(found)
    for name in ("reference", "cuda", "rocm", "ascend"):
        named = installed().only(found[name]["contracts"]).hooks
        assert None not in [found[name]["hooks"][hook] for hook in named], name
        assert found[name]["distribution"] == "hwbackends"
