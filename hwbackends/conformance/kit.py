"""What a test gets: the backend's hooks, the device, random numbers, and checks that are booked on a clause. It lives
in the worker process; `Runner` turns jobs into outcomes. A failed check does not end a test: one test may judge several
clauses, and only those that fail turn red."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import sys
import traceback
import zlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hwbackends.conformance import oracle
from hwbackends.conformance.claims import Claims, NotClaimed, read_claims
from hwbackends.conformance.workers import Job, Outcome, Settings
from hwbackends.contract.model import Contracts
from hwbackends.contract.reader import installed
from hwbackends.errors import BackendUnavailableError, HookNotImplementedError, SignatureDriftError
from hwbackends.registry.binding import Implementations, inspect_plugin
from hwbackends.registry.candidates import Candidate, State, discover, import_plugin, probe
from hwbackends.registry.manifest import find_manifest, read_manifest
from hwbackends.registry.selection import Request, select

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN = 4
"""Places shown per failed comparison."""


class KitError(Exception):
    """A test of the kit is wrong: it proves nothing, or checks a clause that it does not name."""


class Kit:
    """The hooks of one backend on one device, and the checks of one test.

    Attributes:
        hooks: one callable per hook of the contract; one that is missing or drifted raises when called.
        claims: what the manifest claims.
        device: where tensors lie.
        rng: random numbers of the running test, from its own seed.
    """

    def __init__(self, backend: str, device: str) -> None:
        self.device = _device(device)
        self.emulated = _emulated(self.device)
        self.candidate = _candidate(backend, self.device, self.emulated)
        plugin = import_plugin(self.candidate)
        manifest = self.candidate.manifest
        named = manifest.contracts if manifest else None
        self.contracts = installed().only(installed() if named is None else named)
        self.implementations = inspect_plugin(plugin, installed(), named)
        self.hooks = SimpleNamespace(**_hooks(self.candidate.name, self.contracts, self.implementations))
        present = tuple(self.implementations.functions)
        self.claims: Claims = read_claims(manifest.capabilities if manifest else {}, self.contracts, present)
        self.begin("", (), 0)

    def begin(self, test_id: str, declared: tuple[str, ...], seed: int) -> None:
        """Forget the last test."""
        self.test_id, self.declared, self.seed = test_id, declared, seed
        self.rng = np.random.default_rng(seed)
        self.failures: list[tuple[str, str]] = []
        self.clauses: dict[str, bool] = {}
        self.worst: dict[str, tuple[float, float]] = {}

    def need(self, **needs: Any) -> None:
        """End the test as not claimed unless the manifest claims every need, see `Claims.missing`."""
        reason = self.claims.missing(**needs)
        if reason:
            raise NotClaimed(reason)

    def dtype(self, *preferred: str) -> str:
        """The first claimed dtype of `preferred`, for tests that any dtype serves."""
        for name in preferred:
            if not self.claims.missing(dtype=name):
                return name
        raise NotClaimed(f"dtype {' or '.join(preferred)}")

    # --- tensors ---

    def tensor(self, values: Any, dtype: str) -> Tensor:
        """`values` on the device."""
        return torch.tensor(np.asarray(values)).to(getattr(torch, dtype)).to(self.device)

    @staticmethod
    def host(tensor: Tensor) -> Tensor:
        """A copy in host memory."""
        return tensor.detach().cpu().clone()

    # --- checks ---

    def check(self, clause: str, holds: bool, message: str) -> bool:
        """Book one check on a clause; a failure is kept and the test goes on."""
        if clause not in self.declared:
            raise KitError(f"{self.test_id} checks {clause}, which it does not name")
        self.clauses[clause] = bool(holds) and self.clauses.get(clause, True)
        if not holds:
            self.failures.append((clause, message))
        return bool(holds)

    def equal(self, clause: str, got: Any, want: Any, what: str) -> bool:
        """Same numbers, NaN equal to NaN; no tolerance."""
        mine, theirs = np.asarray(_numbers(got)), np.asarray(_numbers(want))
        if mine.shape != theirs.shape:
            return self.check(clause, False, f"{what}: shape {mine.shape}, wanted {theirs.shape}")
        wrong = (mine != theirs) & ~(np.isnan(mine) & np.isnan(theirs))
        return self._compared(clause, wrong, mine, theirs, what)

    def same_bits(self, clause: str, got: Tensor, want: Tensor, what: str) -> bool:
        """The same bytes, NaN and the sign of zero included."""
        mine, theirs = bits(self.host(got)), bits(self.host(want))
        wrong = (mine != theirs).numpy()
        return self._compared(clause, wrong, _numbers(got), _numbers(want), what)

    def _compared(self, clause: str, wrong: Any, got: Any, want: Any, what: str) -> bool:
        """Book the outcome of a comparison, with the places where it failed."""
        found = bool(wrong.any())
        return self.check(clause, not found, f"{what}: {places(wrong, got, want)}" if found else "")

    def within(self, clause: str, got: Any, want: oracle.Array, bound: oracle.Array, dtype: str, what: str) -> bool:
        """|got - want| <= bound for each element; keeps the worst error."""
        mine = np.asarray(_numbers(got), oracle.WIDE)
        with np.errstate(invalid="ignore"):
            error = np.abs(mine - want)
        error = np.where(np.isnan(error), np.inf, error)
        wrong = ~(error <= bound)
        if error.size:
            ulps = float(np.max(error / oracle.ulp(want, dtype)))
            share = float(np.max(error / np.maximum(bound, np.finfo(np.float64).tiny)))
            before = self.worst.get(clause, (0.0, 0.0))
            self.worst[clause] = (max(before[0], ulps), max(before[1], share))
        text = f"{what}: {places(wrong, mine, want)}, bound {float(bound[wrong].min()):.3g}" if wrong.any() else ""
        return self.check(clause, not wrong.any(), text)

    def refuses(self, clause: str, wanted: type[BaseException], call: Callable[[], Any], what: str) -> bool:
        """`call` raises `wanted`; another error, or none, is a failure."""
        try:
            call()
        except wanted:
            return self.check(clause, True, "")
        except Exception as error:
            return self.check(
                clause, False, f"{what}: raised {type(error).__name__}: {error}; wanted {wanted.__name__}"
            )
        return self.check(clause, False, f"{what}: raised nothing, wanted {wanted.__name__}")


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a host tensor as integers."""
    plain = tensor.contiguous()
    return plain.view(_BITS[plain.element_size()])


