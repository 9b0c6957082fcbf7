"""SGLang's Inkling convs on a backend of hwbackends: every phase gives the answers of Transformers' math, and SGLang's
own pool holds exactly the right windows."""

from __future__ import annotations

import pytest
import torch
from world import BOUND, CHUNK, DRAFTS, TRACK_INTERVAL, World


@pytest.fixture
def world() -> World:
    """Three requests; request rows and slots never have the same number."""
    made = World(DRAFTS)
    for row, slot in ((1, 4), (2, 7), (3, 2)):
        made.admit(row, slot)
    return made


def test_sglang_itself_builds_the_backend_and_the_module(world: World) -> None:
    from sglang.srt.layers.attention.linear.inkling_sconv_backend import InklingShortConvHybridAttnBackend

    from hwbackends.engines.sglang.inkling import InklingConvStateBackend, InklingShortConvolution

    assert type(world.backend) is InklingShortConvHybridAttnBackend
    assert type(world.backend.short_conv_backend) is InklingConvStateBackend
    assert all(type(conv) is InklingShortConvolution for conv in world.convs.values())
    assert "forward" not in vars(InklingShortConvolution), "forward is SGLang's own"


def test_state_and_draft_rows_lie_in_sglangs_own_tensors(world: World) -> None:
    cache, pool = world.pool.mamba_pool.mamba_cache, world.backend.short_conv_backend.steps.pool
    for own, theirs in zip(pool.conv_streams.values(), cache.conv, strict=True):
        assert own.data_ptr() == theirs.data_ptr()
    for own, theirs in zip(pool.draft_rows.values(), cache.intermediate_conv_window, strict=True):
        assert own.data_ptr() == theirs.data_ptr()


def test_prefill_chunks_and_decodes_mix(world: World) -> None:
    world.extend([1, 2, 3], [5, 1, 2])
    world.extend([3, 1], [7, 1])
    world.decode([2, 1])
    world.extend([2, 3, 1], [0, 2, 3])
    world.decode([3, 2, 1])
    for row, slot in ((1, 4), (2, 7), (3, 2)):
        world.check_slot(slot, row)
    assert world.worst <= BOUND


def test_padded_rows_answer_zero_and_change_no_slot(world: World) -> None:
    world.extend([1, 2, 3], [5, 1, 2])
    for key in world.convs:
        world.state(0, key).fill_(-7.0)
    world.decode([2, 0, 1, 0])
    assert all((world.state(0, key) == -7.0).all() for key in world.convs)
    world.check_slot(7, 2)
    world.check_slot(2, 3)
    assert world.worst <= BOUND


def test_an_idle_step_changes_nothing(world: World) -> None:
    world.extend([1], [5])
    for rows in ([], [1], [0, 1]):  # a live request's row among those that SGLang pads an idle step with, too
        batch = world.batch("IDLE", rows)
        world.prepare(batch)
        outputs = world.answers(batch, len(rows))
        assert not any(y.any() for y in outputs.values())
        world.check_slot(4, 1)


def test_an_idle_step_without_rows_is_not_prepared_and_reads_nothing(world: World) -> None:
    """SGLang's eager runner prepares nothing for it; the step before is still the current one."""
    world.extend([1, 2], [5, 2])
    world.decode([1, 2])
    outputs = world.answers(world.batch("IDLE", []), 0)
    assert all(y.shape[0] == 0 for y in outputs.values())
    world.check_slot(4, 1)


def test_extend_snapshots_the_last_chunk_boundary(world: World) -> None:
    world.extend([1, 2], [2, 9])
    track = {
        "mamba_track_mask": torch.tensor([True, False, True]),
        "mamba_track_indices": torch.tensor([9, 10, 11]),
        "mamba_track_seqlens": torch.tensor([2 + 5, -1, 9 + 1 + CHUNK]),
    }
    world.extend([1, 3, 2], [5, 3, 7], **track)
    world.check_slot(9, 1, 2 + CHUNK)
    world.check_slot(11, 2, 9 + CHUNK)
    assert all(world.state(10, key).isnan().all() for key in world.convs), "a masked row writes nothing"
    assert world.worst <= BOUND


def test_decode_snapshots_where_the_mask_holds(world: World) -> None:
    world.extend([1, 2], [2, 9])
    world.decode([2, 1], mamba_track_mask=torch.tensor([True, False]), mamba_track_indices=torch.tensor([9, 10]))
    world.check_slot(9, 2)
    assert all(world.state(10, key).isnan().all() for key in world.convs)


