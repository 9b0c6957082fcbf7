"""What a manifest claims is what selection chooses by, what a backend offers, and what the sidecar holds it to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hwbackends
from hwbackends.contract.reader import installed
from hwbackends.conv import ConvStream
from hwbackends.errors import (
    BackendNotFoundError,
    BackendUnavailableError,
    BrokenPluginError,
    GraphError,
    HookNotImplementedError,
    UnsupportedError,
)
from hwbackends.registry.candidates import State
from hwbackends.step import ConvStateSidecar, ForwardMode, StatePool, StepBatch
from tests.registry.fake_plugins import MANIFEST, NAMED, Site

WINDOW = {"layouts": ["window"], "dtypes": ["float32"], "widths": [4], "index_dtypes": ["int32"], "max_requests": 8}


def claiming(site: Site, name: str, capabilities: dict[str, Any], priority: int = 5) -> None:
    site.install(name, manifest=f"{MANIFEST}priority: {priority}\ncapabilities: {capabilities}\n")


def sidecar(name: str, **changed: Any) -> ConvStateSidecar:
    """A sidecar over a pool that `WINDOW` covers, but for what is changed."""
    given = {"layout": "window", "dtype": torch.float32, "width": 4, "index_dtype": torch.int32, "max_batch": 8}
    given |= changed
    stream = ConvStream("k", 8, given.pop("dtype"))
    batch, index = given.pop("max_batch"), given.pop("index_dtype")
    pool = StatePool([stream], num_slots=9, layers=1, **given)
    return ConvStateSidecar(hwbackends.load(name), pool, max_batch=batch, max_tokens=64, index_dtype=index)


def test_a_backend_is_passed_over_where_it_does_not_claim_what_is_needed(site: Site) -> None:
    claiming(site, "narrow", WINDOW, priority=9)
    claiming(site, "wide", {})
    assert hwbackends.load().name == "narrow"
    assert hwbackends.load(needs={"layout": "window", "dtype": torch.float32, "width": 4}).name == "narrow"
    for needs in ({"layout": "ring"}, {"dtype": torch.bfloat16}, {"width": 3}, {"requests": 9}):
        assert hwbackends.load(needs=needs).name == "wide"


def test_a_named_backend_that_lacks_a_need_is_refused_and_one_that_nobody_claims_is_told(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    claiming(site, "narrow", WINDOW)
    with pytest.raises(BackendUnavailableError, match=r"'narrow' .* does not claim layout ring, which is needed"):
        hwbackends.load("narrow", needs={"layout": "ring"})
    with pytest.raises(BackendNotFoundError, match="narrow does not claim dtype float64"):
        hwbackends.load(needs={"dtype": "float64"})
    monkeypatch.setenv("HWBACKENDS_BACKEND", "narrow")
    with pytest.raises(BackendUnavailableError, match=r"HWBACKENDS_BACKEND=narrow: .*does not claim layout lazy"):
        hwbackends.load(needs={"layout": "lazy"})


def test_a_need_of_an_unknown_name_is_refused(site: Site) -> None:
    claiming(site, "narrow", WINDOW)
    with pytest.raises(ValueError, match=r"unknown 'layouts'.*layout"):
        hwbackends.load(needs={"layouts": "ring"})


def test_a_hook_that_is_there_and_not_claimed_is_not_offered(site: Site) -> None:
    claiming(site, "partial", {"hooks": ["probe", "conv_decode"]})
    claiming(site, "whole", {}, priority=1)
    assert hwbackends.load().name == "whole"
    with pytest.raises(HookNotImplementedError, match=r"conv_extend \(not claimed in its manifest\)"):
        hwbackends.load("partial")


def test_an_optional_hook_that_is_not_claimed_is_not_offered(site: Site) -> None:
    claiming(
        site, "plain", {"hooks": [hook for hook in installed().only(NAMED).hooks if not hook.startswith("fused_")]}
    )
    backend = hwbackends.load("plain")
    assert not backend.has("fused_decode_add_rmsnorm")
    with pytest.raises(HookNotImplementedError, match="fused_decode_add_rmsnorm"):
        backend.fused_decode_add_rmsnorm()  # type: ignore[call-arg]


def test_capabilities_that_cannot_be_read_make_a_backend_broken(site: Site) -> None:
    claiming(site, "odd", {"layout": ["ring"]})
    (found,) = hwbackends.backends()
    assert found.state is State.BROKEN
    assert "unknown key 'layout'" in found.reason
    with pytest.raises(BrokenPluginError, match="unknown key 'layout'"):
        hwbackends.load("odd")


@pytest.mark.parametrize(
    ("changed", "lacking"),
    [
        ({"layout": "ring"}, "layout ring"),
        ({"dtype": torch.bfloat16}, "dtype bfloat16"),
        ({"width": 3}, "width 3"),
        ({"index_dtype": torch.int64}, "index dtype int64"),
        ({"max_batch": 9}, "9 requests in a step"),
    ],
)
def test_a_sidecar_refuses_state_that_its_backend_does_not_claim(
    site: Site, changed: dict[str, Any], lacking: str
) -> None:
    claiming(site, "narrow", WINDOW)
    sidecar("narrow")
    with pytest.raises(UnsupportedError, match=f"'narrow', which does not claim {lacking}"):
        sidecar("narrow", **changed)


def test_a_backend_that_claims_all_widths_takes_one_that_the_kit_does_not_test(site: Site) -> None:
    claiming(site, "wide", {})
    assert sidecar("wide", width=7).pool.width == 7


def test_a_capture_is_refused_where_graphs_are_not_claimed(site: Site) -> None:
    claiming(site, "eager", {"graphs": False})
    one = torch.ones(1, dtype=torch.int64)
    batch = StepBatch(ForwardMode.DECODE, one, 1, 1, seq_lens=one)
    with pytest.raises(GraphError, match="'eager' does not claim graph capture"):
        sidecar("eager").init_forward_metadata_in_graph(batch)
