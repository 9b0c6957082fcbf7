"""The sidecar over the torch tier on the emulated npu device, eager and captured: its own tests, on that device."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from hwbackends import load
from tests.step import sidecar_cases, test_sidecar, test_sidecar_graphs


def on_npu(test: Any) -> Any:
    """A test that takes a device, for the emulated npu alone."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        test(*args, **kwargs)

    marks = [mark for mark in test.pytestmark if mark.args[0] != "device"]
    run.pytestmark = [*marks, pytest.mark.parametrize("device", ["npu"]).mark]  # type: ignore[attr-defined]
    return run


globals().update(
    {
        name: on_npu(test)
        for module in (test_sidecar, test_sidecar_graphs)
        for name, test in vars(module).items()
        if name.startswith("test_") and "device" in test.__code__.co_varnames[: test.__code__.co_argcount]
    }
)


@pytest.fixture(autouse=True)
def _ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sidecars of these tests get the Ascend backend instead of the reference."""
    for module in (sidecar_cases, test_sidecar):
        monkeypatch.setattr(module, "load", lambda name: load("ascend", "npu"))
