"""Whether a graph records what is launched now, which is when nothing may wait for the device."""

from __future__ import annotations

from collections.abc import Callable

import torch

RECORDERS: list[Callable[[], bool]] = []
"""What stands for a graph beside the devices' own adds here whether it records now."""


def capturing() -> bool:
    """Whether the current stream of a device, or a recorder, is being captured."""
    if any(recording() for recording in RECORDERS):
        return True
    devices = [torch.cuda, getattr(torch, "npu", None)]
    return any(d is not None and d.is_initialized() and d.is_current_stream_capturing() for d in devices)
