"""Shared by all tests: hypothesis profiles, and which marked tests run where."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# One profile for every machine: a slow machine must not turn a property red, and a failure must come back.
settings.register_profile(
    "default", max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=5_000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def _has_cuda() -> bool:
    try:
        import torch
    except ModuleNotFoundError:
        return False
    return torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out unless `-m` names them; CUDA tests on a machine without a GPU say so."""
    expression = str(config.getoption("markexpr"))
    kept = [item for item in items if item.get_closest_marker("slow") is None or "slow" in expression]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
    marked = [item for item in items if item.get_closest_marker("cuda") is not None]
    if marked and not _has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
