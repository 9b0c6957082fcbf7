"""The shared tests of bad input over the triton tier, on one layout: the launchers refuse before they launch."""

from __future__ import annotations

import pytest

from tests.ascend.conftest import TRITON
from tests.backend.test_bad_input import *  # noqa: F403


@pytest.fixture(scope="session")
def target() -> tuple[str, str]:
    """The lane of this file."""
    return TRITON


@pytest.fixture(scope="session")
def layout() -> str:
    """The layout whose commit and snapshots need the most arguments."""
    return "ring"
