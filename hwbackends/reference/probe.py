"""Whether the `reference` backend can run here; asked before the plugin, which imports torch, is imported."""

from __future__ import annotations

from importlib.util import find_spec

from hwbackends.contract.hookspecs import ProbeResult

ALWAYS_THERE = ("cpu", "meta")


def probe(device: str | None = None) -> ProbeResult:
    """Pure torch runs wherever torch runs. torch is imported only to look for a device other than the CPU."""
    if find_spec("torch") is None:
        return ProbeResult(False, "torch is not installed", "pip install 'hwbackends[reference]'")
    if device is not None and device.partition(":")[0] not in ALWAYS_THERE:
        return _probe_device(device)
    return ProbeResult(True, "pure torch, any device")


def _probe_device(device: str) -> ProbeResult:
    import torch

    hint = "name a device that is there, such as cpu"
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        return ProbeResult(False, f"torch knows no device {device!r}: {str(error).splitlines()[0]}", hint)
    counter = getattr(getattr(torch, wanted.type, None), "device_count", None)
    count = counter() if counter is not None else None
    if count is not None and (wanted.index or 0) >= count:
        return ProbeResult(False, f"device {device!r} is not there: torch sees {count} of type {wanted.type}", hint)
    return ProbeResult(True, f"pure torch on {device}")
