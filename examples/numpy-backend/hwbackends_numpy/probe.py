"""Whether NumPy and torch are installed; asked before the plugin, which imports both, is imported."""

from __future__ import annotations

from importlib.util import find_spec

from hwbackends.contract.hookspecs import ProbeResult


def probe(device: str | None = None) -> ProbeResult:
    """Yes on the CPU, where both packages are there."""
    if device is not None and device.partition(":")[0] != "cpu":
        return ProbeResult(False, f"computes on the CPU, not on {device}", "pass device='cpu'")
    for package in ("numpy", "torch"):
        if find_spec(package) is None:
            return ProbeResult(False, f"{package} is not installed", f"pip install {package}")
    return ProbeResult(True, "NumPy on CPU tensors")
