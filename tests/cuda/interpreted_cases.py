"""The shared backend cases on the cuda or the rocm backend, the kernels in triton's interpreter on the CPU. Not
collected by name: `test_interpreter.py` runs this file in a process of its own, because triton decides at import time
whether it interprets. A subset of widths and dtype pairs; a GPU runs all of them."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest

from hwbackends.registry.loading import load
from tests.backend import lab as laboratory
from tests.backend.lab import Lab
from tests.backend.test_cases import *  # noqa: F403

# one program per request would take minutes in the interpreter
del test_seventy_thousand_requests_of_one_token  # noqa: F821

LAYOUTS = ["window", "ring", "lazy"]


@pytest.fixture(scope="session")
def target() -> tuple[str, str]:
    """Backend and device of this lane."""
    return os.environ.get("INTERPRETED_BACKEND", "cuda"), "cpu"


@pytest.fixture(params=LAYOUTS, scope="session")
def layout(request: pytest.FixtureRequest) -> str:
    """State layout."""
    return str(request.param)


@pytest.fixture(autouse=True)
def by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for the backend by name alone: it serves no CPU unless its kernels are interpreted."""
    monkeypatch.setattr(laboratory, "load", lambda name, device: load(name))


@pytest.fixture
def lab(target: tuple[str, str], layout: str) -> Any:
    """Make a `Lab`."""
    return partial(Lab, *target, layout)