def places(wrong: Any, got: Any, want: Any, first: int = 0) -> str:
    """The first places where a comparison failed, with both values; `first` is the number of the first entry."""
    found = np.argwhere(np.asarray(wrong))
    shift = np.zeros(np.asarray(wrong).ndim, int)
    shift[:1] = first
    shown = [f"{(p + shift).tolist()}: {got[tuple(p)]} instead of {want[tuple(p)]}" for p in found[:_SHOWN]]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ("; ".join(shown) or "a single value") + more


def _numbers(value: Any) -> Any:
    if isinstance(value, Tensor):
        host = value.detach().cpu()
        return (host if host.dtype in (torch.bool, torch.int32, torch.int64) else host.double()).numpy()
    return np.asarray(value, np.float64)


# --- the backend ---------------------------------------------------------------------------------------------------


def _device(name: str) -> torch.device:
    if name.partition(":")[0] == "npu" and importlib.util.find_spec("torch_npu") is None:
        from hwbackends.testing.emulated_npu import emulate_npu

        return emulate_npu()
    return torch.device(name)


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
    """Callables by hook; what is missing or drifted raises a named error when a test calls it."""
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


# --- jobs ------------------------------------------------------------------------------------------------------------


class Runner:
    """Runs jobs in the worker process; the backend is loaded once, and a failure to load it answers every job."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._kit: Kit | None = None
        self._broken = ""
        try:
            self._kit = Kit(settings.backend, settings.device)
        except Exception as error:
            self._broken = f"{type(error).__name__}: {error}"

    def run(self, job: Job) -> Outcome:
        """One test, or the description of the backend."""
        if self._kit is None:
            return Outcome("failed", self._broken)
        if not job.function:
            return Outcome("passed", info=describe(self._kit))
        return self._test(self._kit, job)

    def _test(self, kit: Kit, job: Job) -> Outcome:
        test = getattr(importlib.import_module(job.module), job.function)
        seed = zlib.crc32(job.test_id.encode()) ^ self.settings.seed
        kit.begin(job.test_id, test.clauses, seed)
        details = ""
        try:
            test(kit, **job.params)
            if not kit.clauses:
                raise KitError(f"{job.test_id} made no check")
        except NotClaimed as reason:
            if not kit.failures:
                return Outcome("not_claimed", str(reason), seed=seed)
        except Exception as error:
            kit.failures.insert(0, (", ".join(test.clauses), f"{type(error).__name__}: {error}"))
            kit.clauses |= dict.fromkeys(test.clauses, False)
            details = traceback.format_exc()
        return _outcome(kit, details)


def _outcome(kit: Kit, details: str) -> Outcome:
    lines = [f"{clause}: {message}" for clause, message in kit.failures]
    return Outcome(
        "failed" if lines else "passed",
        reason=lines[0] if lines else "",
        details="\n".join([*lines, details]).rstrip(),
        clauses=dict(kit.clauses),
        worst=dict(kit.worst),
        seed=kit.seed,
    )


def describe(kit: Kit) -> dict[str, Any]:
    """The backend and the environment, for the report."""
    candidate, found = kit.candidate, kit.implementations
    return {
        "backend": candidate.name,
        "package": candidate.package,
        "contracts": {name: contract.version for name, contract in kit.contracts.items()},
        "device": str(kit.device),
        "device_name": _device_name(kit),
        "emulated": kit.emulated,
        "probe": candidate.reason,
        "capabilities": dict(candidate.manifest.capabilities) if candidate.manifest else {},
        "hooks_claimed": list(kit.claims.hooks),
        "hooks_missing": list(found.missing),
        "signature_drifts": [str(drift) for drift in found.drifts],
        "environment": {
            "python": sys.version.split()[0],
            "platform": f"{platform.system()} {platform.machine()}",
            **{name: _version(name) for name in ("hwbackends", "torch", "triton", "numpy")},
        },
    }


def _device_name(kit: Kit) -> str:
    if kit.emulated:
        return "emulated npu (every op runs on the CPU)"
    return torch.cuda.get_device_name(kit.device) if kit.device.type == "cuda" else platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
