"""The SSM kernels on a machine without a GPU: bits against decode, bounds against float64, in triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton ships for Linux only")

ROOT = Path(__file__).parents[2]


def run_cases(*arguments: str, backend: str = "cuda") -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["INTERPRETED_BACKEND"] = backend
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cuda/interpreted_ssm_cases.py"]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1]


def test_ssm_hooks_hold_in_the_interpreter() -> None:
    run_cases("-m", "not slow")


@pytest.mark.slow
def test_ssm_hooks_hold_in_the_interpreter_at_odd_dims() -> None:
    run_cases("-m", "slow")


def test_decode_verify_and_a_snapshot_hold_in_the_interpreter_with_the_launch_sizes_of_rocm() -> None:
    run_cases("-k", "a_snapshot_of_a_commit", backend="rocm")


@pytest.mark.slow
def test_ssm_hooks_of_rocm_hold_in_the_interpreter() -> None:
    run_cases("-m", "not slow", backend="rocm")
