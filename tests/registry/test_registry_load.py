"""`hwbackends.load` and `hwbackends.backends`, from installed packages to a bound backend, as a caller sees them."""

from __future__ import annotations

import pytest

import hwbackends
from hwbackends.errors import (
    ArgumentError,
    BackendNotFoundError,
    BackendTieError,
    BackendUnavailableError,
    BrokenPluginError,
)
from hwbackends.registry import candidates
from hwbackends.registry import loading as registry
from tests.registry.fake_plugins import Site, plugin_source

LOW = 'contracts: {step: ">=1.0,<2.0", conv: ">=1.0,<2.0"}\ndevices: [cpu]\npriority: 3\n'
HIGH = 'contracts: {step: ">=1.0,<2.0", conv: ">=1.0,<2.0"}\ndevices: [cuda, cpu]\npriority: 5\n'


def test_load_returns_the_best_backend_and_the_same_object_again(site: Site) -> None:
    site.install("low", manifest=LOW)
    site.install("high", manifest=HIGH)
    assert hwbackends.load().name == "high"
    assert hwbackends.load() is hwbackends.load("high")


def test_load_by_name_asks_no_other_plugin(site: Site) -> None:
    site.install("low", manifest=LOW)
    site.install("high", manifest=HIGH, probe="def probe(device=None): raise SystemExit('asked')")
    assert hwbackends.load("low").name == "low"


def test_load_obeys_the_environment(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("low", manifest=LOW)
    site.install("high", manifest=HIGH)
    monkeypatch.setenv("HWBACKENDS_BACKEND", "low,high")
    assert hwbackends.load().name == "low"


def test_load_takes_a_device_object_as_well_as_a_string(site: Site) -> None:
    torch = pytest.importorskip("torch", reason="the device object is torch's")
    site.install("high", manifest=HIGH)
    assert hwbackends.load(device=torch.device("cuda:1")).name == "high"
    assert hwbackends.load(device="cuda").name == "high"


def test_load_refuses_a_device_that_the_named_backend_does_not_serve(site: Site) -> None:
    site.install("low", manifest=LOW)
    with pytest.raises(BackendUnavailableError, match="got 'npu:1', wanted one of: cpu"):
        hwbackends.load("low", "npu:1")


def test_load_refuses_a_tie_and_lists_both_with_their_reasons(site: Site) -> None:
    for name in ("one", "two"):
        probe = f"""
            from hwbackends.contract.hookspecs import ProbeResult

            def probe(device=None):
                return ProbeResult(True, '{name} driver 5', '')
        """
        site.install(name, manifest=LOW, probe=probe)
    with pytest.raises(BackendTieError, match="one driver 5") as caught:
        hwbackends.load()
    assert "two driver 5" in str(caught.value)
    assert "HWBACKENDS_BACKEND=one" in str(caught.value)


def test_load_offers_the_nearest_name(site: Site) -> None:
    site.install("high", manifest=HIGH)
    with pytest.raises(BackendNotFoundError, match="did you mean 'high'"):
        hwbackends.load("hihg")


def test_load_keeps_the_original_error_of_a_broken_plugin(site: Site) -> None:
    site.install("broken", source="import vendor_ops_that_is_not_there")
    with pytest.raises(BrokenPluginError, match="vendor_ops_that_is_not_there") as caught:
        hwbackends.load("broken")
    chain, error = [], caught.value.__cause__
    while error is not None:
        chain.append(type(error))
        error = error.__cause__
    assert ModuleNotFoundError in chain


def test_a_fallback_comes_from_the_reference_only_when_it_is_allowed(site: Site) -> None:
    site.install("partial", manifest=HIGH, source=plugin_source({"conv_extend": ""}))
    site.install("reference", manifest='contracts: {step: ">=1.0,<2.0", conv: ">=1.0,<2.0"}\ndevices: ["*"]\n')
    with pytest.raises(hwbackends.HwBackendsError, match="conv_extend"):
        hwbackends.load("partial")
    backend = hwbackends.load("partial", fallback=True)
    assert backend.hook_origins["conv_extend"].backend == "reference"
    assert backend.hook_origins["conv_decode"].backend == "partial"


def test_a_fallback_that_cannot_run_is_an_error_of_its_own(site: Site) -> None:
    site.install("partial", manifest=HIGH, source=plugin_source({"conv_extend": ""}))
    with pytest.raises(BackendNotFoundError, match="no backend is called 'reference'"):
        hwbackends.load("partial", fallback=True)


def test_backends_lists_every_candidate_with_its_state_and_its_hooks_origins(site: Site) -> None:
    folder = site.install("low", manifest=LOW, source=plugin_source({"copy_slots": ""}))
    site.install("broken", source="1 / 0")
    assert {c.name: str(c.state) for c in hwbackends.backends()} == {"low": "available", "broken": "broken"}
    (low,) = [candidate for candidate in hwbackends.backends() if candidate.name == "low"]
    assert low.hook_origins["copy_slots"] is None
    assert str(low.hook_origins["clear_slots"]).startswith(f"{folder / 'plugin.py'}:")


def test_tracing_is_a_switch_of_the_environment(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("low", manifest=LOW)
    plain = hwbackends.load()
    monkeypatch.setenv("HWBACKENDS_TRACE", "1")
    traced = hwbackends.load()
    assert traced.clear_slots is not plain.clear_slots
    assert traced.clear_slots(1, 2) == "clear_slots"


class TestCheckedMode:
    """HWBACKENDS_CHECKED wraps at binding time only."""

    def test_off_leaves_the_plain_function(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("torch", reason="the reference needs it")
        from hwbackends.torch_ops import commit

        for value in ("", "0"):
            monkeypatch.setenv("HWBACKENDS_CHECKED", value)
            assert registry.load("reference").clear_slots is commit.clear_slots

    def test_on_refuses_what_only_device_memory_tells(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch = pytest.importorskip("torch", reason="the reference needs it")
        from hwbackends.conv.state import ConvStream
        from hwbackends.step.pool import StatePool

        monkeypatch.setenv("HWBACKENDS_CHECKED", "1")
        backend = registry.load("reference")
        pool = StatePool([ConvStream("conv", 5)], num_slots=11, width=4)
        with pytest.raises(ArgumentError, match="cache_indices"):
            backend.clear_slots(pool, torch.tensor([3, 13]))
        assert backend.hook_origins["clear_slots"].backend == "reference"


def test_the_installed_package_registers_its_three_backends() -> None:
    names = {candidate.name for candidate in candidates.discover()}
    assert {"reference", "cuda", "ascend"} <= names
