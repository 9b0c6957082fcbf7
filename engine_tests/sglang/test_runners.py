"""The plugin under SGLang's own graph runners and draft worker: their buffers, their batches, the views that they make
for a replay. hwbackends' recorder stands in for a CUDA graph."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from world import BOUND, DRAFTS, World, verify_input

from hwbackends.testing.recorder import CpuGraph

ROWS = ((1, 4), (2, 7), (3, 2))
KEY = (1, 4)


class Absent:
    """What SGLang's code asks of a scheduler's batch or of a model runner, and does not need here, is None."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def admitted(world: World, lengths: tuple[int, ...] = (5, 1, 2)) -> World:
    for row, slot in ROWS:
        world.admit(row, slot)
    world.extend([row for row, _ in ROWS], list(lengths))
    return world


def decode_buffers() -> Any:
    """The static buffers of SGLang's decode runner, for three requests."""
    from sglang.srt.model_executor.input_buffers import ForwardInputBuffers  # noqa: F401
    from sglang.srt.model_executor.runner_utils.buffers import DecodeInputBuffers

    return DecodeInputBuffers.create(
        device=torch.device("cpu"),
        max_bs=3,
        max_num_token=3 * DRAFTS,
        hidden_size=8,
        next_token_logits_buffer=torch.zeros(3 * DRAFTS, 8),
        dtype=torch.float32,
        num_dp_ranks=1,
        pp_size=1,
        is_encoder_decoder=False,
        require_mlp_tp_gather=False,
        seq_len_fill_value=1,
        encoder_len_fill_value=0,
        num_tokens_per_req=1,
        cache_loc_dtype=torch.int64,
        enable_mamba_track=True,
        ne_token_table=None,
    )


def replay_view(buffers: Any, batch: Any, mode: Any) -> SimpleNamespace:
    """The view that SGLang's decode runner makes for a replay of three requests."""
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view

    view: SimpleNamespace = build_replay_fb_view(
        forward_batch=batch,
        buffers=buffers,
        bs=3,
        raw_bs=batch.batch_size,
        num_tokens=3,
        global_num_tokens_cpu=None,
        seq_len_fill_value=1,
        capture_forward_mode=mode,
        is_encoder_decoder=False,
    )
    return view


def static_batch(world: World, buffers: Any, mode: str, **fields: Any) -> Any:
    """The batch that SGLang captures: over the runner's buffers."""
    batch = world.batch(mode, [0, 0, 0], **fields)
    batch.req_pool_indices, batch.seq_lens = buffers.req_pool_indices[:3], buffers.seq_lens[:3]
    return batch


