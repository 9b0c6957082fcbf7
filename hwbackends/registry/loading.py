"""The registry's front door: `load` goes from an installed plugin to a bound backend (discover -> probe -> select ->
validate -> bind) and `backends` lists what is installed. The steps lie in `candidates`, `selection` and `binding`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hwbackends.errors import BrokenPluginError, HookNotImplementedError, SignatureDriftError
from hwbackends.registry.binding import Backend, bind
from hwbackends.registry.candidates import Candidate, State, discover, probe
from hwbackends.registry.selection import ENVIRONMENT, Request, select
from hwbackends.switches import switched_on

CHECKED = "HWBACKENDS_CHECKED"
TRACE = "HWBACKENDS_TRACE"
REFERENCE = "reference"

_BOUND: dict[tuple[object, ...], Backend] = {}


def backends(device: str | None = None) -> tuple[Candidate, ...]:
    """Every installed backend with its state, probed for `device`."""
    return tuple(probe(candidate, device) for candidate in discover())


def load(
    name: str | None = None, device: Any = None, *, fallback: bool = False, needs: Mapping[str, Any] | None = None
) -> Backend:
    """The backend to use, bound to plain functions.

    Args:
        name: take this backend or fail; nothing else is tried.
        device: device string or `torch.device` that the backend must serve.
        fallback: let hooks that the backend lacks come from the reference; `hook_origins` tells which did.
        needs: what the backend has to claim, such as `{"layout": "ring", "dtype": torch.bfloat16, "width": 4}`; see
            `Claims.missing` for the names. One that does not is passed over.

    Raises:
        ValueError: a need of an unknown name.
        PluginError: see `select` and `bind`; the message says what to do.
    """
    device = None if device is None else str(device)
    request = Request(name, device, os.environ.get(ENVIRONMENT, ""), fallback, dict(needs or {}))
    candidates = discover()
    wanted = (name,) if name is not None else request.preferred
    probed = [probe(c, request.device) if not wanted or c.name in wanted else c for c in candidates]
    while True:
        chosen = select(request, probed).candidate
        try:
            return _bound(chosen, candidates, request)
        except _UNUSABLE as error:
            if name is not None:
                raise
            # what only its import shows: take the next one, and name the reason should there be none
            failed = replace(chosen, state=State.BROKEN, reason=str(error), hint="", cause=error)
            probed = [failed if c is chosen else c for c in probed]


_UNUSABLE = (BrokenPluginError, SignatureDriftError, HookNotImplementedError)


def _bound(chosen: Candidate, candidates: Sequence[Candidate], request: Request) -> Backend:
    """A candidate bound as the environment asks, once per process."""
    fallback = request.fallback
    lender = _lender(candidates, request.device) if fallback and chosen.name != REFERENCE else None
    checked, traced = (switched_on(flag) for flag in (CHECKED, TRACE))
    place = chosen.manifest.path if chosen.manifest else None
    key = (chosen.name, chosen.value, chosen.package, place, lender is not None, checked, traced)
    if key not in _BOUND:
        _BOUND[key] = bind(chosen, fallback=lender, checked=checked, traced=traced)
    return _BOUND[key]


def _lender(candidates: Sequence[Candidate], device: str | None) -> Candidate:
    """The reference, which must be able to run where its hooks are asked for."""
    return select(Request(REFERENCE, device), [probe(c, device) for c in candidates if c.name == REFERENCE]).candidate
