"""Sizes lane: one size for every kind of block that an implementation may cut its work into. Sizes are beyond the block
and never a multiple of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hwbackends.conformance import oracle
from hwbackends.conformance.cases import MODES, Req, Rig, Weights, judge_outputs, judge_state, rig_for, shape_of
from hwbackends.conformance.conv.test_commit import COMMIT, commit, judge_commit
from hwbackends.conformance.conv.test_fused import EPS, FUSED, judge_fused
from hwbackends.conformance.conv.test_tolerance import random_histories, random_numbers, silu_weights
from hwbackends.conformance.kit import Kit
from hwbackends.conformance.marks import cases, clauses, over

OWN = {
    "decode": "CS-DECODE-01",
    "extend": "CS-EXTEND-01",
    "target_verify": "CS-VERIFY-03",
    "draft_extend": "CS-DRAFT-01",
}


def _step(kit: Kit, rig: Rig, mode: str, requests: list[Req], own: str = "") -> None:
    """A step of random numbers, judged whole."""
    dim = rig.shape.dims[0]
    random_histories(kit, rig, requests, mode)
    batch = rig.batch(mode, requests)
    x = random_numbers(kit, (batch.num_tokens, dim), rig.shape.dtype)
    call = rig.run(batch, silu_weights(kit, dim), x, tail=1)
    judge_outputs(kit, call, "CS-CONV-01", "CS-CONV-05", exact=False)
    clause = own or OWN[mode]
    drafts = "CS-VERIFY-03" if mode == "target_verify" else ""
    judge_state(kit, call, rig, own=clause, track=clause, others="CS-CONV-07", padded="CS-CONV-05", drafts=drafts)


@cases("dim, mode", [(dim, mode) for dim in (300, 2053, 8193) for mode in MODES], quick=8)
@over("layout", "dtype", quick=1)
@clauses("CS-CONV-01", "CS-CONV-05", "CS-CONV-07", "CS-DECODE-01", "CS-EXTEND-01", "CS-VERIFY-03", "CS-DRAFT-01")
def test_channels(kit: Kit, dim: int, mode: str) -> None:
    """D beyond one block of 256, 2,048 and 8,192 channels."""
    rig = rig_for(kit, mode, dims=(dim,))
    _step(
        kit, rig, mode, [Req(3, tokens=2, length=7, accept=2), Req(0, tokens=1, accept=1), Req(9, tokens=5, length=12)]
    )


@cases("count, mode", [(count, mode) for count in (70, 140, 300) for mode in MODES], quick=8)
@over("layout", "dtype", quick=1)
@clauses("CS-CONV-01", "CS-CONV-05", "CS-CONV-07", "CS-DECODE-01", "CS-EXTEND-01", "CS-VERIFY-03", "CS-DRAFT-01")
def test_requests(kit: Kit, count: int, mode: str) -> None:
    """B beyond one launch of 64, 128 and 256 requests, padded rows among them."""
    count = kit.rows(count)
    rig = rig_for(kit, mode, dims=(3,), slots=count + 5, request_rows=count + 9)
    slots = (kit.rng.permutation(count + 2) + 1).tolist()
    requests = [
        Req(slots[b] if b % 7 != 3 else -(b % 2), tokens=b % 4, length=b % 11, accept=b % 4) for b in range(count)
    ]
    _step(kit, rig, mode, requests)


@cases("tokens", [300, 1100, 5003], quick=3)
@over("layout", "dtype", quick=1)
@clauses("CS-EXTEND-07", "CS-CONV-01", "CS-CONV-05", "CS-CONV-07")
def test_tokens(kit: Kit, tokens: int) -> None:
    """T_b beyond one block of tokens, between short requests: outputs, window and snapshots."""
    rig = rig_for(kit, "extend", dims=(3,), track_interval=64)
    requests = [
        Req(4, tokens=2, length=3), Req(2, tokens=tokens, length=11, track=8, track_seqlen=11 + tokens - 5),
        Req(7, tokens=tokens // 3, track=6, track_seqlen=tokens // 4), Req(5, tokens=1, length=1),
    ]  # fmt: skip
    _step(kit, rig, "extend", requests, own="CS-EXTEND-07")


DRAFTS = [(1, 0), (2, 0), (5, 0), (9, 0), (2, 3), (1, 8), (4, 1)]
"""Drafts of a step, and how many more the pool has room for."""


@cases("drafts, spare, mode", [(*pair, m) for pair in DRAFTS for m in ("target_verify", "draft_extend")], quick=14)
@over("layout", "dtype", "width", quick=1)
@clauses("CS-CONV-01", "CS-CONV-05", "CS-CONV-07", "CS-VERIFY-03", "CS-DRAFT-01")
def test_drafts(kit: Kit, drafts: int, spare: int, mode: str) -> None:
    """One to nine drafts, in pools that have room for as many or for more."""
    rig = rig_for(kit, mode, drafts=drafts + spare, step_drafts=drafts, dims=(5,))
    requests = [
        Req(3, length=7, accept=drafts),
        Req(1, length=2, accept=0),
        Req(9, length=30, accept=max(0, drafts - 1)),
    ]
    _step(kit, rig, mode, requests)


@cases("extra, mode", [(extra, mode) for extra in (0, 1, 2, 3, 5) for mode in MODES], quick=12)
@over("width", "dtype", quick=1, layout=("ring",))
@clauses("CS-CONV-01", "CS-CONV-05", "CS-CONV-07", "CS-DECODE-01", "CS-EXTEND-01", "CS-VERIFY-03", "CS-DRAFT-01")
def test_ring_sizes(kit: Kit, extra: int, mode: str) -> None:
    """Rings with more rows than they need, with and without speculation: the row is p mod C of the pool's own C."""
    for drafts in (3,) if mode in ("target_verify", "draft_extend") else (0, 4):
        rig = rig_for(kit, mode, drafts=drafts, extra_rows=extra)
        requests = [
            Req(3, tokens=2, length=7, accept=2),
            Req(1, tokens=9, length=23, accept=1),
            Req(9, tokens=1, length=2),
        ]
        _step(kit, rig, mode, requests)


