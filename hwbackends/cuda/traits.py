"""What is particular to NVIDIA GPUs: warps of 32, dependent launch, programs that fetch ahead, and launch sizes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from hwbackends.cuda import dependent, tuning
from hwbackends.cuda.ahead import attach
from hwbackends.cuda.probe import OLDEST, in_words
from hwbackends.triton_ops.traits import Traits

CUDA = Traits(
    devices="a CUDA device",
    lanes=32,
    tuning=tuning,
    epilogue_channels=16384,
    dependents=dependent,
    fetch_ahead=attach,
    speaks_ptx=True,
)


def traits_of(device: torch.device) -> Traits:
    """Those of every CUDA device that triton supports; `dependent` asks each for its compute capability."""
    if device.type != "cuda":
        return CUDA
    return _of(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _of(index: int) -> Traits:
    capability = torch.cuda.get_device_capability(index)
    return (
        CUDA if capability >= OLDEST else replace(CUDA, refused=(in_words(capability), f"at least {in_words(OLDEST)}"))
    )
