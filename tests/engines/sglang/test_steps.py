"""SGLang's pool and batches as hwbackends sees them, with stand-ins that have SGLang's field names and no SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hwbackends.engines.sglang.batches import Batches, fit, forward_mode
from hwbackends.engines.sglang.pools import as_draft_rows, as_rows, wrap_pool
from hwbackends.engines.sglang.steps import Limits, Steps
from hwbackends.errors import (
    GraphError,
    GraphLimitError,
    MissingArgumentError,
    ShapeError,
    TreeDraftsError,
    UnsupportedError,
)
from hwbackends.registry.loading import load
from hwbackends.step.batch import ForwardMode

S, D, N, ROWS, SLOTS, LAYERS = 3, 5, 4, 6, 11, 2


class Mode:
    """One of SGLang's forward modes, asked as SGLang asks."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, question: str) -> Any:
        return lambda: question == f"is_{self.name}"


MODES = {name: Mode(name) for name in ("idle", "decode", "target_verify", "draft_extend_v2", "extend", "prebuilt")}


class MambaPool:
    """SGLang's state pool."""

    def __init__(self, drafts: int = N, transposed: bool = False) -> None:
        conv = torch.zeros(LAYERS, SLOTS, D, S) if transposed else torch.zeros(LAYERS, SLOTS, S, D)
        self.mamba_cache = SimpleNamespace(conv=[conv])
        if drafts:
            windows = torch.zeros(LAYERS, ROWS, drafts, *conv.shape[2:])
            self.mamba_cache.intermediate_conv_window = [windows]


def pool_of(mamba_pool: MambaPool, **fields: Any) -> SimpleNamespace:
    """SGLang's request pool: request row 1 has slot 4, row 2 slot 7."""
    given: dict[str, Any] = {
        "mamba_pool": mamba_pool,
        "mamba_map": {3: 1, 0: 0},
        "req_index_to_mamba_index_mapping": torch.tensor([0, 4, 7, 0, 0, 0], dtype=torch.int32),
        "mamba_v2p_table": None,
        "mamba_translate_is_fusable": True,
        **fields,
    }
    return SimpleNamespace(**given)


BATCHES = Batches(torch.device("cpu"), 3, 1, tracks_drafts=True)


def steps_of(pool: SimpleNamespace, **options: Any) -> Steps:
    wrapped = wrap_pool(pool, ("conv",), S, (D,), True, 4)
    return Steps(load("reference"), pool, wrapped, Limits(3, 12, N), **options)


def batch(mode: str, rows: list[int], **fields: Any) -> SimpleNamespace:
    """SGLang's ForwardBatch as far as it is read."""
    empty = ("mamba_track_mask", "mamba_track_indices", "mamba_track_seqlens", "extend_prefix_lens", "seq_lens")
    given = {
        **dict.fromkeys(empty),
        "forward_mode": MODES[mode],
        "logical_forward_mode": MODES[mode],
        "batch_size": len(rows),
        "req_pool_indices": torch.tensor(rows, dtype=torch.int64),
        **fields,
    }
    return SimpleNamespace(**given)


def draft_input(counts: list[int] | None, front: int = 0, width: int = -1) -> SimpleNamespace:
    """SGLang's EagleDraftExtendInput as far as it is read."""
    tensor = None if counts is None else torch.tensor(counts)
    return SimpleNamespace(num_accept_tokens=tensor, num_front_tokens=front, num_tokens_per_req=width)


def test_both_orientations_and_spare_rows_are_views() -> None:
    for shape in ((LAYERS, SLOTS, S, D), (LAYERS, SLOTS, D, S), (LAYERS, SLOTS, S + 2, D)):
        tensor = torch.zeros(shape)
        rows = as_rows(tensor, S, D)
        assert rows.shape == (LAYERS, SLOTS, S, D)
        assert rows.data_ptr() == tensor.data_ptr()


