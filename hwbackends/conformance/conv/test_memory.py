"""Memory lane: what a backend may keep from an earlier call, and what it may not. The same objects come with new
contents, new strides, another layer, another epilogue, new weights, another map; batches shrink and grow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hwbackends.conformance import oracle
from hwbackends.conformance.cases import (
    CONV,
    MODES,
    Inputs,
    Req,
    Rig,
    Weights,
    judge_outputs,
    judge_state,
    prepare_rig,
    rig_for,
    shape_of,
)
from hwbackends.conformance.conv.test_commit import COMMIT, commit, judge_commit
from hwbackends.conformance.kit import Kit
from hwbackends.conformance.marks import cases, clauses, over

FIRST = [Req(3, tokens=2, length=7, accept=2), Req(0, tokens=1, accept=1), Req(9, tokens=4, length=12, accept=1)]
OTHER = [Req(5, tokens=3, length=4, accept=1), Req(2, tokens=2, length=9, accept=3), Req(-1, tokens=2, accept=1)]
SHORT = [Req(8, tokens=2, length=6, accept=3)]
LONG = [Req(1 + b, tokens=1 + b % 3, length=b + 2, accept=b % 4) for b in range(9)]


class Held(Inputs):
    """The same tensors for x, weights, bias and output in every call, overwritten in place."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, Tensor] = {}

    def _same(self, name: str, made: Tensor) -> Tensor:
        held = self.tensors.get(name)
        if held is None or held.shape != made.shape:
            held = self.tensors[name] = made
        held.copy_(made)
        return held

    def x(self, rig: Rig, values: oracle.Array) -> Tensor:
        return self._same("x", super().x(rig, values).clone())

    def weight(self, rig: Rig, taps: oracle.Array) -> Tensor:
        return self._same("weight", super().weight(rig, taps))

    def bias(self, rig: Rig, values: oracle.Array) -> Tensor:
        return self._same("bias", super().bias(rig, values))

    def out_base(self, rig: Rig, shape: tuple[int, ...]) -> Tensor:
        return self._same(f"out{shape}", super().out_base(rig, shape))


def _turned(rig: Rig, by: int) -> Weights:
    """Exact weights, other ones for every `by`."""
    bias = np.arange(1.0, rig.shape.dims[0] + 1) * (2 + by)
    return Weights(np.roll(rig.taps(), by, axis=1), bias)


@cases("mode", MODES, quick=4)
@over("layout", "dtype", "width", quick=2)
@clauses("CS-CONV-12", "CS-CONV-04")
def test_weights_and_x_change_in_place(kit: Kit, mode: str) -> None:
    """The same tensors with new contents (a reload, an adapter), then others: it is read anew."""
    rig = rig_for(kit, mode, dims=(5,))
    rig.histories(FIRST)
    batch = rig.batch(mode, FIRST)
    metadata, held = rig.prepare(batch), Held()
    for turn in range(3):
        call = rig.run(batch, _turned(rig, turn), metadata=metadata, inputs=held)
        judge_outputs(kit, call, "CS-CONV-12")
        judge_state(kit, call, rig, own="CS-CONV-04")
        rig.histories(FIRST)
    call = rig.run(batch, _turned(rig, 1), metadata=metadata, inputs=Held())
    judge_outputs(kit, call, "CS-CONV-12")


@cases("mode", MODES, quick=4)
@over("layout", "dtype", quick=2)
@clauses("CS-CONV-06", "CS-CONV-04")
def test_x_comes_with_other_strides(kit: Kit, mode: str) -> None:
    """The same state and metadata, and x, out and weights that lie otherwise; also at the same address."""
    rig = rig_for(kit, mode, dims=(5,))
    batch = rig.batch(mode, FIRST)
    metadata = rig.prepare(batch)
    lays = [
        Inputs(), Inputs(x_columns=(5, 5)), Inputs(out_columns=(3, 8)), Inputs(weight_step=2, bias_step=2),
        Inputs(weight_transposed=True, x_columns=(1, 0)), Inputs(no_out=True),
    ]  # fmt: skip
    for lay in lays:
        rig.histories(FIRST)
        call = rig.run(batch, _turned(rig, 1), metadata=metadata, inputs=lay)
        judge_outputs(kit, call, "CS-CONV-06")
        judge_state(kit, call, rig, own="CS-CONV-04")
    wide = torch.full((64, 40), torch.nan, dtype=getattr(torch, rig.shape.dtype))
    for stride in (40, 7, 5):
        rig.histories(FIRST)
        call = rig.run(batch, _turned(rig, 0), metadata=metadata, inputs=_At(wide, stride))
        judge_outputs(kit, call, "CS-CONV-06")


