"""AMD's GPU architectures: which of them Triton compiles for, and how wide their waves are. Imports no torch."""

from __future__ import annotations

from hwbackends.triton_ops.wheel import triton_version

SHOWN = ("gfx942", "gfx950", "gfx1100", "gfx1201")
"""Every variant of every kernel is compiled for these (docs/rocm.md)."""
COMMON = (
    "gfx908", "gfx90a", *SHOWN, "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153", "gfx1200",
)  # fmt: skip
KNOWN = {
    "3.6": (*COMMON, "gfx1010", "gfx1030"),
    "3.7": (*COMMON, "gfx1010", "gfx1030", "gfx1250"),
    "3.8": ("gfx906", *COMMON, "gfx1010", "gfx1030", "gfx1170", "gfx1250"),
    "3.9": ("gfx906", *COMMON, "gfx1170", "gfx1250"),
}
"""By release of triton, what it makes code objects of decode's two kernels for. gfx803, gfx900 and gfx940 were tried
with each of them, too, and refused."""


def known() -> tuple[str, ...]:
    """What the installed triton compiles for: as its release does, or one that is not listed as the newest that is."""
    release = ".".join(triton_version().split(".")[:2])
    return KNOWN.get(release, list(KNOWN.values())[-1])


def wanted() -> str:
    """The known ones, in words."""
    return f"one that triton {triton_version()} compiles for: {', '.join(known())}"


def lanes(architecture: str) -> int:
    """Threads of a wave: 64 on GCN and CDNA (gfx9), 32 on RDNA and gfx1250."""
    return 64 if name(architecture).startswith("gfx9") else 32


def name(text: str) -> str:
    """`gfx942` of what ROCm says, `gfx942:sramecc+:xnack-`."""
    return text.partition(":")[0]


def of_target_version(version: int) -> str:
    """The name of a `gfx_target_version` as the driver writes it: 90402 is gfx942, 90010 is gfx90a."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
