"""Graph lane: capture a recordable hook once, change everything in place, replay three times; the bits are those of an
eager call and no address moves. On CUDA with `torch.cuda.CUDAGraph`, elsewhere with the recorder of `testing`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hwbackends.conformance import oracle
from hwbackends.conformance.cases import CONV, LAYOUTS, Req, Rig, Shape, Weights, rig_for
from hwbackends.conformance.kit import Kit
from hwbackends.conformance.marks import cases, clauses
from hwbackends.step.batch import StepBatch
from hwbackends.step.metadata import StepMetadata
from hwbackends.testing.recorder import Graph, graph_for

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


def capture(kit: Kit, work: Callable[[], Any]) -> Graph:
    """Warm up twice, then capture."""
    for _ in range(2):
        work()
    graph = graph_for(kit.device)
    with graph.capture():
        work()
    return graph


def overwrite(mine: Any, theirs: Any) -> None:
    """Write another step's tensors into the captured ones."""
    for name in mine.__slots__:
        value = getattr(mine, name)
        if isinstance(value, Tensor):
            value.copy_(getattr(theirs, name))


class _Step:
    """One captured step: static tensors of a batch, its metadata, x and out."""

    def __init__(self, kit: Kit, mode: str, layout: Any, **sizes: Any) -> None:
        settings = {"virtual": True, "drafts": 3, **sizes}
        self.kit, self.mode = kit, mode
        self.rig, self.eager = (rig_for(kit, mode, Shape(layout, **settings), graphs=True) for _ in range(2))
        self.batch = self.make(self.rig, WARM)
        self.tensors: StepBatch = self.rig.step_batch(self.batch)
        self.metadata: StepMetadata = self.rig.metadata(self.batch)
        self.x = kit.tensor(np.ones((self.batch.num_tokens, 5)), "float32")
        self.out = torch.full_like(self.x, torch.nan)
        self.taps = kit.tensor(self.rig.taps(), "float32")
        self.state = self.rig.pool.conv_state("k", 0)

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

    def prepare(self) -> None:
        self.rig.prepare(self.batch, self.tensors, self.metadata)

    def conv(self) -> None:
        hook = getattr(self.kit.hooks, CONV[self.mode])
        hook(self.x, self.taps, None, self.state, self.metadata, out=self.out)

    def addresses(self) -> dict[str, int]:
        held = self.metadata.tensors() | {"x": self.x, "out": self.out, "taps": self.taps, "state": self.state.tensor}
        return {name: tensor.data_ptr() for name, tensor in held.items()}

    def restore(self, requests: Sequence[Req]) -> None:
        """New histories for a round, the same in both pools."""
        for base in (*self.rig.bases.values(), *self.rig.draft_bases.values()):
            base.fill_(torch.nan)
        self.rig.histories([r for r in requests if r.slot > 0])
        self.eager.copy_state(self.rig)


FORMS = [(mode, layout) for layout in LAYOUTS for mode in ("decode", "target_verify", "draft_extend")]


@cases("mode, layout", FORMS, quick=3)
@clauses("CS-PREP-09")
def test_replayed_metadata(kit: Kit, mode: str, layout: Any) -> None:
    """Rows, lengths, map, track slots and the live count changed in place are what the replay writes."""
    step = _Step(kit, mode, layout)
    graph = capture(kit, step.prepare)
    places = step.addresses()
    for number, requests in enumerate(ROUNDS):
        live = (ROWS, 3, 4)[number]
        batch = step.make(step.rig, requests, live)
        overwrite(step.tensors, step.rig.step_batch(batch))
        graph.replay()
        for name, values in oracle.metadata(batch, oracle.prepare(batch, step.rig.facts)).items():
            kit.equal(
                "CS-PREP-09", getattr(step.metadata, name), values, f"{mode} on {layout}, replay {number}: {name}"
            )
    kit.check("CS-PREP-09", step.addresses() == places, "an address moved")