class _At(Inputs):
    """x at the same address, with another row stride."""

    def __init__(self, wide: Tensor, stride: int) -> None:
        super().__init__()
        self.wide, self.stride = wide, stride

    def x(self, rig: Rig, values: oracle.Array) -> Tensor:
        view = self.wide.as_strided(values.shape, (self.stride, 1))
        view.copy_(rig.kit.tensor(values, rig.shape.dtype))
        return view


@cases("mode", MODES, quick=4)
@over("layout", "dtype", quick=2)
@clauses("CS-CONV-07", "CS-CONV-01")
def test_layers_share_one_metadata(kit: Kit, mode: str) -> None:
    """Every layer and stream of a step reads one metadata, and each gets its own state, weights and epilogue."""
    rig = rig_for(kit, mode, dims=(5, 3), layers=3)
    rig.histories(FIRST)
    batch = rig.batch(mode, FIRST)
    metadata = rig.prepare(batch)
    order = [("k", 0), ("v", 0), ("k", 2), ("v", 1), ("k", 1), ("v", 2)]
    for number, (name, layer) in enumerate(order):
        dim = 5 if name == "k" else 3
        bias = np.arange(1.0, dim + 1) * 3 if number % 2 else None
        weights = Weights(np.roll(rig.taps(dim), number, axis=1), bias, residual=number % 3 == 1)
        call = rig.run(batch, weights, metadata=metadata, name=name, layer=layer)
        judge_outputs(kit, call, "CS-CONV-01")
        drafts = "CS-CONV-07" if mode == "target_verify" else ""
        judge_state(kit, call, rig, own="CS-CONV-07", others="CS-CONV-07", drafts=drafts)


@cases("mode", MODES, quick=4)
@over("layout", "dtype", quick=1)
@clauses("CS-CONV-12", "CS-PREP-04", "CS-CONV-05")
def test_one_metadata_serves_many_steps(kit: Kit, mode: str) -> None:
    """Prepared again over the same tensors for other requests, between convs of the same objects."""
    rig = rig_for(kit, mode, dims=(5,))
    held, metadata = Held(), None
    for requests in (FIRST, OTHER, [OTHER[1], FIRST[1], FIRST[0]], FIRST):
        rig.histories(requests)
        batch = rig.batch(mode, requests)
        if mode == "extend":
            batch.num_tokens = 9
        metadata = rig.metadata(batch) if metadata is None else metadata
        rig.prepare(batch, out=metadata)
        want = oracle.metadata(batch, oracle.prepare(batch, rig.facts))
        for name, values in want.items():
            kit.equal("CS-PREP-04", getattr(metadata, name), values, f"{mode}: {name}")
        call = rig.run(batch, Weights(rig.taps()), metadata=metadata, inputs=held)
        judge_outputs(kit, call, "CS-CONV-12", "CS-CONV-05")
        judge_state(kit, call, rig, own="CS-CONV-12")


@cases("mode", MODES, quick=4)
@over("layout", "index", quick=1)
@clauses("CS-PREP-04", "CS-CONV-01")
def test_batches_shrink_and_grow(kit: Kit, mode: str) -> None:
    """Two, then nine, then one, then nine requests over one pool."""
    rig = rig_for(kit, mode, dims=(5,))
    for requests in (FIRST, LONG, SHORT, LONG, OTHER):
        requests = requests[: kit.rows(len(requests))]
        rig.histories(requests)
        batch = rig.batch(mode, requests)
        metadata = rig.prepare(batch)
        for name, values in oracle.metadata(batch, oracle.prepare(batch, rig.facts)).items():
            kit.equal("CS-PREP-04", getattr(metadata, name), values, f"{mode}, {len(requests)} requests: {name}")
        judge_outputs(kit, rig.run(batch, Weights(rig.taps()), metadata=metadata), "CS-CONV-01")


