"""The kernels of the `cuda` backend serve the real models, in triton's interpreter where there is no GPU. In a process
of its own: the interpreter is chosen when triton is first imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed on this platform")

SERVE = """
import sys
import torch
from hwbackends.runner.drafters import missing_counts
from tests.engines.transformers.scenes import PROMPTS, assert_stock, make_runner, seeded

torch.set_num_threads(1)
name, layout, drafts = sys.argv[1], sys.argv[2], int(sys.argv[3])
prompts = PROMPTS[2:8]
drafter = seeded(name, prompts) if drafts else None
runner = make_runner(name, drafter, recorded=False, backend="cuda", layout=layout, draft_tokens=drafts, max_batch=3)
for index, prompt in enumerate(prompts):
    runner.add(prompt, 9, arrival=index // 2)
for request in runner.run():
    assert len(request.generated) == 9
    assert_stock(name, request)
assert any(request.reused for request in runner.requests)
print("missing", missing_counts(runner.requests, drafts) if drafts else [])
"""


def serve(name: str, layout: str, drafts: int) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[3]
    arguments = [sys.executable, "-c", SERVE, name, layout, str(drafts)]
    done = subprocess.run(
        arguments, capture_output=True, text=True, cwd=root, env=environment, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "missing []"


def test_the_cuda_kernels_serve_a_model_with_drafts() -> None:
    serve("lfm2", "ring", 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inkling", "lfm2"])
@pytest.mark.parametrize("layout", ["window", "ring", "lazy"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_the_cuda_kernels_serve_both_models_on_every_layout(name: str, layout: str, drafts: int) -> None:
    serve(name, layout, drafts)
