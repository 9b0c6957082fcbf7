"""The conformance kit on the GPU of this machine, over the backend that serves it; and what a run says where there is
none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hwbackends.errors import BackendUnavailableError, DeviceError, HwBackendsError
from hwbackends.remote.plugin import Plugin
from tests.gpu import GPU, visible

ROOT = Path(__file__).parents[2]


def judged(folder: Path, backend: str, device: str, *options: str) -> dict[str, Any]:
    """The report of a run of the kit, in a process of its own."""
    report = folder / "report.json"
    kit = [
        sys.executable,
        "-m",
        "hwbackends",
        "conformance",
        "run",
        backend,
        "--device",
        device,
        "--report",
        str(report),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*kit, "-q", "-p", "no:cacheprovider", *options],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert report.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    data: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return data


def assert_certified(data: dict[str, Any], verdict: str = "certified") -> None:
    """Nothing that the backend claims failed, and everything that it claims was judged."""
    failed = [f"{test['id']}: {test['reason']}" for test in data["tests"] if test["outcome"] == "failed"]
    assert data["verdict"] == verdict, (data["line"], failed[:20])
    assert not failed
    assert data["counts"]["passed"] == data["counts"]["claimed"]


@pytest.mark.rocm
@pytest.mark.timeout(7200)
def test_the_backend_that_serves_this_gpu_is_certified_by_the_whole_kit(tmp_path: Path) -> None:
    data = judged(tmp_path, GPU, "cuda")
    assert (data["backend"], data["device"].partition(":")[0]) == (GPU, "cuda")
    assert_certified(data)


def test_the_same_run_judges_the_reference_on_this_cpu(tmp_path: Path) -> None:
    data = judged(tmp_path, "reference", "cpu", "--quick", "-k", "test_probe")
    assert (data["backend"], data["device"]) == ("reference", "cpu")
    assert data["counts"]["passed"] > 1
    assert_certified(data, "partial")
    data["tests"][0] |= {"outcome": "failed", "reason": "as if"}
    with pytest.raises(AssertionError):
        assert_certified(data, "partial")
    with pytest.raises(AssertionError, match="partial"):
        assert_certified(data)


@pytest.mark.skipif(visible(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("backend", "device", "error", "words"),
    [
        ("rocm", "cuda", BackendUnavailableError, "install a ROCm build of torch"),
        ("cuda", "cuda", BackendUnavailableError, "install a CUDA build of torch"),
        ("rocm", "cuda:1", BackendUnavailableError, "install a ROCm build of torch"),
        ("rocm", "cpu", BackendUnavailableError, "serves ROCm devices, which torch calls cuda, not cpu"),
        ("hwbackends.rocm.plugin", "cuda", DeviceError, "of which torch .* sees 0, .*doctor"),
        ("rocm", "gpu", DeviceError, "got gpu, wanted a device as torch names it"),
    ],
)
def test_a_run_on_a_device_that_is_not_there_says_what_to_do(
    backend: str, device: str, error: type[HwBackendsError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # in the interpreter the CPU is a device of theirs
    with pytest.raises(error, match=words):
        Plugin(backend, device)