def test_a_pool_of_another_width_is_refused() -> None:
    with pytest.raises(ShapeError, match="transpose"):
        as_rows(torch.zeros(LAYERS, SLOTS, D + 1, S), S, D)


def test_draft_rows_use_sglangs_window_buffer_where_it_is_large_enough() -> None:
    windows = torch.zeros(LAYERS, ROWS, N, S, D)
    rows = as_draft_rows(windows, ROWS, S + N, D)
    assert rows is not None
    assert rows.shape == (LAYERS, ROWS, S + N, D)
    assert rows.data_ptr() == windows.data_ptr()
    rows[1, 2] = 1.0
    assert windows[1, 2].sum() == (S + N) * D, "a request's rows stay in its part of the buffer"


@pytest.mark.parametrize(
    "windows",
    [
        None,
        torch.zeros(LAYERS, ROWS - 1, N, S, D),
        torch.zeros(LAYERS, ROWS, 1, S, D),
        torch.zeros(LAYERS, ROWS, N, S, 2 * D)[..., :D],
    ],
    ids=["none", "too few requests", "too few rows", "strided"],
)
def test_draft_rows_are_made_where_the_buffer_does_not_fit(windows: Tensor | None) -> None:
    assert as_draft_rows(windows, ROWS, S + N, D) is None


def test_one_wrapped_pool_serves_every_backend_over_it() -> None:
    pool = pool_of(MambaPool(drafts=1))
    first = wrap_pool(pool, ("conv",), S, (D,), True, 4)
    assert wrap_pool(pool, ("conv",), S, (D,), True, 4) is first
    assert first.draft_rows["conv"].shape == (LAYERS, ROWS, S + 1, D), "made: one window is smaller than S + 1 rows"
    assert first.layer_ids == (0, 3)


def test_a_draft_models_pool_has_no_draft_rows() -> None:
    assert not wrap_pool(pool_of(MambaPool()), ("conv",), S, (D,), False, 4).draft_rows
    assert not wrap_pool(pool_of(MambaPool(drafts=0)), ("conv",), S, (D,), True, 4).draft_rows


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("idle", ForwardMode.IDLE),
        ("decode", ForwardMode.DECODE),
        ("target_verify", ForwardMode.TARGET_VERIFY),
        ("draft_extend_v2", ForwardMode.DRAFT_EXTEND),
        ("extend", ForwardMode.EXTEND),
    ],
)
def test_each_forward_mode_has_its_phase(mode: str, expected: ForwardMode) -> None:
    assert forward_mode(Mode(mode)) is expected


def test_a_mode_without_convs_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="forward_mode"):
        forward_mode(Mode("prebuilt"))


def test_rows_are_cut_or_padded_to_the_batch() -> None:
    given = torch.tensor([3, 1])
    assert fit(None, 3, 0) is None
    assert fit(given, 2, 0) is given
    assert fit(given, 1, 0).tolist() == [3]  # type: ignore[union-attr]
    assert fit(given, 3, -1).tolist() == [3, 1, -1]  # type: ignore[union-attr]


def test_a_capture_batch_without_prefix_lengths_starts_from_nothing() -> None:
    lengths = {"extend_seq_lens": torch.tensor([2, 3]), "seq_lens": torch.tensor([2, 9])}
    step = BATCHES.step_batch(batch("extend", [1, 2], extend_num_tokens=5, **lengths))
    assert step.extend_prefix_lens is not None
    assert step.extend_prefix_lens.tolist() == [0, 6]
    assert (step.num_tokens, step.mamba_track_mask) == (5, None)


def test_a_larger_eager_step_gets_constants_of_its_own() -> None:
    fields = {"extend_num_tokens": 10, "seq_lens": torch.full((5,), 20)}
    step = BATCHES.step_batch(batch("draft_extend_v2", [1, 2, 0, 0, 0], spec_info=draft_input(None, front=1), **fields))
    assert step.has_initial_state is not None
    assert step.has_initial_state.tolist() == [False] * 5


