"""Runs the shared backend tests over both tiers of the Ascend backend. Every test here carries the mark `npu`. On a
machine with an NPU both tiers run on it. Elsewhere lanes stand in, and the summary says so in one line: the torch tier
on the emulated npu device, through the registry; the triton tier in triton's interpreter on CPU tensors; and the
vendor's compiler, on every kernel."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
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

FOUND = probe.probe("npu")
NPU = FOUND.available and not probe.emulated()
if not NPU and not torch.cuda.is_available():  # triton reads it when it is first imported, for the whole process
    os.environ.setdefault("TRITON_INTERPRET", "1")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TORCH, TRITON = ("ascend", "npu"), ("ascend in the triton tier", "npu" if NPU else "cpu")
"""What a `Lab` is made with in each lane."""
NO_TRITON = ""
"""Why the triton tier has no lane here."""
if NPU and tier.triton_ascend() is None:
    NO_TRITON = "triton-ascend is not installed"
elif not NPU and not INTERPRETED:
    NO_TRITON = "triton compiles for a GPU in this process: run tests/ascend alone with TRITON_INTERPRET=1"
FOLDER = Path(__file__).parent
LAYOUTS = ["window", "ring", "lazy"]


@functools.cache
def triton_hooks() -> Any:
    """The hooks that the plugin serves in the triton tier; the registry would want an NPU for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(tier.ENVIRONMENT, "triton")
        homes = (probe, epilogue, torch_commit, *tier.modules())
    names = ("probe", *tier.TRITON_HOOKS, *tier.TORCH_HOOKS)
    return SimpleNamespace(**{name: getattr(home, name) for home in homes for name in names if hasattr(home, name)})


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark this folder, and skip the triton tier where it has no lane."""
    for item in items:
        if FOLDER not in item.path.parents:
            continue
        item.add_marker(pytest.mark.npu)
        if item.path.name.startswith("test_triton") and NO_TRITON:
            item.add_marker(pytest.mark.skip(reason=NO_TRITON))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The one line."""
    lanes = "ran on the device" if NPU else "ran the emulated device, the interpreter and the lowering instead"
    terminalreporter.write_line(f"npu: {FOUND.reason}; {lanes}")


def fewer(test: Any, examples: int) -> Any:
    """A property of the shared tests with fewer examples: every op here is Python."""
    again: Any = given(**test.hypothesis._given_kwargs)(test.hypothesis.inner_test)
    again._hypothesis_internal_use_settings = settings(max_examples=examples)
    again.pytestmark = getattr(test, "pytestmark", [])
    return again


@pytest.fixture(scope="session", autouse=True)
def _lanes() -> Iterator[None]:
    """The emulated device where there is no NPU, and hooks of the triton tier for its lane."""
    if not NPU:
        emulate_npu()
    original = lab_module.load

    def load(name: str, device: Any) -> Any:
        return triton_hooks() if name == TRITON[0] else original(name, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab_module, "load", load)
        if INTERPRETED:
            _hold_launches(patch)
        yield


def _hold_launches(patch: pytest.MonkeyPatch) -> None:
    """Each launch of each test must be a variant that the lowering job compiles."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def covered_run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if kernel.fn.__module__.startswith("hwbackends.ascend."):
            coverage.check(kernel, args, kwargs)
        return run(kernel, *args, **kwargs)

    patch.setattr(InterpretedFunction, "run", covered_run)


@pytest.fixture(params=LAYOUTS, scope="session")
def layout(request: pytest.FixtureRequest) -> str:
    """State layout."""
    return str(request.param)


@pytest.fixture
def lab(target: tuple[str, str], layout: str) -> Callable[..., Lab]:
    """Make a `Lab` on the tier and layout under test."""
    return partial(Lab, *target, layout)
