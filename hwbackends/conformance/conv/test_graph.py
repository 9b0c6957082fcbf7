"""Graph lane: capture a recordable hook once, change everything in place, replay three times; the bits are those of an
eager call. On CUDA with `torch.cuda.CUDAGraph`, elsewhere with the recorder of `testing`, in the backend's process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hwbackends.conformance import oracle
from hwbackends.conformance.cases import CONV, PREPARE, Req, Rig, Weights, rig_for, shape_of
from hwbackends.conformance.kit import HookCall, Kit
from hwbackends.conformance.marks import cases, clauses, over
from hwbackends.step.batch import StepBatch
from hwbackends.step.metadata import StepMetadata

COMMIT = "update_mamba_state_after_mtp_verify"
RECORDED = ("decode", "target_verify", "draft_extend")
ROWS = 5
WARM = [
    Req(1, length=3, accept=1), Req(2, length=5, accept=2), Req(4, length=6, accept=3), Req(5, length=7),
    Req(6, length=8),
]  # fmt: skip
"""What is live during warm-up and capture; no later step has these rows."""
ROUNDS = [
    [
        Req(3, length=7, accept=2, accepted=2), Req(-1, accept=1), Req(1, length=2, accept=0), Req(0),
        Req(9, length=12, accept=3),
    ],
    [
        Req(0), Req(7, length=1, accept=3), Req(3, length=9, accept=1), Req(9, length=15, accept=-1), Req(-1),
    ],
    [
        Req(2, length=4, accept=1), Req(5, length=30, accept=2, accepted=3), Req(8, length=6, accept=0),
        Req(1, length=2), Req(4, length=1),
    ],
]  # fmt: skip


def overwrite(mine: Any, theirs: Any) -> None:
    """Write another step's tensors into the captured ones."""
    for name in mine.__slots__:
        value = getattr(mine, name)
        if isinstance(value, Tensor):
            value.copy_(getattr(theirs, name))


class _Step:
    """One captured step: static tensors of a batch, its metadata, x and out."""

    def __init__(self, kit: Kit, mode: str) -> None:
        self.kit, self.mode = kit, mode
        settings: dict[str, Any] = {"virtual": True, "drafts": 3}
        self.rig, self.eager = (rig_for(kit, mode, {"graphs": True}, **settings) for _ in range(2))
        self.batch = self.make(self.rig, WARM)
        self.tensors: StepBatch = self.rig.step_batch(self.batch)
        self.metadata: StepMetadata = self.rig.metadata(self.batch)
        dtype = self.rig.shape.dtype
        self.x = kit.tensor(np.ones((self.batch.num_tokens, 5)), dtype)
        self.out = torch.full_like(self.x, torch.nan)
        self.taps = kit.tensor(self.rig.taps(), dtype)
        state = self.rig.pool.conv_state("k", 0)
        self.prepare: HookCall = (PREPARE[mode], (self.tensors, self.rig.pool, self.metadata), {})
        self.conv: HookCall = (CONV[mode], (self.x, self.taps, None, state, self.metadata), {"out": self.out})

    def make(self, rig: Rig, requests: Sequence[Req], live: int = ROWS) -> oracle.Batch:
        """A batch whose live count is on the device; `num_reqs` is baked into the graph."""
        tracked = [r if r.slot <= 0 else Req(**{**vars(r), "track": 10}) for r in requests[:1]]
        whole = [*tracked, *requests[1:]] if self.mode != "target_verify" else list(requests)
        tracking = {
            "mamba_track_mask": [r.track > 0 for r in whole],
            "mamba_track_indices": [rig.virtual(max(0, r.track)) for r in whole],
            "mamba_track_seqlens": [-1] * ROWS,
        }
        extra: dict[str, Any] = {} if self.mode == "target_verify" else tracking
        return rig.batch(self.mode, whole, num_reqs_device=live, **extra)

    def restore(self, requests: Sequence[Req]) -> None:
        """New histories for a round, the same in both pools."""
        for base in (*self.rig.bases.values(), *self.rig.draft_bases.values()):
            base.fill_(torch.nan)
        self.rig.histories([r for r in requests if r.slot > 0])
        self.eager.copy_state(self.rig)


@cases("mode", RECORDED, quick=3)
@over("layout", "index", quick=1)
@clauses("CS-PREP-09")
def test_replayed_metadata(kit: Kit, mode: str) -> None:
    """Rows, lengths, map, track slots and the live count changed in place are what the replay writes."""
    step = _Step(kit, mode)
    graph = kit.capture([step.prepare])
    for number, requests in enumerate(ROUNDS):
        live = (ROWS, 3, 4)[number]
        batch = step.make(step.rig, requests, live)
        overwrite(step.tensors, step.rig.step_batch(batch))
        kit.replay(graph, [step.prepare])
        for name, values in oracle.metadata(batch, oracle.prepare(batch, step.rig.facts)).items():
            kit.equal("CS-PREP-09", getattr(step.metadata, name), values, f"{mode}, replay {number}: {name}")