def test_rows_behind_the_batch_are_no_requests() -> None:
    """The buffers of a draft runner are longer than its batch."""
    step = BATCHES.step_batch(batch("decode", [1, 2, 3, 4], batch_size=2))
    assert step.req_pool_indices.tolist() == [1, 2]


def test_an_idle_step_has_no_live_row() -> None:
    step = BATCHES.step_batch(batch("idle", [0, 1]))
    assert (step.padded_reqs, step.num_reqs) == (2, 0)


def test_a_decode_that_is_labelled_an_extend_is_prepared_as_a_decode() -> None:
    """Data parallelism: every rank presents one shape, and the tokens are padded to it."""
    track = {"mamba_track_mask": torch.tensor([True, False]), "mamba_track_indices": torch.tensor([9, 10])}
    fields = {
        "extend_num_tokens": 2,
        "extend_seq_lens": torch.ones(2).int(),
        "extend_prefix_lens": torch.tensor([4, 7]),
    }
    given = batch("extend", [1, 2], logical_forward_mode=MODES["decode"], **fields, **track)
    step = BATCHES.step_batch(given)
    assert (step.forward_mode, step.num_tokens) == (ForwardMode.DECODE, 2)
    assert step.mamba_track_mask is not None


def test_padded_requests_do_not_change_the_tokens_of_each() -> None:
    """Data parallelism pads a draft extend's requests and leaves extend_num_tokens."""
    fields = {"extend_num_tokens": 2 * N, "seq_lens": torch.tensor([20, 30, 1, 1])}
    step = BATCHES.step_batch(
        batch("draft_extend_v2", [1, 2, 0, 0], spec_info=draft_input([2, 1, 0, 0], width=N), **fields)
    )
    assert (step.draft_token_num, step.num_tokens) == (N, 4 * N)


def test_track_rows_behind_the_live_ones_are_masked() -> None:
    track = {
        "mamba_track_mask": torch.tensor([True]),
        "mamba_track_indices": torch.tensor([9]),
        "mamba_track_seqlens": torch.tensor([4]),
    }
    given = batch(
        "extend",
        [1, 2],
        extend_num_tokens=5,
        extend_seq_lens=torch.tensor([2, 3]),
        seq_lens=torch.tensor([2, 3]),
        **track,
    )
    step = BATCHES.step_batch(given)
    assert step.mamba_track_mask is not None
    assert step.mamba_track_seqlens is not None
    assert step.mamba_track_mask.tolist() == [True, False]
    assert step.mamba_track_seqlens.tolist() == [4, -1]


def test_tree_drafts_are_refused_by_name() -> None:
    steps = steps_of(pool_of(MambaPool()), topk=2)
    spec = SimpleNamespace(draft_token_num=N)
    with pytest.raises(TreeDraftsError, match="speculative_eagle_topk"):
        steps.eager(batch("target_verify", [1], spec_info=spec))


def test_ragged_verify_is_refused_by_name() -> None:
    steps = steps_of(pool_of(MambaPool()))
    spec = SimpleNamespace(draft_token_num=N, ragged_verify_layout=object())
    with pytest.raises(UnsupportedError, match="ragged_verify_layout"):
        steps.eager(batch("target_verify", [1], spec_info=spec))


def test_front_tokens_make_a_draft_run_fresh() -> None:
    fields = {"extend_num_tokens": 2 * (N + 5), "seq_lens": torch.tensor([20, 30])}
    given = batch(
        "draft_extend_v2",
        [1, 2],
        spec_info=draft_input([2, 1], front=5),
        mamba_track_indices=torch.tensor([9, 10]),
        **fields,
    )
    step = BATCHES.step_batch(given)
    assert step.draft_token_num == N + 5
    assert step.has_initial_state is not None
    assert step.has_initial_state.tolist() == [False, False]
    assert step.mamba_track_mask is not None
    assert step.mamba_track_mask.tolist() == [True, True]


