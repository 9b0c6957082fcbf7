"""SGLang's pool and batches as hwbackends sees them, with stand-ins that have SGLang's field names and no SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hwbackends.engines.sglang.steps import Limits, Steps, as_draft_rows, as_rows, fit, forward_mode, wrap_pool
from hwbackends.errors import GraphLimitError, ShapeError, TreeDraftsError, UnsupportedError
from hwbackends.registry.loading import load
from hwbackends.step.metadata import ForwardMode

S, D, N, ROWS, SLOTS, LAYERS = 3, 5, 4, 6, 11, 2


class Mode:
    """One of SGLang's forward modes, asked as SGLang asks."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, question: str) -> Any:
        return lambda: question == f"is_{self.name}"


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


def steps_of(pool: SimpleNamespace, **options: Any) -> Steps:
    wrapped = wrap_pool(pool, ("conv",), S, (D,), True, 4)
    return Steps(load("reference"), pool, wrapped, Limits(3, 12, N), **options)


def batch(mode: str, rows: list[int], **fields: Any) -> SimpleNamespace:
    """SGLang's ForwardBatch as far as it is read."""
    empty = ("mamba_track_mask", "mamba_track_indices", "mamba_track_seqlens", "extend_prefix_lens", "seq_lens")
    requests = torch.tensor(rows, dtype=torch.int64)
    given = {**dict.fromkeys(empty), "forward_mode": Mode(mode), "req_pool_indices": requests, **fields}
    return SimpleNamespace(**given)


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
    steps = steps_of(pool_of(MambaPool()))
    step = steps.step_batch(batch("extend", [1, 2], extend_num_tokens=5, extend_seq_lens=torch.tensor([2, 3])))
    assert step.extend_prefix_lens is not None
    assert step.extend_prefix_lens.tolist() == [0, 0]
    assert (step.num_tokens, step.mamba_track_mask) == (5, None)


def test_a_larger_eager_step_gets_constants_of_its_own() -> None:
    steps = steps_of(pool_of(MambaPool()))
    rows = [1, 2, 0, 0, 0]
    step = steps.step_batch(batch("extend", rows, extend_num_tokens=5, extend_seq_lens=torch.ones(5).int()))
    assert step.extend_prefix_lens is not None
    assert step.extend_prefix_lens.shape == (5,)


def test_track_rows_behind_the_live_ones_are_masked() -> None:
    steps = steps_of(pool_of(MambaPool()))
    track = {
        "mamba_track_mask": torch.tensor([True]),
        "mamba_track_indices": torch.tensor([9]),
        "mamba_track_seqlens": torch.tensor([4]),
    }
    given = batch("extend", [1, 2], extend_num_tokens=5, extend_seq_lens=torch.tensor([2, 3]), **track)
    step = steps.step_batch(given)
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
    steps = steps_of(pool_of(MambaPool()), draft_track_interval=4)
    spec = SimpleNamespace(num_accept_tokens=torch.tensor([2, 1]), num_front_tokens=2)
    fields = {"extend_num_tokens": 2 * (N + 2), "seq_lens": torch.tensor([20, 30])}
    given = batch("draft_extend_v2", [1, 2], spec_info=spec, mamba_track_indices=torch.tensor([9, 10]), **fields)
    step = steps.step_batch(given)
    assert step.draft_token_num == N + 2
    assert step.has_initial_state is not None
    assert step.has_initial_state.tolist() == [False, False]
    assert step.mamba_track_mask is not None
    assert step.mamba_track_mask.tolist() == [True, True]
    steps.eager(given)


def test_draft_extend_tracks_only_where_sglang_does() -> None:
    steps = steps_of(pool_of(MambaPool()))
    spec = SimpleNamespace(num_accept_tokens=torch.tensor([2]))
    fields = {"extend_num_tokens": N, "seq_lens": torch.tensor([20]), "mamba_track_indices": torch.tensor([9])}
    assert steps.step_batch(batch("draft_extend_v2", [1], spec_info=spec, **fields)).mamba_track_mask is None


def test_eager_and_captured_steps_have_buffers_of_their_own() -> None:
    steps = steps_of(pool_of(MambaPool()))
    held = steps.sidecar(ForwardMode.DECODE, graph=True).addresses()
    captured = batch("decode", [1, 2])
    steps.out_graph(captured, in_capture=True)
    steps.in_graph(captured)
    steps.eager(batch("decode", [1, 2, 0, 0, 0, 0, 0]))  # beyond the captured extents
    assert steps.sidecar(ForwardMode.DECODE, graph=True).addresses() == held
    with pytest.raises(GraphLimitError):
        steps.out_graph(batch("decode", [1, 2, 0, 0, 0, 0, 0]), in_capture=False)


def test_the_limits_that_sglang_reports_are_checked() -> None:
    steps = steps_of(pool_of(MambaPool()))
    steps.check_limits(3, 12)
    with pytest.raises(GraphLimitError, match="max_batch"):
        steps.check_limits(4, 12)


def test_no_layer_has_a_handle_before_the_first_step() -> None:
    steps = steps_of(pool_of(MambaPool()))
    assert steps.handle(0) is None
    steps.eager(batch("decode", [2, 1]))
    handle = steps.handle(3)
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
            handle = steps.handle(layer)
            assert handle is not None
            handle.conv("conv", x, weight)
    last = torch.tensor([2])
    steps.commit(torch.tensor([1]), last, torch.tensor([5]), torch.tensor([0]))
    (conv,) = mamba_pool.mamba_cache.conv
    state = conv.transpose(-1, -2) if transposed else conv
    for slot, window in ((4, [1.0, 2.0, 3.0]), (5, [0.0, 0.0, 1.0]), (7, [0.0, 0.0, 9.0])):
        expected = torch.tensor(window)[:, None].expand(S, D)
        assert torch.equal(state[:, translated[slot]], expected.expand(LAYERS, S, D)), slot
