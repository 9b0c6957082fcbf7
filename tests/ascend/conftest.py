"""Runs the shared backend tests over both tiers of the Ascend backend, in lanes that need no NPU: `torch`, its ops on
the emulated npu device through the registry; `triton`, its kernels in triton's interpreter on CPU tensors. With
`-m npu` on a machine that has an NPU the same tests run on the device instead."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from hwbackends.ascend import probe, tier
from hwbackends.testing.emulated_npu import emulate_npu
from hwbackends.torch_ops import commit as torch_commit
from hwbackends.torch_ops import epilogue
from tests.ascend import coverage
from tests.backend import lab as lab_module
from tests.backend.lab import Lab

if not torch.cuda.is_available():  # triton reads it when it is first imported, for the whole process
    os.environ.setdefault("TRITON_INTERPRET", "1")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LAYOUTS = ["window", "ring", "lazy"]


@functools.cache
def triton_hooks() -> Any:
    """The hooks that the plugin serves in the triton tier; the registry would want an NPU for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(tier.ENVIRONMENT, "triton")
        homes = (probe, epilogue, torch_commit, *tier.modules())
    names = ("probe", *tier.TRITON_HOOKS, *tier.TORCH_HOOKS)
    return SimpleNamespace(**{name: getattr(home, name) for home in homes for name in names if hasattr(home, name)})


TORCH, TRITON = ("ascend", "npu"), ("ascend", "cpu")
"""What a `Lab` is made with in each lane: the emulated device, and CPU tensors for the interpreter."""


def fewer(test: Any, examples: int) -> Any:
    """A property of the shared tests with fewer examples: every op here is Python."""
    again: Any = given(**test.hypothesis._given_kwargs)(test.hypothesis.inner_test)
    again._hypothesis_internal_use_settings = settings(max_examples=examples)
    again.pytestmark = getattr(test, "pytestmark", [])
    return again


@pytest.fixture(scope="session", autouse=True)
def _lanes() -> Iterator[None]:
    emulate_npu()
    if not INTERPRETED:
        yield
        return
    from triton.runtime.interpreter import InterpretedFunction

    original, run = lab_module.load, InterpretedFunction.run

    def covered_run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        """Each launch of each test must be a variant that the lowering job compiles."""
        if kernel.fn.__module__.startswith("hwbackends.ascend."):
            coverage.check(kernel, args, kwargs)
        return run(kernel, *args, **kwargs)

    def load(name: str, device: Any) -> Any:
        return triton_hooks() if (name, device) == TRITON else original(name, device)

    lab_module.load, InterpretedFunction.run = load, covered_run
    yield
    lab_module.load, InterpretedFunction.run = original, run


@pytest.fixture(params=LAYOUTS, scope="session")
def layout(request: pytest.FixtureRequest) -> str:
    """State layout."""
    return str(request.param)


@pytest.fixture
def lab(target: tuple[str, str], layout: str) -> Callable[..., Lab]:
    """Make a `Lab` on the tier and layout under test."""
    return partial(Lab, *target, layout)