def test_draft_extend_tracks_only_where_sglang_does() -> None:
    fields = {"extend_num_tokens": N, "seq_lens": torch.tensor([20]), "mamba_track_indices": torch.tensor([9])}
    given = batch("draft_extend_v2", [1], spec_info=draft_input([2]), **fields)
    assert Batches(torch.device("cpu"), 3, 1, tracks_drafts=False).step_batch(given).mamba_track_mask is None


def draft_extend(steps: Steps, counts: list[int] | None) -> SimpleNamespace:
    """A draft extend of request row 1, prepared."""
    given = batch(
        "draft_extend_v2", [1], spec_info=draft_input(counts), extend_num_tokens=N, seq_lens=torch.tensor([20])
    )
    steps.eager(given)
    return given


def test_a_draft_extend_waits_for_its_accepted_counts() -> None:
    """SGLang prepares it before it knows them; its own code reads them at the conv."""
    steps = steps_of(pool_of(MambaPool()))
    given = draft_extend(steps, None)
    given.spec_info.num_accept_tokens = torch.tensor([3])
    handle = steps.handle(0, given)
    assert handle is not None
    assert handle.metadata.num_accept_tokens.tolist() == [3]


def test_counts_that_change_before_the_first_conv_are_those_that_hold() -> None:
    steps = steps_of(pool_of(MambaPool()))
    given = draft_extend(steps, [1])
    given.spec_info.num_accept_tokens = torch.tensor([3])
    handle = steps.handle(0, given)
    assert handle is not None
    assert handle.metadata.num_accept_tokens.tolist() == [3]
    assert steps.handle(0, given) is handle, "prepared once"


def test_a_draft_extend_whose_counts_never_come_is_refused_by_name() -> None:
    steps = steps_of(pool_of(MambaPool()))
    given = draft_extend(steps, None)
    with pytest.raises(MissingArgumentError, match="num_accept_tokens"):
        steps.handle(0, given)


def test_a_step_after_one_that_waits_is_its_own() -> None:
    steps = steps_of(pool_of(MambaPool()))
    draft_extend(steps, None)
    decode = batch("decode", [2])
    steps.eager(decode)
    handle = steps.handle(0, decode)
    assert handle is not None
    assert handle.metadata.cache_indices.tolist() == [7]


def test_a_replay_reads_nothing_of_its_view_but_the_shape() -> None:
    steps = steps_of(pool_of(MambaPool()))
    static = batch("decode", [0, 0])
    steps.out_graph(static, in_capture=True)
    steps.in_graph(static)
    view = SimpleNamespace(forward_mode=MODES["decode"], batch_size=2)
    steps.out_graph(view, in_capture=False)
    handle = steps.handle(0, view)
    assert handle is not None
    assert handle.metadata.num_reqs == 2


def test_a_replay_of_a_shape_without_a_capture_is_refused_by_name() -> None:
    steps = steps_of(pool_of(MambaPool()))
    with pytest.raises(GraphError, match="decode of 3 requests"):
        steps.out_graph(SimpleNamespace(forward_mode=MODES["decode"], batch_size=3), in_capture=False)


def test_slots_that_sglang_stages_are_read_in_place_of_the_map() -> None:
    pool = pool_of(MambaPool())
    steps = steps_of(pool)
    slots = torch.tensor([5], dtype=torch.int32)
    given = batch("draft_extend_v2", [1], spec_info=draft_input([2]), extend_num_tokens=N, seq_lens=torch.tensor([20]))
    steps.in_graph(given, slots)
    pool.req_index_to_mamba_index_mapping.fill_(9)  # the scheduler has gone on
    handle = steps.handle(0, given)
    assert handle is not None
    assert handle.metadata.cache_indices.tolist() == [5]


