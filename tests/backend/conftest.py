"""Runs this folder once per backend and layout: the reference on the CPU always, `cuda` or `rocm` on a GPU (`-m
cuda`, `-m rocm`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.backend.lab import Lab
from tests.gpu import GPU

BACKENDS = [
    pytest.param(("reference", "cpu"), id="reference"),
    pytest.param((GPU, "cuda"), id=GPU, marks=pytest.mark.cuda),
]
LAYOUTS = ["window", "ring", "lazy"]


@pytest.fixture(params=BACKENDS, scope="session")
def target(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Backend name and device."""
    found: tuple[str, str] = request.param
    return found


@pytest.fixture(params=LAYOUTS, scope="session")
def layout(request: pytest.FixtureRequest) -> str:
    """State layout."""
    return str(request.param)


@pytest.fixture
def lab(target: tuple[str, str], layout: str) -> Callable[..., Lab]:
    """Make a `Lab` on the backend and layout under test."""
    return partial(Lab, *target, layout)
