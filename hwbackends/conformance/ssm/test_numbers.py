"""Tolerance lane: random numbers against float64, each element within its own bound, which follows the errors of
float32 work through the recurrence. The state is rounded to its dtype after every token, and no sooner: a gate, a beta
or an update that was rounded to 16 bits lies far outside."""

from __future__ import annotations

from typing import Any

import numpy as np

from hwbackends.conformance import oracle as plain
from hwbackends.conformance.kit import Kit
from hwbackends.conformance.marks import cases, clauses, full, product
from hwbackends.conformance.ssm import oracle
from hwbackends.conformance.ssm.cases import DTYPES, Live, Request, Rig, judge_outputs, over_ssm, rig_for, states
from hwbackends.contract.claims import Claims

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "gdn": ("gdn", {}),
    "gdn-plain-scaled": ("gdn", {"l2norm": False, "scale": 0.37}),
    "gdn-no-bias": ("gdn", {"dt_bias": None}),
    "kda": ("kda", {}),
    "kda-safe-gate": ("kda", {"lower_bound": -5.0}),
    "kda-plain-scaled": ("kda", {"l2norm": False, "scale": 2.0}),
    "mamba2": ("mamba2", {}),
    "mamba2-limits": ("mamba2", {"dt_limit": (0.4, 1.1)}),
    "mamba2-no-skip-scaled": ("mamba2", {"D": None, "scale": 0.25}),
    "mamba2-no-bias": ("mamba2", {"dt_bias": None}),
}


def judge_states(kit: Kit, rig: Rig, clause: str, request: Request, position: int, got: Any, what: str) -> None:
    """A state against S(position), each element within its bound."""
    trail = request.trails[rig.keys[0]]
    want, error = trail.states[position - request.base], trail.errors[position - request.base]
    kit.within(clause, got, want, error + np.finfo(np.float64).tiny, rig.shape.state_dtype, what)


def _options(claims: Claims, seed: int) -> list[tuple[str, str]]:
    layouts = claims.ssm_layouts or ("ring",)
    names = [name for name, (kind, _) in OPTIONS.items() if kind in claims.ssm_kinds] or ["gdn"]
    return [(name, layouts[i % len(layouts)]) for i, name in enumerate(names)]


@cases("name, layout", _options, quick=2)
@over_ssm()
@clauses("CS-SSM-01", "CS-SSM-02", "CS-SSM-03", "CS-SSM-04")
def test_gates_norms_and_scales(kit: Kit, name: str, layout: str) -> None:
    """A prompt, a verify and a decode of bfloat16 inputs over a float32 state."""
    kind, options = OPTIONS[name]
    dtype = "bfloat16" if "bfloat16" in kit.claims.dtypes and kit.claims.mixed_dtypes else kit.point.dtype
    state = "float32" if kit.claims.mixed_dtypes else dtype
    rig = rig_for(kit, kind, layout, "extend", whole=False, dtype=dtype, state_dtype=state, options=options)
    kit.need(hooks=("ssm_target_verify", "ssm_decode", "materialize_slots"))
    rows = [Live(rig.request(3, fresh=True), 4), Live(rig.request(6, 9, 3), 2)]
    for mode, counts in (("extend", (4, 2)), ("target_verify", (0, 0)), ("decode", (1, 1)), ("decode", (1, 1))):
        step = rig.run(mode, rows)
        judge_outputs(kit, rig, step, "CS-SSM-02")
        rig.advance(rows, counts)
        if mode != "target_verify":
            _states_of(kit, rig, rows, "CS-SSM-01", f"{step.text}, {name}")
    for clause in ("CS-SSM-03", "CS-SSM-04"):
        judge_outputs(kit, rig, rig.run("target_verify", rows), clause)


def _states_of(kit: Kit, rig: Rig, rows: list[Live], clause: str, what: str) -> None:
    """Materialize the rows' states into slot 7 and the one behind, and judge them."""
    requests = [row.request for row in rows if row.request is not None]
    given = [[r.row for r in requests], [r.position for r in requests], [7, 5][: len(requests)]]
    kit.hooks.materialize_slots(rig.pool, *(kit.tensor(np.asarray(value, np.int64), "int64") for value in given))
    for request, slot in zip(requests, given[2], strict=True):
        judge_states(kit, rig, clause, request, request.position, rig.bases["s"]["tensor"][0, 1 + slot], what)


def _pairs(claims: Claims, seed: int) -> list[tuple[str, str, str]]:
    """Every pair of an activation and a state dtype, the kinds in turn."""
    held = [name for name in DTYPES if name in claims.dtypes]
    pairs = [(one, other) for one, other in product(one=held, other=held) if claims.mixed_dtypes or one == other]
    kinds = claims.ssm_kinds or ("gdn",)
    return [(*pair, kinds[i % len(kinds)]) for i, pair in enumerate(pairs)] or [("float32", "float32", kinds[0])]


