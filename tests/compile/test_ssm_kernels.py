"""The SSM kernels through NVIDIA's and AMD's compilers on a CPU, in a process that no test has put into triton's
interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton ships for Linux only")

ROOT = Path(__file__).parents[2]


def run_cases(expression: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", expression]
    done = subprocess.run(
        [*command, "tests/compile/compiled_ssm_cases.py"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


def test_decode_compiles_without_spills_for_both_vendors() -> None:
    run_cases("not slow")


@pytest.mark.slow
def test_every_launch_shape_sums_in_one_layout() -> None:
    run_cases("slow")
