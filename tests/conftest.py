"""Shared by all tests: hypothesis profiles, and which marked tests run where."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from hwbackends.registry import candidates
from tests.gpu import GPU, missing_gpu, visible
from tests.registry import fake_plugins
from tests.registry.fake_plugins import Site

# One profile for every machine: a slow machine must not turn a property red, and a failure must come back.
settings.register_profile(
    "default", max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=5_000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out unless `-m` names them. Tests for a GPU (`cuda`) are `rocm` tests too: the same bodies run
    on either vendor's device, over the backend that serves it. Without such a device they say so."""
    expression = str(config.getoption("markexpr"))
    for item in items:
        if item.get_closest_marker("cuda") is not None:
            item.add_marker(pytest.mark.rocm)
    kept = [item for item in items if item.get_closest_marker("slow") is None or "slow" in expression]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
    missing = missing_gpu(expression, GPU, visible())
    for item in items:
        if missing and item.get_closest_marker("rocm") is not None:
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(autouse=True)
def import_path() -> Iterator[None]:
    """No test leaves a folder on `sys.path`: a plugin package in it would be found by every test after it. Set up
    before `monkeypatch`, so that this is the last word."""
    path, folders = sys.path, list(sys.path)
    yield
    sys.path = path
    sys.path[:] = folders


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A folder for plugin packages; the registry sees the packages in it and no others."""
    for flag in ("HWBACKENDS_BACKEND", "HWBACKENDS_CHECKED", "HWBACKENDS_TRACE"):
        monkeypatch.delenv(flag, raising=False)
    with fake_plugins.site(tmp_path) as made:
        monkeypatch.setattr(candidates, "entry_points", made.points)
        yield made
