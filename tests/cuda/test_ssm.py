"""The SSM kernels on a GPU: the interpreter's cases on the device, and the same bits from every launch shape, ring and
policy at the sizes that models have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import GPU

pytestmark = pytest.mark.cuda
ROOT = Path(__file__).parents[2]


def test_the_cases_of_the_interpreter_hold_on_the_device() -> None:
    environment = {**os.environ, "SSM_DEVICE": "cuda", "INTERPRETED_BACKEND": GPU, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cuda/interpreted_ssm_cases.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gdn_tp4", "kda_tp4", "mamba2_tp4"])
def test_launch_shape_ring_and_policy_change_no_bit(name: str, dtype: torch.dtype) -> None:
    from hwbackends.bench.ssm import digests
    from hwbackends.bench.ssm_sizes import SIZES

    size = next(size for size in SIZES if size.name == name)
    found: dict[str, list[str]] = {}
    for line in digests(size, dtype, (8, 12), "cuda", small=False):
        found.setdefault(line["digest"], []).append(f"{line['work']} C={line['ring']} {line['shape']}")
    assert len(found) == 1, found