def captured(world: World, batch: Any, tokens: int) -> tuple[CpuGraph, torch.Tensor, torch.Tensor]:
    """SGLang's order of a capture around one conv: out of graph, then in graph and forward."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    x, graph = torch.randn(tokens, world.model.dim(KEY), generator=world.generator), CpuGraph()
    world.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    with forward_context(ForwardContext(attn_backend=world.backend)), graph.capture():
        world.backend.init_forward_metadata_in_graph(batch)
        y = world.convs[KEY].forward(x, None, batch)
    return graph, x, y


def right(world: World, row: int, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        whole: torch.Tensor = world.model.stock[KEY](torch.cat([world.inputs[row][KEY], x])[None])[0, -len(x) :]
    return whole


def test_a_decode_is_replayed_from_sglangs_view() -> None:
    """The view has no `mamba_track_mask`; the padded row of the buffers changes no slot."""
    world, buffers = admitted(World(DRAFTS)), decode_buffers()
    track = {"mamba_track_mask": buffers.mamba_track_mask[:3], "mamba_track_indices": buffers.mamba_track_indices[:3]}
    graph, x, y = captured(world, static_batch(world, buffers, "DECODE", **track), 3)
    live = world.batch("DECODE", [2, 1])
    buffers.req_pool_indices[:3] = torch.tensor([2, 1, 0])
    buffers.mamba_track_mask[:3] = torch.tensor([True, False, False])
    buffers.mamba_track_indices[:3] = torch.tensor([9, 10, 0])
    view = replay_view(buffers, live, live.forward_mode)
    assert not hasattr(view, "mamba_track_mask"), "as SGLang makes it"
    x.normal_(generator=world.generator)
    world.backend.init_forward_metadata_out_graph(view)
    graph.replay()
    for place, row in enumerate((2, 1)):
        expected = right(world, row, x[place : place + 1])
        assert (y[place] - expected[0]).abs().max() <= BOUND * expected.abs().max()
        world.inputs[row][KEY] = torch.cat([world.inputs[row][KEY], x[place : place + 1].clone()])
    assert not y[2].any()
    assert torch.equal(world.state(9, KEY), world.window(2, KEY)), "the snapshot that the mask asks for"
    assert world.state(10, KEY).isnan().all()


def test_a_verify_is_replayed_from_sglangs_view_and_committed() -> None:
    world, buffers = admitted(World(DRAFTS)), decode_buffers()
    batch = static_batch(world, buffers, "TARGET_VERIFY", spec_info=verify_input(DRAFTS))
    graph, x, _ = captured(world, batch, 3 * DRAFTS)
    live = world.batch("TARGET_VERIFY", [3, 1], spec_info=verify_input(DRAFTS))
    buffers.req_pool_indices[:3] = torch.tensor([3, 1, 0])
    x.normal_(generator=world.generator)
    world.backend.init_forward_metadata_out_graph(replay_view(buffers, live, live.forward_mode))
    graph.replay()
    assert torch.equal(world.state(2, KEY), world.window(3, KEY)), "verify changes no slot"
    world.commit([3, 1], [1, DRAFTS - 1])
    for place, (row, slot, kept) in enumerate(((3, 2, 2), (1, 4, DRAFTS))):
        drawn = x[place * DRAFTS :][:kept].clone()
        world.inputs[row][KEY] = torch.cat([world.inputs[row][KEY], drawn])
        assert torch.equal(world.state(slot, KEY), world.window(row, KEY))


def test_an_idle_rank_replays_a_decode_of_padded_rows() -> None:
    """Data parallelism: the runtime mode is idle, the captured one decode."""
    world, buffers = admitted(World(DRAFTS)), decode_buffers()
    graph, _, y = captured(world, static_batch(world, buffers, "DECODE"), 3)
    idle = world.batch("IDLE", [])
    buffers.req_pool_indices.zero_()
    world.backend.init_forward_metadata_out_graph(replay_view(buffers, idle, world.batch("DECODE", []).forward_mode))
    graph.replay()
    assert not y.any()
    for row, slot in ROWS:
        world.check_slot(slot, row)


def prepared_draft_extend(world: World, rows: list[int]) -> Any:
    """SGLang's `prepare_for_draft_extend`, without a graph: it prepares metadata and does not know the counts yet."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.speculative.eagle_info import EagleDraftExtendInput
    from sglang.srt.speculative.eagle_worker_common import prepare_for_draft_extend

    lengths = torch.tensor([world.length(row) for row in rows])
    batch = Absent(forward_mode=ForwardMode.DECODE, seq_lens=lengths, seq_lens_cpu=lengths)
    batch.req_pool_indices = torch.tensor(rows)
    batch.model_config = SimpleNamespace(vocab_size=97)
    runner = Absent(attn_backend=world.backend, spec_algorithm=SimpleNamespace(is_standalone=lambda: False))

    def init_new(given: Any, *args: Any, **kwargs: Any) -> Any:
        """A forward batch of what was prepared; tables of tokens and positions, which no conv reads, are left out."""
        return ForwardBatch(
            forward_mode=given.forward_mode,
            batch_size=len(rows),
            input_ids=given.input_ids,
            req_pool_indices=given.req_pool_indices,
            seq_lens=given.seq_lens,
            seq_lens_cpu=given.seq_lens_cpu,
            out_cache_loc=given.input_ids,
            seq_lens_sum=int(given.seq_lens.sum()),
            extend_num_tokens=given.extend_num_tokens,
            extend_seq_lens=torch.tensor(given.extend_lens, dtype=torch.int32),
            extend_prefix_lens=torch.tensor(given.prefix_lens, dtype=torch.int32),
            spec_info=given.spec_info,
        )

    with mock.patch.object(ForwardBatch, "init_new", init_new):
        return prepare_for_draft_extend(
            EagleDraftExtendInput(num_tokens_per_req=DRAFTS),
            batch,
            torch.zeros(len(rows) * DRAFTS, dtype=torch.int64),
            DRAFTS,
            runner,
            None,
            return_hidden_states_before_norm=True,
        )


def test_an_eager_draft_extend_is_prepared_before_its_counts_are_known() -> None:
    world = admitted(World(None, draft_worker=True))
    batch = prepared_draft_extend(world, [2, 1])
    assert batch.spec_info.num_accept_tokens is None, "as SGLang leaves it"
    batch.spec_info.num_accept_tokens = torch.tensor([3, 1], dtype=torch.int32)
    drawn = world.forward(batch, [DRAFTS, DRAFTS])
    world.keep(2, drawn, 0, 3)
    world.keep(1, drawn, 1, 1)
    for row, slot in ROWS:
        world.check_slot(slot, row)
    assert world.worst <= BOUND


