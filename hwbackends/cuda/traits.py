"""What is particular to NVIDIA GPUs: warps of 32, dependent launch, programs that fetch ahead, and launch sizes."""

from __future__ import annotations

import torch

from hwbackends.cuda import dependent, tuning
from hwbackends.cuda.ahead import attach
from hwbackends.triton_ops.traits import Traits

CUDA = Traits(
    devices="a CUDA device",
    lanes=32,
    tuning=tuning,
    epilogue_channels=16384,
    dependents=dependent,
    fetch_ahead=attach,
)


def traits_of(device: torch.device) -> Traits:
    """Those of every CUDA device; `dependent` asks each for its compute capability."""
    return CUDA
