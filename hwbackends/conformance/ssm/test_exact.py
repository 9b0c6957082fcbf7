"""Exact lane: tokens of whole numbers, whose gates are 0 or 1. Every state, ring row and output is compared with `==`,
whatever the order of sums; state that nobody may touch, bit by bit."""

from __future__ import annotations

import numpy as np

from hwbackends.conformance import oracle as plain
from hwbackends.conformance.kit import Kit
from hwbackends.conformance.marks import cases, clauses
from hwbackends.conformance.ssm import oracle
from hwbackends.conformance.ssm.cases import (
    MODES,
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
from hwbackends.conformance.ssm.oracle import Array
from hwbackends.contract.claims import Claims


def padded() -> list[Live]:
    """A row without a request row, and one whose request row maps to slot 0."""
    return [Live(None), Live(None, slot0=True)]


@cases("kind, layout", states, quick=2)
@over_ssm("index")
@clauses("CS-SSM-01", "CS-SSM-02", "CS-SSM-05", "CS-SSM-07", "CS-SSM-08", "CS-SSM-10", "CS-SSM-11", "CS-SSM-DEC-01")
def test_decode(kit: Kit, kind: str, layout: str) -> None:
    """Requests that begin, that continue, and that the ring holds tokens of, between padded rows."""
    rig = rig_for(kit, kind, layout, "decode", virtual=True, slack=5)
    live = [Live(rig.request(3, 7, 4)), Live(rig.request(1)), Live(rig.request(6, 21, 2), track=5)]
    one, other = padded()
    step = rig.run("decode", [live[0], one, live[1], other, live[2]], tail=2)
    judge_outputs(kit, rig, step, "CS-SSM-01", "CS-SSM-07")
    judge_state(kit, rig, step, "CS-SSM-DEC-01", "CS-SSM-08", "CS-SSM-DEC-01", "CS-SSM-11", "CS-SSM-07")
    kit.check("CS-SSM-10", True, "")
    for clause in ("CS-SSM-02", "CS-SSM-05"):
        judge_outputs(kit, rig, step, clause)


@cases("kind, layout", states, quick=2)
@over_ssm("index")
@clauses(
    "CS-SSM-EXT-01", "CS-SSM-EXT-04", "CS-SSM-EXT-05", "CS-SSM-EXT-06", "CS-SSM-07", "CS-SSM-08", "CS-SSM-09",
)  # fmt: skip
def test_extend(kit: Kit, kind: str, layout: str) -> None:
    """Empty requests, new ones, some that continue, one behind tokens that the ring still holds."""
    rig = rig_for(kit, kind, layout, "extend", virtual=True, slack=3)
    rows = [
        Live(rig.request(3, fresh=True), 5, track=7), Live(None, 2), Live(rig.request(1, 9, 5), 4),
        Live(rig.request(5, 4, 1), 0),
        Live(None, 1, slot0=True), Live(rig.request(6, fresh=True), 1),
        Live(rig.request(2, 3, 3), 7, track=4),
    ]  # fmt: skip
    step = rig.run("extend", rows, tail=1)
    judge_outputs(kit, rig, step, "CS-SSM-EXT-05", "CS-SSM-07")
    judge_state(kit, rig, step, "CS-SSM-EXT-01", "CS-SSM-08", "CS-SSM-EXT-04", "CS-SSM-EXT-01", "CS-SSM-07")
    for clause, kept in (("CS-SSM-EXT-06", [rows[2], rows[6]]), ("CS-SSM-09", [rows[0], rows[5]])):
        step.rows = kept
        judge_outputs(kit, rig, step, clause)
        judge_state(kit, rig, step, clause)


@cases("kind, layout", states, quick=2)
@over_ssm("index")
@clauses("CS-SSM-VER-02", "CS-SSM-VER-03", "CS-SSM-VER-05", "CS-SSM-07", "CS-SSM-08", "CS-SSM-09", "CS-SSM-11")
def test_verify(kit: Kit, kind: str, layout: str) -> None:
    """The state behind every accepted count is there, and the committed one is what it was."""
    rig = rig_for(kit, kind, layout, "target_verify", virtual=True, slack=5)
    live = [Live(rig.request(3, 7, 4)), Live(rig.request(1)), Live(rig.request(6, 21, 2)), Live(rig.request(2, 5, 0))]
    one, other = padded()
    step = rig.run("target_verify", [one, *live[:2], other, *live[2:]], tail=2)
    judge_outputs(kit, rig, step, "CS-SSM-VER-03", "CS-SSM-07")
    judge_state(kit, rig, step, "CS-SSM-VER-05", "CS-SSM-08", "", "CS-SSM-VER-02", "CS-SSM-07")
    judge_state(kit, rig, step, "CS-SSM-VER-03", lens="CS-SSM-11")
    step.rows = [live[1]]
    judge_state(kit, rig, step, "CS-SSM-09")


@cases("kind, layout", states, quick=2)
@over_ssm("index")
@clauses("CS-SSM-DEX-01", "CS-SSM-DEX-02", "CS-SSM-DEX-03", "CS-SSM-DEX-04", "CS-SSM-08", "CS-SSM-11")
def test_draft_extend(kit: Kit, kind: str, layout: str) -> None:
    """Every accepted count, a negative one over somebody's slot, and requests that run fresh over front tokens."""
    rig = rig_for(kit, kind, layout, "draft_extend", virtual=True, slack=5)
    rows = [
        Live(rig.request(3, 7, 4), accept=2, track=7), Live(rig.request(1, 5, 1), accept=-1),
        Live(rig.request(6, 21, 2), accept=3), Live(None), Live(rig.request(2, 5, fresh=True), accept=1, initial=False),
        Live(rig.request(5, 4, 4), accept=0),
        Live(rig.request(4, fresh=True), accept=3, initial=False),
    ]  # fmt: skip
    step = rig.run("draft_extend", rows, tail=2)
    judge_outputs(kit, rig, step, "CS-SSM-DEX-01", "CS-SSM-DEX-02")
    judge_state(kit, rig, step, "CS-SSM-DEX-01", "CS-SSM-08", "CS-SSM-DEX-04", "CS-SSM-11", "CS-SSM-DEX-02")
    step.rows = [rows[4], rows[6]]
    judge_outputs(kit, rig, step, "CS-SSM-DEX-03")
    judge_state(kit, rig, step, "CS-SSM-DEX-03", lens="CS-SSM-DEX-03")


@cases("kind, layout", states, quick=1)
@over_ssm()
@clauses("CS-SSM-EXT-03")
def test_extend_from_another_slot(kit: Kit, kind: str, layout: str) -> None:
    """A prefix that two requests share stays as it was; on a ring it brings its own length."""
    rig = rig_for(kit, kind, layout, "extend")
    prefix = rig.request(7, 6)
    heirs = [rig.request(slot, 6, fresh=True, seed=107) for slot in (2, 4)]
    for heir in heirs:
        heir.trails, heir.inputs, heir.base = prefix.trails, prefix.inputs, prefix.base
    rows = [Live(heir, tokens, source=7) for heir, tokens in zip(heirs, (4, 3), strict=True)]
    step = rig.run("extend", rows)
    judge_outputs(kit, rig, step, "CS-SSM-EXT-03")
    judge_state(kit, rig, step, "CS-SSM-EXT-03", "CS-SSM-EXT-03", source="CS-SSM-EXT-03", lens="CS-SSM-EXT-03")


def _stale(claims: Claims, seed: int) -> list[tuple[str, str, str]]:
    return [(stale, *state) for stale in ("numbers", "nan") for state in states(claims, seed)]


@cases("stale, kind, layout", _stale, quick=1)
@over_ssm()
@clauses("CS-SSM-09", "CS-SSM-10")
def test_a_recycled_request_row(kit: Kit, stale: str, kind: str, layout: str) -> None:
    """A predecessor's tokens, or NaN, in every row of the ring, in the slot, and a length beyond any position."""
    for mode in MODES:
        rig = rig_for(kit, kind, layout, mode, stale=stale)
        first = False if mode in ("extend", "draft_extend") else None
        rows = [
            Live(rig.request(3, fresh=first is False), 4, accept=2, initial=first),
            Live(rig.request(2, 4, 1), 3, accept=1),
        ]
        step = rig.run(mode, rows)
        judge_outputs(kit, rig, step, "CS-SSM-09")
        judge_state(kit, rig, step, "CS-SSM-09")
        step.rows = rows[1:]
        judge_state(kit, rig, step, "CS-SSM-10")


RINGS = (6, 7, 13)


@cases("kind, layout", on_ring, quick=1)
@over_ssm()
@clauses("CS-SSM-10", "CS-SSM-11", "CS-SSM-VER-05")
def test_every_place_of_the_ring(kit: Kit, kind: str, layout: str) -> None:
    """Requests at every position of a turn of the ring, with as many pending tokens as it may hold: rows wrap."""
    for count in RINGS:
        rig = rig_for(kit, kind, layout, "target_verify", ring_rows=count, slots=18, request_rows=19)
        lengths = range(count, 2 * count)
        rows = [Live(rig.request(2 + i, n, (n * 5) % (count - 2), row=1 + i)) for i, n in enumerate(lengths)]
        step = rig.run("target_verify", rows)
        judge_outputs(kit, rig, step, "CS-SSM-10")
        judge_state(kit, rig, step, "CS-SSM-VER-05", lens="CS-SSM-11")


PLAN = (
    ("extend", 5), ("target_verify", 2), ("target_verify", 0), ("decode", 1), ("target_verify", 3), ("decode", 1),
    ("draft_extend", 1), ("target_verify", 3), ("extend", 2), ("target_verify", 1),
)  # fmt: skip
"""Phases with what each keeps."""


@cases("kind, layout", states, quick=2)
@over_ssm()
@clauses("CS-SSM-10", "CS-SSM-11", "CS-SSM-VER-04", "CS-SSM-VER-05")
def test_a_history_of_steps(kit: Kit, kind: str, layout: str) -> None:
    """Ten steps of two requests that accept other counts, with the commit behind each verify."""
    rig = rig_for(kit, kind, layout, "target_verify", ring_rows=7)
    one, two = rig.request(3, fresh=True), rig.request(6, 4, 2)
    for number, (mode, kept) in enumerate(PLAN):
        other = {"extend": (kept + 1) % 4, "decode": 1, "target_verify": (kept + number) % 4, "draft_extend": 2}[mode]
        rows = [Live(one, kept, accept=kept), Live(None), Live(two, other, accept=other)]
        rows = rows if number % 2 else rows[::-1]
        step = rig.run(mode, rows)
        judge_outputs(kit, rig, step, "CS-SSM-VER-05")
        judge_state(kit, rig, step, "CS-SSM-10", lens="CS-SSM-11")
        if mode == "target_verify":
            _commit(kit, rig, rows, [row.accept - 1 for row in rows])
        rig.advance(rows, [row.accept if row.request else 0 for row in rows])
        if mode == "target_verify" and not kept:
            got = rig.implied(rig.snapshot(), rig.keys[0], one, one.position)
            want = plain.round_to(one.state(rig.keys[0], one.position), rig.shape.state_dtype)
            kit.equal("CS-SSM-VER-04", got, want, "state behind nothing accepted")


def _commit(kit: Kit, rig: Rig, rows: list[Live], steps: list[int]) -> None:
    named = kit.tensor(np.asarray([row.request.row if row.request else -1 for row in rows], np.int64), "int64")
    kit.hooks.update_mamba_state_after_mtp_verify(rig.pool, named, kit.tensor(np.asarray(steps, np.int64), "int64"))


@cases("kind, layout", on_intermediate, quick=1)
@over_ssm()
@clauses("CS-SSM-VER-06")
def test_trees(kit: Kit, kind: str, layout: str) -> None:
    """Each draft starts from the state behind its parent: chains, forks, and several roots."""
    for number, parents in enumerate(([-1, 0, 0], [-1, -1, 1], [-1, 0, 1], [-1, -1, -1])):
        rig = rig_for(kit, kind, layout, "target_verify")
        requests = [rig.request(3, 7, seed=11 + number), rig.request(5)]
        rows = [Live(request) for request in requests]
        tree = kit.tensor(np.asarray([parents, [-1, 0, 1]], np.int64), "int64")
        step = rig.run("target_verify", rows, retrieve_parent_token=tree)
        want = _tree(rig, requests[0], parents)
        saved = step.after["s", "0", "intermediate"][1 + requests[0].row].double().numpy()
        for t, (output, state) in enumerate(want):
            kit.equal("CS-SSM-VER-06", saved[t], state, f"{step.text}: parents {parents}: state of draft {t}")
            kit.equal("CS-SSM-VER-06", step.y[t].double().numpy(), output, f"parents {parents}: output of draft {t}")
        step.rows = rows[1:]
        judge_outputs(kit, rig, step, "CS-SSM-VER-06")
        judge_state(kit, rig, step, "CS-SSM-VER-06")


def _tree(rig: Rig, request: Request, parents: list[int]) -> list[tuple[Array, Array]]:
    """Output and state of each draft, from the state behind its parent."""
    key, found, behind = rig.keys[0], [], {-1: request.state(rig.keys[0], request.position)}
    for t, parent in enumerate(parents):
        trail = oracle.run(rig.rules, behind[parent], request.tokens(key, request.position + t, 1))
        behind[t] = trail.states[-1]
        output = plain.round_to(trail.outputs[0], rig.shape.dtype)
        found.append((output, plain.round_to(behind[t], rig.shape.state_dtype)))
    return found
