"""Limits lane: many short requests, many rows, and element offsets past 2**31 in strided views with few live values."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hwbackends.conformance import oracle
from hwbackends.conformance.cases import Req, Rig, Shape, rig_for
from hwbackends.conformance.kit import Kit
from hwbackends.conformance.marks import cases, clauses
from hwbackends.conv.state import ConvState
from hwbackends.errors import HwBackendsError
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.metadata import MetadataBuffers, MetadataLimits, StepMetadata
from hwbackends.step.pool import StatePool

MANY = 70_000
"""Requests of one token: more than the 65,535 blocks that a launch grid may have."""


def _many(kit: Kit, dim: int = 8) -> tuple[StepBatch, StatePool, StepMetadata]:
    """A step of `MANY` new requests, one token each, and a pool with a slot for each."""
    rows = torch.arange(1, MANY + 1)
    tensor = torch.full((1, MANY + 2, 3, dim), torch.nan).to(kit.device)
    pool = StatePool.wrap({"k": tensor}, width=4, mamba_index_mapping=torch.arange(MANY + 1).int().to(kit.device))
    ones, zeros = (
        torch.ones(MANY, dtype=torch.int64).to(kit.device),
        torch.zeros(MANY, dtype=torch.int64).to(kit.device),
    )
    batch = StepBatch(
        ForwardMode.EXTEND, rows.to(kit.device), MANY, MANY, extend_seq_lens=ones, extend_prefix_lens=zeros
    )
    buffers = MetadataBuffers(MetadataLimits(MANY, MANY), kit.device, torch.int64)
    return batch, pool, buffers.view(ForwardMode.EXTEND, MANY, MANY)


@clauses("CS-PREP-EXT-04")
def test_metadata_of_many_short_requests(kit: Kit) -> None:
    """70,000 requests in one step."""
    kit.need(hooks=("prepare_extend_metadata",), requests=MANY)
    batch, pool, out = _many(kit)
    kit.hooks.prepare_extend_metadata(batch, pool, out)
    count = np.arange(MANY + 1)
    want = {"cache_indices": count[1:], "query_start_loc": count, "seq_idx": count[:-1], "computed_lens": 0 * count[1:]}
    for name, values in want.items():
        kit.equal("CS-PREP-EXT-04", getattr(out, name), values, name)


@clauses("CS-EXTEND-07")
def test_many_short_requests(kit: Kit) -> None:
    """70,000 requests of one token: every output 1000, every window 0, 0, 1."""
    kit.need(hooks=("prepare_extend_metadata", "conv_extend"), requests=MANY, dtype="float32")
    batch, pool, out = _many(kit)
    kit.hooks.prepare_extend_metadata(batch, pool, out)
    x = torch.ones(MANY, 8).to(kit.device)
    weight = kit.tensor(np.tile([1.0, 10.0, 100.0, 1000.0], (8, 1)), "float32")
    y = kit.hooks.conv_extend(x, weight, None, pool.conv_state("k", 0), out)
    kit.check("CS-EXTEND-07", bool((kit.host(y) == 1000).all()), "an output is not 1000")
    state = kit.host(pool.conv_streams["k"][0])
    window = torch.tensor([0.0, 0.0, 1.0])[:, None].expand(3, 8)
    kit.check("CS-EXTEND-07", bool((state[1:-1] == window).all()), "a window is not 0, 0, 1")
    kit.check("CS-EXTEND-07", bool(state[[0, -1]].isnan().all()), "slot 0 or the last slot was written")


@cases("mode", ["decode", "target_verify", "draft_extend"], quick=1)
@clauses("CS-PREP-09")
def test_no_bound_on_the_rows_of_a_step(kit: Kit, mode: str) -> None:
    """3,001 rows: beyond one block of any size."""
    kit.need(requests=3001)
    rig = rig_for(kit, mode, Shape(slots=3007, request_rows=3011))
    rows = np.arange(1, 3002)
    rig.mapping[:] = [(7 * row) % 3006 for row in range(3011)]
    rig.pool.mamba_index_mapping.copy_(kit.tensor(rig.mapping, "int32"))
    drafts = rig.shape.drafts if mode != "decode" else 1
    batch = oracle.Batch(
        mode, rows.tolist(), 2999, 3001 * drafts, computed_lens=(rows % 13).tolist(), draft_token_num=drafts,
        num_accept_tokens=(rows % (drafts + 2) - 1).tolist() if mode == "draft_extend" else None,
    )  # fmt: skip
    got = rig.prepare(batch)
    for name, values in oracle.metadata(batch, oracle.prepare(batch, rig.facts)).items():
        kit.equal("CS-PREP-09", getattr(got, name), values, f"{mode}: {name}")


def _steps(kit: Kit) -> list[int]:
    """Strides whose third multiple passes 2**31; on a GPU with room also 2**32."""
    return [2**30 + 8, 2**31 + 8] if kit.device.type == "cuda" else [2**30 + 8]


def _strided(kit: Kit, count: int, inner: tuple[int, ...], step: int) -> Tensor:
    """[count, *inner] with `step` elements from one entry to the next; only what is used is ever touched."""
    dense = int(np.prod(inner))
    if kit.emulated:  # only what is used may be touched, and a copy to the device touches all
        step = 4104
    storage = torch.empty((count - 1) * step + dense, dtype=torch.float16, device=kit.device)
    inner_strides = [int(np.prod(inner[i + 1 :])) for i in range(len(inner))]
    return storage.as_strided((count, *inner), (step, *inner_strides))


def _huge_step(kit: Kit, mode: str, strided_state: bool, step: int) -> tuple[Rig, oracle.Batch, Tensor, ConvState]:
    """Bit taps over x of 0 and 1 in float16; either x or the state has huge strides."""
    rig = rig_for(kit, mode, Shape("window", "float16", slots=5))
    requests = [Req(3, tokens=2, length=7), Req(1, tokens=1, length=2)]
    rig.histories(requests, binary=True)
    batch = rig.batch(mode, requests)
    x = kit.tensor(rig.whole_numbers(batch.num_tokens, 5), "float16")
    state = rig.pool.conv_state("k", 0)
    if strided_state:
        wide = _strided(kit, 5, (3, 5), step)
        wide.copy_(state.tensor)
        state = ConvState(wide, "window", 4)
    else:
        wide = _strided(kit, batch.num_tokens + 1, (5,), step)
        wide[:-1].copy_(x)
        wide[-1].fill_(torch.nan)
        x = wide
    return rig, batch, x, state


@cases("mode, what", [(mode, what) for what in ("state", "x") for mode in ("decode", "extend")], quick=1)
@clauses("CS-CONV-09")
def test_offsets_past_two_to_the_31(kit: Kit, mode: str, what: str) -> None:
    """Exact, or refused by name before anything is written."""
    for step in _steps(kit):
        rig, batch, x, state = _huge_step(kit, mode, what == "state", step)
        before = kit.host(state.tensor)
        metadata = rig.prepare(batch)
        rows = oracle.prepare(batch, rig.facts)
        numbers = kit.host(x[: batch.num_tokens]).double().numpy()
        want = oracle.step(mode, rows, numbers, rig.taps(), before.double().numpy(), "window", dtype="float16")
        hook = getattr(kit.hooks, f"conv_{mode}")
        try:
            y = kit.host(hook(x, kit.tensor(rig.taps(), "float16"), None, state, metadata))
        except HwBackendsError as error:
            kit.check("CS-CONV-09", not kit.claims.large_offsets, f"claimed, and refused: {error}")
            kit.same_bits("CS-CONV-09", state.tensor, before, f"{mode}, {what}: refused after writing")
            continue
        kit.equal("CS-CONV-09", y[: batch.num_tokens], want.y, f"{mode}, {what} with stride {step}: outputs")
        after = want.state.apply(before.double().numpy(), "float16")
        kit.equal("CS-CONV-09", state.tensor, after, f"{mode}, {what} with stride {step}: state")
