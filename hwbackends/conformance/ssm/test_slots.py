"""Materializing, the commit, clearing and copying of SSM states: every layer and state, by bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hwbackends.conformance import oracle as plain
from hwbackends.conformance.cases import GUARD
from hwbackends.conformance.kit import Kit, bits
from hwbackends.conformance.marks import cases, clauses
from hwbackends.conformance.ssm.cases import (
    Live,
    Request,
    Rig,
    judge_outputs,
    judge_state,
    on_intermediate,
    on_ring,
    over_ssm,
    rig_for,
    states,
)
from hwbackends.errors import ArgumentError

COMMIT = "update_mamba_state_after_mtp_verify"


def indices(kit: Kit, *values: Sequence[int]) -> list[Tensor]:
    """Index tensors of the test's dtype."""
    return [kit.tensor(np.asarray(value, np.int64), kit.point.index) for value in values]


def judge_slots(kit: Kit, rig: Rig, clause: str, before: Any, wanted: dict[int, tuple[Request, int]], what: str,
                others: str = "") -> None:  # fmt: skip
    """Slots that hold S(position) of a request in every layer and state, and nothing else that changed."""
    after = rig.snapshot()
    for key in rig.keys:
        for slot, (request, position) in wanted.items():
            got = after[key[0], str(key[1]), "tensor"][GUARD + slot].double().numpy()
            want = plain.round_to(request.state(key, position), rig.shape.state_dtype)
            kit.equal(clause, got, want, f"{what}: slot {slot}, S({position}), {key}")
            if rig.shape.layout == "ring":
                lens = after[key[0], str(key[1]), "state_lens"][GUARD + slot].numpy()
                kit.equal(clause, lens, np.full_like(lens, position), f"{what}: length of slot {slot}, {key}")
    for name, tensor in before.items():
        changed = (bits(tensor) != bits(after[name])).flatten(1).any(1)
        hit = [place - GUARD for place in np.flatnonzero(changed.numpy()).tolist()]
        kept = set(wanted) if name[2] in ("tensor", "state_lens") else set()
        hit = [place for place in hit if place not in kept]
        kit.check(others or clause, not hit, f"{what}: {'.'.join(name)} {hit} changed")


@cases("kind, layout", states, quick=2)
@over_ssm("index")
@clauses("CS-SSM-MAT-01", "CS-SSM-MAT-02", "CS-SSM-MAT-03")
def test_materialize(kit: Kit, kind: str, layout: str) -> None:
    """Into other slots, into the requests' own; padded rows, negative positions and slots that are none."""
    rig = rig_for(kit, kind, layout, layers=2, names=("s", "t"), virtual=True, slack=5)
    one, two, three = rig.request(3, 8, 4), rig.request(6, 21, 0), rig.request(2, 5, 1)
    spare = next(row for row in range(rig.shape.request_rows) if not rig.mapping[row])
    back = 2 if layout == "ring" else 0
    rows = [one.row, -1, two.row, spare, three.row, one.row, three.row]
    lens, goals = [8 - back, 3, 21, 3, -1, 3, 5], [5, 4, 7, 4, 4, 0, -1]
    if layout != "ring":
        lens[5] = 8
    before = rig.snapshot()
    given = indices(kit, rows, lens, [rig.virtual(slot) for slot in goals])
    for turn in range(2):
        kit.hooks.materialize_slots(rig.pool, *given)
        wanted = {5: (one, 8 - back), 7: (two, 21)}
        clause = "CS-SSM-MAT-03" if turn else "CS-SSM-MAT-01"
        judge_slots(kit, rig, clause, before, wanted, f"materialize, {kind} on {layout}", "CS-SSM-MAT-02")
    before = rig.snapshot()
    kit.hooks.materialize_slots(rig.pool, *indices(kit, [one.row, three.row], [8, 5]), None)
    judge_slots(kit, rig, "CS-SSM-MAT-01", before, {3: (one, 8), 2: (three, 5)}, "in place", "CS-SSM-MAT-02")


@cases("kind, layout", states, quick=1)
@over_ssm("index")
@clauses("CS-SSM-MAT-01", "CS-SSM-10")
def test_a_snapshot_is_a_start(kit: Kit, kind: str, layout: str) -> None:
    """A request that begins at a materialized slot, over a recycled row, goes on as the one that it was taken of."""
    rig = rig_for(kit, kind, layout, "target_verify", stale="numbers")
    one = rig.request(3, 8, 4)
    kit.hooks.materialize_slots(rig.pool, *indices(kit, [one.row], [8], [6]))
    heir = rig.request(6, 8, fresh=True, row=one.row - 1)
    heir.inputs, heir.trails, heir.base = one.inputs, one.trails, one.base
    step = rig.run("target_verify", [Live(heir)])
    saved = rig.implied(step.after, rig.keys[0], heir, 8) if layout == "ring" else None
    want = plain.round_to(one.state(rig.keys[0], 8), rig.shape.state_dtype)
    if saved is not None:
        kit.equal("CS-SSM-10", saved, want, "S(8) of the heir")
    got = step.y.double().numpy()
    wanted = plain.round_to(np.stack(one.trails[rig.keys[0]].outputs[8 - one.base :][: len(got)]), rig.shape.dtype)
    kit.equal("CS-SSM-MAT-01", got, wanted, f"{step.text}: outputs from the snapshot")