@cases("mode", MODES, quick=4)
@over("layout", "index", quick=1)
@clauses("CS-PREP-01", "CS-PREP-06")
def test_map_table_and_batch_are_read_every_time(kit: Kit, mode: str) -> None:
    """The map and the table change in place, then are replaced; the batch object gets other tensors."""
    rig = prepare_rig(kit, mode, virtual=True)
    batch = rig.batch(mode, FIRST)
    step, out = rig.step_batch(batch), rig.metadata(batch)

    def judge(what: str, batch: oracle.Batch) -> None:
        rig.prepare(batch, step, out)
        want = oracle.metadata(batch, oracle.prepare(batch, rig.facts))
        for name, values in want.items():
            clause = "CS-PREP-06" if name == "computed_lens" else "CS-PREP-01"
            kit.equal(clause, getattr(out, name), values, f"{mode}, {what}: {name}")

    judge("first", batch)
    rows = [row for row in batch.req_pool_indices if row >= 0]
    for what, fresh in (("map changed in place", False), ("map replaced", True)):
        rig.mapping[rows[0]], rig.mapping[rows[-1]] = rig.mapping[rows[-1]], rig.mapping[rows[0]]
        made = kit.tensor(rig.mapping, rig.shape.map_dtype)
        if fresh:
            rig.pool.mamba_index_mapping = made
        rig.pool.mamba_index_mapping.copy_(made)
        judge(what, batch)
    assert rig.table is not None
    for what, fresh in (("table changed in place", False), ("table replaced", True)):
        rig.table[1:] = rig.table[2:] + rig.table[1:2]
        made = kit.tensor(rig.table, "int64")
        if fresh:
            rig.pool.mamba_v2p_table = made
        assert rig.pool.mamba_v2p_table is not None
        rig.pool.mamba_v2p_table.copy_(made)
        judge(what, batch)
    lengths = [length + 5 for length in (batch.computed_lens or batch.extend_prefix_lens or [])]
    key = "extend_prefix_lens" if mode == "extend" else "computed_lens"
    other = replace(batch, **{key: lengths})  # type: ignore[arg-type]
    setattr(step, key, kit.tensor(lengths, rig.shape.index_dtype))
    judge("lengths replaced", other)


@over("layout", "dtype", "index", quick=3)
@clauses("CS-COMMIT-01", "CS-COMMIT-02", "CS-COMMIT-03")
def test_a_commit_reads_its_arguments_every_time(kit: Kit) -> None:
    """The same index tensors with new contents, another map, other saved drafts, tensors that were replaced."""
    kit.need(hooks=(COMMIT,))
    rig = Rig(kit, shape_of(kit, dims=(5, 3), layers=2, drafts=3, ssm=True))
    batch = rig.batch("target_verify", LONG[:6])
    for turn in range(4):
        for base in (*rig.bases.values(), *rig.draft_bases.values()):
            base.copy_(kit.tensor(kit.rng.integers(1, 99, tuple(base.shape)).astype(float), rig.shape.dtype))
        assert rig.pool.intermediate_ssm is not None
        numbers = kit.rng.standard_normal(tuple(rig.pool.intermediate_ssm.shape))
        rig.pool.intermediate_ssm.copy_(kit.tensor(numbers, "float32"))
        if turn == 2:
            rig.pool.intermediate_ssm = rig.pool.intermediate_ssm.clone().neg_()
            rows = [row for row in batch.req_pool_indices if row >= 0]
            slots = [rig.mapping[row] for row in rows]
            for row, slot in zip(rows, slots[1:] + slots[:1], strict=True):
                rig.mapping[row] = slot
            rig.pool.mamba_index_mapping = kit.tensor(rig.mapping, rig.shape.map_dtype)
        steps = [(b + turn) % 4 - 1 for b in range(6)]
        made = [
            oracle.CommitRow(row, step, computed_len=9) for row, step in zip(batch.req_pool_indices, steps, strict=True)
        ]
        before = rig.snapshot()
        commit(kit, rig, made)
        judge_commit(kit, rig, made, before, "CS-COMMIT-01", "CS-COMMIT-03")
        judge_commit(kit, rig, made, before, "CS-COMMIT-02", "CS-COMMIT-02")


@cases("mode", MODES, quick=4)
@over("layout", "dtype", quick=1)
@clauses("CS-CONV-05", "CS-CONV-01")
def test_outputs_are_filled_and_returned(kit: Kit, mode: str) -> None:
    """`out` where it is given, a new tensor of x's dtype where it is not; each is whole, padded rows and rows behind
    the tokens too, and no later call changes it."""
    rig = rig_for(kit, mode, dims=(5,))
    rig.histories(FIRST)
    batch = rig.batch(mode, FIRST)
    for lay in (Inputs(), Inputs(no_out=True), Inputs(no_out=True), Inputs(out_columns=(2, 3))):
        rig.histories(FIRST)
        call = rig.run(batch, Weights(rig.taps()), tail=3, inputs=lay)
        judge_outputs(kit, call, "CS-CONV-01", "CS-CONV-05")


def _raw(kit: Kit, mode: str, rig: Rig, x: Tensor) -> tuple[Tensor, Any]:
    """The conv of a step of `FIRST` over x as it is; the outputs and the batch."""
    batch = rig.batch(mode, FIRST)
    metadata, state = rig.prepare(batch), rig.pool.conv_state("k", 0)
    taps = kit.tensor(rig.taps(), rig.shape.dtype)
    y = getattr(kit.hooks, CONV[mode])(x, taps, None, state, metadata)
    return y, oracle.prepare(batch, rig.facts)


