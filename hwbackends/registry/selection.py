"""Selection: which candidate serves a request. A pure function of the request, which holds the environment's wish, and
of the candidates, which hold what was installed and what the probes said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hwbackends.contract.document import nearest
from hwbackends.errors import (
    BackendNotFoundError,
    BackendTieError,
    BackendUnavailableError,
    BrokenPluginError,
    HookNotImplementedError,
    IncompatiblePluginError,
    PluginError,
)
from hwbackends.registry.candidates import Candidate, State

ENVIRONMENT = "HWBACKENDS_BACKEND"
ANY_DEVICE = "*"


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for: an explicit name, a device such as `cuda:0`, the value of HWBACKENDS_BACKEND, whether the
    reference may lend hooks, and what the backend has to claim (`Claims.missing`)."""

    name: str | None = None
    device: str | None = None
    environment: str = ""
    fallback: bool = False
    needs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def device_type(self) -> str | None:
        """`cuda` of `cuda:0`."""
        return self.device.partition(":")[0] if self.device else None

    @property
    def preferred(self) -> tuple[str, ...]:
        """Names of HWBACKENDS_BACKEND in their order."""
        return tuple(name for part in self.environment.split(",") if (name := part.strip()))


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen candidate and the rule that chose it."""

    candidate: Candidate
    rule: str


def select(request: Request, candidates: Sequence[Candidate]) -> Selection:
    """Choose one candidate: explicit name > HWBACKENDS_BACKEND > serves the device > claims what is needed > priority.
    Pure.

    A backend that takes any device serves every one: it is passed over by a larger priority, or by an equal one that
    names its devices. A backend that lacks hooks is chosen only by name, or where the reference may lend them. Names
    order listings only: two backends that fit equally well are an error, not an alphabetical accident.

    Raises:
        BackendNotFoundError: no backend of that name, or none that fits.
        BackendUnavailableError: the named one cannot run here, does not serve the device, or does not claim a need.
        BrokenPluginError, IncompatiblePluginError: the named one is broken, ambiguous or of another contract.
        BackendTieError: several fit equally well.
    """
    if request.name is not None:
        return Selection(_named(request.name, request, candidates), "asked for by name")
    if request.preferred:
        return _preferred(request, candidates)
    serving = [c for c in candidates if c.state is State.AVAILABLE and _serves(c, request) and _complete(c, request)]
    usable = [c for c in serving if not _unclaimed(c, request)]
    if not usable:
        where = f" for device {request.device!r}" if request.device else ""
        lacks = "".join(f"\n  {c.name} does not claim {_unclaimed(c, request)}" for c in serving)
        raise BackendNotFoundError(f"no backend is usable{where}:\n{_listing(candidates)}{lacks}")
    best = max(_rank(c) for c in usable)
    winners = [c for c in usable if _rank(c) == best]
    if len(winners) > 1:
        names = ", ".join(c.name for c in winners)
        raise BackendTieError(
            f"several backends fit with priority {best[0]}: {names}:\n{_listing(winners)}\n"
            f"choose one: set {ENVIRONMENT}={winners[0].name}, or pass name={winners[0].name!r} or a device"
        )
    return Selection(winners[0], f"priority {best[0]}" + (f" for device {request.device}" if request.device else ""))


def _named(name: str, request: Request, candidates: Sequence[Candidate]) -> Candidate:
    matches = [c for c in candidates if c.name == name]
    if not matches:
        known = [c.name for c in candidates]
        listed = ", ".join(known) or "none"
        raise BackendNotFoundError(f"no backend is called {name!r}{nearest(name, known)} (installed: {listed})")
    candidate = matches[0]
    if candidate.state is not State.AVAILABLE:
        raise _UNUSABLE[candidate.state](f"backend {candidate}") from candidate.cause
    if not _serves(candidate, request):
        serves = ", ".join(candidate.devices)
        raise BackendUnavailableError(
            f"backend {name!r}: device: got {request.device!r}, wanted one of: {serves}; "
            f"pass another device, or leave the name out to have one chosen"
        )
    if lacks := _unclaimed(candidate, request):
        raise BackendUnavailableError(
            f"backend {name!r} ({candidate.package}) does not claim {lacks}, which is needed; "
            f"leave the name out to have one chosen that does"
        )
    return candidate


_UNUSABLE: dict[State, type[PluginError]] = {
    State.FOUND: BackendUnavailableError,
    State.UNAVAILABLE: BackendUnavailableError,
    State.INCOMPATIBLE: IncompatiblePluginError,
    State.DUPLICATE: BrokenPluginError,
    State.BROKEN: BrokenPluginError,
}


def _preferred(request: Request, candidates: Sequence[Candidate]) -> Selection:
    """The first usable name of HWBACKENDS_BACKEND; never one that is not in it."""
    refusals = []
    for name in request.preferred:
        try:
            found = _named(name, request, candidates)
            if not _complete(found, request):
                lacking = ", ".join(found.missing)
                raise HookNotImplementedError(f"backend {name!r} ({found.package}) does not have: {lacking}")
            return Selection(found, f"{ENVIRONMENT}={request.environment}")
        except PluginError as error:
            refusals.append(error)
    if len(refusals) == 1:
        raise type(refusals[0])(f"{ENVIRONMENT}={request.environment}: {refusals[0]}") from refusals[0].__cause__
    lines = "\n".join(f"  {error}" for error in refusals)
    raise BackendNotFoundError(f"{ENVIRONMENT}={request.environment}: none of these is usable:\n{lines}")


def _rank(candidate: Candidate) -> tuple[int, bool]:
    """The larger priority; among equals a backend that names its devices comes before one that takes any."""
    return candidate.priority, ANY_DEVICE not in candidate.devices


def _complete(candidate: Candidate, request: Request) -> bool:
    """Whether it has every hook that the contracts require, or may borrow what it lacks."""
    return request.fallback or not candidate.missing


def _serves(candidate: Candidate, request: Request) -> bool:
    return request.device_type is None or not {request.device_type, ANY_DEVICE}.isdisjoint(candidate.devices)


def _unclaimed(candidate: Candidate, request: Request) -> str:
    """The first need that it does not claim."""
    return candidate.claims.missing(**request.needs) if candidate.claims and request.needs else ""


def _listing(candidates: Sequence[Candidate]) -> str:
    return "\n".join(f"  {candidate}" for candidate in candidates) or "  none is installed"
