"""The floor of a device: copy bandwidth, and what a launch costs that does nothing, plain and dependent."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hwbackends.bench import timing
from hwbackends.bench.kernels import copy_kernel, nothing_kernel


@dataclass(frozen=True, slots=True)
class Floor:
    """Bytes per second of a copy (read and written), microseconds of an empty launch in a graph."""

    copy_bytes_per_s: float
    empty_us: float
    empty_dependent_us: float

    def of(self, size: int) -> float:
        """Microseconds below which no plain launch that moves `size` bytes goes."""
        return max(size / self.copy_bytes_per_s * 1e6, self.empty_us)


def measure() -> Floor:
    """Measure the current device."""
    block, programs = 4096, 1 << 17
    source = torch.randint(1 << 30, (programs * block,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    copy = timing.in_graph(lambda i: copy_kernel[(programs,)](source, target, BLOCK=block, num_warps=8), 4)
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    plain = timing.in_graph(lambda i: nothing_kernel[(1,)](flag, DEPENDENT=False, num_warps=1), 512)
    dependent = plain
    if torch.cuda.get_device_capability()[0] >= 9:
        nothing_kernel[(1,)](flag, DEPENDENT=True, num_warps=1, launch_pdl=True)
        dependent = timing.in_graph(
            lambda i: nothing_kernel[(1,)](flag, DEPENDENT=True, num_warps=1, launch_pdl=True), 512
        )
    return Floor(2 * source.nbytes / copy.us * 1e6, plain.us, dependent.us)