@cases("value, mode", [(v, m) for v in ("nan", "inf") for m in MODES], quick=8)
@over("layout", "dtype", quick=1)
@clauses("CS-CONV-07")
def test_one_requests_infinities_stay_its_own(kit: Kit, value: str, mode: str) -> None:
    """NaN or infinity in one request's history and tokens: the outputs and state of the others are what they were."""
    results = []
    for poison in (0.0, float(value)):
        rig = rig_for(kit, mode, dims=(5,))
        rig.kit.rng = np.random.default_rng(kit.seed)
        rig.histories(FIRST)
        batch = rig.batch(mode, FIRST)
        x = kit.tensor(rig.whole_numbers(batch.num_tokens, 5), rig.shape.dtype)
        rows = oracle.prepare(batch, rig.facts)
        x[rows[0].start : rows[0].start + rows[0].tokens, 1:3] = poison
        rig.history(3, 7, rig.offset(FIRST[0]), values=poison)
        y, _ = _raw(kit, mode, rig, x)
        results.append((y[rows[1].start :], rig.tensor()[[1 + 9, 1 + 4, 0, 1]]))
    kit.same_bits("CS-CONV-07", results[1][0], results[0][0], f"{mode}: outputs beside {value}")
    kit.same_bits("CS-CONV-07", results[1][1], results[0][1], f"{mode}: state beside {value}")


@cases("mode", ["decode", "extend"], quick=2)
@over("layout", "dtype", quick=2)
@clauses("CS-CONV-04")
def test_state_is_a_copy_of_every_bit(kit: Kit, mode: str) -> None:
    """Negative zero, subnormal numbers, the largest ones, infinity and NaN in x come back out of the state as they
    were, at the rows of the new window."""
    rig = rig_for(kit, mode, dims=(8,))
    dtype = getattr(torch, rig.shape.dtype)
    info = torch.finfo(dtype)
    special = [-0.0, info.tiny / 4, -info.tiny / 4, info.max, info.min, float("inf"), float("nan"), 1 / 3]
    requests = [Req(3, tokens=rig.shape.width, length=7)]
    rig.histories(requests)
    batch = rig.batch(mode, requests)
    x = torch.tensor(special, dtype=torch.float64).to(dtype).repeat(batch.num_tokens, 1)
    metadata, state = rig.prepare(batch), rig.pool.conv_state("k", 0)
    getattr(kit.hooks, CONV[mode])(x, kit.tensor(rig.taps(), rig.shape.dtype), None, state, metadata)
    end = 7 + batch.num_tokens
    last = oracle.window_rows(rig.shape.layout, state.tensor.shape[1], rig.shape.width, end)[-1]
    kit.same_bits("CS-CONV-04", rig.tensor()[1 + 3, last], x[-1], "the newest row of state")


@cases("mode", MODES, quick=4)
@over("layout", "index", quick=1)
@clauses("CS-PREP-02", "CS-CONV-05", "CS-CONV-07")
def test_padding_of_every_kind(kit: Kit, mode: str) -> None:
    """Rows that are padded by the request row, the slot, the table or an accepted count, with the engine's own slots or
    the map's; their tokens stand in x and give 0, and a row behind the live ones names anything."""
    rig = rig_for(kit, mode, virtual=True)
    requests = [
        Req(-1, tokens=2, length=3, accept=2), Req(3, tokens=2, length=7, accept=2),
        Req(0, tokens=3, length=5, accept=1), Req(9, tokens=4, length=12, accept=1), Req(-1, tokens=1, accept=1),
    ]  # fmt: skip
    rig.histories([r for r in requests if r.slot > 0])
    given = [-1, 3, 0, 9, -1]
    choices: list[dict[str, Any]] = [{}, {"cache_indices": given}, {"cache_indices": [8, 3, 0, 9, 5]}]
    for extra in choices:
        rig.histories([r for r in requests if r.slot > 0])
        batch = rig.batch(mode, requests, **extra)
        metadata = rig.prepare(batch)
        for name, values in oracle.metadata(batch, oracle.prepare(batch, rig.facts)).items():
            kit.equal("CS-PREP-02", getattr(metadata, name), values, f"{mode}, {extra}: {name}")
        call = rig.run(batch, Weights(rig.taps()), metadata=metadata, tail=1)
        judge_outputs(kit, call, "CS-CONV-07", "CS-CONV-05")
        judge_state(kit, call, rig, others="CS-CONV-07", padded="CS-CONV-05")
    row = batch.req_pool_indices[1]
    rig.mapping[row] = -1  # a row of the map without a slot
    rig.pool.mamba_index_mapping.copy_(kit.tensor(rig.mapping, rig.shape.map_dtype))
    batch = rig.batch(mode, requests, place=False, req_pool_indices=batch.req_pool_indices)
    metadata = rig.prepare(batch)
    for name, values in oracle.metadata(batch, oracle.prepare(batch, rig.facts)).items():
        kit.equal("CS-PREP-02", getattr(metadata, name), values, f"{mode}, -1 in the map: {name}")