def test_counts_that_never_come_are_missed_by_name() -> None:
    from hwbackends.errors import MissingArgumentError

    world = admitted(World(None, draft_worker=True))
    batch = prepared_draft_extend(world, [2])
    with pytest.raises(MissingArgumentError, match="num_accept_tokens"):
        world.forward(batch, [DRAFTS])


def draft_runners(world: World, front: int) -> tuple[Any, Any]:
    """SGLang's multi-layer draft runner and the runner of its first step, with buffers of SGLang's own making."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.speculative.multi_layer_eagle_draft_extend_cuda_graph_runner import (
        MultiLayerEagleDraftExtendCudaGraphRunner as Step,
    )
    from sglang.srt.speculative.multi_layer_eagle_draft_extend_cuda_graph_runner import (
        MultiLayerEagleMultiStepDraftExtendCudaGraphRunner as Every,
    )

    config = SimpleNamespace(dtype=torch.float32, vocab_size=97, hf_config=SimpleNamespace(), hidden_size=8)
    runner = Absent(
        model_config=config,
        spec_algorithm=SimpleNamespace(is_standalone=lambda: False),
        kv_index_translator=SimpleNamespace(bind_runner_slots=lambda batch: None),
    )
    step, every = object.__new__(Step), object.__new__(Every)
    width = DRAFTS + front
    shared = {"max_bs": 3, "captured_req_width": width, "num_front_tokens": front, "seq_len_fill_value": 1}
    shared |= {"prune_draft_extend_logits": True, "require_gathered_buffer": False, "require_mlp_tp_gather": False}
    worker = SimpleNamespace(mtp_model_runner=lambda step: runner, draft_extend_attn_backend_list=[world.backend])
    vars(step).update(
        shared, step=0, model_runner=runner, eagle_worker=worker, attn_backend=world.backend, capture_bs=[3],
        forward_mode=ForwardMode.DRAFT_EXTEND_V2, extend_seq_lens_cpu=[width] * 3, require_attn_tp_gather=False,
        deepep_adapter=SimpleNamespace(replay=lambda: None), metadata_captured_in_graph=False,
    )  # fmt: skip
    vars(every).update(
        shared, runners=[step], device="cpu", eagle_worker=worker, speculative_num_steps=1, capture_bs=[3],
        draft_extend_attn_backend_list=[world.backend], _out_cache_loc_virtual=None, _kv_loc_plan=None,
        _kv_loc_cols=None,
    )  # fmt: skip
    with mock.patch(f"{Step.__module__}.get_draft_input_from_target_hidden_dim", return_value=8):
        every.buffers = step.buffers = every._allocate_buffers()
    return every, step


def capture_draft_extend(world: World, step: Any) -> tuple[CpuGraph, dict[Any, Any], dict[Any, Any]]:
    """The order of the runner's `capture_one_shape`, every conv of the model in the graph."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    world.backend.init_cuda_graph_state(3, 3 * step.captured_req_width)
    batch = step.get_forward_batch(3)
    tokens = 3 * step.captured_req_width
    xs = {key: torch.randn(tokens, world.model.dim(key), generator=world.generator) for key in world.convs}
    graph = CpuGraph()
    with forward_context(ForwardContext(attn_backend=world.backend)):
        world.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        with graph.capture():
            world.backend.init_forward_metadata_in_graph(batch)
            ys = {key: world.convs[key].forward(x, None, batch) for key, x in xs.items()}
    return graph, xs, ys


