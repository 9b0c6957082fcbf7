"""Graph rules: what is recorded, what a replay sees, and that no address moves. On a CPU the recorder stands for a
graph; on a GPU the same tests run on CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from hwbackends.conv.layouts import Layout
from hwbackends.errors import GraphLimitError, SlotError
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.metadata import PADDED, StepMetadata
from hwbackends.step.pool import StatePool
from hwbackends.step.sidecar import ConvStateSidecar
from hwbackends.testing.guards import frozen_addresses, no_alloc, no_sync
from hwbackends.testing.recorder import CpuGraph, Graph, graph_for
from tests.step.sidecar_cases import (
    BATCH,
    DIM,
    DRAFTS,
    ROWS,
    SLOTS,
    TOKENS,
    CountingBackend,
    StaticInputs,
    decode,
    devices,
    extend,
    graph_phases,
    inputs,
    layouts,
    make_pool,
    make_sidecar,
    same,
    state_of,
)


@dataclass
class Captured:
    """A step captured with every row live, and what it was captured over."""

    sidecar: ConvStateSidecar
    pool: StatePool
    static: StaticInputs
    batch: StepBatch
    x: Tensor
    y: Tensor
    weight: Tensor
    graph: Graph

    def replay(self) -> None:
        self.sidecar.init_forward_metadata_out_graph(self.batch)
        self.graph.replay()


def capture(mode: ForwardMode, layout: Layout = "window", device: str = "cpu", tracks: bool = False) -> Captured:
    """Capture preparation and one conv, after a warm-up whose effects are undone."""
    pool = make_pool(layout, device)
    sidecar, static = make_sidecar(pool), StaticInputs(device)
    static.fill(ROWS, [9] * BATCH)
    batch = static.step(mode, tracks)
    x, weight = inputs(batch.num_tokens, device=device)
    before = state_of(pool)

    def work() -> Tensor:
        sidecar.init_forward_metadata_in_graph(batch)
        return sidecar.conv_state_metadata(6).conv("k", x, weight)

    sidecar.init_forward_metadata_out_graph(batch, in_capture=True)
    work()
    for tensor, value in zip([*pool.storages(), *pool.draft_storages()], before, strict=True):
        tensor.copy_(value)
    graph = graph_for(device)
    with graph.capture():
        y = work()
    return Captured(sidecar, pool, static, batch, x, y, weight, graph)


def eagerly(case: Captured, pool: StatePool, rows: Sequence[int], lens: Sequence[int]) -> tuple[Tensor, StepBatch]:
    """The same step without padding, without a graph, on another pool."""
    device, count = case.static.device, len(rows)
    tokens = case.batch.draft_token_num
    accepted = case.static.num_accept_tokens[:count].clone()
    batch = replace(
        case.batch,
        req_pool_indices=torch.tensor(rows, dtype=torch.int64, device=device),
        seq_lens=torch.tensor(lens, dtype=torch.int64, device=device),
        num_reqs=0 if case.batch.forward_mode is ForwardMode.IDLE else count,
        num_tokens=count * tokens,
        num_accept_tokens=accepted if case.batch.num_accept_tokens is not None else None,
        mamba_track_mask=None if case.batch.mamba_track_mask is None else case.static.track_mask[:count].clone(),
        mamba_track_indices=None
        if case.batch.mamba_track_indices is None
        else case.static.track_indices[:count].clone(),
        num_reqs_device=None,
    )
    sidecar = make_sidecar(pool)
    sidecar.init_forward_metadata(batch)
    return sidecar.conv_state_metadata(6).conv("k", case.x[: count * tokens], case.weight), batch


@devices
@layouts
@graph_phases
def test_one_capture_serves_every_live_count_with_indices_changed_in_place(
    mode: ForwardMode, layout: Layout, device: str
) -> None:
    case, twin = capture(mode, layout, device), make_pool(layout, device)
    assert same(state_of(case.pool), state_of(twin)), "a capture runs nothing"
    with frozen_addresses(case.sidecar):
        for live in (3, 0, 5, 1, 4, 2):
            rows, lens = ROWS[5 - live :], [9 + live + index for index in range(live)]
            case.static.fill(rows, lens)
            case.x.copy_(inputs(case.x.shape[0], seed=live)[0])
            case.replay()
            wanted, _ = eagerly(case, twin, rows, lens)
            assert torch.equal(case.y[: wanted.shape[0]], wanted)
            assert not case.y[wanted.shape[0] :].any(), "rows behind the live ones are 0"
            assert same(state_of(case.pool), state_of(twin))


@devices
@graph_phases
def test_every_row_that_a_replay_may_read_is_valid_for_every_live_count(mode: ForwardMode, device: str) -> None:
    case = capture(mode, "ring", device, tracks=mode is not ForwardMode.TARGET_VERIFY)
    metadata = case.sidecar.conv_state_metadata(6).metadata
    for live in (5, 2, 0, 3):
        case.static.fill(ROWS[:live], [9] * live, track=[9] * live)
        case.replay()
        alive = 0 if mode is ForwardMode.IDLE else live
        for name in ("cache_indices", "source_indices", "draft_indices", "mamba_track_indices", "mamba_track_tokens"):
            assert (getattr(metadata, name)[alive:] == PADDED).all(), name
        assert not metadata.computed_lens[alive:].any()
        assert not metadata.has_initial_state[alive:].any()
        assert (metadata.cache_indices[:alive] > 0).all()
        assert (metadata.cache_indices < SLOTS).all()
        offsets = torch.arange(BATCH + 1, device=device) * case.batch.tokens_per_req
        assert torch.equal(metadata.query_start_loc.long(), offsets)


@devices
def test_a_replay_tracks_the_rows_that_ask_now(device: str) -> None:
    case, twin = capture(ForwardMode.DECODE, "window", device, tracks=True), make_pool("window", device)
    for rows, track in [(ROWS[:3], [9]), (ROWS[1:], [6, 5]), (ROWS[:2], [])]:
        lens = [9] * len(rows)
        case.static.fill(rows, lens, track=track)
        case.replay()
        eagerly(case, twin, rows, lens)
        assert same(state_of(case.pool), state_of(twin))
        for slot, row in zip(track, rows, strict=False):
            stream = case.pool.conv_streams["k"][1]
            assert torch.equal(stream[slot], stream[case.pool.mamba_index_mapping[row].long()])


@devices
def test_a_replay_gathers_slots_from_the_map_as_it_is_now(device: str) -> None:
    case = capture(ForwardMode.DECODE, device=device)
    metadata = case.sidecar.conv_state_metadata(6).metadata
    case.static.fill([5, 3, 8], [4, 5, 6])
    case.replay()
    assert metadata.cache_indices.tolist() == [1, 2, 4, -1, -1]
    case.pool.mamba_index_mapping[torch.tensor([5, 8], device=device)] = torch.tensor(
        [9, 0], dtype=torch.int32, device=device
    )
    case.replay()
    assert metadata.cache_indices.tolist() == [9, 2, -1, -1, -1], "slot 0 is a padded row"


@graph_phases
def test_the_default_path_out_of_graph_launches_and_allocates_nothing(mode: ForwardMode) -> None:
    case = capture(mode)
    graph = CpuGraph()
    with no_sync(), no_alloc(temporaries=False), graph.capture():
        case.sidecar.init_forward_metadata_out_graph(case.batch)
    assert graph.num_ops == 0


@graph_phases
def test_a_capture_holds_one_preparation_and_replays_ask_for_none(mode: ForwardMode) -> None:
    backend = CountingBackend()
    sidecar, static = make_sidecar(make_pool(), backend), StaticInputs()
    graph = CpuGraph()
    with graph.capture():
        sidecar.init_forward_metadata_in_graph(static.step(mode))
    for _ in range(3):
        sidecar.init_forward_metadata_out_graph(static.step(mode))
        graph.replay()
    assert sidecar.resolutions == backend.calls.total() == 1


def test_after_a_replay_convs_outside_the_graph_read_the_replayed_step() -> None:
    sidecar, static = make_sidecar(make_pool()), StaticInputs()
    graphs: dict[ForwardMode, CpuGraph] = {ForwardMode.DECODE: CpuGraph(), ForwardMode.TARGET_VERIFY: CpuGraph()}
    for mode, graph in graphs.items():
        with graph.capture():
            sidecar.init_forward_metadata_in_graph(static.step(mode))
    sidecar.init_forward_metadata(extend([5], [4], [0]))
    for mode, graph in graphs.items():
        static.fill([8, 12], [6, 7])
        sidecar.init_forward_metadata_out_graph(static.step(mode))
        graph.replay()
        metadata = sidecar.conv_state_metadata(2).metadata
        assert metadata.forward_mode is mode
        assert metadata.cache_indices.tolist() == [4, 10, -1, -1, -1]


def test_no_address_moves_from_the_first_step_on() -> None:
    sidecar, static = make_sidecar(make_pool()), StaticInputs()
    with frozen_addresses(sidecar):
        sidecar.init_forward_metadata(decode([5, 3]))
        for mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND):
            sidecar.init_forward_metadata_out_graph(static.step(mode), in_capture=True)
            sidecar.init_forward_metadata_in_graph(static.step(mode))
        sidecar.init_graph_state(BATCH, TOKENS, DRAFTS)
        sidecar.init_forward_metadata_out_graph(extend([5], [30], [0]))
        sidecar.init_forward_metadata(extend([5, 3], [30, 3], [0, 0]))


@pytest.mark.parametrize("hook", ["init_forward_metadata_out_graph", "init_forward_metadata_in_graph"])
def test_a_step_beyond_the_limits_never_grows_on_the_graph_path(hook: str) -> None:
    sidecar = make_sidecar(make_pool())
    with frozen_addresses(sidecar), pytest.raises(GraphLimitError, match="max_batch >= 7"):
        getattr(sidecar, hook)(StaticInputs(batch=7).step(ForwardMode.DECODE))


@dataclass
class Prefill:
    """A full prefill graph: the conv is captured, preparation is not."""

    sidecar: ConvStateSidecar
    pool: StatePool
    x: Tensor
    y: Tensor
    weight: Tensor
    graph: Graph
    metadata: StepMetadata


def capture_prefill(layout: Layout, device: str = "cpu") -> Prefill:
    """Capture an extend of 3 requests in a bucket of 17 tokens, without tracking."""
    pool = make_pool(layout, device)
    sidecar = make_sidecar(pool)
    x, weight = inputs(17, device=device)
    batch = extend([5, 3, 8], [6, 6, 5], [0, 0, 0], device)
    before = state_of(pool)
    sidecar.init_forward_metadata_out_graph(batch, in_capture=True)
    sidecar.init_forward_metadata_in_graph(batch)
    assert sidecar.resolutions == 1, "the in-graph hook has nothing to record in a prefill"
    sidecar.conv_state_metadata(6).conv("k", x, weight)
    for tensor, value in zip([*pool.storages(), *pool.draft_storages()], before, strict=True):
        tensor.copy_(value)
    graph = graph_for(device)
    with graph.capture():
        y = sidecar.conv_state_metadata(6).conv("k", x, weight)
    return Prefill(sidecar, pool, x, y, weight, graph, sidecar.conv_state_metadata(6).metadata)


@devices
@layouts
def test_a_full_prefill_graph_reads_what_was_prepared_out_of_graph(layout: Layout, device: str) -> None:
    case, twin = capture_prefill(layout, device), make_pool(layout, device)
    steps = [
        extend([3, 12], [4, 3], [0, 6], device),
        extend([8, 0, 5], [1, 0, 16], [4, 9, 0], device),
        extend([12], [2], [3], device),
    ]
    for seed, batch in enumerate(steps):
        case.x.copy_(inputs(17, seed=seed)[0])
        case.sidecar.init_forward_metadata_out_graph(batch)
        case.graph.replay()
        eager = make_sidecar(twin)
        eager.init_forward_metadata(batch)
        wanted = eager.conv_state_metadata(6).conv("k", case.x[: batch.num_tokens], case.weight)
        assert torch.equal(case.y[: batch.num_tokens], wanted)
        assert not case.y[batch.num_tokens :].any(), "tokens behind the live ones are 0"
        baked = case.metadata
        assert baked.query_start_loc[batch.num_reqs :].eq(batch.num_tokens).all(), "rows behind have no tokens"
        assert baked.cache_indices[batch.num_reqs :].eq(PADDED).all()
        assert baked.seq_idx[batch.num_tokens :].eq(PADDED).all()
        assert same(state_of(case.pool), state_of(twin))


@devices
def test_a_prefill_captured_without_tracking_tracks_when_a_replay_asks(device: str) -> None:
    case, twin = capture_prefill("window", device), make_pool("window", device)
    track = {
        "mamba_track_mask": torch.tensor([True, False], device=device),
        "mamba_track_indices": torch.tensor([9, 6], device=device),
        "mamba_track_seqlens": torch.tensor([10, -1], device=device),
    }
    batch = extend([5, 3], [10, 2], [0, 0], device, **track)
    case.sidecar.init_forward_metadata_out_graph(batch)
    case.graph.replay()
    eager = make_sidecar(twin)
    eager.init_forward_metadata(batch)
    eager.conv_state_metadata(6).conv("k", case.x[:12], case.weight)
    assert torch.equal(case.pool.conv_streams["k"][1, 9], case.x[5:8])
    assert same(state_of(case.pool), state_of(twin))


def test_limits_hold_although_a_prefill_is_captured_before_the_engine_tells_them() -> None:
    case = capture_prefill("window")
    with frozen_addresses(case.sidecar):
        case.sidecar.init_graph_state(BATCH, TOKENS, DRAFTS)
        with pytest.raises(GraphLimitError):
            case.sidecar.init_graph_state(BATCH + 1, TOKENS, DRAFTS)


def test_checked_mode_looks_at_the_slots_of_a_replay_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWBACKENDS_CHECKED", "1")
    case = capture(ForwardMode.DECODE)
    case.static.fill([5, 3], [9, 9])
    case.replay()
    before = state_of(case.pool)
    case.static.fill([5, 3, 5], [9, 9, 9])
    with pytest.raises(SlotError, match="req_pool_indices"):
        case.replay()
    assert same(before, state_of(case.pool))


def test_a_buffer_that_did_move_gives_a_wrong_replay() -> None:
    case = capture(ForwardMode.DECODE)
    case.static.fill([5, 3], [4, 4])
    case.static.req_pool_indices = torch.full_like(case.static.req_pool_indices, 8)
    case.replay()
    assert case.sidecar.conv_state_metadata(6).metadata.cache_indices[:2].tolist() == [1, 2], "not slot 4"


def test_an_eager_step_between_two_replays_disturbs_neither() -> None:
    case, twin = capture(ForwardMode.TARGET_VERIFY), make_pool()
    rows, lens = [3, 12], [9, 14]
    case.static.fill(rows, lens)
    case.replay()
    first = case.y.clone()
    case.sidecar.init_forward_metadata(extend([8, 0], [4, 9], [0, 0]))
    case.replay()
    wanted, _ = eagerly(case, twin, rows, lens)
    assert torch.equal(case.y, first)
    assert torch.equal(first[: 2 * DRAFTS], wanted)
    assert wanted.shape == (2 * DRAFTS, DIM)
