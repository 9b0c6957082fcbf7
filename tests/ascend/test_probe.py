"""The probe on machines that are faked with installed distributions: what is wrong, and the way out of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hwbackends.ascend import probe as module
from hwbackends.ascend import tier
from hwbackends.ascend.probe import probe
from hwbackends.doctor import report

Install = Callable[..., Path]
BREAKS = "raise ImportError('libhccl.so: cannot open shared object file')\n"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Write a distribution as an installer leaves it; importing its package breaks."""
    monkeypatch.setattr(module, "emulated", lambda: False)
    monkeypatch.setattr(module, "TOOLKIT_FOLDERS", ())
    monkeypatch.setattr(module, "DEVICE_NODES", str(tmp_path / "dev"))
    for name in (*module.TOOLKIT_VARIABLES, "ASCEND_RT_VISIBLE_DEVICES", module.AUTOLOAD, tier.ENVIRONMENT):
        monkeypatch.delenv(name, raising=False)
    site = tmp_path / "site"
    site.mkdir()
    (tmp_path / "dev").mkdir()
    monkeypatch.syspath_prepend(site)

    def write(name: str, version: str) -> Path:
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        if name == "torch_npu":
            (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
            (site / "torch_npu").mkdir()
            (site / "torch_npu" / "__init__.py").write_text(BREAKS)
        return site

    return write


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CANN toolkit whose set_env.sh was sourced."""
    folder = tmp_path / "ascend-toolkit"
    folder.mkdir()
    monkeypatch.setenv("ASCEND_HOME_PATH", str(folder))
    return folder


def nodes(tmp_path: Path, count: int) -> None:
    for index in range(count):
        (tmp_path / "dev" / f"davinci{index}").touch()


def test_no_torch_npu(install: Install) -> None:
    install("torch", "2.9.1")
    found = probe()
    assert not found.available
    assert found.reason == "torch_npu is not installed"
    assert "pip install torch_npu==2.9.1" in found.hint


def test_torch_npu_without_cann(install: Install) -> None:
    install("torch", "2.9.1")
    install("torch_npu", "2.9.1")
    found = probe()
    assert not found.available
    assert found.reason == "torch_npu 2.9.1 is installed without the CANN toolkit"
    assert "set_env.sh" in found.hint
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in found.hint


def test_torch_npu_without_cann_breaks_import_torch_and_not_the_probe(install: Install, tmp_path: Path) -> None:
    site = install("torch_npu", "2.13.0")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.getcwd()])}

    def run(code: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=environment | more, capture_output=True, text=True, check=False)

    broken = run("import torch")
    assert broken.returncode != 0
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in broken.stderr
    words = run("from hwbackends.ascend.probe import probe; import sys; print(probe()); print('torch' in sys.modules)")
    assert words.returncode == 0, words.stderr
    assert "is installed without the CANN toolkit" in words.stdout
    assert words.stdout.endswith("False\n")
    assert run("import torch", TORCH_DEVICE_BACKEND_AUTOLOAD="0").returncode == 0


@pytest.mark.parametrize("version", ["2.7.1", "2.7.1.post2", "2.9.0rc1"])
def test_torch_and_torch_npu_of_different_releases(install: Install, toolkit: Path, version: str) -> None:
    install("torch", "2.9.1+cpu")
    install("torch_npu", version)
    found = probe()
    assert not found.available
    assert found.reason == f"torch 2.9.1+cpu and torch_npu {version} are of different releases"
    assert "pip install torch_npu==2.9.1" in found.hint


def test_no_device(install: Install, toolkit: Path) -> None:
    install("torch", "2.9.1+cpu")
    install("torch_npu", "2.9.1.post1")
    found = probe()
    assert not found.available
    assert found.reason.startswith("no NPU: ")
    assert "npu-smi info" in found.hint


@pytest.mark.parametrize(("device", "visible", "count"), [("npu:3", None, 3), ("npu:1", "2", 1), ("npu", "", 0)])
def test_a_device_that_is_not_visible(
    install: Install, toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, visible: str | None,
    count: int,
) -> None:  # fmt: skip
    install("torch", "2.9.1")
    install("torch_npu", "2.9.1")
    nodes(tmp_path, 3)
    if visible is not None:
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    found = probe(device)
    assert not found.available
    assert f"{count} visible of 3" in found.reason
    assert "ASCEND_RT_VISIBLE_DEVICES" in found.hint


def test_torch_imported_before_torch_npu(install: Install, toolkit: Path, tmp_path: Path) -> None:
    install("torch", "2.9.1")
    install("torch_npu", "2.9.1")
    nodes(tmp_path, 1)
    found = probe()
    assert not found.available
    assert found.reason == "torch was imported without torch_npu"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in found.hint


def test_all_there(install: Install, toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install("torch", "2.9.1+cpu")
    install("torch_npu", "2.9.1.post1")
    nodes(tmp_path, 2)
    monkeypatch.delitem(sys.modules, "torch")
    found = probe("npu:1")
    assert found == (True, f"torch_npu 2.9.1.post1, CANN in {toolkit}; tier torch serves every hook", "")
    assert probe("npu:1") == found
    assert "torch_npu" not in sys.modules


def test_another_device_is_refused(install: Install) -> None:
    found = probe("cuda:0")
    assert not found.available
    assert found.reason == "serves npu devices, not cuda:0"
    assert found.hint


def test_a_misspelt_tier_is_refused(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tier.ENVIRONMENT, "trition")
    found = probe()
    assert not found.available
    assert "got 'trition', wanted one of torch, triton" in found.reason
    assert "unset HWBACKENDS_ASCEND_TIER" in found.hint


def test_the_tier_follows_what_is_installed(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "version_of", {"triton-ascend": "3.2.0"}.get)
    assert tier.hook_origins()["conv_decode"] == "triton"
    assert tier.hook_origins()["clear_slots"] == "torch"
    monkeypatch.setenv(tier.ENVIRONMENT, "torch")
    assert set(tier.hook_origins().values()) == {"torch"}


def test_triton_beside_triton_ascend_is_not_used_unasked(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "version_of", {"triton-ascend": "3.2.0", "triton": "3.9.0"}.get)
    assert tier.chosen() == "torch"
    assert "both installed and share one import package" in module._tier_words()


def test_the_doctor_tells_owners_of_an_npu_and_of_a_laptop_the_truth(
    install: Install, toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("torch", "2.9.1")
    laptop = ascend_of(report("npu"))
    assert laptop["state"] == "unavailable"
    assert laptop["reason"] == "torch_npu is not installed"
    install("torch_npu", "2.9.1")
    nodes(tmp_path, 1)
    monkeypatch.setattr(module, "_not_loaded", lambda: None)
    monkeypatch.setattr(tier, "version_of", {"triton-ascend": "3.2.0"}.get)
    owner = ascend_of(report("npu"))
    assert owner["state"] == "available"
    assert owner["reason"].endswith("tier triton (triton-ascend 3.2.0) serves 9 hooks, tier torch the other 9")
    assert owner["tiers"]["conv_decode"] == "triton"
    assert owner["tiers"]["clear_slots"] == "torch"
    assert report("npu")["selection"]["name"] == "ascend"


def ascend_of(data: dict[str, Any]) -> dict[str, Any]:
    """The doctor's entry of this backend."""
    found: dict[str, Any] = next(item for item in data["backends"] if item["name"] == "ascend")
    return found
