"""Commit lane: every accepted count on every layout, SSM state, tracking, a commit after other steps, a commit twice,
and clear and copy. Pools have three layers and two streams; everything that is not named keeps its bits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hwbackends.conformance import oracle
from hwbackends.conformance.cases import Req, Rig, Weights, judge_effect, judge_outputs, rig_for, shape_of
from hwbackends.conformance.kit import Kit
from hwbackends.conformance.marks import cases, clauses, over
from hwbackends.errors import HwBackendsError

COMMIT = "update_mamba_state_after_mtp_verify"
DRAFTS = 3
REQUESTS = [Req(3, length=7), Req(-1), Req(1, length=2), Req(0), Req(9, length=12), Req(5, length=4)]
STEPS = (1, 2, -1, 0, 2, 0)
"""Last correct steps of `REQUESTS`: padded rows carry counts too, which must be ignored."""


def _rig(kit: Kit, **sizes: Any) -> Rig:
    kit.need(hooks=(COMMIT,))
    settings: dict[str, Any] = {"dims": (5, 3), "layers": 3, "drafts": DRAFTS, "ssm": True, **sizes}
    return rig_for(kit, "target_verify", **settings)


def _verify(rig: Rig, requests: Sequence[Req], seed: int = 0) -> oracle.Batch:
    """A verify step of every layer and stream."""
    batch = rig.batch("target_verify", list(requests))
    for layer in range(rig.shape.layers):
        for name, dim in zip(rig.names, rig.shape.dims, strict=True):
            rig.run(batch, Weights(rig.taps(dim)), name=name, layer=layer)
    return batch


def index(kit: Kit, values: Sequence[int] | None, dtype: str = "", step: int = 1) -> Tensor | None:
    """An index tensor at the running point, or of another claimed dtype, `step` elements from entry to entry."""
    if values is None:
        return None
    made = kit.tensor(np.asarray(values, np.int64), dtype or kit.point.index)
    if step >= 1 << 20:
        return kit.far(made, 0, 1, step)
    wide = made.new_ones((len(values), step))
    wide[:, 0] = made
    return wide.reshape(-1)[::step]


def commit(
    kit: Kit,
    rig: Rig,
    rows: Sequence[oracle.CommitRow],
    lengths: bool = True,
    mix: Sequence[str] = (),
    step: int = 1,
) -> None:
    """Call the hook with the tensors that `rows` say; track arguments only where something is tracked."""
    dtypes = itertools.cycle(mix or (kit.point.index,))
    tracks = any(row.track_slot > 0 or row.track_step >= 0 for row in rows)
    drafts = any(row.draft_row is not None for row in rows)
    getattr(kit.hooks, COMMIT)(
        rig.pool,
        index(kit, [row.request_row for row in rows], next(dtypes), step),
        index(kit, [row.step for row in rows], next(dtypes), step),
        mamba_track_indices=index(kit, [row.track_slot for row in rows] if tracks else None, next(dtypes), step),
        mamba_steps_to_track=index(kit, [row.track_step for row in rows] if tracks else None, next(dtypes), step),
        computed_lens=index(kit, [row.computed_len for row in rows] if lengths else None, next(dtypes), step),
        draft_indices=index(kit, [row.drafts for row in rows] if drafts else None, next(dtypes), step),
    )


def judge_commit(
    kit: Kit, rig: Rig, rows: Sequence[oracle.CommitRow], before: dict[Any, Tensor], conv: str, ssm: str = ""
) -> None:
    """Every stream and layer, and the SSM state, after a commit."""
    after = rig.snapshot()
    for name in rig.names:
        for layer in range(rig.shape.layers):
            tensor = before["state", name, layer][1:-1].double().numpy()
            saved = before.get(("drafts", name, layer))
            drafts = None if saved is None else saved[1:-1].double().numpy()
            effect = oracle.commit_conv(rows, rig.facts, tensor, drafts)
            key = ("state", name, layer)
            judge_effect(kit, conv, before[key], after[key], effect, rig.shape.state, f"{name}, layer {layer}")
            if saved is not None:
                kit.same_bits(conv, after["drafts", name, layer], saved, f"draft rows of {name}, layer {layer}")
    for layer in range(rig.shape.layers if ssm else 0):
        want = before["ssm", "", layer].clone()
        intermediate = kit.host(rig.pool.intermediate_ssm[layer]).double().numpy()  # type: ignore[index]
        for slot, value in oracle.commit_ssm(rows, rig.facts, intermediate).items():
            want[1 + slot] = torch.from_numpy(value).to(want.dtype)
        kit.same_bits(ssm, after["ssm", "", layer], want, f"SSM state, layer {layer}")


def _rows(batch: oracle.Batch, requests: Sequence[Req], steps: Sequence[int], **more: Any) -> list[oracle.CommitRow]:
    return [
        oracle.CommitRow(row, step, computed_len=req.length)
        for row, req, step in zip(batch.req_pool_indices, requests, steps, strict=True)
    ]


@over("layout", "dtype", "width", "index", quick=3)
@clauses("CS-COMMIT-01", "CS-COMMIT-03", "CS-COMMIT-07")
def test_commit(kit: Kit) -> None:
    """Each request moves to its own last correct step, in every layer and stream; padded rows write nothing."""
    rig = _rig(kit, virtual=bool(kit.seed % 2))
    rig.histories(REQUESTS)
    rows = _rows(_verify(rig, REQUESTS), REQUESTS, STEPS)
    before = rig.snapshot()
    commit(kit, rig, rows)
    judge_commit(kit, rig, rows, before, "CS-COMMIT-01", "CS-COMMIT-03")
    for key, want in before.items():
        reserved = [0, 1, -2, -1]  # guards, slot 0 and the last slot
        if key[0] != "drafts":
            kit.same_bits("CS-COMMIT-07", rig.snapshot()[key][reserved], want[reserved], f"reserved slots of {key}")


@over("dtype", "width", quick=1, layout=("window",))
@clauses("CS-COMMIT-01")
def test_commit_of_random_numbers(kit: Kit) -> None:
    """State is a copy: no bit is lost on the way through the draft rows."""
    rig = _rig(kit, dims=(37,), ssm=False)
    for base in (*rig.bases.values(), *rig.draft_bases.values()):
        base.copy_(
            kit.tensor(oracle.round_to(kit.rng.standard_normal(tuple(base.shape)), rig.shape.dtype), rig.shape.dtype)
        )
    rows = _rows(rig.batch("target_verify", REQUESTS), REQUESTS, STEPS)
    before = rig.snapshot()
    commit(kit, rig, rows)
    judge_commit(kit, rig, rows, before, "CS-COMMIT-01")


@over("layout", "dtype", "width", quick=3)
@clauses("CS-COMMIT-01", "CS-COMMIT-03")
def test_draft_rows_of_another_name_space(kit: Kit) -> None:
    """`draft_indices` names the rows of the draft buffers, where an engine keeps them by batch row."""
    rig = _rig(kit)
    for base in (*rig.bases.values(), *rig.draft_bases.values()):
        base.copy_(kit.tensor(kit.rng.integers(1, 99, tuple(base.shape)).astype(float), rig.shape.dtype))
    batch = rig.batch("target_verify", REQUESTS)
    rows = [replace(row, draft_row=b) for b, row in enumerate(_rows(batch, REQUESTS, STEPS))]
    before = rig.snapshot()
    commit(kit, rig, rows)
    judge_commit(kit, rig, rows, before, "CS-COMMIT-01", "CS-COMMIT-03")


@over("layout", "dtype", "width", "index", quick=3)
@clauses("CS-COMMIT-02")
def test_a_commit_after_another_step_was_prepared(kit: Kit) -> None:
    """Another batch has gone through the same buffers: slots come from the request rows that the commit names."""
    rig = _rig(kit)
    rig.histories(REQUESTS)
    batch = rig.batch("target_verify", REQUESTS)
    metadata = rig.metadata(batch)
    rig.prepare(batch, out=metadata)
    for layer in range(3):
        for name, dim in (("k", 5), ("v", 3)):
            rig.run(batch, Weights(rig.taps(dim)), name=name, layer=layer, metadata=metadata)
    mapping = list(rig.mapping)
    other = rig.batch("target_verify", [Req(8), Req(2), Req(4), Req(6), Req(7), Req(0)])
    rig.prepare(other, out=metadata)
    rig.mapping[:] = mapping
    rig.pool.mamba_index_mapping.copy_(kit.tensor(mapping, "int32"))
    rows = _rows(batch, REQUESTS, STEPS)[::-1][:4]  # another order and fewer rows than the step had
    before = rig.snapshot()
    commit(kit, rig, rows)
    judge_commit(kit, rig, rows, before, "CS-COMMIT-02", "CS-COMMIT-02")


@over("layout", "dtype", "width", "index", quick=3)
@clauses("CS-COMMIT-04")
def test_commit_snapshots_the_track_slot(kit: Kit) -> None:
    """The window and SSM state of the tracked step; both read the state before this commit."""
    rig = _rig(kit, virtual=True)
    rig.histories(REQUESTS)
    batch = _verify(rig, REQUESTS)
    tracks = ((8, 0), (4, 1), (6, 2), (2, 1), (7, -1), (10, 1))
    rows = [
        replace(row, track_slot=rig.virtual(slot), track_step=step)
        for row, (slot, step) in zip(_rows(batch, REQUESTS, (1, 2, -1, 0, 2, 2)), tracks, strict=True)
    ]
    rows[4] = replace(rows[4], track_slot=-1)
    before = rig.snapshot()
    commit(kit, rig, rows)
    judge_commit(kit, rig, rows, before, "CS-COMMIT-04", "CS-COMMIT-04")


@over("layout", "dtype", "width", "index", quick=3)
@clauses("CS-COMMIT-05")
def test_a_commit_may_be_repeated_and_come_late(kit: Kit) -> None:
    """Twice in a row; and on window after decode steps have moved the slot: it reads what verify saved."""
    rig = _rig(kit)
    rig.histories(REQUESTS)
    rows = _rows(_verify(rig, REQUESTS), REQUESTS, STEPS)
    before = rig.snapshot()
    commit(kit, rig, rows)
    commit(kit, rig, rows)
    judge_commit(kit, rig, rows, before, "CS-COMMIT-05", "CS-COMMIT-05")
    if rig.shape.layout != "window":
        return
    kit.need(hooks=("conv_decode", "prepare_decode_metadata"))
    later = rig.batch("decode", REQUESTS)
    for layer in range(3):
        for name, dim in (("k", 5), ("v", 3)):
            rig.run(later, Weights(rig.taps(dim)), name=name, layer=layer)
    before = rig.snapshot()
    commit(kit, rig, rows)
    judge_commit(kit, rig, rows, before, "CS-COMMIT-05", "CS-COMMIT-05")


@over("layout", "dtype", quick=2, layout=("ring", "lazy"))
@clauses("CS-COMMIT-06")
def test_the_conv_commit_is_nothing(kit: Kit) -> None:
    """Without SSM state and tracking no tensor is written."""
    rig = _rig(kit, ssm=False)
    rig.histories(REQUESTS)
    rows = _rows(_verify(rig, REQUESTS), REQUESTS, STEPS)
    before = rig.snapshot()
    commit(kit, rig, rows, lengths=False)
    for key, tensor in rig.snapshot().items():
        kit.same_bits("CS-COMMIT-06", tensor, before[key], f"{key}")


@over("layout", "index", quick=1)
@clauses("CS-COMMIT-08")
def test_request_rows_are_required(kit: Kit) -> None:
    """Leaving `req_pool_indices` out is an error, not a guess; by keyword it is taken."""
    rig = _rig(kit)
    rig.histories(REQUESTS)
    rows = _rows(_verify(rig, REQUESTS), REQUESTS, STEPS)
    hook, steps = getattr(kit.hooks, COMMIT), index(kit, STEPS)
    for arguments in ({}, {"req_pool_indices": None}):
        try:
            hook(rig.pool, last_correct_step_indices=steps, **arguments)
            raised = "nothing"
        except (TypeError, HwBackendsError) as error:
            raised = "" if "req_pool_indices" in str(error) else f"an error that does not name it: {error}"
        kit.check("CS-COMMIT-08", not raised, f"without req_pool_indices it raised {raised}")
    before = rig.snapshot()
    hook(pool=rig.pool, req_pool_indices=index(kit, [row.request_row for row in rows]), last_correct_step_indices=steps)
    judge_commit(kit, rig, rows, before, "CS-COMMIT-08", "CS-COMMIT-08")


@cases("accepted", range(DRAFTS + 1), quick=4)
@over("layout", "dtype", "width", quick=3)
@clauses("CS-VERIFY-05")
def test_rollback_to_every_count(kit: Kit, accepted: int) -> None:
    """After a commit of a tokens a decode step reads the window after a tokens, for every a."""
    if kit.point.layout == "lazy" and not accepted:  # cannot be expressed there: what is read is 1 token
        accepted = 1
    kit.need(hooks=("conv_decode", "prepare_decode_metadata"))
    rig = _rig(kit, layers=1, dims=(5,))
    req = Req(3, length=7)
    history = rig.history(3, 7)
    x = rig.whole_numbers(DRAFTS, 5)
    width = rig.shape.width
    batch = rig.batch("target_verify", [req])
    rig.run(batch, Weights(rig.taps()), x)
    commit(kit, rig, [oracle.CommitRow(batch.req_pool_indices[0], accepted - 1, computed_len=7)])
    after = Req(3, length=7 + accepted, accepted=max(1, accepted))
    call = rig.run(rig.batch("decode", [after]), Weights(rig.taps()), rig.whole_numbers(1, 5))
    judge_outputs(kit, call, "CS-VERIFY-05")
    window = oracle.window(oracle.v_rows(history, x, width), accepted, width)
    offset = after.accepted - 1 if rig.shape.layout == "lazy" else 0
    read = oracle.read_history(call.before[1 + 3].double().numpy(), rig.shape.layout, width, 7 + accepted, offset)
    kit.equal("CS-VERIFY-05", read, window, f"window after {accepted} accepted tokens")


@over("layout", "dtype", "width", quick=3)
@clauses("CS-COMMIT-09")
def test_speculation_equals_plain_decoding(kit: Kit) -> None:
    """Rounds of verify and commit with changing counts, against decoding the accepted tokens one by one."""
    kit.need(hooks=("conv_decode", "prepare_decode_metadata"))
    spec, plain = (_rig(kit, layers=1, dims=(5,), ssm=False) for _ in range(2))
    lengths, slots = [7, 2, 12], [3, 1, 9]
    start = [Req(slot, length=n) for slot, n in zip(slots, lengths, strict=True)]
    spec.histories(start)
    plain.copy_state(spec)
    weights, kept = Weights(spec.taps()), [1, 1, 1]
    for counts in ((1, 3, 2), (3, 2, 1), (2, 1, 3), (1, 1, 1)):
        reqs = [Req(s, length=n, accepted=k) for s, n, k in zip(slots, lengths, kept, strict=True)]
        x = spec.whole_numbers(3 * DRAFTS, 5)
        batch = spec.batch("target_verify", reqs)
        verified = spec.run(batch, weights, x)
        steps = [count - 1 for count in counts]
        commit(kit, spec, _rows(batch, reqs, steps))
        for t in range(max(counts)):
            now = [b for b, count in enumerate(counts) if t < count]
            rows = [b * DRAFTS + t for b in now]
            decoded = plain.batch("decode", [Req(slots[b], length=lengths[b] + t) for b in now])
            call = plain.run(decoded, weights, x[rows])
            kit.same_bits("CS-COMMIT-09", verified.y[rows], call.y, f"token {t} of requests {now}")
        lengths, kept = [n + c for n, c in zip(lengths, counts, strict=True)], list(counts)
        for b, slot in enumerate(slots):
            offset = kept[b] - 1 if spec.shape.layout == "lazy" else 0
            mine, theirs = spec.window_of(slot, lengths[b], offset), plain.window_of(slot, lengths[b])
            kit.equal("CS-COMMIT-09", mine, theirs, f"window of request {b} after {counts}")


@over("layout", "dtype", "width", "index", quick=3)
@clauses("CS-CLEAR-01")
def test_clear(kit: Kit) -> None:
    """Named slots become zero in every layer, stream and SSM state, over NaN too; nothing else changes."""
    kit.need(hooks=("clear_slots",))
    rig = Rig(kit, shape_of(kit, dims=(5, 3), layers=3, ssm=True, transposed=bool(kit.seed % 2)))
    rig.histories([Req(s, length=7) for s in (0, 1, 2, 4, 6, 10)])
    before = rig.snapshot()
    slots = [4, 0, 2, -1, 7]
    kit.hooks.clear_slots(rig.pool, index(kit, slots))
    _judge_slots(kit, rig, before, "CS-CLEAR-01", clear=slots)


@over("layout", "dtype", "width", "index", quick=3)
@clauses("CS-COPY-01")
def test_copy(kit: Kit) -> None:
    """Rows keep their row numbers; a pair with a padded side is left out; sources keep their bits."""
    kit.need(hooks=("copy_slots",))
    rig = Rig(kit, shape_of(kit, dims=(5, 3), layers=3, ssm=True, transposed=bool(kit.seed % 2)))
    rig.histories([Req(s, length=7) for s in (1, 2, 4, 6)])
    before = rig.snapshot()
    sources, destinations = [4, 0, 2, -1, 6, 1], [8, 3, 0, 5, 10, -1]
    kit.hooks.copy_slots(rig.pool, index(kit, sources), index(kit, destinations))
    _judge_slots(kit, rig, before, "CS-COPY-01", copy=dict(zip(sources, destinations, strict=True)))


def _judge_slots(
    kit: Kit,
    rig: Rig,
    before: dict[Any, Tensor],
    clause: str,
    clear: Sequence[int] = (),
    copy: dict[int, int] | None = None,
) -> None:
    after = rig.snapshot()
    for key, old in before.items():
        tensor = old.double().flatten(2)[:, :, None] if key[0] == "ssm" else old
        mine = after[key].double().flatten(2)[:, :, None] if key[0] == "ssm" else after[key]
        if key[0] == "drafts":
            continue
        numbers = tensor[1:-1].double().numpy()
        effect = oracle.cleared(clear, numbers) if copy is None else oracle.copied(copy, numbers)
        judge_effect(kit, clause, tensor, mine, effect, "float64" if key[0] == "ssm" else rig.shape.state, f"{key}")
