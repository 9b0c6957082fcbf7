"""Limits lane: many requests, and large slots and positions."""

from __future__ import annotations

import numpy as np
import torch

from hwbackends.conformance import oracle
from hwbackends.conformance.cases import (
    BITS,
    MODES,
    Req,
    Weights,
    judge_outputs,
    judge_state,
    prepare_rig,
    rig_for,
)
from hwbackends.conformance.kit import Kit
from hwbackends.conformance.marks import cases, clauses, over
from hwbackends.conv.layouts import layout_rows
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.metadata import MetadataBuffers, MetadataLimits, StepMetadata
from hwbackends.step.pool import StatePool

MANY = 70_000
"""Requests of one token: more than the 65,535 blocks that a launch grid may have."""


def _many(kit: Kit, count: int, dim: int = 2) -> tuple[StepBatch, StatePool, StepMetadata]:
    """A step of `count` new requests, one token each, and a pool with a slot for each."""
    point = kit.point
    rows = layout_rows(point.layout, point.width, 0)  # type: ignore[arg-type]
    tensor = torch.full((1, count + 2, rows, dim), torch.nan, dtype=getattr(torch, point.dtype))
    index = getattr(torch, point.index)
    mapping = torch.arange(count + 1).to(index)
    pool = StatePool.wrap({"k": tensor}, width=point.width, mamba_index_mapping=mapping, layout=point.layout)  # type: ignore[arg-type]
    kit.client.adopt(pool)
    ones, zeros = torch.ones(count, dtype=index), torch.zeros(count, dtype=index)
    requests = torch.arange(1, count + 1).to(index)
    batch = StepBatch(ForwardMode.EXTEND, requests, count, count, extend_seq_lens=ones, extend_prefix_lens=zeros)
    buffers = MetadataBuffers(MetadataLimits(count, count), "cpu", index)
    return batch, pool, buffers.view(ForwardMode.EXTEND, count, count)


@over("layout", "index", quick=1)
@clauses("CS-PREP-EXT-04")
def test_metadata_of_many_short_requests(kit: Kit) -> None:
    """70,000 requests in one step, or as many as are claimed."""
    kit.need(hooks=("prepare_extend_metadata",))
    many = kit.rows(MANY)
    batch, pool, out = _many(kit, many)
    kit.hooks.prepare_extend_metadata(batch, pool, out)
    count = np.arange(many + 1)
    want = {"cache_indices": count[1:], "query_start_loc": count, "seq_idx": count[:-1], "computed_lens": 0 * count[1:]}
    for name, values in want.items():
        kit.equal("CS-PREP-EXT-04", getattr(out, name), values, name)


@over("layout", "dtype", quick=1)
@clauses("CS-EXTEND-07")
def test_many_short_requests(kit: Kit) -> None:
    """70,000 requests of one token: every output the newest tap, every window zeros and a 1."""
    kit.need(hooks=("prepare_extend_metadata", "conv_extend"))
    many, width = kit.rows(MANY), kit.point.width
    batch, pool, out = _many(kit, many)
    kit.hooks.prepare_extend_metadata(batch, pool, out)
    dtype = getattr(torch, kit.point.dtype)
    x = torch.ones(many, 2, dtype=dtype)
    weight = kit.tensor(np.tile(BITS[:width], (2, 1)), kit.point.dtype)
    y = kit.hooks.conv_extend(x, weight, None, pool.conv_state("k", 0), out)
    kit.check("CS-EXTEND-07", bool((y == BITS[width - 1]).all()), f"an output is not {BITS[width - 1]}")
    state = pool.conv_streams["k"][0]
    window = torch.tensor([0.0] * (width - 2) + [1.0], dtype=dtype)[:, None].expand(width - 1, 2)
    rows = oracle.window_rows(kit.point.layout, state.shape[1], width, 1)
    right = bool((state[1:-1][:, rows] == window).all())
    kit.check("CS-EXTEND-07", right, "a window is not zeros and a 1")
    kit.check("CS-EXTEND-07", bool(state[[0, -1]].isnan().all()), "slot 0 or the last slot was written")


