"""Whether the `cuda` backend can run here, found out without importing torch and without a device context."""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path

from hwbackends.contract.hookspecs import ProbeResult
from hwbackends.triton_ops.wheel import torch_build

NVML = "libnvidia-ml.so.1"
AMD_DRIVER = Path("/dev/kfd")
OLDEST = (8, 0)
"""Compute capability from which on triton supports NVIDIA's devices (its README, releases 3.6 to 3.9), and every kernel
is compiled (docs/rocm.md)."""


def in_words(capability: tuple[int, int]) -> str:
    """`compute capability 7.5`."""
    return f"compute capability {capability[0]}.{capability[1]}"


def probe(device: str | None = None) -> ProbeResult:
    """torch built for CUDA, triton, and a visible device; allocates nothing and creates no context."""
    for name in ("torch", "triton"):
        if find_spec(name) is None:
            return ProbeResult(False, f"{name} is not installed", "pip install 'hwbackends[cuda]'")
    kind = None if device is None else device.partition(":")[0]
    if os.environ.get("TRITON_INTERPRET") == "1" and kind in (None, "cpu"):
        return ProbeResult(True, "triton's interpreter on the CPU (TRITON_INTERPRET=1): right numbers, no speed")
    if kind not in (None, "cuda"):
        return ProbeResult(False, f"serves CUDA devices, not {device}", "load another backend for this device")
    build = torch_build()
    if build.hip is not None:
        return ProbeResult(False, str(build), "load the rocm backend, or install a CUDA build of torch")
    if build.cuda is None:
        return ProbeResult(False, str(build), "install a CUDA build of torch")
    count, found = device_count(), capabilities()
    if count and found and max(found) < OLDEST:
        names = ", ".join(dict.fromkeys(in_words(capability) for capability in found))
        reason = f"{names}: older than triton supports, which is {in_words(OLDEST)}"
        return ProbeResult(False, reason, "load the reference backend for these devices")
    if count:
        return ProbeResult(True, f"{build}, {count} device(s)")
    if AMD_DRIVER.exists():
        reason = f"{build}; no CUDA device is visible, and this machine has an AMD GPU driver ({AMD_DRIVER})"
        return ProbeResult(False, reason, "install a ROCm build of torch: the rocm backend serves those GPUs")
    return ProbeResult(False, "no CUDA device is visible", "check nvidia-smi and CUDA_VISIBLE_DEVICES")


def device_count() -> int:
    """CUDA devices that this process may use: those that the driver's management library counts, as far as
    CUDA_VISIBLE_DEVICES lists them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = None if visible is None else [part for part in visible.split(",") if part.strip() not in ("", "-1")]
    total = len(capabilities())
    return total if listed is None else min(total, len(listed))


def capabilities() -> list[tuple[int, int]]:
    """Compute capability of each device that the driver's management library counts, in its order, which need not be
    torch's."""
    try:
        library = ctypes.CDLL(NVML)
    except OSError:
        return []
    if library.nvmlInit_v2() != 0:
        return []
    count = ctypes.c_uint(0)
    failed = library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    found = [] if failed else [_capability(library, index) for index in range(count.value)]
    library.nvmlShutdown()
    return found


def _capability(library: ctypes.CDLL, index: int) -> tuple[int, int]:
    """Of one device; one that the library does not tell counts as new enough: its first launch asks torch."""
    handle, major, minor = ctypes.c_void_p(), ctypes.c_int(0), ctypes.c_int(0)
    failed = library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    failed = failed or library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    return OLDEST if failed else (major.value, minor.value)
