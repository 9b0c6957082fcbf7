"""Which GPU tests run where: the same bodies on either vendor's device, and never silently on the other's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import missing_gpu

ROOT = Path(__file__).parents[1]
NVIDIA, AMD = "needs an NVIDIA GPU and a CUDA build of torch", "needs an AMD GPU and a ROCm build of torch"


@pytest.mark.parametrize(
    ("expression", "backend", "seen", "reason"),
    [
        ("", "cuda", True, ""),
        ("", "rocm", True, ""),
        ("", "cuda", False, "needs a GPU"),
        ("cuda", "cuda", True, ""),
        ("rocm", "rocm", True, ""),
        ("rocm and not slow", "rocm", True, ""),
        ("rocm", "cuda", True, AMD),
        ("cuda", "rocm", True, NVIDIA),
        ("rocm", "rocm", False, AMD),
        ("cuda or rocm", "rocm", True, ""),
    ],
)
def test_a_vendor_s_marker_asks_for_that_vendor_s_gpu(expression: str, backend: str, seen: bool, reason: str) -> None:
    assert missing_gpu(expression, backend, seen) == reason


def test_every_test_for_a_gpu_is_a_test_for_an_amd_gpu_too() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "rocm", "tests/cuda/test_graphs.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    assert "::" in done.stdout
    assert "deselected" not in done.stdout
