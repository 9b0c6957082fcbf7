"""Whether the Ascend backend can run here, found out without importing torch or torch_npu: where torch_npu is installed
and the CANN toolkit is not, `import torch` itself fails, because torch loads installed device backends on import."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from hwbackends.ascend import tier
from hwbackends.ascend.tier import hook_origins as hook_origins
from hwbackends.ascend.tier import version_of
from hwbackends.contract.hookspecs import ProbeResult
from hwbackends.errors import UnsupportedError

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
TOOLKIT_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
TOOLKIT_FOLDERS = (
    "/usr/local/Ascend/ascend-toolkit/latest",
    "/usr/local/Ascend/latest",
    "~/Ascend/ascend-toolkit/latest",
    "~/Ascend/latest",
)
DEVICE_NODES = "/dev"

Finding = tuple[str, str]
"""What is wrong, and the way out."""


def probe(device: str | None = None) -> ProbeResult:
    """Say whether an NPU can be used, on `device` if one is named. Imports nothing, allocates nothing.

    The checks go from the outside in: wrong device type, tier, emulation, torch_npu, its version against torch's,
    CANN, the device nodes.
    """
    if device is not None and device.partition(":")[0] != "npu":
        return ProbeResult(False, f"serves npu devices, not {device}", "pass device='npu', or choose another backend")
    wrong = _tier_finding()
    if wrong is None and emulated():
        return ProbeResult(True, f"emulated npu in this process, not a device; {_tier_words()}")
    checks: tuple[Callable[[], Finding | None], ...] = (
        _no_torch, _no_torch_npu, _no_toolkit, _mismatch, lambda: _no_device(device), _not_loaded
    )  # fmt: skip
    for check in checks:
        wrong = wrong or check()
    if wrong is not None:
        return ProbeResult(False, *wrong)
    return ProbeResult(True, f"torch_npu {version_of('torch_npu')}, CANN in {toolkit()}; {_tier_words()}")


def emulated() -> bool:
    """Whether `hwbackends.testing.emulated_npu` provides the device in this process."""
    module = sys.modules.get("hwbackends.testing.emulated_npu")
    return module is not None and bool(module.is_emulated())


def toolkit() -> Path | None:
    """Folder of the CANN toolkit: what the environment names, else the usual places."""
    named = [os.environ[name] for name in TOOLKIT_VARIABLES if os.environ.get(name)]
    for folder in (*named, *TOOLKIT_FOLDERS):
        path = Path(folder).expanduser()
        if path.is_dir():
            return path
    return None


def _tier_finding() -> Finding | None:
    try:
        wanted = tier.chosen()
    except UnsupportedError as error:
        return str(error), f"unset {tier.ENVIRONMENT}, or set it to one of: {', '.join(tier.TIERS)}"
    if wanted == "triton" and find_spec("triton") is None:
        hint = f"pip install 'triton-ascend>=3.2', or set {tier.ENVIRONMENT}=torch"
        return f"{tier.ENVIRONMENT}=triton, but triton-ascend is not installed", hint
    return None


def _tier_words() -> str:
    if tier.chosen() == "torch":
        clash = " (triton and triton-ascend are both installed and share one import package)" if tier.clash() else ""
        return f"tier torch serves every hook{clash}"
    kernels = tier.triton_ascend()
    source = f"triton-ascend {kernels}" if kernels else "triton, which is not triton-ascend"
    return f"tier triton ({source}) serves {len(tier.TRITON_HOOKS)} hooks, tier torch the other {len(tier.TORCH_HOOKS)}"


def _no_torch() -> Finding | None:
    if find_spec("torch") is not None:
        return None
    return "torch is not installed", "pip install torch and torch_npu of one release, see docs/ascend.md"


def _no_torch_npu() -> Finding | None:
    if find_spec("torch_npu") is not None:
        return None
    ours = _release(version_of("torch"))
    release = ".".join(map(str, ours)) if ours else "the same release as torch"
    return "torch_npu is not installed", f"pip install torch_npu=={release} on a machine with CANN, see docs/ascend.md"


def _no_toolkit() -> Finding | None:
    """torch_npu without CANN breaks `import torch`, whoever imports it."""
    if toolkit() is not None:
        return None
    where = ", ".join(TOOLKIT_VARIABLES)
    hint = (
        f"install the CANN toolkit and source its set_env.sh (it sets {where}); "
        f"until then set {AUTOLOAD}=0, or `import torch` fails"
    )
    return f"torch_npu {version_of('torch_npu')} is installed without the CANN toolkit", hint


def _mismatch() -> Finding | None:
    ours, theirs = version_of("torch"), version_of("torch_npu")
    if _release(ours) == _release(theirs):
        return None
    release = ".".join(map(str, _release(ours)))
    hint = f"pip install torch_npu=={release}, or the torch release that torch_npu {theirs} names"
    return f"torch {ours} and torch_npu {theirs} are of different releases", hint


def _release(text: str | None) -> tuple[int, ...]:
    """(2, 7, 1) of 2.7.1, 2.7.1+cpu and 2.7.1.post2."""
    found = re.match(r"\d+(\.\d+){0,2}", text or "")
    return tuple(map(int, found[0].split("."))) if found else ()


def _no_device(device: str | None) -> Finding | None:
    nodes = sorted(path.name for path in Path(DEVICE_NODES).glob("davinci[0-9]*"))
    if not nodes:
        hint = f"check `npu-smi info`; in a container pass {DEVICE_NODES}/davinci0 and {DEVICE_NODES}/davinci_manager"
        return f"no NPU: {DEVICE_NODES} has no davinci node", hint
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    count = len(nodes) if visible is None else len([part for part in visible.split(",") if part.strip()])
    index = int((device or "npu:0").partition(":")[2] or 0)
    if index >= count:
        hint = "name a smaller index, or widen ASCEND_RT_VISIBLE_DEVICES"
        return f"no NPU {index}: {count} visible of {len(nodes)} ({', '.join(nodes)})", hint
    return None


def _not_loaded() -> Finding | None:
    """torch is imported already, and torch_npu was kept out of it."""
    if "torch" not in sys.modules or "torch_npu" in sys.modules:
        return None
    return "torch was imported without torch_npu", f"unset {AUTOLOAD}, or import torch_npu before the backend is loaded"
