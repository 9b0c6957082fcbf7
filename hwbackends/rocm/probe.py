"""Whether the `rocm` backend can run here, found out without importing torch or triton and without a device context:
from the source of torch, the driver's device node, and what the driver says of the GPUs under /sys."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from hwbackends.contract.hookspecs import ProbeResult
from hwbackends.rocm import architectures
from hwbackends.triton_ops.wheel import torch_build, triton_version

DRIVER = Path("/dev/kfd")
TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
VISIBLE = (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"))
"""The driver's list, and within what it leaves, HIP's: the first variable that is set."""

Finding = tuple[str, str]
"""What is wrong, and the way out."""


def probe(device: str | None = None) -> ProbeResult:
    """Say whether an AMD GPU can be used, `device` (`cuda:1`) if one is named. Allocates nothing, creates no context.

    The checks go from the outside in: packages, device type, what torch and triton were built for, the driver, the
    devices that this process may see, their architecture.
    """
    for package in ("torch", "triton"):
        if find_spec(package) is None:
            return ProbeResult(False, f"{package} is not installed", "install a ROCm build of torch, see docs/rocm.md")
    kind = None if device is None else device.partition(":")[0]
    if os.environ.get("TRITON_INTERPRET") == "1" and kind in (None, "cpu"):
        return ProbeResult(True, "triton's interpreter on the CPU (TRITON_INTERPRET=1): right numbers, no speed")
    if kind not in (None, "cuda"):
        hint = "load another backend for this device"
        return ProbeResult(False, f"serves ROCm devices, which torch calls cuda, not {device}", hint)
    checks: tuple[Callable[[], Finding | None], ...] = (
        _build, _triton, _driver, lambda: _devices(device), lambda: _architecture(device)
    )  # fmt: skip
    for check in checks:
        wrong = check()
        if wrong is not None:
            return ProbeResult(False, *wrong)
    return ProbeResult(True, f"{torch_build()}, {', '.join(visible())}")


def _build() -> Finding | None:
    build = torch_build()
    if build.hip is not None:
        return None
    if DRIVER.exists():
        return f"{build}; this machine has an AMD GPU driver ({DRIVER})", "install a ROCm build of torch"
    return str(build), "install a ROCm build of torch, on a machine with AMD GPUs"


def _triton() -> Finding | None:
    spec = find_spec("triton")
    home = Path(spec.origin).parent if spec is not None and spec.origin else Path()
    if (home / "backends" / "amd").is_dir():
        return None
    return "the installed triton has no AMD backend", "install the triton that the ROCm build of torch asks for"


def _driver() -> Finding | None:
    if not DRIVER.exists():
        hint = f"install the amdgpu driver; a container needs --device={DRIVER} --device=/dev/dri"
        return f"{torch_build()}, but there is no AMD GPU driver: no {DRIVER}", hint
    if not os.access(DRIVER, os.R_OK | os.W_OK):
        return f"{DRIVER} may not be opened by this user", f"add the user to the group of {DRIVER} (render, or video)"
    return None


def _devices(device: str | None) -> Finding | None:
    found, seen = gpus(), visible()
    if not found:
        return f"no AMD GPU: {TOPOLOGY} names none", "check rocminfo"
    limits = [f"{name}={os.environ[name]}" for name in _limits()]
    if not seen:
        return f"no AMD GPU is visible of {len(found)}: {', '.join(limits)}", "widen or unset it"
    index = int((device or "cuda:0").partition(":")[2] or 0)
    if index >= len(seen):
        hint = f"name a smaller index{', or widen ' + ', '.join(limits) if limits else ''}"
        return f"no AMD GPU {index}: {len(seen)} visible of {len(found)} ({', '.join(found)})", hint
    return None


def _architecture(device: str | None) -> Finding | None:
    """The device's own architecture, or where none is named any of them."""
    seen = visible()
    index = (device or "").partition(":")[2]
    asked = [seen[int(index)]] if index else seen
    known, version = architectures.known(), triton_version()
    if any(architecture in known for architecture in asked):
        return None
    hint = f"it knows {', '.join(known)}; {OVERRIDE} names another one for the driver to report"
    newer = {release for release, names in architectures.KNOWN.items() for one in asked if one in names}
    hint = f"install triton {', or '.join(sorted(newer))}; {hint}" if newer else hint
    return f"{', '.join(dict.fromkeys(asked))}: an architecture that triton {version} does not know", hint


def gpus() -> list[str]:
    """Architectures of the machine's AMD GPUs, in the driver's order."""
    found = []
    for node in sorted(TOPOLOGY.glob("*/properties"), key=lambda path: int(path.parent.name)):
        values = dict(re.findall(r"^(\w+) (\d+)$", node.read_text(encoding="utf-8"), flags=re.MULTILINE))
        version = int(values.get("gfx_target_version", 0))
        if int(values.get("simd_count", 0)) and version:
            found.append(_overridden() or architectures.of_target_version(version))
    return found


def _overridden() -> str | None:
    """The architecture that HSA_OVERRIDE_GFX_VERSION makes the runtime report: 11.0.0 for gfx1100."""
    parts = os.environ.get(OVERRIDE, "").split(".")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        return None
    major, minor, step = map(int, parts)
    return f"gfx{major}{minor:x}{step:x}"


def visible() -> list[str]:
    """Architectures of the GPUs that this process may use, in torch's order. An entry that is no index (a UUID) counts
    as some GPU; the list ends at the first entry that names none, as the runtime's does."""
    seen = gpus()
    for name in _limits():
        seen = _limited(seen, [part.strip() for part in os.environ[name].split(",")])
    return seen


def _limits() -> list[str]:
    """The variables that count, of those that are set."""
    found = ([name for name in names if name in os.environ] for names in VISIBLE)
    return [names[0] for names in found if names]


def _limited(seen: list[str], listed: list[str]) -> list[str]:
    kept: list[str] = []
    for part in listed:
        if part.isdecimal() and int(part) < len(seen):
            kept.append(seen[int(part)])
        elif part.upper().startswith("GPU-") and len(kept) < len(seen):
            kept.append(seen[len(kept)])
        else:
            break
    return kept