def verified(rig: Rig) -> list[Request]:
    """Three requests behind a verify in every layer and state."""
    requests = [rig.request(3, 8, 2), rig.request(6, 21, 1), rig.request(2, 5)]
    rows = [Live(requests[0]), Live(requests[1]), Live(None), Live(requests[2])]
    metadata = rig.prepare("target_verify", rows)
    for key in rig.keys:
        rig.run("target_verify", rows, key, metadata)
    return requests


@cases("kind, layout", on_intermediate, quick=1)
@over_ssm("index")
@clauses("CS-SSM-COM-01")
def test_commit_of_saved_states(kit: Kit, kind: str, layout: str) -> None:
    """Every accepted count, none among them, in any order; with track slots; a pool without saved states."""
    for accepted in ([2, -1, 0], [-1, 1, 2], [0, 2, -1]):
        rig = rig_for(kit, kind, layout, "target_verify", needs={}, layers=2, names=("s", "t"), virtual=True)
        kit.need(hooks=(COMMIT,))
        requests = verified(rig)
        before = rig.snapshot()
        rows = [r.row for r in requests]
        tracks, steps = [rig.virtual(7), 0, rig.virtual(5)], [max(0, accepted[0] - 1), -1, accepted[2]]
        given = indices(kit, [*rows[:2], -1, rows[2]], [*accepted[:2], 2, accepted[2]],
                        [*tracks[:2], rig.virtual(4), tracks[2]], [*steps[:2], 1, steps[2]])  # fmt: skip
        kit.call(COMMIT, rig.pool, *given)
        wanted = {r.slot: (r, r.position + j + 1) for r, j in zip(requests, accepted, strict=True) if j >= 0}
        wanted |= {slot: (r, r.position + j + 1) for slot, r, j in ((7, requests[0], steps[0]),
                   (5, requests[2], steps[2])) if j >= 0}  # fmt: skip
        judge_slots(kit, rig, "CS-SSM-COM-01", before, wanted, f"commit of {accepted}, {kind}")
    bare = rig_for(kit, kind, layout, drafts=0)
    before = bare.snapshot()
    call = lambda: kit.call(COMMIT, bare.pool, *indices(kit, [bare.request(3, 4).row], [0]))  # noqa: E731
    kit.refuses("CS-SSM-COM-01", ArgumentError, call, "a commit without intermediate states")
    kit.check("CS-SSM-COM-01", before.keys() == bare.snapshot().keys(), "")


@cases("kind, layout", on_ring, quick=1)
@over_ssm("index")
@clauses("CS-SSM-COM-02")
def test_commit_on_a_ring(kit: Kit, kind: str, layout: str) -> None:
    """Nothing is launched and nothing written; with tracking, the track slots alone."""
    rig = rig_for(kit, kind, layout, "target_verify", layers=2, names=("s", "t"), virtual=True)
    kit.need(hooks=(COMMIT,))
    requests = verified(rig)
    rows, lens = [r.row for r in requests], [r.position for r in requests]
    before = rig.snapshot()
    named = indices(kit, [*rows, -1], [2, -1, 0, 1])
    made = kit.call(COMMIT, rig.pool, *named, watch="ops")
    kit.check("CS-SSM-COM-02", not made.notes.get("ops", ""), f"ops of a commit: {made.notes.get('ops', '')}")
    judge_slots(kit, rig, "CS-SSM-COM-02", before, {}, f"commit, {kind} on a ring")
    goals = [rig.virtual(7), rig.virtual(5), rig.virtual(4), rig.virtual(1)]
    kit.call(COMMIT, rig.pool, *named, *indices(kit, goals, [1, 2, -1, 0], [*lens, 3]))
    wanted = {7: (requests[0], lens[0] + 2), 5: (requests[1], lens[1] + 3)}
    judge_slots(kit, rig, "CS-SSM-COM-02", before, wanted, f"commit with tracking, {kind} on a ring")


