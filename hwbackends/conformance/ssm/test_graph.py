"""Graph and discipline lanes: what is captured replays over inputs, metadata and state that changed in place; no hook
waits for the device or allocates what outlives its call; many steps leave no more memory in use than few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hwbackends.conformance.cases import PREPARE
from hwbackends.conformance.conv.test_discipline import disciplined, steady
from hwbackends.conformance.kit import HookCall, Kit
from hwbackends.conformance.marks import cases, clauses
from hwbackends.conformance.ssm.cases import HOOK, MODES, Live, Rig, over_ssm, rig_for, states
from hwbackends.conformance.ssm.test_slots import indices
from hwbackends.contract.claims import Claims

RECORDED = ("decode", "target_verify", "draft_extend")
ROUNDS = (((3, 7, 2), (6, 21, 1)), ((5, 9, 3), (3, 14, 0)), ((6, 4, 4), (7, 30, 5)))
"""Slot, position and pending tokens of the live rows of each replay."""


SMALL: dict[str, Any] = {"whole": False, "heads": (1, 2, 8, 11), "ring_rows": 6}


class _Step:
    """One captured step: metadata, inputs and output at fixed addresses."""

    def __init__(self, kit: Kit, kind: str, layout: str, mode: str) -> None:
        needs = {"graphs": True}
        self.kit, self.mode = kit, mode
        self.rig, self.eager = (rig_for(kit, kind, layout, mode, needs, **SMALL) for _ in range(2))
        rows = self.rows(self.rig, 0)
        self.batch = self.rig.batch(mode, rows)
        self.metadata = self.rig.stale(self.batch)
        self.given = self.rig.tokens(mode, rows, self.rig.keys[0])
        self.out = torch.full_like(self.given["v"], torch.nan)
        arguments = self.rig.arguments(mode, self.given, self.rig.keys[0], self.metadata, out=self.out)
        self.calls: list[HookCall] = [
            (PREPARE[mode], (self.batch, self.rig.pool, self.metadata), {}),
            (HOOK[mode], (), arguments),
        ]

    def rows(self, rig: Rig, number: int) -> list[Live]:
        """A padded row between two requests; which ones, and where, changes from round to round."""
        live = [Live(rig.request(slot, length, pending, row=1 + i + number), accept=1 + (number + i) % 3)
                for i, (slot, length, pending) in enumerate(ROUNDS[number])]  # fmt: skip
        return [live[0], Live(None), live[1]]

    def renew(self, number: int) -> list[Live]:
        """Another round's state, batch and tokens, written into the captured tensors; returns the eager rig's rows."""
        rows = self.rows(self.rig, number)
        self.eager.copy_from(self.rig)
        batch = self.rig.batch(self.mode, rows)
        for name in batch.__slots__:
            value = getattr(self.batch, name)
            if isinstance(value, torch.Tensor):
                value.copy_(getattr(batch, name))
        for name, value in self.rig.tokens(self.mode, rows, self.rig.keys[0]).items():
            if value is not None:
                self.given[name].copy_(value)
        return rows


def _phases(modes: Sequence[str]) -> Callable[[Claims, int], list[tuple[str, str, str]]]:
    """Every claimed kind on every claimed layout, phases in turn."""

    def draw(claims: Claims, seed: int) -> list[tuple[str, str, str]]:
        return [(modes[(i + i // 3) % len(modes)], *state) for i, state in enumerate(states(claims, seed))]

    return draw


@cases("mode, kind, layout", _phases(RECORDED), quick=1)
@over_ssm()
@clauses("CS-SSM-15")
def test_replayed_steps(kit: Kit, mode: str, kind: str, layout: str) -> None:
    """Preparation and hook in one graph, three replays, each against an eager call over the same state."""
    step = _Step(kit, kind, layout, mode)
    graph = kit.capture(step.calls)
    for number in range(len(ROUNDS)):
        rows = step.renew(number)
        kit.replay(graph, step.calls)
        eager = step.eager.run(mode, rows)
        kit.same_bits("CS-SSM-15", step.out, eager.y, f"{eager.text}: replay {number}: outputs")
        got = step.rig.snapshot()
        for name, want in eager.after.items():
            kit.same_bits("CS-SSM-15", got[name], want, f"{eager.text}: replay {number}: {'.'.join(name)}")


@cases("kind, layout", states, quick=1)
@over_ssm("index")
@clauses("CS-SSM-MAT-04")
def test_replayed_materialization(kit: Kit, kind: str, layout: str) -> None:
    """Index tensors changed in place are what the replay reads."""
    rigs = [rig_for(kit, kind, layout, needs={"graphs": True}, whole=False) for _ in range(2)]
    for rig in rigs:
        rig.request(3, 8, 2, row=5)
        rig.request(6, 21, 1, row=7)
    rigs[1].copy_from(rigs[0])
    held = indices(kit, [5, -1], [8, 0], [1, 0])
    call: HookCall = ("materialize_slots", (rigs[0].pool, *held), {})
    graph = kit.capture([call])
    rigs[1].copy_from(rigs[0])
    for values in (([7, 5], [21, 7 if layout == "ring" else 8], [5, 7]), ([-1, 7], [3, 20], [2, 2])):
        for tensor, value in zip(held, values, strict=True):
            tensor.copy_(kit.tensor(np.asarray(value, np.int64), kit.point.index))
        kit.replay(graph, [call])
        kit.hooks.materialize_slots(rigs[1].pool, *indices(kit, *values))
        want = rigs[1].snapshot()
        for name, got in rigs[0].snapshot().items():
            kit.same_bits("CS-SSM-MAT-04", got, want[name], f"{kind} on {layout}, {values}: {'.'.join(name)}")


def _call(rig: Rig, mode: str, out: Any) -> tuple[HookCall, HookCall]:
    rows = [Live(rig.request(3, 7, 2), 2, accept=1), Live(None, 1), Live(rig.request(6, 9), 3, accept=2, track=5)]
    rows[2].track = -1 if mode == "target_verify" else 5
    batch = rig.batch(mode, rows)
    metadata, given = rig.stale(batch, mode != "target_verify"), rig.tokens(mode, rows, rig.keys[0])
    made = torch.full_like(given["v"], torch.nan) if out else None
    arguments = rig.arguments(mode, given, rig.keys[0], metadata, out=made)
    return (PREPARE[mode], (batch, rig.pool, metadata), {}), (HOOK[mode], (), arguments)


@cases("mode, kind, layout", _phases(MODES), quick=1)
@over_ssm()
@clauses("CS-SSM-15")
def test_no_synchronisation_and_no_allocation(kit: Kit, mode: str, kind: str, layout: str) -> None:
    """With an output that is given, and with one that is made."""
    rig = rig_for(kit, kind, layout, mode)
    for out in (True, False):
        prepare, call = _call(rig, mode, out)
        kit.call(prepare[0], *prepare[1])
        disciplined(kit, "CS-SSM-15", call[0], **call[2])


@cases("kind, layout", states, quick=1)
@over_ssm()
@clauses("CS-SSM-MAT-04")
def test_a_materialization_waits_for_nothing(kit: Kit, kind: str, layout: str) -> None:
    """No synchronisation, no allocation that outlives the call."""
    rig = rig_for(kit, kind, layout, layers=2)
    held = indices(kit, [rig.request(3, 8, 2).row, -1], [8, 0], [5, 0])
    disciplined(kit, "CS-SSM-MAT-04", "materialize_slots", rig.pool, *held)


@cases("mode", ["decode", "extend"], quick=0)
@over_ssm()
@clauses("CS-SSM-15", "CS-SSM-MAT-04")
def test_memory_does_not_grow_with_steps(kit: Kit, mode: str) -> None:
    """Thirty-two steps, each prepared in metadata of its own; thirty-two materializations."""
    kind, layout = states(kit.claims, 0)[len(mode) % len(states(kit.claims, 0))]
    rig = rig_for(kit, kind, layout, mode, heads=(1, 2, 8, 8))
    steady(kit, "CS-SSM-15", HOOK[mode], list(_call(rig, mode, out=True)))
    held = indices(kit, [rig.request(3, 8, 2).row, -1], [8, 0], [5, 0])
    steady(kit, "CS-SSM-MAT-04", "materialize_slots", [("materialize_slots", (rig.pool, *held), {})])
