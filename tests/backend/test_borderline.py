"""All backends whose kernels run on this machine's CPU, over illegal and borderline steps: the same named errors or the
same bits, and no write outside of what the contract lets them. A process of its own, because triton decides at its
import whether it interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hwbackends.registry.loading import load
from tests.backend import borderline

ROOT = Path(__file__).parents[2]


def fuzzed(seconds: int, seed: int) -> str:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.backend.borderline", "--seconds", str(seconds), "--seed", str(seed)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds + 500, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return done.stdout


def test_a_minute_of_illegal_steps_finds_no_difference() -> None:
    pytest.importorskip("triton", reason="triton ships for Linux only")
    assert "3 backends, 0 wrong" in fuzzed(45, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(5000)
def test_an_hour_of_illegal_steps_finds_no_difference() -> None:
    pytest.importorskip("triton", reason="triton ships for Linux only")
    assert "3 backends, 0 wrong" in fuzzed(3600, seed=1_000_000)


@pytest.mark.cuda
def test_illegal_steps_on_the_gpu_give_the_reference_s_errors_and_bits() -> None:
    backends = {name: load(name, "cuda") for name in ("reference", "cuda")}
    for seed in range(2000, 2300):
        step = borderline.make(seed)
        assert not borderline.judge(step, backends, "cuda"), step


def test_a_backend_that_writes_beside_its_output_is_found() -> None:
    """The judge's own proof: a copy of the reference with one fault of each kind that it looks for."""
    reference = load("reference")

    class Beside:
        def __getattr__(self, name: str) -> object:
            return getattr(reference, name)

        def conv_decode(self, x, weight, bias, state, metadata, activation=None, residual=False, out=None):  # type: ignore[no-untyped-def]
            y = reference.conv_decode(x, weight, bias, state, metadata, activation, residual, out)
            if out is not None and out.numel():
                out.as_strided((out.numel() + 1,), (1,))[-1] = 5.0
            return y

    class Lenient(Beside):
        def conv_decode(self, x, weight, bias, state, metadata, activation=None, residual=False, out=None):  # type: ignore[no-untyped-def]
            return reference.conv_decode(x, weight, bias, state, metadata, activation, residual)

    found = {"Beside": set(), "Lenient": set()}
    for kind in (Beside, Lenient):
        for seed in range(120):
            told = borderline.judge(borderline.make(seed), {"reference": reference, "other": kind()})
            found[kind.__name__].add(told)
    assert "other wrote outside of its memory" in found["Beside"]
    assert any("no error; reference" in told for told in found["Lenient"])