@pytest.mark.parametrize("accepted", range(DRAFTS + 1))
def test_verify_then_another_forward_then_the_commit(world: World, accepted: int) -> None:
    """The later forward overwrites the step's buffers, slots included, before the commit asks for them."""
    world.extend([1, 2, 3], [5, 1, 2])
    drawn = world.verify([2, 1], DRAFTS)
    world.check_slot(7, 2)  # verify changed no slot
    world.check_slot(4, 1)
    world.decode([3, 0])
    world.extend([3], [2])
    world.commit([2, 1], [accepted - 1, DRAFTS - 1])
    world.keep(2, drawn, 0, accepted)
    world.keep(1, drawn, 1, DRAFTS)
    for row, slot in ((1, 4), (2, 7), (3, 2)):
        world.check_slot(slot, row)
    world.decode([3, 1, 2])
    assert world.worst <= BOUND


def test_the_commit_takes_its_slots_from_the_request_rows(world: World) -> None:
    """Of a fusable pool too, where SGLang reads the step's slot buffer, which names another request's slot by then."""
    assert world.pool.mamba_translate_is_fusable
    world.extend([1, 3], [5, 2])
    drawn = world.verify([1], DRAFTS)
    world.decode([3])
    world.commit([1], [1])
    world.keep(1, drawn, 0, 2)
    world.check_slot(4, 1)
    world.check_slot(2, 3)


def test_a_repeated_commit_gives_the_same_state(world: World) -> None:
    world.extend([1], [5])
    drawn = world.verify([1], DRAFTS)
    world.commit([1], [1])
    world.commit([1], [1])
    world.keep(1, drawn, 0, 2)
    world.check_slot(4, 1)


def test_the_commit_snapshots_for_the_prefix_cache(world: World) -> None:
    world.extend([1, 2], [5, 3])
    drawn = world.verify([1, 2], DRAFTS)
    world.commit([1, 2], [2, 1], track=torch.tensor([9, 10]), steps=torch.tensor([1, -1]))
    world.keep(1, drawn, 0, 3)
    world.keep(2, drawn, 1, 2)
    world.check_slot(9, 1, 5 + 2)
    world.check_slot(4, 1)
    world.check_slot(7, 2)
    assert all(world.state(10, key).isnan().all() for key in world.convs)


def draft_extend(world: World, rows: list[int], accepted: list[int], **fields: object) -> None:
    """Draft extend as SGLang's draft runner does it; a negative count is a padded row."""
    from sglang.srt.speculative.eagle_info import EagleDraftExtendInput

    spec = EagleDraftExtendInput(num_accept_tokens=torch.tensor(accepted, dtype=torch.int32))
    lengths = torch.tensor([world.length(row) + DRAFTS for row in rows])
    batch = world.batch(
        "DRAFT_EXTEND_V2",
        rows,
        spec_info=spec,
        seq_lens=lengths,
        extend_num_tokens=len(rows) * DRAFTS,
        extend_seq_lens=torch.full((len(rows),), DRAFTS, dtype=torch.int32),
        **fields,
    )
    world.prepare(batch)
    kept = dict(world.inputs)
    padded = [row for row, count in zip(rows, accepted, strict=True) if count < 0]
    for row in padded:
        del world.inputs[row]  # its answers are 0 as for any padded row
    drawn = world.forward(batch, [DRAFTS] * len(rows))
    world.inputs = kept
    for place, (row, count) in enumerate(zip(rows, accepted, strict=True)):
        if count > 0:
            world.keep(row, drawn, place, count)


def test_draft_extend_keeps_the_accepted_tokens() -> None:
    world = World(None, draft_worker=True)
    for row, slot in ((1, 4), (2, 7), (3, 2)):
        world.admit(row, slot)
    world.extend([1, 2, 3], [5, 1, 2])
    draft_extend(world, [2, 3, 1], [3, 1, -1])
    for row, slot in ((1, 4), (2, 7), (3, 2)):
        world.check_slot(slot, row)
    world.decode([1, 2, 3])
    assert world.worst <= BOUND


def test_draft_extend_snapshots_the_interval_that_the_accepted_tokens_cross() -> None:
    from sglang.srt.runtime_context import get_exec

    with get_exec().mamba.override(enable_mamba_extra_buffer=True):
        world = World(None, draft_worker=True)
    for row, slot in ((1, 4), (2, 7)):
        world.admit(row, slot)
    world.extend([1, 2], [2, 5])
    draft_extend(world, [1, 2], [3, 2], mamba_track_indices=torch.tensor([9, 10]))
    world.check_slot(9, 1, TRACK_INTERVAL)
    assert all(world.state(10, key).isnan().all() for key in world.convs), "5 + 2 tokens cross no boundary"
    assert world.worst <= BOUND


