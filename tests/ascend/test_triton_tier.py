"""The shared backend tests over the triton tier, its kernels in triton's interpreter."""

from __future__ import annotations

import pytest

from tests.ascend.conftest import TRITON
from tests.backend.test_cases import *  # noqa: F403


@pytest.fixture(scope="session")
def target() -> tuple[str, str]:
    """The lane of this file."""
    return TRITON
