"""A whole model through the triton tier: its kernels in the interpreter, its tensors on the emulated device."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from hwbackends.ascend import tier
from tests.ascend.conftest import NPU


def test_a_model_gives_the_stock_models_tokens_through_the_kernels() -> None:
    pytest.importorskip("transformers", reason="the demo needs the extra 'transformers'")
    environment = {**os.environ, tier.ENVIRONMENT: "triton", "OMP_NUM_THREADS": "1"}
    arguments = ["--model", "lfm2", "--backend", "ascend", "--device", "npu", "--requests", "2", "--json"]
    if not NPU:
        environment["TRITON_INTERPRET"] = "1"
        arguments.append("--emulate")
    command = [sys.executable, "-m", "hwbackends", "demo", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert [check["name"] for check in found["checks"] if not check["passed"]] == []