@cases("mode", ["decode", "target_verify", "draft_extend"], quick=3)
@over("layout", "index", quick=1)
@clauses("CS-PREP-09")
def test_no_bound_on_the_rows_of_a_step(kit: Kit, mode: str) -> None:
    """3,001 rows: beyond one block of any size."""
    count = kit.rows(3001)
    rig = prepare_rig(kit, mode, slots=3007, request_rows=3011)
    rows = np.arange(1, count + 1)
    rig.mapping[:] = [(7 * row) % 3006 for row in range(3011)]
    rig.pool.mamba_index_mapping.copy_(kit.tensor(rig.mapping, rig.shape.map_dtype))
    drafts = rig.shape.drafts if mode != "decode" else 1
    batch = oracle.Batch(
        mode, rows.tolist(), max(1, count - 2), count * drafts, computed_lens=(rows % 13).tolist(),
        draft_token_num=drafts,
        num_accept_tokens=(rows % (drafts + 2) - 1).tolist() if mode == "draft_extend" else None,
    )  # fmt: skip
    got = rig.prepare(batch)
    for name, values in oracle.metadata(batch, oracle.prepare(batch, rig.facts)).items():
        kit.equal("CS-PREP-09", getattr(got, name), values, f"{mode}: {name}")


FAR_SLOTS = (2**15 + 3, 2**16 + 5)
"""Slots beyond 16 bits, signed and unsigned."""


@cases("mode", MODES, quick=4)
@over("layout", "index", quick=1)
@clauses("CS-PREP-01", "CS-CONV-01", "CS-CONV-04")
def test_slots_beyond_16_bits(kit: Kit, mode: str) -> None:
    """A pool of 70,000 slots and a request pool of as many rows: prepared, convolved and written right."""
    rig = rig_for(kit, mode, dims=(1,), slots=MANY, request_rows=MANY, virtual=False)
    requests = [
        Req(FAR_SLOTS[0], tokens=2, length=7, accept=2),
        Req(FAR_SLOTS[1], tokens=1, length=9, accept=1),
        Req(3, length=4),
    ]
    rig.histories(requests)
    rows = [FAR_SLOTS[1] + 20, FAR_SLOTS[0] + 20, 2]
    for row, req in zip(rows, requests, strict=True):
        rig.pool.mamba_index_mapping[row] = rig.mapping[row] = req.slot
    batch = rig.batch(mode, requests, place=False, req_pool_indices=rows)
    metadata = rig.prepare(batch)
    for name, values in oracle.metadata(batch, oracle.prepare(batch, rig.facts)).items():
        kit.equal("CS-PREP-01", getattr(metadata, name), values, f"{mode}: {name}")
    call = rig.run(batch, Weights(rig.taps()), metadata=metadata)
    judge_outputs(kit, call, "CS-CONV-01")
    judge_state(kit, call, rig, own="CS-CONV-04", drafts="CS-CONV-04" if mode == "target_verify" else "")


@cases("mode", MODES, quick=4)
@over("layout", "index", quick=1)
@clauses("CS-PREP-06", "CS-CONV-03", "CS-CONV-04")
def test_positions_beyond_16_24_and_30_bits(kit: Kit, mode: str) -> None:
    """Contexts of 33,000 to two thousand million tokens; float32 cannot tell the larger ones apart."""
    lengths = (2**15 + 1, 2**16 + 3, 2**24 + 1, 2**31 - 40)
    rig = rig_for(kit, mode, track_interval=2**10)
    requests = [
        Req(3 + i, tokens=1 + i, length=n, accept=i % 4, track=10 if i == 2 else -1, track_seqlen=n + 1)
        for i, n in enumerate(lengths)
    ]
    rig.histories(requests)
    batch = rig.batch(mode, requests)
    metadata = rig.prepare(batch)
    for name, values in oracle.metadata(batch, oracle.prepare(batch, rig.facts)).items():
        kit.equal("CS-PREP-06", getattr(metadata, name), values, f"{mode}: {name}")
    if mode != "extend":
        tokens = rig.shape.drafts if mode != "decode" else 1
        after = rig.batch(mode, requests, computed_lens=None, seq_lens=[n + tokens for n in lengths])
        got = rig.prepare(after)
        kit.equal("CS-PREP-06", got.computed_lens, lengths, f"{mode}: computed_lens from seq_lens")
    call = rig.run(batch, Weights(rig.taps()), metadata=metadata)
    judge_outputs(kit, call, "CS-CONV-03")
    judge_state(kit, call, rig, own="CS-CONV-04")
