"""Real CUDA graphs: one capture serves every live count and every change of its inputs, bit for bit as eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hwbackends.registry.loading import load
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.metadata import MetadataBuffers, MetadataLimits
from hwbackends.step.sidecar import ConvStateSidecar
from tests.backend.lab import same_bits
from tests.cuda.steps import DRAFTS, PHASE, Case, Setting
from tests.gpu import GPU

pytestmark = pytest.mark.cuda
LAYOUTS = ["window", "ring", "lazy"]
RECORDED = [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND]


class Step:
    """Prepare and conv of one phase over static inputs; `eager` and a captured graph run the same thing."""

    def __init__(self, setting: Setting, mode: ForwardMode, backend: str = GPU) -> None:
        self.case, self.mode, self.hooks = Case(setting, "cuda"), mode, load(backend, "cuda")
        self.batch = self.case.batch(mode)
        self.batch.num_reqs = setting.requests
        self.batch.num_reqs_device = torch.full((1,), setting.requests, dtype=torch.int32, device="cuda")
        self.x = self.case.inputs(self.batch)
        buffers = MetadataBuffers(MetadataLimits(64, 512, DRAFTS), "cuda", torch.int32)
        tracks = self.batch.mamba_track_mask is not None
        count = self.batch.padded_reqs
        self.view = buffers.view(mode, count, self.batch.num_tokens, self.batch.tokens_per_req, tracks)
        self.y = torch.full_like(self.x, float("nan"))

    def run(self) -> None:
        self.prepare()
        self.conv()

    def prepare(self) -> None:
        getattr(self.hooks, f"prepare_{PHASE[self.mode]}_metadata")(self.batch, self.case.pool, self.view)

    def conv(self) -> None:
        case = self.case
        hook = getattr(self.hooks, f"conv_{PHASE[self.mode]}")
        hook(self.x, case.weight, None, case.state, self.view, None, True, self.y)

    def change(self, live: int, seed: int) -> None:
        """Other inputs in place: fewer live rows, rows in another order, other lengths and tokens."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.case.rows), generator=generator)
        self.batch.req_pool_indices.copy_(self.case.rows[order])
        if self.batch.computed_lens is not None:
            self.batch.computed_lens.copy_(torch.randint(0, 31, order.shape, generator=generator))
        assert self.batch.num_reqs_device is not None
        self.batch.num_reqs_device.fill_(live)
        self.x.copy_(torch.randn(self.x.shape, generator=generator).to(self.x.dtype))

    def restore(self, other: Step) -> None:
        for mine, theirs in zip(self._memory(), other._memory(), strict=True):
            mine.copy_(theirs)

    def _memory(self) -> list[torch.Tensor]:
        pool = self.case.pool
        return [*pool.storages(), *pool.draft_storages()]


def captured(step: Step) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step.run()
        step.run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    return graph