COMMITS: dict[str, dict[str, Any]] = {
    "24 layers of 4 streams": {"layers": 24, "dims": (2, 1, 3, 2), "drafts": 3},
    "transposed": {"layers": 2, "dims": (5, 3), "drafts": 3, "transposed": True},
    "9 drafts": {"layers": 2, "dims": (5,), "drafts": 9},
    "1 draft": {"layers": 1, "dims": (5,), "drafts": 1},
    "300 channels": {"layers": 1, "dims": (300, 70), "drafts": 2},
    "8193 channels": {"layers": 1, "dims": (8193,), "drafts": 2},
    "16-bit SSM state": {"layers": 2, "dims": (5,), "drafts": 3, "ssm_dtype": "bfloat16"},
    "float64 SSM state": {"layers": 2, "dims": (5,), "drafts": 3, "ssm_dtype": "float64"},
    "wide SSM state": {"layers": 2, "dims": (5,), "drafts": 3, "ssm_shape": (5, 17, 33)},
    "one dimension of SSM state": {"layers": 2, "dims": (5,), "drafts": 3, "ssm_shape": (7,)},
}  # fmt: skip


@cases("what, strided", [(what, s) for s in (False, True) for what in COMMITS], quick=13)
@over("layout", "dtype", "width", "index", quick=1)
@clauses("CS-COMMIT-01", "CS-COMMIT-03", "CS-COMMIT-04")
def test_commits(kit: Kit, what: str, strided: bool) -> None:
    """Every size of a commit: tensors, channels, drafts, layouts of the pool, dtypes and shapes of the SSM state; index
    tensors with strides and of mixed dtypes; snapshots and draft rows of a name space of their own."""
    kit.need(hooks=(COMMIT,), dtype=COMMITS[what].get("ssm_dtype"))
    rig = Rig(kit, shape_of(kit, ssm=True, slots=31, **COMMITS[what]))
    fill(kit, rig)
    last = rig.shape.drafts - 1
    requests = [Req(3, length=7), Req(-1), Req(1, length=2), Req(0), Req(9, length=12), Req(5, length=4)]
    rows = rig.batch("target_verify", requests).req_pool_indices
    steps = [last, last, 0, 0, -1, last // 2]
    drafts = (kit.rng.permutation(12)[:6]).tolist() if strided else [None] * 6
    made = [
        oracle.CommitRow(row, step, 20 + b if b % 2 else -1, last if b % 2 else -1, req.length, drafts[b])
        for b, (row, step, req) in enumerate(zip(rows, steps, requests, strict=True))
    ]
    before = rig.snapshot()
    mix = list(kit.claims.index_dtypes) if strided else []
    commit(kit, rig, made, mix=mix, step=3 if strided else 1)
    judge_commit(kit, rig, made, before, "CS-COMMIT-01", "CS-COMMIT-03")
    judge_commit(kit, rig, made, before, "CS-COMMIT-04", "CS-COMMIT-04")


def fill(kit: Kit, rig: Rig) -> None:
    """Random numbers in every state tensor."""
    for base in (*rig.bases.values(), *rig.draft_bases.values()):
        base.copy_(
            kit.tensor(oracle.round_to(kit.rng.standard_normal(tuple(base.shape)), rig.shape.state), rig.shape.state)
        )


@cases("count", [70, 300, 1100], quick=2)
@over("layout", "index", quick=1)
@clauses("CS-COMMIT-01", "CS-COMMIT-03", "CS-CLEAR-01", "CS-COPY-01")
def test_many_rows_between_steps(kit: Kit, count: int) -> None:
    """A commit, a clear and a copy of more rows than one block has."""
    kit.need(hooks=(COMMIT, "clear_slots", "copy_slots"))
    count = kit.rows(count)
    rig = Rig(kit, shape_of(kit, ssm=True, slots=2 * count + 3, request_rows=count + 9, drafts=2, dims=(2,)))
    fill(kit, rig)
    requests = [Req(1 + b, length=b % 9) for b in range(count)]
    rows = rig.batch("target_verify", requests).req_pool_indices
    made = [oracle.CommitRow(row, b % 3 - 1, computed_len=b % 9) for b, row in enumerate(rows)]
    before = rig.snapshot()
    commit(kit, rig, made)
    judge_commit(kit, rig, made, before, "CS-COMMIT-01", "CS-COMMIT-03")
    slots = np.arange(1, count + 1)
    pairs = dict(zip(slots.tolist(), (slots + count).tolist(), strict=True))
    before = rig.snapshot()
    kit.hooks.copy_slots(rig.pool, kit.tensor(slots, kit.point.index), kit.tensor(slots + count, kit.point.index))
    judge_slots(kit, rig, before, "CS-COPY-01", list(pairs.items()))
    before = rig.snapshot()
    kit.hooks.clear_slots(rig.pool, kit.tensor(slots + count, kit.point.index))
    judge_slots(kit, rig, before, "CS-CLEAR-01", [(None, int(slot)) for slot in slots + count])


def judge_slots(kit: Kit, rig: Rig, before: Any, clause: str, writes: list[tuple[int | None, int]]) -> None:
    """Destinations hold their source's bits, or zeros; everything else, draft rows too, is bit-unchanged."""
    for key, old in before.items():
        want = old.clone()
        for source, destination in writes if key[0] != "drafts" else []:
            want[1 + destination] = 0 if source is None else old[1 + source]
        kit.same_bits(clause, rig.snapshot()[key] if len(before) > 6 else _now(rig, key), want, f"{key}")


def _now(rig: Rig, key: Any) -> torch.Tensor:
    kind, name, layer = key
    base = rig.ssm_base if kind == "ssm" else (rig.bases if kind == "state" else rig.draft_bases)[name]
    return rig.kit.host(base[layer])


@over("layout", "dtype", "index", quick=3)
@clauses("CS-COPY-01", "CS-CLEAR-01")
def test_forks_and_other_name_spaces(kit: Kit) -> None:
    """One source into two destinations; slots that are also request rows with saved drafts; lists with strides, of
    mixed dtypes; and empty lists."""
    kit.need(hooks=("clear_slots", "copy_slots"))
    rig = Rig(kit, shape_of(kit, ssm=True, dims=(5, 3), layers=2, drafts=3, transposed=bool(kit.seed % 2)))
    fill(kit, rig)
    dtypes = kit.claims.index_dtypes

    def slots(values: list[int], dtype: str, step: int = 2) -> torch.Tensor:
        wide = np.full((len(values), step), 1)
        wide[:, 0] = values
        return kit.tensor(wide.reshape(-1), dtype)[::step]

    before = rig.snapshot()
    kit.hooks.copy_slots(rig.pool, slots([4, 4, 9], dtypes[0]), slots([8, 3, 10], dtypes[-1], 3))
    judge_slots(kit, rig, before, "CS-COPY-01", [(4, 8), (4, 3), (9, 10)])
    before = rig.snapshot()
    kit.hooks.clear_slots(rig.pool, slots([5, 0, 3, -1, 7], dtypes[-1]))
    judge_slots(kit, rig, before, "CS-CLEAR-01", [(None, 5), (None, 3), (None, 7)])
    before = rig.snapshot()
    kit.hooks.clear_slots(rig.pool, slots([], dtypes[0]))
    kit.hooks.copy_slots(rig.pool, slots([], dtypes[0]), slots([], dtypes[0]))
    judge_slots(kit, rig, before, "CS-CLEAR-01", [])


@cases("mode", MODES, quick=4)
@over("layout", "dtype", quick=1)
@clauses("CS-DECODE-03", "CS-PREP-04", "CS-COMMIT-07")
def test_nothing_to_do(kit: Kit, mode: str) -> None:
    """B = 0: an idle rank prepares, convolves and commits nothing, and rows of x behind the tokens give 0."""
    rig = rig_for(kit, mode)
    rig.history(4, 7)
    batch = rig.batch(mode, [])
    metadata = rig.prepare(batch)
    kit.equal("CS-PREP-04", metadata.query_start_loc, [0], f"{mode}: query_start_loc")
    for tail in (0, 2):
        call = rig.run(batch, Weights(rig.taps()), metadata=metadata, tail=tail)
        judge_outputs(kit, call, padded="CS-DECODE-03")
        judge_state(kit, call, rig, others="CS-DECODE-03", padded="CS-DECODE-03")
    if mode == "target_verify" and not kit.claims.missing(hooks=(COMMIT,)):
        before = rig.snapshot()
        commit(kit, rig, [])
        judge_commit(kit, rig, [], before, "CS-COMMIT-07")


@cases("dim, mode", [(dim, mode) for dim in (300, 5003) for mode in FUSED], quick=4)
@over("layout", "dtype", quick=1)
@clauses("CS-FUSED-01", "CS-FUSED-02")
def test_fused_channels(kit: Kit, dim: int, mode: str) -> None:
    """The norm runs over all channels, however many blocks they take."""
    kit.need(hooks=(FUSED[mode],))
    rig = rig_for(kit, mode, dims=(dim,))
    judge_fused(kit, rig, mode, [Req(3, length=7), Req(0), Req(9, length=12)], EPS)
