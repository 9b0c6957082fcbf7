"""The shared backend tests over the triton tier: the kernels that the lowering job compiles, in its interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hwbackends.ascend import launch, metadata
from tests.ascend.conftest import TRITON, fewer
from tests.backend import test_cases, test_properties
from tests.backend.lab import Lab
from tests.backend.test_cases import *  # noqa: F403
from tests.backend.test_properties import *  # noqa: F403
from tests.backend.test_wrapped_pools import *  # noqa: F403

FLOATS = [torch.float16, torch.bfloat16, torch.float32]

globals().update({name: fewer(test, 3) for name, test in vars(test_properties).items() if name.startswith("test_")})


@pytest.fixture(scope="session")
def target() -> tuple[str, str]:
    """The lane of this file."""
    return TRITON


@pytest.mark.parametrize("count", [6])
@pytest.mark.parametrize("state_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_pair_of_activation_and_state_dtype_is_exact(
    lab: Callable[..., Lab], dtype: torch.dtype, state_dtype: torch.dtype, count: int
) -> None:
    test_cases.test_every_pair_of_activation_and_state_dtype_is_exact(lab, dtype, state_dtype, count)


def test_seventy_thousand_requests_of_one_token(
    target: tuple[str, str], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More work items than programs, at a size that the interpreter can do: 37 requests, 5 programs."""
    monkeypatch.setattr(launch, "MAX_PROGRAMS", 5)
    monkeypatch.setattr(metadata, "EXTEND_PROGRAMS", 5)
    count = 37
    it = Lab(*target, layout, dim=3, slots=count + 1, requests=count, drafts=0)
    it.pool.mamba_index_mapping.copy_(torch.arange(1, count + 1, dtype=torch.int32))
    y = it.extend(range(count), [1] * count, torch.ones(count, 3))
    assert torch.equal(y, torch.full_like(y, 1000.0))
