"""The shared backend tests over the torch tier, on the emulated npu device and through the registry: a CPU tensor that
slips into an op, or a missing op, fails them."""

from __future__ import annotations

import pytest

from tests.ascend.conftest import TORCH, fewer
from tests.backend import test_properties
from tests.backend.test_bad_input import *  # noqa: F403
from tests.backend.test_cases import *  # noqa: F403
from tests.backend.test_properties import *  # noqa: F403
from tests.backend.test_wrapped_pools import *  # noqa: F403

globals().update({name: fewer(test, 10) for name, test in vars(test_properties).items() if name.startswith("test_")})


@pytest.fixture(scope="session")
def target() -> tuple[str, str]:
    """The lane of this file."""
    return TORCH
