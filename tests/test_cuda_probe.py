"""The `cuda` backend's probe: every answer, with its way out, and no torch imported for it."""

from __future__ import annotations

import ctypes
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hwbackends.cuda import probe as module
from hwbackends.triton_ops import wheel


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine whose torch, triton and driver are what the test says."""
    found = SimpleNamespace(packages={"torch", "triton"}, version="", devices=3, driver=True, init=0)
    found.capability, found.secretive = (9, 0), False

    def find_spec(name: str) -> ModuleSpec | None:
        (tmp_path / "version.py").write_text(found.version)
        return ModuleSpec(name, None, origin=str(tmp_path / "__init__.py")) if name in found.packages else None

    def load(name: str) -> Any:
        if not found.driver:
            raise OSError(name)

        def count(pointer: Any) -> int:
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint)).contents.value = found.devices
            return 0

        def capability(handle: Any, major: Any, minor: Any) -> int:
            for pointer, value in zip((major, minor), found.capability, strict=True):
                ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int)).contents.value = value
            return int(found.secretive)

        return SimpleNamespace(
            nvmlInit_v2=lambda: found.init,
            nvmlDeviceGetCount_v2=count,
            nvmlDeviceGetHandleByIndex_v2=lambda index, handle: 0,
            nvmlDeviceGetCudaComputeCapability=capability,
            nvmlShutdown=lambda: 0,
        )

    monkeypatch.setattr(module, "find_spec", find_spec)
    monkeypatch.setattr(wheel, "find_spec", find_spec)
    monkeypatch.setattr(module, "AMD_DRIVER", tmp_path / "kfd")
    monkeypatch.setattr(module.ctypes, "CDLL", load)
    for name in ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return found


CUDA_BUILD = "from typing import Optional\n__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n"
CPU_BUILD = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n"


def test_a_cuda_build_and_a_device_make_it_available(machine: Any) -> None:
    machine.version = CUDA_BUILD
    assert module.probe() == (True, "torch 2.13.0+cu130, built for CUDA 13.0, 3 device(s)", "")
    assert module.probe("cuda:1").available


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_missing_package_is_named_with_the_extra(machine: Any, name: str) -> None:
    machine.packages.remove(name)
    assert module.probe() == (False, f"{name} is not installed", "pip install 'hwbackends[cuda]'")


def test_a_cpu_build_of_torch_is_told(machine: Any) -> None:
    machine.version = CPU_BUILD
    assert module.probe()[:2] == (False, "torch 2.13.0+cpu, built for the CPU alone")


def test_a_torch_without_a_version_file_is_told(machine: Any) -> None:
    assert module.probe()[:2] == (False, "torch of an unknown version, built for the CPU alone")


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("2,0", 2), ("0,1,2,3,4", 3)])
def test_the_environment_limits_the_devices(
    machine: Any, monkeypatch: pytest.MonkeyPatch, visible: str, count: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert module.device_count() == count


@pytest.mark.parametrize("fault", [{"driver": False}, {"init": 9}, {"devices": 0}])
def test_no_driver_or_no_device_is_told_with_a_way_out(machine: Any, fault: dict[str, Any]) -> None:
    machine.version = CUDA_BUILD
    vars(machine).update(fault)
    reason, hint = "no CUDA device is visible", "check nvidia-smi and CUDA_VISIBLE_DEVICES"
    assert module.probe() == (False, reason, hint)


@pytest.mark.parametrize("capability", [(5, 2), (6, 0), (7, 0), (7, 5)])
def test_chips_that_triton_is_too_new_for_are_refused_by_their_compute_capability(
    machine: Any, capability: tuple[int, int]
) -> None:
    machine.version, machine.capability = CUDA_BUILD, capability
    name = f"compute capability {capability[0]}.{capability[1]}"
    reason = f"{name}: older than triton supports, which is compute capability 8.0"
    assert module.probe("cuda") == (False, reason, "load the reference backend for these devices")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
def test_chips_from_8_0_on_are_served(machine: Any, capability: tuple[int, int]) -> None:
    machine.version, machine.capability = CUDA_BUILD, capability
    assert module.probe("cuda").available


def test_a_library_that_does_not_tell_the_capability_hides_no_device(machine: Any) -> None:
    machine.version, machine.capability, machine.secretive = CUDA_BUILD, (7, 5), True
    assert module.probe("cuda").available


def test_the_interpreter_serves_the_cpu_only(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.version = CPU_BUILD
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert module.probe().available
    assert module.probe("cpu").available
    assert not module.probe("cuda").available


def test_another_device_is_refused_by_name(machine: Any) -> None:
    assert module.probe("npu:0")[:2] == (False, "serves CUDA devices, not npu:0")
