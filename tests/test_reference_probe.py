"""The reference's probe: which devices it takes, and how it refuses one that is not there."""

from __future__ import annotations

import pytest

import hwbackends
from hwbackends.errors import BackendUnavailableError
from hwbackends.reference import probe as module

torch = pytest.importorskip("torch", reason="the reference needs it")


@pytest.mark.parametrize("device", [None, "cpu", "cpu:0", "meta"])
def test_the_cpu_is_always_there(device: str | None) -> None:
    assert module.probe(device).available


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert module.probe() == (False, "torch is not installed", "pip install 'hwbackends[reference]'")


def test_a_device_that_is_not_there_is_refused_with_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert module.probe("cuda:1").available
    assert module.probe("cuda").available
    assert module.probe("cuda:2")[:2] == (False, "device 'cuda:2' is not there: torch sees 2 of type cuda")


def test_a_device_that_torch_does_not_know_is_refused_by_name() -> None:
    assert not module.probe("warp:1").available
    assert "torch knows no device 'warp:1'" in module.probe("warp:1").reason


def test_a_device_type_that_cannot_count_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "xpu")
    assert module.probe("xpu:3").available


def test_load_refuses_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(BackendUnavailableError, match="device 'cuda:0' is not there: torch sees 0 of type cuda"):
        hwbackends.load("reference", "cuda:0")
