"""Whether the `cuda` backend can run here, found out without importing torch and without a device context."""

from __future__ import annotations

import ctypes
import os
import re
from importlib.util import find_spec
from pathlib import Path

from hwbackends.contract.hookspecs import ProbeResult

NVML = "libnvidia-ml.so.1"


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
    version, cuda = torch_build()
    if cuda is None:
        return ProbeResult(False, f"torch {version} is built without CUDA", "install a CUDA build of torch")
    count = device_count()
    if not count:
        return ProbeResult(False, "no CUDA device is visible", "check nvidia-smi and CUDA_VISIBLE_DEVICES")
    return ProbeResult(True, f"torch {version} with CUDA {cuda}, {count} device(s)")


def torch_build() -> tuple[str, str | None]:
    """Version of the installed torch and of the CUDA that it was built for, read from its source."""
    spec = find_spec("torch")
    path = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else Path()
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = dict(re.findall(r"^(__version__|cuda)\b[^=\n]*= *'([^']+)'", text, flags=re.MULTILINE))
    return found.get("__version__", "of an unknown version"), found.get("cuda")


def device_count() -> int:
    """CUDA devices that this process may use: those that the driver's management library counts, as far as
    CUDA_VISIBLE_DEVICES lists them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = None if visible is None else [part for part in visible.split(",") if part.strip() not in ("", "-1")]
    try:
        library = ctypes.CDLL(NVML)
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if library.nvmlInit_v2() != 0:
        return 0
    found = library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    library.nvmlShutdown()
    total = count.value if found == 0 else 0
    return total if listed is None else min(total, len(listed))