@cases("mode, layout", FORMS, quick=3)
@clauses("CS-CONV-12", "CS-CONV-05")
def test_replayed_conv(kit: Kit, mode: str, layout: Any) -> None:
    """Preparation and conv in one graph, against eager calls over the same state."""
    step = _Step(kit, mode, layout)
    step.restore(WARM)

    def work() -> None:
        step.prepare()
        step.conv()

    graph = capture(kit, work)
    places = step.addresses()
    for number, requests in enumerate(ROUNDS):
        batch = step.make(step.rig, requests)
        step.make(step.eager, requests)
        step.restore(requests)
        x = step.rig.whole_numbers(batch.num_tokens, 5)
        overwrite(step.tensors, step.rig.step_batch(batch))
        step.x.copy_(kit.tensor(x, "float32"))
        step.out.fill_(torch.nan)
        graph.replay()
        want = step.eager.run(batch, Weights(step.rig.taps()), x)
        what = f"{mode} on {layout}, replay {number}"
        kit.same_bits("CS-CONV-12", step.out, want.y, f"{what}: outputs")
        kit.same_bits("CS-CONV-12", step.rig.tensor(), want.after, f"{what}: state")
        if want.drafts_after is not None:
            kit.same_bits("CS-CONV-12", step.rig.draft_bases["k"][0], want.drafts_after, f"{what}: draft rows")
        padded = np.concatenate(
            [np.arange(r.start, r.start + r.tokens) for r in want.rows if r.padded] or [np.arange(0)]
        )
        zeros = np.zeros((len(padded), 5))
        kit.equal("CS-CONV-05", kit.host(step.out)[padded.astype(int)], zeros, f"{what}: padded outputs")
    kit.check("CS-CONV-12", step.addresses() == places, "an address moved")


@cases("layout", LAYOUTS, quick=3)
@clauses("CS-COMMIT-10")
def test_replayed_commit(kit: Kit, layout: Any) -> None:
    """Request rows, steps and track slots changed in place, against an eager commit."""
    hook_name = "update_mamba_state_after_mtp_verify"
    kit.need(hooks=(hook_name,), layout=layout, graphs=True)
    shape = Shape(layout, dims=(5, 3), layers=2, drafts=3, ssm=True)
    rig, eager = Rig(kit, shape), Rig(kit, shape)
    numbers = [kit.tensor(kit.rng.integers(1, 99, tuple(t.shape)).astype(float), "float32") for t in _tensors(rig)]
    names = (
        "req_pool_indices",
        "last_correct_step_indices",
        "mamba_track_indices",
        "mamba_steps_to_track",
        "computed_lens",
    )
    held = {name: kit.tensor(np.zeros(ROWS, np.int64), "int64") for name in names}

    def work() -> None:
        getattr(kit.hooks, hook_name)(rig.pool, **held)

    graph = capture(kit, work)
    for number, requests in enumerate(ROUNDS):
        rows = rig.batch("target_verify", requests).req_pool_indices
        eager.batch("target_verify", requests)
        values = [rows, [1, 2, 0, 2, -1], [10, 6, -1, 0, 7], [number % 3, -1, 2, 1, 0], [r.length for r in requests]]
        for tensor, value in zip(held.values(), values, strict=True):
            tensor.copy_(kit.tensor(np.asarray(value, np.int64), "int64"))
        for mine, theirs, start in zip(_tensors(rig), _tensors(eager), numbers, strict=True):
            mine.copy_(start)
            theirs.copy_(start)
        graph.replay()
        getattr(kit.hooks, hook_name)(eager.pool, **held)
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
@clauses("CS-CLEAR-02")
def test_replayed_clear_and_copy(kit: Kit, hook: str) -> None:
    """Slots changed in place, against eager calls."""
    kit.need(hooks=(hook,), graphs=True)
    shape = Shape(dims=(5, 3), layers=2, ssm=True)
    rig, eager = Rig(kit, shape), Rig(kit, shape)
    held = [kit.tensor(np.zeros(3, np.int64), "int64") for _ in range(2 if hook == "copy_slots" else 1)]
    graph = capture(kit, lambda: getattr(kit.hooks, hook)(rig.pool, *held))
    for sources, destinations in (([1, 0, 7], [4, 3, 0]), ([9, 2, -1], [10, 5, 6]), ([3, 4, 5], [6, 7, 8])):
        for mine, theirs in zip(rig.bases.values(), eager.bases.values(), strict=True):
            mine.copy_(kit.tensor(kit.rng.integers(1, 99, tuple(mine.shape)).astype(float), "float32"))
            theirs.copy_(mine)
        eager.ssm_base.copy_(rig.ssm_base)
        for tensor, value in zip(held, (sources, destinations), strict=False):
            tensor.copy_(kit.tensor(np.asarray(value, np.int64), "int64"))
        graph.replay()
        getattr(kit.hooks, hook)(eager.pool, *held)
        want = eager.snapshot()
        for key, tensor in rig.snapshot().items():
            kit.same_bits("CS-CLEAR-02", tensor, want[key], f"{hook} {sources} {destinations}: {key}")
