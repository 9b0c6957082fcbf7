"""Properties: what must give the same bits. A verify against decodes, a step run twice, another ring, batch, order,
padding, other strides; random numbers, no oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hwbackends.conformance.cases import GUARD
from hwbackends.conformance.kit import Kit
from hwbackends.conformance.marks import cases, clauses
from hwbackends.conformance.ssm.cases import (
    HOOK,
    Live,
    Request,
    Rig,
    judge_outputs,
    judge_state,
    on_ring,
    over_ssm,
    rig_for,
    states,
)
from hwbackends.errors import HwBackendsError

BEFORE = ((3, 7, 2), (6, 21, 1))
"""Slot, position and pending tokens of the requests."""


def requests(rig: Rig) -> list[Request]:
    """Two that are in the middle of their text."""
    return [rig.request(slot, length, pending) for slot, length, pending in BEFORE]


def state_at(kit: Kit, rig: Rig, named: Sequence[Request], positions: Sequence[int]) -> list[Tensor]:
    """The backend's own states of requests at positions, in slots that nobody has; the rig is as it was."""
    spare = [7, 5][: len(named)]
    given = ([request.row for request in named], positions, [rig.virtual(slot) for slot in spare])
    kit.hooks.materialize_slots(rig.pool, *(kit.tensor(np.asarray(value, np.int64), "int64") for value in given))
    return [kit.host(rig.bases["s"]["tensor"][0, GUARD + slot]) for slot in spare]


def saved_at(kit: Kit, rig: Rig, named: Sequence[Request], k: int) -> list[Tensor]:
    """The states behind k drafts of a verify, as the layout keeps them."""
    if rig.shape.layout == "ring":
        return state_at(kit, rig, named, [request.position + k for request in named])
    if not k:
        return [kit.host(rig.bases["s"]["tensor"][0, GUARD + request.slot]) for request in named]
    saved = rig.bases["s"]["intermediate"][0]
    return [kit.host(saved[GUARD + request.row, k - 1]) for request in named]


@cases("kind, layout", states, quick=2)
@over_ssm()
@clauses("CS-SSM-VER-01", "CS-SSM-VER-04", "CS-SSM-VER-05", "CS-SSM-04", "CS-SSM-MAT-01")
def test_a_verify_is_decodes(kit: Kit, kind: str, layout: str) -> None:
    """Outputs, and the state behind each accepted count, of a verify that runs twice."""
    rigs = [rig_for(kit, kind, layout, mode, whole=False) for mode in ("target_verify", "decode")]
    kit.need(hooks=("materialize_slots",))
    drafted, straight = ([Live(request) for request in requests(rig)] for rig in rigs)
    first = rigs[0].run("target_verify", drafted)
    again = rigs[0].run("target_verify", drafted)
    kit.same_bits("CS-SSM-VER-04", again.y, first.y, f"{first.text}: outputs of a second run")
    count = rigs[0].shape.drafts
    for k in range(count + 1):
        named = [row.request for row in drafted if row.request is not None]
        for mine, theirs in zip(saved_at(kit, rigs[0], named, k), _now(kit, rigs[1], straight), strict=True):
            kit.same_bits("CS-SSM-VER-05", mine, theirs, f"{first.text}: state behind {k} drafts")
            kit.same_bits("CS-SSM-MAT-01", mine, theirs, f"{first.text}: state behind {k} drafts")
        if k < count:
            step = rigs[1].run("decode", straight)
            for clause in ("CS-SSM-VER-01", "CS-SSM-04"):
                kit.same_bits(clause, first.y[k::count], step.y, f"{first.text}: output of draft {k}")
            rigs[1].advance(straight, [1, 1])


def _now(kit: Kit, rig: Rig, rows: Sequence[Live]) -> list[Tensor]:
    """The backend's own states where the requests stand."""
    named = [row.request for row in rows if row.request is not None]
    return state_at(kit, rig, named, [request.position for request in named])


@cases("kind, layout", on_ring, quick=1)
@over_ssm()
@clauses("CS-SSM-DEC-02")
def test_a_decode_may_run_twice(kit: Kit, kind: str, layout: str) -> None:
    """The same output and the same state, also where the first run wrote the checkpoint."""
    for count in (6, 8):
        rig = rig_for(kit, kind, layout, "decode", whole=False, ring_rows=count)
        rows = [Live(request) for request in requests(rig)]
        for number in range(4):
            first = rig.run("decode", rows)
            one = [state_at(kit, rig, [row.request], [row.request.position + 1])[0] for row in rows if row.request]
            second = rig.run("decode", rows)
            two = [state_at(kit, rig, [row.request], [row.request.position + 1])[0] for row in rows if row.request]
            kit.same_bits("CS-SSM-DEC-02", second.y, first.y, f"{first.text}: decode {number} again, ring of {count}")
            for mine, theirs in zip(two, one, strict=True):
                kit.same_bits("CS-SSM-DEC-02", mine, theirs, f"{first.text}: state of decode {number} again")
            rig.advance(rows, [1, 1])


