"""Offsets lane: each tensor of each hook with strides that carry its entries past 2**31 and 2**32 elements, exact or
refused by name before anything is written. What is large is addresses, not memory: a test touches a few megabytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from torch import Tensor

from hwbackends.conformance import oracle
from hwbackends.conformance.cases import (
    MODES,
    Far,
    Req,
    Rig,
    judge_outputs,
    judge_state,
    prepare_rig,
    rig_for,
    shape_of,
)
from hwbackends.conformance.conv.test_commit import COMMIT, commit, index, judge_commit
from hwbackends.conformance.conv.test_fused import EPS, FUSED, judge_fused
from hwbackends.conformance.conv.test_sizes import fill, judge_slots
from hwbackends.conformance.conv.test_tolerance import random_histories, random_numbers, silu_weights
from hwbackends.conformance.kit import Kit
from hwbackends.conformance.marks import cases, clauses, over
from hwbackends.errors import HwBackendsError

REQUESTS = [
    Req(2, tokens=2, length=7, accept=2),
    Req(1, tokens=1, length=2, accept=1, track=5, track_seqlen=3),
    Req(3, tokens=3, length=12, accept=3),
]
"""Request rows 5, 3 and 12, slots to 3, a track slot behind them."""
BOUNDS = (2**31, 2**32)
TENSORS = {
    "x": (0, -1), "out": (0, -1), "weight": (0, 4), "taps": (1, -1), "bias": (0, 4), "slots": (1, 3), "rows": (2, 1),
    "channels": (3, 4), "draft rows": (1, 12), "rows of drafts": (2, 1),
}  # fmt: skip
"""What is far apart in a conv step: its dimension, and the entry that lies past the bound; -1: the last one in use."""
NAMES = {
    "slots": "state", "rows": "state", "channels": "state", "layers": "state", "taps": "weight",
    "draft rows": "drafts", "rows of drafts": "drafts",
}  # fmt: skip


def _exact_or_refused(kit: Kit, rig: Rig, what: str, call: Callable[[], Any]) -> bool:
    """Make a call; false if it was refused by name, which only a backend may do that does not claim such offsets."""
    before = rig.snapshot()
    try:
        call()
    except HwBackendsError as error:
        kit.check("CS-CONV-09", not kit.claims.large_offsets, f"{what}: claimed, and refused: {error}")
        for key, old in before.items():
            kit.same_bits("CS-CONV-09", rig.snapshot()[key], old, f"{what}: refused, and {key} was written")
        return False
    return True


def _turned() -> list[tuple[str, str]]:
    """Tensor and phase; the first cases have each tensor once, and every phase."""
    names = list(TENSORS)
    found = [(name, MODES[(place + turn) % 4]) for turn in range(4) for place, name in enumerate(names)]
    return [(name, mode) for name, mode in found if "draft" in mode or "verify" in mode or NAMES.get(name) != "drafts"]


def _far(kit: Kit, what: str, mode: str) -> Far:
    """One of the two bounds, by the test's seed."""
    dim, entry = TENSORS[what]
    last = {"decode": 2, "extend": 5}.get(mode, 8) if what in ("x", "out") else kit.point.width - 1
    return Far(NAMES.get(what, what), dim, entry if entry > 0 else last, BOUNDS[kit.seed % 2])


@cases("what, mode", _turned(), quick=40)
@over("layout", quick=1, dtype=("float16", "bfloat16", "float32"), width=(3, 4, 5))
@clauses("CS-CONV-09")
def test_offsets_of_a_step(kit: Kit, what: str, mode: str) -> None:
    """x, output, weights, bias, state and draft rows: outputs, state and snapshots."""
    if NAMES.get(what) == "drafts":
        kit.need(layout="window")
        kit.point = kit.point.at(layout="window")
    rig = rig_for(kit, mode, dims=(5,), slots=6, far=_far(kit, what, mode))
    random_histories(kit, rig, REQUESTS, mode)
    batch = rig.batch(mode, REQUESTS)
    metadata = rig.prepare(batch)
    x = random_numbers(kit, (batch.num_tokens, 5), rig.shape.dtype)
    weights = silu_weights(kit, 5)
    made: list[Any] = []
    if _exact_or_refused(kit, rig, what, lambda: made.append(rig.run(batch, weights, x, metadata=metadata))):
        own = "CS-CONV-09"
        judge_outputs(kit, made[0], own, own, exact=False)
        judge_state(kit, made[0], rig, own=own, others=own, track=own, source=own, drafts=own, padded=own)