@cases("kind, layout", states, quick=2)
@over_ssm("index")
@clauses("CS-SSM-COM-03")
def test_clear_and_copy(kit: Kit, kind: str, layout: str) -> None:
    """Every layer and state, lengths with them; rings, saved states, guards and all other slots stay."""
    rig = rig_for(kit, kind, layout, layers=2, names=("s", "t"), slack=3)
    kit.need(hooks=("clear_slots", "copy_slots"))
    for slot, length in ((3, 8), (6, 21), (2, 5)):
        rig.request(slot, length, 2)
    for hook, given in (("copy_slots", ([3, 0, 6], [7, 4, 5])), ("clear_slots", ([3, 0, 2],))):
        before = rig.snapshot()
        kit.call(hook, rig.pool, *indices(kit, *given))
        want = {name: tensor.clone() for name, tensor in before.items()}
        for name, tensor in want.items():
            if name[2] not in ("tensor", "state_lens"):
                continue
            for pair in zip(*given, strict=True):
                if hook == "copy_slots" and min(pair) > 0:
                    tensor[GUARD + pair[1]] = before[name][GUARD + pair[0]]
                elif hook == "clear_slots" and pair[0] > 0:
                    tensor[GUARD + pair[0]] = 0
        for name, tensor in rig.snapshot().items():
            kit.same_bits("CS-SSM-COM-03", tensor, want[name], f"{hook}, {kind} on {layout}: {'.'.join(name)}")


@cases("kind, layout", lambda claims, seed: states(claims, seed)[:3], quick=0)
@over_ssm()
@clauses("CS-SSM-12", "CS-SSM-MAT-01")
def test_far_slots(kit: Kit, kind: str, layout: str) -> None:
    """Slots, ring rows and saved states that lie past 2**31 elements from the first."""
    if not kit.claims.large_offsets:
        kit.need(hooks=("offsets past 2**31",))
    parts = ("tensor", "ring_u", "ring_k", "ring_d") if layout == "ring" else ("tensor", "intermediate")
    for part in parts:
        for beyond in (2**31 + 7, 2**32 + 7):
            place = 6 if part == "tensor" else 11
            rig = rig_for(kit, kind, layout, "target_verify", far=(part, place, beyond), heads=(1, 2, 8, 8))
            request = rig.request(6, 8, 2, row=11)
            rows = [Live(request), Live(rig.request(3, 5, 1, row=2))]
            step = rig.run("target_verify", rows)
            judge_outputs(kit, rig, step, "CS-SSM-12")
            judge_state(kit, rig, step, "CS-SSM-12", "CS-SSM-12")
            before, back = rig.snapshot(), 1 if layout == "ring" else 0
            kit.hooks.materialize_slots(rig.pool, *indices(kit, [request.row], [8 - back], [5]))
            judge_slots(kit, rig, "CS-SSM-MAT-01", before, {5: (request, 8 - back)}, f"{part} past {beyond}")


def _bad(name: str, rig: Rig, request: Request, kit: Kit) -> list[Any]:
    """Arguments of a materialization, of which one is wrong."""
    rows, lens, goals = indices(kit, [request.row, -1], [8, 0], [5, 0])
    given: dict[str, list[Any]] = {
        "no pool": ["pool", rows, lens, goals], "rank": [rig.pool, rows[None], lens, goals],
        "floats": [rig.pool, rows, lens.float(), goals], "extents": [rig.pool, rows, lens[:1], goals],
        "destinations": [rig.pool, rows, lens, goals[:1]], "elsewhere": [rig.pool, rows.to("meta"), lens, goals],
        "none": [rig.pool, None, lens, goals],
    }  # fmt: skip
    return given[name]


@cases("bad", ["no pool", "rank", "floats", "extents", "destinations", "elsewhere", "none"], quick=3)
@over_ssm()
@clauses("CS-SSM-MAT-04")
def test_bad_arguments_of_a_materialization(kit: Kit, bad: str) -> None:
    """Refused by name, with nothing written, and the next call is right."""
    kind, layout = states(kit.claims, 0)[0]
    rig = rig_for(kit, kind, layout)
    request = rig.request(3, 8, 2)
    before = rig.snapshot()
    given = _bad(bad, rig, request, kit)
    kit.refuses("CS-SSM-MAT-04", ArgumentError, lambda: kit.hooks.materialize_slots(*given), bad)
    same = all(torch.equal(bits(tensor), bits(before[name])) for name, tensor in rig.snapshot().items())
    kit.check("CS-SSM-MAT-04", same, f"{bad}: refused after it had written")
    kit.hooks.materialize_slots(rig.pool, *indices(kit, [request.row], [8], [5]))
    judge_slots(kit, rig, "CS-SSM-MAT-04", before, {5: (request, 8)}, f"behind {bad}")
