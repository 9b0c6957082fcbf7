"""Once per step, pure reads, limits, growth, several parts, commit: what the sidecar promises without graphs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hwbackends import load
from hwbackends.conv.layouts import Layout
from hwbackends.errors import (
    ArgumentError,
    GraphError,
    GraphLimitError,
    HookNotImplementedError,
    MissingArgumentError,
    ShapeError,
    TreeDraftsError,
)
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.handle import HostMirrors
from hwbackends.step.pool import PoolParts
from hwbackends.step.sidecar import ConvStateSidecar
from hwbackends.testing.guards import frozen_addresses, no_alloc, no_sync
from tests.step.sidecar_cases import (
    BATCH,
    DIM,
    DRAFTS,
    LAYERS,
    ROWS,
    SLOT_OF_ROW,
    TOKENS,
    CountingBackend,
    StaticInputs,
    decode,
    devices,
    extend,
    inputs,
    layouts,
    make_pool,
    make_sidecar,
    same,
    state_of,
    verify,
)


def steps() -> list[StepBatch]:
    """One step of each phase."""
    static = StaticInputs()
    static.fill(ROWS[:3], [7, 8, 9])
    draft_extend = static.step(ForwardMode.DRAFT_EXTEND)
    idle = StepBatch(ForwardMode.IDLE, torch.tensor([5, 3]), 0, 2, seq_lens=torch.tensor([4, 4]))
    return [decode(ROWS[:3]), idle, extend([5, 3], [4, 1], [0, 6]), verify([3, 8]), draft_extend]


phases = pytest.mark.parametrize("batch", steps(), ids=lambda batch: batch.forward_mode.value)


@phases
def test_metadata_is_resolved_once_however_many_modules_ask(batch: StepBatch) -> None:
    backend = CountingBackend()
    sidecar = make_sidecar(make_pool(), backend)
    sidecar.init_forward_metadata(batch)
    handles = [sidecar.conv_state_metadata(layer) for layer in LAYERS for _module in "kvam"]
    assert sum(count for name, count in backend.calls.items() if name.startswith("prepare")) == 1
    assert (sidecar.resolutions, sidecar.reads) == (1, 8)
    assert all(handle.metadata is handles[0].metadata for handle in handles)


def test_asking_is_a_pure_read_that_returns_the_same_object() -> None:
    sidecar = make_sidecar(make_pool())
    sidecar.init_forward_metadata(decode([5, 3, 8]))
    first = sidecar.conv_state_metadata(6)
    with no_sync(), no_alloc(temporaries=False):
        assert sidecar.conv_state_metadata(6) is first
    sidecar.init_forward_metadata(decode([3, 8]))
    assert sidecar.conv_state_metadata(6) is not first
    sidecar.init_forward_metadata(decode([8, 0, 12]))
    assert sidecar.conv_state_metadata(6) is first, "the same extents are the same view"


@layouts
@phases
def test_preparing_twice_changes_no_state_and_gives_the_same_tensors(batch: StepBatch, layout: Layout) -> None:
    pool = make_pool(layout)
    for tensor in pool.storages():
        tensor[:, 3].fill_(float("nan"))
    sidecar = make_sidecar(pool)
    before = state_of(pool)
    sidecar.init_forward_metadata(batch)
    first = {name: tensor.clone() for name, tensor in sidecar.conv_state_metadata(2).metadata.tensors().items()}
    sidecar.init_forward_metadata(batch)
    second = sidecar.conv_state_metadata(2).metadata.tensors()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert same(before, state_of(pool))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_the_index_dtype_of_kernels_is_an_option(index_dtype: torch.dtype) -> None:
    sidecar = make_sidecar(make_pool(), index_dtype=index_dtype)
    sidecar.init_forward_metadata(decode([5, 3, -1]))
    metadata = sidecar.conv_state_metadata(2).metadata
    dtypes = {metadata.cache_indices.dtype, metadata.source_indices.dtype, metadata.mamba_track_indices.dtype}
    assert dtypes == {index_dtype}
    assert metadata.cache_indices.tolist() == [1, 2, -1]


@devices
@layouts
@phases
def test_preparing_neither_synchronises_nor_leaves_an_allocation(batch: StepBatch, layout: Layout, device: str) -> None:
    sidecar = make_sidecar(make_pool(layout, device))
    moved = on_device(batch, device)
    sidecar.init_forward_metadata(moved)
    with no_sync(), no_alloc():
        sidecar.init_forward_metadata(moved)


def on_device(batch: StepBatch, device: str) -> StepBatch:
    values = {name: getattr(batch, name) for name in StepBatch.__dataclass_fields__}
    return StepBatch(**{n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in values.items()})


@layouts
def test_a_handle_runs_the_conv_of_the_steps_phase(layout: Layout) -> None:
    for batch in steps():
        backend, plain = CountingBackend(), load("reference")
        pool, twin = make_pool(layout), make_pool(layout)
        sidecar = make_sidecar(pool, backend)
        sidecar.init_forward_metadata(batch)
        handle = sidecar.conv_state_metadata(6)
        x, weight = inputs(batch.num_tokens)
        got = handle.conv("k", x, weight, torch.ones(DIM), "silu", True)
        mode = "decode" if batch.forward_mode is ForwardMode.IDLE else batch.forward_mode.value
        conv = getattr(plain, f"conv_{mode}")
        wanted = conv(x, weight, torch.ones(DIM), twin.conv_state("k", 6), handle.metadata, "silu", True)
        assert backend.calls[f"conv_{mode}"] == 1
        assert torch.equal(got, wanted)
        assert same(state_of(pool), state_of(twin))


def test_neighbouring_streams_run_as_one_conv_into_a_given_output() -> None:
    pool, twin = make_pool(), make_pool()
    sidecar, apart = make_sidecar(pool), make_sidecar(twin)
    batch = decode([5, 3, 8])
    x, weight = inputs(3, DIM + DIM + 2)
    for each in (sidecar, apart):
        each.init_forward_metadata(batch)
    out = torch.full((3, 12), float("nan"))
    handle = sidecar.conv_state_metadata(2)
    assert handle.conv(("k", "v"), x, weight, out=out) is out
    assert handle.state(("k", "v")) is handle.state(("k", "v"))
    k = apart.conv_state_metadata(2).conv("k", x[:, :5], weight[:5])
    v = apart.conv_state_metadata(2).conv("v", x[:, 5:], weight[5:])
    assert torch.equal(out, torch.cat([k, v], dim=1))
    assert same(state_of(pool), state_of(twin))


@pytest.mark.parametrize("batch", [decode([5, 3, -1]), verify([8, 0])], ids=lambda batch: batch.forward_mode.value)
def test_the_fused_epilogue_is_that_of_the_phase(batch: StepBatch) -> None:
    pool, twin, plain = make_pool(), make_pool(), load("reference")
    sidecar = make_sidecar(pool)
    sidecar.init_forward_metadata(batch)
    handle = sidecar.conv_state_metadata(2)
    x, weight = inputs(batch.num_tokens)
    stream, other = x * 3, x * 3
    got = handle.fused("k", x, weight, None, stream, torch.ones(DIM), 1e-6)
    hook = getattr(plain, f"fused_{batch.forward_mode.value}_add_rmsnorm")
    wanted = hook(x, weight, None, twin.conv_state("k", 2), handle.metadata, other, torch.ones(DIM), 1e-6)
    assert torch.equal(got, wanted)
    assert torch.equal(stream, other)


def test_a_phase_or_backend_without_the_fused_hook_says_so() -> None:
    bare = CountingBackend()
    hooks = {name: getattr(bare, name) for name in load("reference").hook_origins if not name.startswith("fused")}
    for backend, batch in [(SimpleNamespace(**hooks), decode([5])), (bare, extend([5], [3], [0]))]:
        sidecar = make_sidecar(make_pool(), backend)
        sidecar.init_forward_metadata(batch)
        x, weight = inputs(batch.num_tokens)
        with pytest.raises(HookNotImplementedError, match="fused"):
            sidecar.conv_state_metadata(2).fused("k", x, weight, None, x, torch.ones(DIM), 1e-6)


def test_a_backend_that_lacks_a_hook_is_refused_at_construction() -> None:
    with pytest.raises(HookNotImplementedError, match="prepare_decode_metadata"):
        make_sidecar(make_pool(), SimpleNamespace())


def test_asking_before_any_step_or_for_an_unknown_layer_is_an_error() -> None:
    sidecar = make_sidecar(make_pool())
    with pytest.raises(GraphError, match="no step is prepared"):
        sidecar.conv_state_metadata(2)
    sidecar.init_forward_metadata(decode([5]))
    with pytest.raises(ArgumentError, match="layer_id"):
        sidecar.conv_state_metadata(3)


@pytest.mark.parametrize(("rows", "got"), [(None, "NoneType"), ([5], "list")])
def test_request_rows_that_are_no_tensor_are_named(rows: list[int] | None, got: str) -> None:
    with pytest.raises(ArgumentError, match=rf"StepBatch: req_pool_indices: got {got}, wanted a tensor \[B\]"):
        make_sidecar(make_pool()).init_forward_metadata(replace(decode([5]), req_pool_indices=rows))


def test_a_negative_number_of_tokens_is_named() -> None:
    with pytest.raises(ShapeError, match=r"prepare_extend_metadata: batch.num_tokens: got -1, wanted the step's rows"):
        make_sidecar(make_pool()).init_forward_metadata(replace(extend([5], [7], [0]), num_tokens=-1))


@pytest.mark.parametrize(
    "prepare", ["init_forward_metadata", "init_forward_metadata_out_graph", "init_forward_metadata_in_graph"]
)
def test_tree_drafts_are_refused_by_name_before_anything_is_launched(prepare: str) -> None:
    backend = CountingBackend()
    sidecar = make_sidecar(make_pool(), backend)
    with pytest.raises(TreeDraftsError, match="topk: got 4"):
        getattr(sidecar, prepare)(verify([5], topk=4))
    assert not backend.calls


def test_graph_limits_are_the_constructors_and_fail_at_init_graph_state() -> None:
    sidecar = make_sidecar(make_pool())
    with frozen_addresses(sidecar), no_alloc(temporaries=False):
        sidecar.init_graph_state(BATCH, TOKENS, DRAFTS)
        for beyond in [(BATCH + 1, TOKENS, DRAFTS), (BATCH, TOKENS + 1, DRAFTS), (BATCH, TOKENS, DRAFTS + 1)]:
            with pytest.raises(GraphLimitError, match="construct the sidecar with"):
                sidecar.init_graph_state(*beyond)


def test_limits_cover_the_tokens_of_a_full_verify_step() -> None:
    sidecar = make_sidecar(make_pool(), max_tokens=7)
    sidecar.init_graph_state(BATCH, BATCH * DRAFTS, DRAFTS)


@pytest.mark.parametrize("name", ["max_batch", "max_tokens", "draft_tokens"])
def test_a_limit_below_one_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name}: got 0"):
        make_sidecar(make_pool(), **{name: 0})


@layouts
def test_more_drafts_than_the_pool_has_rows_for_are_refused_at_construction(layout: Layout) -> None:
    with pytest.raises(GraphLimitError, match="draft_tokens: got 4"):
        make_sidecar(make_pool(layout), draft_tokens=DRAFTS + 1)
    make_sidecar(make_pool("ring", ring_rows=9), draft_tokens=6)


def test_larger_eager_steps_grow_the_buffers_until_a_graph_holds_them() -> None:
    sidecar = make_sidecar(make_pool())
    sidecar.init_forward_metadata(extend([5, 3, 8], [20, 1, 20], [0, 0, 0]))
    assert sidecar.conv_state_metadata(2).metadata.seq_idx.shape == (41,)
    sidecar.init_forward_metadata(decode([5, 3, 8, 0, 12, -1, -1]))
    static = StaticInputs()
    sidecar.init_forward_metadata_in_graph(static.step(ForwardMode.DECODE))
    with frozen_addresses(sidecar):
        sidecar.init_forward_metadata(extend([5, 3, 8], [20, 1, 20], [0, 0, 0]))
        for batch in [extend([5, 3], [40, 2], [0, 0]), decode([-1] * 8)]:
            with pytest.raises(GraphLimitError, match="a captured graph holds the buffers"):
                sidecar.init_forward_metadata(batch)


def test_growing_does_not_raise_the_graph_limits() -> None:
    sidecar = make_sidecar(make_pool())
    sidecar.init_forward_metadata(extend([5], [TOKENS + 8], [0]))
    with pytest.raises(GraphLimitError):
        sidecar.init_graph_state(BATCH, TOKENS + 8, DRAFTS)


def test_more_drafts_in_a_captured_step_than_the_limits_are_refused() -> None:
    sidecar = make_sidecar(make_pool(), draft_tokens=2)
    with pytest.raises(GraphLimitError, match="draft_token_num: got 3"):
        sidecar.init_forward_metadata_in_graph(verify([5]))


def test_ever_new_extents_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hwbackends.step.metadata.KEPT_VIEWS", 7)
    sidecar = make_sidecar(make_pool())
    for tokens in range(1, 30):
        sidecar.init_forward_metadata(extend([5], [tokens], [0]))
    assert len(sidecar._buffers._views) <= 7
    assert sidecar.conv_state_metadata(2).metadata.num_tokens == 29


def two_parts() -> tuple[PoolParts, ConvStateSidecar, ConvStateSidecar]:
    target = make_pool("window")
    draft = make_pool("ring", mamba_index_mapping=target.mamba_index_mapping)
    parts = PoolParts({"target": target, "draft": draft})
    return parts, make_sidecar(parts), make_sidecar(parts, part="draft")


def test_parts_share_the_map_and_keep_their_own_lengths_and_state() -> None:
    parts, target, draft = two_parts()
    before = state_of(parts["target"])
    target.init_forward_metadata(decode([5, 3], [9, 8]))
    draft.init_forward_metadata(decode([5, 3], [4, 3]))
    ours, theirs = target.conv_state_metadata(2), draft.conv_state_metadata(2)
    assert ours.metadata.computed_lens.tolist() == [8, 7]
    assert theirs.metadata.computed_lens.tolist() == [3, 2]
    assert torch.equal(ours.metadata.cache_indices, theirs.metadata.cache_indices)
    theirs.conv("k", *inputs(2))
    assert same(before, state_of(parts["target"]))


def test_clear_and_copy_reach_every_part() -> None:
    parts, target, _ = two_parts()
    target.clear_slots(torch.tensor([4, 1]))
    target.copy_slots(torch.tensor([2]), torch.tensor([9]))
    for pool in parts:
        for stream in pool.conv_streams.values():
            assert not stream[:, [4, 1]].any()
            assert torch.equal(stream[:, 9], stream[:, 2])
            assert stream[:, 2].any()


def test_an_unknown_part_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(ArgumentError, match="one of target, draft"):
        make_sidecar(two_parts()[0], part="mtp")


@layouts
@pytest.mark.parametrize("late", [False, True], ids=["commit-now", "commit-after-another-step"])
def test_a_commit_finds_slots_by_request_row_not_by_the_last_steps_metadata(layout: Layout, late: bool) -> None:
    pool, twin, plain = make_pool(layout, ssm_shape=(3,)), make_pool(layout, ssm_shape=(3,)), load("reference")
    for each in (pool, twin):
        assert each.intermediate_ssm is not None
        each.intermediate_ssm.copy_(torch.arange(each.intermediate_ssm.numel()).reshape(each.intermediate_ssm.shape))
    sidecar, other = make_sidecar(pool), make_sidecar(twin)
    for each in (sidecar, other):
        each.init_forward_metadata(verify([5, 3, 12]))
        each.conv_state_metadata(6).conv("k", *inputs(9))
    if late:
        sidecar.init_forward_metadata(decode([8]))
    rows, last = torch.tensor([5, 3, 12]), torch.tensor([1, -1, 2])
    sidecar.update_mamba_state_after_mtp_verify(rows, last)
    plain.update_mamba_state_after_mtp_verify(twin, rows, last)
    assert same(state_of(pool), state_of(twin))
    assert pool.ssm_state is not None
    assert pool.ssm_state[0, SLOT_OF_ROW[5]].any(), "the commit wrote the slots of its rows"
    assert not pool.ssm_state[0, SLOT_OF_ROW[3]].any(), "a rejected row keeps its state"


def test_a_commit_without_its_request_rows_is_refused_by_name_and_changes_nothing() -> None:
    pool = make_pool()
    sidecar = make_sidecar(pool)
    before = state_of(pool)
    with pytest.raises(MissingArgumentError, match="req_pool_indices"):
        sidecar.update_mamba_state_after_mtp_verify(last_correct_step_indices=torch.tensor([1]))
    with pytest.raises(MissingArgumentError, match="last_correct_step_indices"):
        sidecar.update_mamba_state_after_mtp_verify(torch.tensor([5]))
    assert same(before, state_of(pool))


def test_host_mirrors_are_there_in_extend_steps_of_a_sidecar_that_asked_for_them() -> None:
    sidecar = make_sidecar(make_pool(), host_mirrors=True)
    sidecar.init_forward_metadata(extend([5, -1, 3], [4, 0, 1], [0, 0, 6]))
    assert sidecar.conv_state_metadata(2).host_mirrors == HostMirrors([1, -1, 2], [False, False, True])
    sidecar.init_forward_metadata(extend([8, -1, 12], [1, 0, 4], [6, 0, 0]))
    assert sidecar.conv_state_metadata(2).host_mirrors == HostMirrors([4, -1, 10], [True, False, False])
    sidecar.init_forward_metadata(decode([5, -1, 3]))
    assert sidecar.conv_state_metadata(2).host_mirrors is None
    without = make_sidecar(make_pool())
    without.init_forward_metadata(extend([5], [4], [0]))
    assert without.conv_state_metadata(2).host_mirrors is None


def test_checked_mode_notices_a_tensor_that_moved_after_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWBACKENDS_CHECKED", "1")
    pool = make_pool()
    sidecar = make_sidecar(pool)
    batch = StaticInputs().step(ForwardMode.DECODE)
    sidecar.init_forward_metadata_out_graph(batch, in_capture=True)
    sidecar.init_forward_metadata_in_graph(batch)
    sidecar.init_forward_metadata_out_graph(batch)
    pool.mamba_index_mapping = pool.mamba_index_mapping.clone()
    with pytest.raises(GraphError, match=r"address moved after a capture: target\.mamba_index_mapping"):
        sidecar.init_forward_metadata_out_graph(batch)