@pytest.mark.parametrize("front", [0, 5])
def test_the_multi_layer_draft_runner_captures_and_replays(front: int) -> None:
    """Wider than twice the drafts, and replayed from a view without `extend_num_tokens` whose tensors are longer than
    its batch."""
    from sglang.srt.runtime_context import get_exec

    chunk = 3 * (DRAFTS + 5)  # SGLang wants room for every token of a captured draft extend
    graphs = SimpleNamespace(
        decode=SimpleNamespace(bs=[3], max_bs=3), prefill=SimpleNamespace(bs=[chunk], max_bs=chunk, backend=None)
    )
    with get_exec().graph.override(cuda_graph_config=graphs):
        world = admitted(World(None, draft_worker=True))
        every, step = draft_runners(world, front)
        graph, xs, _ = capture_draft_extend(world, step)
    lengths = torch.tensor([world.length(2), world.length(1)])
    buffers = every.buffers
    every._stage_metadata(3, 2)
    buffers.req_pool_indices[:3] = torch.tensor([2, 1, 0])
    buffers.seq_lens[:3] = torch.tensor([*(lengths + DRAFTS), 1])
    buffers.num_accept_tokens[:3] = torch.tensor([front + 3, front + 1, -1])
    for x in xs.values():
        x.normal_(generator=world.generator)
    step._replay_graph = lambda key, view: graph.replay()
    step.bs = 3
    step.replay(
        3,
        None,
        step.get_forward_batch(3).spec_info,
        None,
        out_cache_loc_virtual=None,
        kv_loc_plan=None,
        kv_loc_cols=None,
    )
    for place, (row, slot, kept) in enumerate(((2, 7, front + 3), (1, 4, front + 1))):
        for key, x in xs.items():
            drawn = x[place * step.captured_req_width :][:kept].clone()
            before = torch.zeros(0, drawn.shape[1]) if front else world.inputs[row][key]
            rows = torch.cat([torch.zeros(3, drawn.shape[1]), before, drawn])[-3:]
            assert torch.equal(world.state(slot, key), rows), (row, key)
    world.check_slot(2, 3)


def test_a_draft_extend_whose_slots_are_staged_reads_no_map_in_its_graph() -> None:
    """SGLang's FlashAttention backends stage what a draft extend reads, so that the scheduler may go on meanwhile."""
    world = admitted(World(None, draft_worker=True))
    own = world.backend.short_conv_backend

    def gather(batch: Any) -> None:
        """SGLang's gather launches a Triton kernel; the same numbers in torch."""
        rows = batch.req_pool_indices[: batch.batch_size]
        own._cache_indices_buf[: len(rows)] = world.pool.req_index_to_mamba_index_mapping[rows]

    with (
        mock.patch.object(type(world.backend.full_attn_backend), "supports_draft_extend_metadata_staging", True),
        mock.patch.object(
            type(world.backend.full_attn_backend), "stage_draft_extend_metadata", mock.Mock(), create=True
        ),
        mock.patch.object(own, "_prepare_slot_indices", gather),
    ):
        assert world.backend.supports_draft_extend_metadata_staging
        _, step = draft_runners(world, 0)
        graph, xs, _ = capture_draft_extend(world, step)
        every, _ = draft_runners(world, 0)
        every.buffers = step.buffers
        step.buffers.req_pool_indices[:3] = torch.tensor([2, 1, 0])
        step.buffers.seq_lens[:3] = torch.tensor([world.length(2) + DRAFTS, world.length(1) + DRAFTS, 1])
        step.buffers.num_accept_tokens[:3] = torch.tensor([2, 1, -1])
        every._stage_metadata(3, 2)
        taken = world.pool.req_index_to_mamba_index_mapping.clone()
        world.pool.req_index_to_mamba_index_mapping[1:3] = 9  # the scheduler gives the rows to others
        for x in xs.values():
            x.normal_(generator=world.generator)
        graph.replay()
        world.pool.req_index_to_mamba_index_mapping.copy_(taken)
    for place, (row, kept) in enumerate(((2, 2), (1, 1))):
        for key, x in xs.items():
            world.inputs[row][key] = torch.cat([world.inputs[row][key], x[place * DRAFTS :][:kept].clone()])
    for row, slot in ROWS:
        world.check_slot(slot, row)
    assert all(world.state(9, key).isnan().all() for key in world.convs)


def test_rows_that_data_parallelism_adds_to_a_prepared_step_answer_zero() -> None:
    """`prepare_mlp_sync_batch` pads tokens after a step was prepared; its metadata is used as it is."""
    world = admitted(World(DRAFTS))
    batch = world.batch("DECODE", [2, 1])
    world.prepare(batch)
    answers = world.answers(batch, 4)
    assert all(not y[2:].any() for y in answers.values())


def test_breakable_prefill_graphs_are_refused_by_name() -> None:
    """They record convs over an eager step's extents; SGLang chooses full prefill graphs for Inkling."""
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.runtime_context import get_exec

    from hwbackends.errors import UnsupportedError

    phase = SimpleNamespace(bs=[3], max_bs=3, backend=Backend.BREAKABLE)
    graphs = SimpleNamespace(decode=SimpleNamespace(bs=[3], max_bs=3), prefill=phase)
    with (
        get_exec().graph.override(cuda_graph_config=graphs),
        pytest.raises(UnsupportedError, match="cuda_graph_backend_prefill"),
    ):
        World(DRAFTS)
