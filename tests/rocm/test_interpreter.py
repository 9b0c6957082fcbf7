"""The rocm backend's own launch sizes, in triton's interpreter on the CPU: the exact lane of the shared cases. The
kernels are those of `tests/cuda/test_interpreter.py`, which runs mixed dtypes, too."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton ships for Linux only")

from tests.cuda.test_interpreter import run_cases


def test_the_exact_lane_holds_in_the_interpreter_on_every_layout() -> None:
    done = run_cases("-k", "not every_pair_of_activation", backend="rocm")
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1]
