"""Memory that is large in addresses and small in pages, for tensors whose offsets pass 2**31."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch
from torch import Tensor


def sparse_bytes(count: int) -> Tensor:
    """[count] uint8 of zeros in host memory, of which only pages that are touched exist.

    It is a mapped file without content: unlike an allocation of that size it counts against no limit of what may be
    committed, so that it can be had where memory is small and overcommitment is off.
    """
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("hwbackends-sparse")
    else:
        with tempfile.TemporaryFile() as file:
            handle = os.dup(file.fileno())
    try:
        os.ftruncate(handle, count)
        memory = mmap.mmap(handle, count)  # has a handle of its own
    finally:
        os.close(handle)
    return torch.frombuffer(memory, dtype=torch.uint8)