@cases("dtype, state_dtype, kind", _pairs, quick=2)
@over_ssm()
@clauses("CS-SSM-13", "CS-SSM-04")
def test_dtypes(kit: Kit, dtype: str, state_dtype: str, kind: str) -> None:
    """Every pair of activation and state dtype, in each phase."""
    for mode in ("extend", "target_verify", "decode", "draft_extend"):
        layout = kit.claims.ssm_layouts[len(mode) % len(kit.claims.ssm_layouts)] if kit.claims.ssm_layouts else "ring"
        rig = rig_for(kit, kind, layout, mode, whole=False, dtype=dtype, state_dtype=state_dtype)
        rows = [Live(rig.request(3, 7, 2), 3, accept=2), Live(rig.request(6, 9), 2, accept=3)]
        step = rig.run(mode, rows)
        judge_outputs(kit, rig, step, "CS-SSM-13")
        saved = {"decode": 1, "extend": None, "draft_extend": None}.get(mode)
        for row in rows if layout == "intermediate" or mode == "extend" else ():
            assert row.request is not None
            count = saved or (row.tokens if mode == "extend" else row.accept)
            if mode != "target_verify":
                got = step.after["s", "0", "tensor"][1 + row.request.slot]
                judge_states(kit, rig, "CS-SSM-04", row.request, row.request.position + count, got, step.text)
        judge_outputs(kit, rig, step, "CS-SSM-04")


HEADS = ((1, 1, 16, 8), (1, 6, 24, 17), (3, 3, 64, 64), (2, 4, 128, 64), (1, 2, 256, 40), (4, 8, 8, 128))


@cases("heads", [(heads,) for heads in HEADS], quick=1)
@over_ssm()
@clauses("CS-SSM-05", "CS-SSM-01")
def test_heads(kit: Kit, heads: tuple[int, int, int, int]) -> None:
    """Heads that share q and k, and that do not; dims of real models, and dims that fill no block."""
    for kind, layout in states(kit.claims, 0)[:: 1 if heads[2] < 64 else 2]:
        mode = "target_verify" if layout == "ring" else "extend"
        rig = rig_for(kit, kind, layout, mode, whole=False, heads=heads, slots=5, request_rows=13)
        rows = [Live(rig.request(3, 7, 1), 2)]
        step = rig.run(mode, rows)
        judge_outputs(kit, rig, step, "CS-SSM-05")
        judge_outputs(kit, rig, step, "CS-SSM-01")


@cases("kind, layout", states, quick=1)
@over_ssm()
@clauses("CS-SSM-EXT-02")
def test_a_prompt_in_any_split(kit: Kit, kind: str, layout: str) -> None:
    """Thirteen tokens at once, in chunks, one by one: outputs and state within the bound of decoding."""
    for split in ((13,), (1, 1, 11), (8, 0, 5), (12, 1)):
        rig = rig_for(kit, kind, layout, "extend", whole=False)
        request = rig.request(3, fresh=True)
        for tokens in split:
            rows = [Live(request, tokens)]
            step = rig.run("extend", rows)
            judge_outputs(kit, rig, step, "CS-SSM-EXT-02")
            rig.advance(rows, [tokens])
        got = rig.bases["s"]["tensor"][0, 1 + request.slot]
        judge_states(kit, rig, "CS-SSM-EXT-02", request, 13, got, f"{kind} in {split}")


@full
@cases("kind, layout", lambda claims, seed: states(claims, seed)[:3])
@over_ssm()
@clauses("CS-SSM-EXT-02", "CS-SSM-EXT-05")
def test_long_prompts(kit: Kit, kind: str, layout: str) -> None:
    """More tokens than a chunk of any kernel: 67 and 70 of two requests, beside one of none."""
    rig = rig_for(kit, kind, layout, "extend", whole=False, heads=(1, 2, 16, 8))
    requests = [Request(rig, row, slot, 0, slot, True, 71) for row, slot in ((5, 3), (7, 6), (2, 1))]
    for request in requests:
        rig.mapping[request.row] = request.slot
        rig.pool.mamba_index_mapping[request.row] = request.slot
    rows = [Live(request, n) for request, n in zip(requests, (67, 70, 0), strict=True)]
    step = rig.run("extend", rows)
    judge_outputs(kit, rig, step, "CS-SSM-EXT-05")
    for row in rows[:2]:
        assert row.request is not None
        got = step.after["s", "0", "tensor"][1 + row.request.slot]
        judge_states(kit, rig, "CS-SSM-EXT-02", row.request, row.tokens, got, step.text)


@over_ssm()
@clauses("CS-SSM-01")
def test_softplus_of_large_inputs(kit: Kit) -> None:
    """softplus(x) is x above 20, and no overflow anywhere."""
    for kind, layout in states(kit.claims, 0)[:3]:
        rig = rig_for(kit, kind, layout, "extend", whole=False, heads=(1, 4, 8, 8))
        request = rig.request(3, 5)
        key, wide = rig.keys[0], np.array([-90.0, 19.5, 20.5, 60.0])
        gates = request.inputs[key]["a"]
        wide = np.broadcast_to(wide.reshape(1, 4, *(1,) * (gates.ndim - 2)), gates.shape)
        request.inputs[key] = {**request.inputs[key], "a": plain.round_to(wide, rig.shape.dtype)}
        start = request.trails[key].states[0]

        request.trails[key] = oracle.run(rig.rules, start, request.inputs[key], rig.shape.state_dtype)
        step = rig.run("extend", [Live(request, 3)])
        judge_outputs(kit, rig, step, "CS-SSM-01")
        got = step.after["s", "0", "tensor"][1 + request.slot]
        judge_states(kit, rig, "CS-SSM-01", request, request.position + 3, got, step.text)
