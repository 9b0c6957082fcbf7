"""What is particular to AMD GPUs: the width of a wave, no dependent launch, no inline assembly that fetches ahead,
compiled kernels that may not depend on a tensor's size, and launch sizes."""

from __future__ import annotations

from functools import cache

import torch

from hwbackends.rocm import architectures
from hwbackends.rocm.tuning import Tuning
from hwbackends.triton_ops.traits import Traits

DEFAULT = "gfx942"
"""Whose launch sizes the interpreter takes."""


@cache
def traits_for(architecture: str) -> Traits:
    """Those of an architecture."""
    lanes = architectures.lanes(architecture)
    return Traits(
        devices="a ROCm device, which torch calls cuda",
        lanes=lanes,
        tuning=Tuning(lanes),
        epilogue_channels=16384,
        sizes_compiled_in=True,
        threads_per_launch=(1 << 32) - 1,
        refused=None if architecture in architectures.known() else (architecture, architectures.wanted()),
    )


@cache
def _architecture(index: int) -> str:
    return architectures.name(str(torch.cuda.get_device_properties(index).gcnArchName))


def traits_of(device: torch.device) -> Traits:
    """Those of the device that a call's tensors lie on."""
    if device.type != "cuda":
        return traits_for(DEFAULT)
    return traits_for(_architecture(torch.cuda.current_device() if device.index is None else device.index))