@pytest.mark.parametrize("mode", RECORDED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_replays_with_other_inputs_and_fewer_live_rows_equal_eager(layout: str, mode: ForwardMode) -> None:
    setting = Setting(layout=layout, dim=136, dtype=torch.bfloat16)
    recorded, eager = Step(setting, mode), Step(setting, mode)
    graph = captured(recorded)
    addresses = {name: tensor.data_ptr() for name, tensor in recorded.view.tensors().items()}
    recorded.restore(eager)
    for seed, live in enumerate((9, 4, 0, 7, 1)):
        recorded.change(live, seed)
        eager.change(live, seed)
        graph.replay()
        eager.run()
        assert torch.equal(recorded.y, eager.y)
        for mine, theirs in zip(recorded._memory(), eager._memory(), strict=True):
            assert same_bits(mine, theirs)
        assert (recorded.y[live * recorded.batch.tokens_per_req :] == 0).all()
    assert addresses == {name: tensor.data_ptr() for name, tensor in recorded.view.tensors().items()}


@pytest.mark.parametrize("mode", RECORDED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_replays_from_one_state_give_the_same_bits(layout: str, mode: ForwardMode) -> None:
    setting = Setting(layout=layout, dim=264, dtype=torch.bfloat16)
    recorded, fresh = Step(setting, mode), Step(setting, mode)
    graph = captured(recorded)
    fresh_run = Step(setting, mode)
    fresh_run.run()
    for _ in range(3):
        recorded.restore(fresh)
        graph.replay()
        assert torch.equal(recorded.y, fresh_run.y)
        for mine, theirs in zip(recorded._memory(), fresh_run._memory(), strict=True):
            assert same_bits(mine, theirs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prefill_graph_reads_metadata_that_is_prepared_before_each_replay(layout: str) -> None:
    setting = Setting(layout=layout, dim=72, dtype=torch.bfloat16)
    recorded, eager = Step(setting, ForwardMode.EXTEND), Step(setting, ForwardMode.EXTEND)
    recorded.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded.conv()
    recorded.restore(eager)
    for seed, live in enumerate((8, 3, 0)):
        recorded.change(live, seed)
        eager.change(live, seed)
        recorded.prepare()
        graph.replay()
        eager.run()
        assert torch.equal(recorded.y, eager.y)
        for mine, theirs in zip(recorded._memory(), eager._memory(), strict=True):
            assert same_bits(mine, theirs)


def test_a_prefill_captured_before_the_decode_limits_are_known_keeps_its_addresses() -> None:
    case, hooks = Case(Setting(layout="ring", dim=72, dtype=torch.bfloat16, track=False), "cuda"), load(GPU, "cuda")
    sidecar = ConvStateSidecar(hooks, case.pool, max_batch=16, max_tokens=256, draft_tokens=DRAFTS)
    batch = case.batch(ForwardMode.EXTEND)
    x = case.inputs(batch)
    given: tuple[Any, ...] = (x, case.weight, None, None, True)

    def forward() -> torch.Tensor:
        return sidecar.conv_state_metadata(0).conv("k", *given)

    sidecar.init_forward_metadata_out_graph(batch)
    forward()
    graph = torch.cuda.CUDAGraph()
    sidecar.init_forward_metadata_out_graph(batch, in_capture=True)
    with torch.cuda.graph(graph):
        y = forward()
    sidecar.init_graph_state(16, 256)
    other = Case(case.setting, "cuda")
    for tensor, fresh in zip(case.pool.storages(), other.pool.storages(), strict=True):
        tensor.copy_(fresh)
    sidecar.init_forward_metadata_out_graph(batch)
    graph.replay()
    _, wanted = other.run(hooks, ForwardMode.EXTEND, residual=True)
    assert torch.equal(y, wanted)
    assert same_bits(case.state.tensor, other.state.tensor)


def test_preparation_is_one_launch_in_every_phase() -> None:
    from hwbackends.bench.timing import node_count

    for mode in PHASE:
        step = Step(Setting(layout="ring", dim=8), mode)
        step.prepare()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            step.prepare()
        assert node_count(graph) == 1, mode
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        step.conv()
        with torch.cuda.graph(graph):
            step.conv()
        assert node_count(graph) == 1, mode


def test_a_batch_of_seventy_thousand_requests_is_prepared_right() -> None:
    count = 70_000
    case, hooks = Case(Setting(layout="window", dim=1, track=False), "cuda"), load(GPU, "cuda")
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 4, (count,), generator=generator)
    rows = torch.full((count,), 2)
    batch = StepBatch(
        ForwardMode.EXTEND,
        rows.to("cuda"),
        count - 11,
        int(lengths.sum()),
        extend_seq_lens=lengths.to("cuda"),
        extend_prefix_lens=torch.zeros(count, dtype=torch.int64, device="cuda"),
    )
    buffers = MetadataBuffers(MetadataLimits(count, batch.num_tokens), "cuda", torch.int32)
    views = [buffers.view(ForwardMode.EXTEND, count, batch.num_tokens)]
    hooks.prepare_extend_metadata(batch, case.pool, views[0])
    other = MetadataBuffers(MetadataLimits(count, batch.num_tokens), "cuda", torch.int32)
    wanted = other.view(ForwardMode.EXTEND, count, batch.num_tokens)
    load("reference", "cuda").prepare_extend_metadata(batch, case.pool, wanted)
    for name, tensor in views[0].tensors().items():
        if name != "num_accept_tokens":
            assert torch.equal(tensor, getattr(wanted, name)), name