def test_eager_and_captured_steps_have_buffers_of_their_own() -> None:
    steps = steps_of(pool_of(MambaPool()))
    held = steps.sidecar(ForwardMode.DECODE, graph=True).addresses()
    captured = batch("decode", [1, 2])
    steps.out_graph(captured, in_capture=True)
    steps.in_graph(captured)
    steps.eager(batch("decode", [1, 2, 0, 0, 0, 0, 0]))  # beyond the captured extents
    assert steps.sidecar(ForwardMode.DECODE, graph=True).addresses() == held
    with pytest.raises(GraphLimitError):
        steps.out_graph(batch("decode", [1, 2, 0, 0, 0, 0, 0]), in_capture=True)


def test_a_runner_reports_the_width_of_its_steps_before_it_captures() -> None:
    """A draft extend with front tokens is wider than any configured number of drafts."""
    steps = steps_of(pool_of(MambaPool()))
    steps.reserve(3, 3 * (N + 5))
    wide = {"extend_num_tokens": 3 * (N + 5), "seq_lens": torch.tensor([20, 30, 40])}
    given = batch("draft_extend_v2", [1, 2, 0], spec_info=draft_input([2, 1, -1], front=5), **wide)
    steps.out_graph(given, in_capture=True)
    steps.in_graph(given)
    handle = steps.handle(0, given)
    assert handle is not None
    assert handle.metadata.draft_token_num == N + 5


def test_buffers_that_a_graph_holds_stay_when_another_runner_reports() -> None:
    steps = steps_of(pool_of(MambaPool()))
    decode = batch("decode", [1, 2])
    steps.out_graph(decode, in_capture=True)
    steps.in_graph(decode)
    held = steps.sidecar(ForwardMode.DECODE, graph=True)
    steps.reserve(3, 3 * (N + 5))
    assert steps.sidecar(ForwardMode.DECODE, graph=True) is held


def test_more_requests_than_sglang_is_configured_for_are_refused_by_name() -> None:
    with pytest.raises(GraphLimitError, match="max_bs"):
        steps_of(pool_of(MambaPool())).reserve(4, 12)


def test_no_layer_has_a_handle_before_the_first_step() -> None:
    steps = steps_of(pool_of(MambaPool()))
    decode = batch("decode", [2, 1])
    assert steps.handle(0, decode) is None
    steps.eager(decode)
    handle = steps.handle(3, decode)
    assert handle is not None
    assert handle.metadata.cache_indices.tolist() == [7, 4]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("fusable", [False, True])
def test_the_commit_reads_no_step_buffer(transposed: bool, fusable: bool) -> None:
    """x = 1, 2, 3, ... spell the windows; a later decode of the other request lies between verify and commit."""
    mamba_pool = MambaPool(transposed=transposed)
    translated = torch.arange(SLOTS) if fusable else torch.tensor([0, *range(SLOTS - 1, 0, -1)])
    pool = pool_of(
        mamba_pool, mamba_translate_is_fusable=fusable, translate_mamba_indices=lambda slots: translated[slots.long()]
    )
    steps = steps_of(pool)
    weight = torch.ones(D, S + 1)
    drafts = torch.arange(1.0, N + 1)[:, None].expand(N, D).contiguous()
    for given, x in (
        (batch("target_verify", [1], spec_info=SimpleNamespace(draft_token_num=N)), drafts),
        (batch("decode", [2, 0]), torch.full((2, D), 9.0)),
    ):
        steps.eager(given)
        for layer in (0, 3):
            handle = steps.handle(layer, given)
            assert handle is not None
            handle.conv("conv", x, weight)
    last = torch.tensor([2])
    steps.commit(torch.tensor([1]), last, torch.tensor([5]), torch.tensor([0]))
    (conv,) = mamba_pool.mamba_cache.conv
    state = conv.transpose(-1, -2) if transposed else conv
    for slot, window in ((4, [1.0, 2.0, 3.0]), (5, [0.0, 0.0, 1.0]), (7, [0.0, 0.0, 9.0])):
        expected = torch.tensor(window)[:, None].expand(S, D)
        assert torch.equal(state[:, translated[slot]], expected.expand(LAYERS, S, D)), slot