@cases("kind, layout", states, quick=1)
@over_ssm()
@clauses("CS-SSM-06")
def test_ring_batch_order_and_padding(kit: Kit, kind: str, layout: str) -> None:
    """The same requests alone, the other way round, among padded rows and strangers, and in rings of other sizes."""
    for mode in ("decode", "target_verify", "draft_extend"):
        rings = (8, 6, 13, 32) if layout == "ring" else (8,)
        want: dict[int, Tensor] = {}
        for number, ring in enumerate((*rings, 8, 8)):
            rig = rig_for(kit, kind, layout, mode, whole=False, ring_rows=ring, slots=13)
            one, two = requests(rig)
            rows = [Live(one, accept=2), Live(two, accept=1)]
            if number == len(rings):
                rows = [Live(None), rows[1], Live(None, slot0=True), Live(rig.request(1, 4), accept=3), rows[0]]
            elif number > len(rings):
                rows = [rows[1]]
            step = rig.run(mode, rows, tail=number)
            for row in rows:
                if row.request is None or row.request.slot not in (3, 6):
                    continue
                y = step.y[row.start : row.start + rig.per_request(mode)]
                got = want.setdefault(row.request.slot, y)
                kit.same_bits("CS-SSM-06", y, got, f"{step.text}: slot {row.request.slot}, ring of {ring}")


def _wide(given: dict[str, Any]) -> dict[str, Any]:
    """Inputs as columns of one wider tensor, as a conv's output hands them out."""
    parts = {name: value.flatten(1) for name, value in given.items() if value is not None}
    packed = torch.cat([torch.full_like(next(iter(parts.values()))[:, :3], torch.nan), *parts.values()], 1)
    found, at = dict(given), 3
    for name, part in parts.items():
        found[name] = packed[:, at : at + part.shape[1]].unflatten(1, given[name].shape[1:])  # type: ignore[no-untyped-call]
        at += part.shape[1]
    return found


def _reversed(given: dict[str, Any]) -> dict[str, Any]:
    """Inputs whose tokens lie heads last: served by copy, or refused by name."""
    return {n: v if v is None else v.movedim(1, -1).contiguous().movedim(-1, 1) for n, v in given.items()}


@cases("kind, layout", states, quick=1)
@over_ssm()
@clauses("CS-SSM-12")
def test_strides(kit: Kit, kind: str, layout: str) -> None:
    """Slots and request rows apart, inputs that are columns of one tensor, and inputs in another order."""
    for mode in ("decode", "extend", "target_verify"):
        want: Tensor | None = None
        for slack, lay in ((0, None), (7, None), (0, _wide), (0, _reversed)):
            rig = rig_for(kit, kind, layout, mode, whole=False, slack=slack)
            rows = [Live(request, 2) for request in requests(rig)]
            try:
                step = rig.run(mode, rows, lay=lay)
            except HwBackendsError:
                kit.check("CS-SSM-12", lay is _reversed, f"{HOOK[mode]} refuses strides that it must serve")
                continue
            want = step.y if want is None else want
            kit.same_bits("CS-SSM-12", step.y, want, f"{step.text}: slack {slack}, {lay.__name__ if lay else 'plain'}")


@cases("kind, layout", states, quick=1)
@over_ssm()
@clauses("CS-SSM-08")
def test_several_states_layers_and_new_weights(kit: Kit, kind: str, layout: str) -> None:
    """One metadata for every layer and state of a step; weights that are updated, and others in their place."""
    rig = rig_for(kit, kind, layout, "decode", layers=2, names=("s", "t"))
    rows = [Live(rig.request(3, 7, 2)), Live(rig.request(6, 9))]
    metadata = rig.prepare("decode", rows)
    for key in rig.keys:
        step = rig.run("decode", rows, key, metadata, no_out=key[1] == 1)
        judge_outputs(kit, rig, step, "CS-SSM-08")
        judge_state(kit, rig, step, "CS-SSM-08", "CS-SSM-08")
    twin = rig_for(kit, kind, layout, "target_verify", whole=False)
    rows = [Live(request) for request in requests(twin)]
    metadata = twin.prepare("target_verify", rows)
    first = twin.run("target_verify", rows, metadata=metadata)
    held = {name: value for name, value in twin.weights.items() if value is not None}
    for factor in (0.5, 2.0):
        for value in held.values():
            value.mul_(factor)
        step = twin.run("target_verify", rows, metadata=metadata)
    kit.same_bits("CS-SSM-08", step.y, first.y, f"{first.text}: the weights of before")
    twin.weights = {name: None if value is None else value.clone() * 0.5 for name, value in twin.weights.items()}
    other = twin.run("target_verify", rows, metadata=metadata)
    for value in held.values():
        value.mul_(0.5)
    twin.weights = {name: held.get(name) for name in twin.weights}
    kit.same_bits("CS-SSM-08", twin.run("target_verify", rows).y, other.y, "the same other weights, a new step")
    kit.check("CS-SSM-08", not torch.equal(other.y, first.y), f"{first.text}: other weights give the same output")