@cases("what", ["batch", "map", "table"], quick=3)
@over("index", quick=1)
@clauses("CS-CONV-09")
def test_offsets_of_a_preparation(kit: Kit, what: str) -> None:
    """Index tensors of the batch, the map and the table, in every phase."""
    for mode in MODES:
        rig = prepare_rig(kit, mode, slots=11, virtual=True)
        batch = rig.batch(mode, REQUESTS)
        step, pool, bound = rig.step_batch(batch), rig.pool, BOUNDS[kit.seed % 2]
        if what == "map":
            pool.mamba_index_mapping = kit.far(pool.mamba_index_mapping, 0, 12, bound)
        elif what == "table":
            assert pool.mamba_v2p_table is not None
            pool.mamba_v2p_table = kit.far(pool.mamba_v2p_table, 0, 10, bound)
        else:
            for name in [f.name for f in fields(step)]:
                value = getattr(step, name)
                if isinstance(value, Tensor) and value.numel() > 1:
                    setattr(step, name, kit.far(value, 0, 2, bound))
        out = rig.metadata(batch)
        if _exact_or_refused(kit, rig, what, lambda: rig.prepare(batch, step, out)):  # noqa: B023
            for name, values in oracle.metadata(batch, oracle.prepare(batch, rig.facts)).items():
                kit.equal("CS-CONV-09", getattr(out, name), values, f"{mode}, {what}: {name}")


POOLS = {
    "layers": ("state", 0, 1), "slots": ("state", 1, 3), "rows": ("state", 2, 1), "channels": ("state", 3, 4),
    "SSM layers": ("ssm", 0, 1), "SSM slots": ("ssm", 1, 3), "SSM rows": ("ssm", 2, 2),
}  # fmt: skip
DRAFTS = {
    "draft layers": ("drafts", 0, 1), "draft rows": ("drafts", 1, 3), "rows of drafts": ("drafts", 2, 1),
    "intermediate layers": ("intermediate", 0, 1), "intermediate rows": ("intermediate", 1, 3),
    "intermediate steps": ("intermediate", 2, 1),
}  # fmt: skip


def _pool(kit: Kit, what: str) -> Rig:
    name, dim, entry = {**POOLS, **DRAFTS}.get(what, ("", 0, 1))
    far = Far(name, dim, entry, BOUNDS[kit.seed % 2])
    sizes: dict[str, Any] = {"dims": (5,), "layers": 2, "slots": 6, "drafts": 3, "ssm": True, "far": far}
    rig = Rig(kit, shape_of(kit, **sizes))
    fill(kit, rig)
    return rig


@cases("what", [*POOLS, *DRAFTS, "lists"], quick=14)
@over("layout", quick=1, width=(3, 4, 5))
@clauses("CS-CONV-09")
def test_offsets_of_a_commit(kit: Kit, what: str) -> None:
    """Conv and SSM state, what verify saved, and the lists of a commit, in every layer."""
    kit.need(hooks=(COMMIT,))
    rig = _pool(kit, what)
    rows = rig.batch("target_verify", REQUESTS).req_pool_indices
    made = [
        oracle.CommitRow(row, step, 5 if step == 1 else -1, 0 if step == 1 else -1, req.length)
        for row, step, req in zip(rows, (2, 1, 0), REQUESTS, strict=True)
    ]
    before, step = rig.snapshot(), BOUNDS[kit.seed % 2] // 2 + 8 if what == "lists" else 1
    if _exact_or_refused(kit, rig, what, lambda: commit(kit, rig, made, step=step)):
        judge_commit(kit, rig, made, before, "CS-CONV-09", "CS-CONV-09")


@cases("what", [*POOLS, "lists"], quick=8)
@over("layout", quick=1, width=(3, 4, 5))
@clauses("CS-CONV-09")
def test_offsets_of_clear_and_copy(kit: Kit, what: str) -> None:
    """Conv and SSM state, and the lists, in every layer."""
    kit.need(hooks=("clear_slots", "copy_slots"))
    rig, step = _pool(kit, what), BOUNDS[kit.seed % 2] // 2 + 8 if what == "lists" else 1
    sources, destinations, cleared = (index(kit, values, step=step) for values in ([3, 1, 2], [5, 4, 0], [1, 0, 3]))
    before = rig.snapshot()
    if _exact_or_refused(kit, rig, what, lambda: kit.hooks.copy_slots(rig.pool, sources, destinations)):
        judge_slots(kit, rig, before, "CS-CONV-09", [(3, 5), (1, 4)])
    before = rig.snapshot()
    if _exact_or_refused(kit, rig, what, lambda: kit.hooks.clear_slots(rig.pool, cleared)):
        judge_slots(kit, rig, before, "CS-CONV-09", [(None, 1), (None, 3)])


@cases("what, mode", [(w, m) for w in ("stream", "x", "out", "slots") for m in FUSED], quick=4)
@over("layout", quick=1, dtype=("float16", "bfloat16", "float32"), width=(3, 4, 5))
@clauses("CS-CONV-09", "CS-FUSED-01", "CS-FUSED-02")
def test_offsets_of_the_epilogue(kit: Kit, what: str, mode: str) -> None:
    """The residual stream, x, the output and the state of the fused hooks."""
    kit.need(hooks=(FUSED[mode],))
    dim, entry = (1, 3) if what == "slots" else (0, 2 if mode == "decode" else 8)
    far = Far({"slots": "state"}.get(what, what), dim, entry, BOUNDS[kit.seed % 2])
    rig = rig_for(kit, mode, dims=(5,), slots=6, far=far)
    requests = [Req(2, length=7), Req(1, length=2), Req(3, length=12)]
    if _exact_or_refused(kit, rig, what, lambda: judge_fused(kit, rig, mode, requests, EPS)):
        kit.check("CS-CONV-09", not kit.failures, f"{mode}, {what}")
