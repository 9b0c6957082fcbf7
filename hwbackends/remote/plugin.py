"""The plugin whose hooks are served: found by name or import path, loaded, and described for a report."""

from __future__ import annotations

import importlib.util
import inspect
import platform
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from typing import Any

import torch

from hwbackends.contract.model import Contracts
from hwbackends.contract.reader import installed
from hwbackends.contract.signatures import location_of
from hwbackends.errors import BackendUnavailableError, DeviceError, HookNotImplementedError, SignatureDriftError
from hwbackends.registry.binding import Implementations, inspect_plugin
from hwbackends.registry.candidates import Candidate, State, discover, import_plugin, probe
from hwbackends.registry.manifest import find_manifest, read_manifest
from hwbackends.registry.selection import Request, select


class Plugin:
    """The hooks of one backend on one device.

    Attributes:
        hooks: one callable per hook of the contract; one that is missing or drifted raises when called.
        device: where tensors lie.
        emulated: whether that device is an emulation.
    """

    def __init__(self, backend: str, device: str) -> None:
        self.device = _device(device)
        self.emulated = _emulated(self.device)
        self.candidate = _candidate(backend, self.device, self.emulated)
        _refuse_absent(self.device)
        manifest = self.candidate.manifest
        named = manifest.contracts if manifest else None
        self.contracts = installed().only(installed() if named is None else named)
        self.found = inspect_plugin(import_plugin(self.candidate), installed(), named)
        self.hooks = _hooks(self.candidate.name, self.contracts, self.found)

    def describe(self) -> dict[str, Any]:
        """The backend and the environment, for a report."""
        manifest = self.candidate.manifest
        return {
            "backend": self.candidate.name,
            "package": self.candidate.package,
            "contracts": {name: contract.version for name, contract in self.contracts.items()},
            "device": str(self.device),
            "device_name": self._device_name(),
            "device_memory": self._device_memory(),
            "emulated": self.emulated,
            "probe": self.candidate.reason,
            "capabilities": dict(manifest.capabilities) if manifest else {},
            "hooks_present": list(self.found.functions),
            "hooks_missing": list(self.found.missing),
            "signature_drifts": [str(drift) for drift in self.found.drifts],
            "origins": _origins(self.found.functions),
            "modules": _modules(self.candidate),
            "environment": {
                "python": sys.version.split()[0],
                "platform": f"{platform.system()} {platform.machine()}",
                **{name: _version(name) for name in ("hwbackends", "torch", "triton", "numpy")},
            },
        }

    def _device_name(self) -> str:
        if self.emulated:
            return "emulated npu (every op runs on the CPU)"
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else platform.machine()

    def _device_memory(self) -> int | None:
        """Free bytes of the device; None for host memory."""
        if self.emulated or self.device.type == "cpu":
            return None
        return int(getattr(torch, self.device.type).mem_get_info(self.device)[0])


def _device(name: str) -> torch.device:
    if name.partition(":")[0] == "npu" and importlib.util.find_spec("torch_npu") is None:
        from hwbackends.testing.emulated_npu import emulate_npu

        return emulate_npu()
    try:
        found = torch.device(name)
    except RuntimeError as error:
        raise DeviceError("conformance run", "device", name, "a device as torch names it: cpu, cuda, npu") from error
    there = name == "cuda" and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if there else found


def _refuse_absent(device: torch.device) -> None:
    """A plugin named by its import path is asked for its device by nobody else."""
    if device.type != "cuda" or (device.index or 0) < torch.cuda.device_count():
        return
    got = f"{device}, of which torch {torch.__version__} sees {torch.cuda.device_count()}"
    raise DeviceError("conformance run", "device", got, "a device that is there", "see `hwbackends doctor`")


def _emulated(device: torch.device) -> bool:
    return device.type == "npu" and importlib.util.find_spec("torch_npu") is None


def _candidate(backend: str, device: torch.device, emulated: bool) -> Candidate:
    """An installed backend by name, or a plugin by its import path with the manifest beside its module."""
    if ":" in backend or "." in backend:
        manifest = read_manifest(find_manifest(backend.partition(":")[0]))
        name = str(manifest.data.get("name", backend))
        return Candidate(name, backend, manifest=manifest, state=State.AVAILABLE, reason="named by import path")
    found = [probe(c, str(device)) if c.name == backend else c for c in discover()]
    named = [c for c in found if c.name == backend]
    if emulated and len(named) == 1 and named[0].state is State.UNAVAILABLE:  # its device is not there: emulation is
        return named[0]
    candidate = select(Request(backend, device.type), found).candidate
    if candidate.state is not State.AVAILABLE:
        raise BackendUnavailableError(str(candidate))
    return candidate


def _hooks(name: str, contracts: Contracts, found: Implementations) -> dict[str, Callable[..., Any]]:
    """Callables by hook; what is missing or drifted raises a named error when it is called."""
    hooks: dict[str, Callable[..., Any]] = {}
    for hook in contracts.hooks:
        drifts = [str(drift) for drift in found.drifts if drift.hook == hook]
        if drifts:
            hooks[hook] = _raiser(SignatureDriftError("\n".join(drifts)))
        elif hook in found.functions:
            hooks[hook] = found.functions[hook]
        else:
            hooks[hook] = _raiser(HookNotImplementedError(f"{hook}: backend {name!r} does not have this hook"))
    return hooks


def _raiser(error: Exception) -> Callable[..., Any]:
    def fail(*args: object, **kwargs: object) -> None:
        raise type(error)(*error.args)  # a new one, without the traceback of the last call

    return fail


def _origins(functions: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Where each hook is defined, and by which distribution; a decorator of another package does not hide it."""
    owners, found = packages_distributions(), {}
    for name, function in functions.items():
        inner = inspect.unwrap(function)
        module = str(getattr(inner, "__module__", "") or "")
        owner = owners.get(module.partition(".")[0], [""])[0]
        found[name] = {"location": location_of(inner), "module": module, "distribution": owner}
    return found


def _modules(candidate: Candidate) -> dict[str, list[str]]:
    """Files of the plugin's package, and modules of other backends that loading it brought in."""
    package = candidate.module.rpartition(".")[0] or candidate.module
    own = {name for name in sys.modules if name == package or name.startswith(f"{package}.")}
    files = sorted({str(file) for name in own if (file := getattr(sys.modules[name], "__file__", None))})
    shared = ("hwbackends.torch_ops", "hwbackends.reference", "hwbackends.cuda", "hwbackends.rocm", "hwbackends.ascend")
    lent = sorted(name for name in shared if name in sys.modules and not package.startswith(name))
    return {"package": [package], "files": files, "borrowed": lent}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
