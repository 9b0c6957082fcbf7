"""Whether the `cuda` backend can run here, found out without a device context."""

from __future__ import annotations

import os
from importlib.util import find_spec

from hwbackends.hookspecs import ProbeResult


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
    import torch

    if torch.version.cuda is None:
        hint = "install a CUDA build of torch"
        return ProbeResult(False, f"torch {torch.__version__} is built without CUDA", hint)
    count = torch.cuda.device_count()
    if not count:
        return ProbeResult(False, "torch sees no CUDA device", "check nvidia-smi and CUDA_VISIBLE_DEVICES")
    return ProbeResult(True, f"torch {torch.__version__} with CUDA {torch.version.cuda}, {count} device(s)")