def test_the_fused_kernels_that_pass_by_the_module_are_off(world: World) -> None:
    from sglang.srt.environ import envs

    from hwbackends.engines.sglang.inkling import FUSED_SWITCHES
    from hwbackends.errors import UnsupportedError

    assert not any(getattr(envs, switch).get() for switch in FUSED_SWITCHES)
    with pytest.raises(UnsupportedError, match="FUSED_ATTN_PROLOGUE"):
        world.convs[0, 0].decode_fused_ar_inputs(None)


def test_a_translation_in_python_serves_every_phase() -> None:
    """A pool whose virtual slots only its own code can translate."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    physical = torch.tensor([0, 3, 5, 8, 1, 2, 4, 6, 7, 9, 10, 11])

    def translate(self: HybridReqToTokenPool, slots: torch.Tensor) -> torch.Tensor:
        return physical[slots.long()].int()

    world = World(DRAFTS, pool_class=type("Own", (HybridReqToTokenPool,), {"translate_mamba_indices": translate}))
    assert not world.pool.mamba_translate_is_fusable
    world.admit(1, 4)
    world.admit(2, 7)
    world.extend([1, 2], [5, 2])
    drawn = world.verify([2, 1], DRAFTS)
    world.decode([0])
    world.commit([2, 1], [0, 1])
    world.keep(2, drawn, 0, 1)
    world.keep(1, drawn, 1, 2)
    world.check_slot(int(physical[4]), 1)
    world.check_slot(int(physical[7]), 2)
    assert world.worst <= BOUND


def test_a_table_with_a_stable_address_is_read_in_the_recorded_launch() -> None:
    """SGLang's unified pool: virtual slots, a table, and compaction that moves slots between steps."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    table = torch.tensor([0, 3, 5, 8, 1, 2, 4, 6, 7, 9, 10, 11])
    methods = {
        "mamba_v2p_table": property(lambda self: table),
        "translate_mamba_indices": lambda self, slots: table[slots],
    }
    world = World(DRAFTS, pool_class=type("Unified", (HybridReqToTokenPool,), methods))
    world.admit(1, 4)
    world.extend([1], [5])
    world.check_slot(1, 1)
    drawn = world.verify([1], DRAFTS)
    for state in world.pool.mamba_pool.mamba_cache.conv:  # compaction moves the slot before the commit
        state[:, 8].copy_(state[:, 1])
    table[4] = 8
    world.commit([1], [1])
    world.keep(1, drawn, 0, 2)
    world.check_slot(8, 1)
    world.decode([1])
    world.check_slot(8, 1)
    assert world.worst <= BOUND


def test_a_captured_decode_replays_over_buffers_that_stay(world: World) -> None:
    """SGLang's out-graph and in-graph hooks; hwbackends' recorder stands in for a CUDA graph."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    from hwbackends.step.batch import ForwardMode
    from hwbackends.testing.recorder import CpuGraph

    world.extend([1, 2, 3], [5, 1, 2])
    steps = world.backend.short_conv_backend.steps
    static = world.batch("DECODE", [0, 0, 0])
    x = torch.randn(3, world.model.dim((1, 4)), generator=world.generator)
    world.backend.init_forward_metadata_out_graph(static, in_capture=True)
    graph = CpuGraph()
    with graph.capture(), forward_context(ForwardContext(attn_backend=world.backend)):
        world.backend.init_forward_metadata_in_graph(static)
        y = world.convs[1, 4].forward(x, None, static)
    held = steps.sidecar(ForwardMode.DECODE, graph=True).addresses()
    for rows in ([2, 0, 1], [3, 2, 0]):
        before = {row: world.window(row, (1, 4)) for row in rows if row}
        static.req_pool_indices.copy_(torch.tensor(rows))
        x.copy_(torch.randn(x.shape, generator=world.generator))
        world.backend.init_forward_metadata_out_graph(static)
        graph.replay()
        for place, row in enumerate(rows):
            if row == 0:
                assert not y[place].any()
                continue
            with torch.no_grad():
                whole = torch.cat([before[row], x[place : place + 1]])
                right = world.model.stock[1, 4](whole[None])[0, -1]
            assert (y[place] - right).abs().max() <= BOUND * right.abs().max()
            world.inputs[row][1, 4] = torch.cat([world.inputs[row][1, 4], x[place : place + 1].clone()])
    assert steps.sidecar(ForwardMode.DECODE, graph=True).addresses() == held
    for row, slot in ((1, 4), (2, 7), (3, 2)):
        assert torch.equal(world.state(slot, (1, 4)), world.window(row, (1, 4)))
