"""The cuda backend's kernels on a machine without a GPU: the exact lane in triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton ships for Linux only")

ROOT = Path(__file__).parents[2]


def run_cases(*arguments: str, backend: str = "cuda") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["INTERPRETED_BACKEND"] = backend
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cuda/interpreted_cases.py"]
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550, check=False
    )


def test_the_exact_lane_holds_in_the_interpreter_on_every_layout() -> None:
    done = run_cases("-k", "not every_pair_of_activation")
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1]


def test_mixed_dtypes_are_exact_in_the_interpreter() -> None:
    done = run_cases("-k", "every_pair_of_activation and bfloat16-torch.float32 and (-3 or -6)")
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