@cases("mode", RECORDED, quick=3)
@over("layout", "dtype", "width", quick=1)
@clauses("CS-CONV-12", "CS-CONV-05")
def test_replayed_conv(kit: Kit, mode: str) -> None:
    """Preparation and conv in one graph, against eager calls over the same state."""
    step = _Step(kit, mode)
    step.restore(WARM)
    calls = [step.prepare, step.conv]
    graph = kit.capture(calls)
    dtype = step.rig.shape.dtype
    for number, requests in enumerate(ROUNDS):
        batch = step.make(step.rig, requests)
        step.make(step.eager, requests)
        step.restore(requests)
        x = step.rig.whole_numbers(batch.num_tokens, 5)
        overwrite(step.tensors, step.rig.step_batch(batch))
        step.x.copy_(kit.tensor(x, dtype))
        step.out.fill_(torch.nan)
        kit.replay(graph, calls)
        want = step.eager.run(batch, Weights(step.eager.taps()), x)
        what = f"{mode} on {step.rig.shape.layout}, replay {number}"
        kit.same_bits("CS-CONV-12", step.out, want.y, f"{what}: outputs")
        kit.same_bits("CS-CONV-12", step.rig.tensor(), want.after, f"{what}: state")
        if want.drafts_after is not None:
            kit.same_bits("CS-CONV-12", step.rig.draft_bases["k"][0], want.drafts_after, f"{what}: draft rows")
        rows = [np.arange(r.start, r.start + r.tokens) for r in want.rows if r.padded]
        padded = np.concatenate([np.arange(0), *rows]).astype(int)
        kit.equal("CS-CONV-05", kit.host(step.out)[padded], np.zeros((len(padded), 5)), f"{what}: padded outputs")


@over("layout", "dtype", "index", quick=3)
@clauses("CS-COMMIT-10")
def test_replayed_commit(kit: Kit) -> None:
    """Request rows, steps and track slots changed in place, against an eager commit."""
    kit.need(hooks=(COMMIT,), graphs=True)
    shape = shape_of(kit, dims=(5, 3), layers=2, drafts=3, ssm=True)
    rig, eager = Rig(kit, shape), Rig(kit, shape)
    numbers = [kit.tensor(kit.rng.integers(1, 99, tuple(t.shape)).astype(float), "float32") for t in _tensors(rig)]
    names = ("req_pool_indices", "last_correct_step_indices", "mamba_track_indices", "mamba_steps_to_track",
             "computed_lens")  # fmt: skip
    held = {name: kit.tensor(np.zeros(ROWS, np.int64), kit.point.index) for name in names}
    call = (COMMIT, (rig.pool,), held)
    graph = kit.capture([call])
    for number, requests in enumerate(ROUNDS):
        rows = rig.batch("target_verify", requests).req_pool_indices
        eager.batch("target_verify", requests)
        values = [rows, [1, 2, 0, 2, -1], [10, 6, -1, 0, 7], [number % 3, -1, 2, 1, 0], [r.length for r in requests]]
        for tensor, value in zip(held.values(), values, strict=True):
            tensor.copy_(kit.tensor(np.asarray(value, np.int64), kit.point.index))
        for mine, theirs, start in zip(_tensors(rig), _tensors(eager), numbers, strict=True):
            mine.copy_(start)
            theirs.copy_(start)
        kit.replay(graph, [call])
        getattr(kit.hooks, COMMIT)(eager.pool, **held)
        want = eager.snapshot()
        for key, tensor in rig.snapshot().items():
            kit.same_bits("CS-COMMIT-10", tensor, want[key], f"replay {number}: {key}")


def _tensors(rig: Rig) -> list[Tensor]:
    found = [*rig.bases.values(), *rig.draft_bases.values()]
    if rig.shape.ssm:
        assert rig.pool.intermediate_ssm is not None
        found += [rig.ssm_base, rig.pool.intermediate_ssm]
    return found


@cases("hook", ["clear_slots", "copy_slots"], quick=2)
@over("layout", "index", quick=1)
@clauses("CS-CLEAR-02")
def test_replayed_clear_and_copy(kit: Kit, hook: str) -> None:
    """Slots changed in place, against eager calls."""
    kit.need(hooks=(hook,), graphs=True)
    shape = shape_of(kit, dims=(5, 3), layers=2, ssm=True)
    rig, eager = Rig(kit, shape), Rig(kit, shape)
    held = [kit.tensor(np.zeros(3, np.int64), kit.point.index) for _ in range(2 if hook == "copy_slots" else 1)]
    call: HookCall = (hook, (rig.pool, *held), {})
    graph = kit.capture([call])
    for sources, destinations in (([1, 0, 7], [4, 3, 0]), ([9, 2, -1], [10, 5, 6]), ([3, 4, 5], [6, 7, 8])):
        for mine, theirs in zip(rig.bases.values(), eager.bases.values(), strict=True):
            mine.copy_(kit.tensor(kit.rng.integers(1, 99, tuple(mine.shape)).astype(float), rig.shape.dtype))
            theirs.copy_(mine)
        eager.ssm_base.copy_(rig.ssm_base)
        for tensor, value in zip(held, (sources, destinations), strict=False):
            tensor.copy_(kit.tensor(np.asarray(value, np.int64), kit.point.index))
        kit.replay(graph, [call])
        kit.call(hook, eager.pool, *held)
        want = eager.snapshot()
        for key, tensor in rig.snapshot().items():
            kit.same_bits("CS-CLEAR-02", tensor, want[key], f"{hook} {sources} {destinations}: {key}")
