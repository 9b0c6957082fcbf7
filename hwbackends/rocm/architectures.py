"""AMD's GPU architectures: which of them Triton compiles for, and how wide their waves are. Imports no torch."""

from __future__ import annotations

SHOWN = ("gfx942", "gfx950", "gfx1100", "gfx1201")
"""Every variant of every kernel is compiled for these (docs/rocm.md)."""
KNOWN = (
    "gfx906", "gfx908", "gfx90a", *SHOWN, "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153",
    "gfx1200", "gfx1250",
)  # fmt: skip
"""Triton 3.9 makes a code object of a conv kernel for each of these, and refuses gfx803, gfx900, gfx1010 and gfx1030:
the compile job tries them all."""


def lanes(architecture: str) -> int:
    """Threads of a wave: 64 on GCN and CDNA (gfx9), 32 on RDNA and gfx1250."""
    return 64 if name(architecture).startswith("gfx9") else 32


def name(text: str) -> str:
    """`gfx942` of what ROCm says, `gfx942:sramecc+:xnack-`."""
    return text.partition(":")[0]


def of_target_version(version: int) -> str:
    """The name of a `gfx_target_version` as the driver writes it: 90402 is gfx942, 90010 is gfx90a."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
