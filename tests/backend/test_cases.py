"""Exact cases from faults that users of engines reported. Outputs spell the window that was read; compared with ==."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hwbackends.errors import DtypeError, WidthError
from hwbackends.step.batch import ForwardMode
from tests.backend.lab import BITS, DIGITS, PAD, Lab, same_bits, spelled

MakeLab = Callable[..., Lab]
NAN = float("nan")


@pytest.mark.parametrize("dirt", [(7.0, 8.0, 9.0), (NAN, NAN, NAN)], ids=["rows", "nan"])
def test_a_reused_slot_does_not_lend_its_old_rows(lab: MakeLab, dirt: tuple[float, ...]) -> None:
    it = lab(rows={5: 1})
    it.put_slot(1, dirt, 0)
    assert spelled(it.extend([5], [2], [1, 2])) == [1000, 2100]
    assert it.seen(5) == [0, 1, 2]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_chunk_into_another_slot_leaves_its_source_alone(lab: MakeLab, count: int) -> None:
    it = lab(rows={5: 2})
    it.put_slot(1, [7, 8, 9], 3)
    it.lengths[5] = 3
    before = it.snapshot()
    y = it.extend([5], [count], range(1, count + 1), source_indices=it.ints([1]))
    virtual = [7, 8, 9, *range(1, count + 1)]
    assert spelled(y) == [sum(t * v for t, v in zip(DIGITS, virtual[i : i + 4], strict=False)) for i in range(count)]
    assert it.seen(5) == virtual[-3:]
    assert same_bits(it.state.tensor[1], before[1])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("pad", [PAD, 0, 9], ids=["negative-row", "row-zero", "row-mapped-to-slot-0"])
def test_a_padded_row_in_the_middle_gives_zero_and_writes_nothing(
    lab: MakeLab, pad: int, index_dtype: torch.dtype
) -> None:
    it = lab(rows={1: 1, 2: 2, 3: 3}, index_dtype=index_dtype)
    for row, window in {1: [1, 2, 3], 2: [4, 5, 6], 3: [7, 8, 9]}.items():
        it.put(row, window)
    before = it.snapshot()
    assert spelled(it.decode([3, pad, 1], [4, 9, 5])) == [4987, 0, 5321]
    assert [it.seen(row) for row in (1, 2, 3)] == [[2, 3, 5], [4, 5, 6], [8, 9, 4]]
    untouched = [0, 2, *range(4, 11)]
    assert same_bits(it.state.tensor[untouched], before[untouched])


def test_a_padded_row_inside_an_extend_keeps_its_tokens_and_gives_zeros(lab: MakeLab) -> None:
    it = lab(rows={1: 1, 3: 3})
    it.put(1, [1, 2, 3])
    before = it.snapshot()
    assert spelled(it.extend([3, PAD, 0, 1], [1, 2, 1, 2], [1, 8, 8, 8, 4, 5])) == [1000, 0, 0, 0, 4321, 5432]
    assert it.seen(1) == [3, 4, 5]
    assert same_bits(it.state.tensor[[0, 2, *range(4, 11)]], before[[0, 2, *range(4, 11)]])


def test_more_rows_than_slots_are_legal_when_the_rest_is_padded(lab: MakeLab) -> None:
    it = lab(rows={1: 1}, slots=2)
    it.put(1, [1, 2, 3])
    assert spelled(it.decode([PAD, 1, 0, PAD], [9, 5, 9, 9])) == [0, 5321, 0, 0]
    assert it.seen(1) == [2, 3, 5]


@pytest.mark.parametrize("width", [2, 3, 5])
def test_every_width_reads_its_own_window(lab: MakeLab, width: int) -> None:
    it = lab(rows={5: 1}, width=width)
    virtual = [0] * (width - 1) + [1, 2, 3, 4, 5]
    want = [sum(t * v for t, v in zip(DIGITS[:width], virtual[i : i + width], strict=True)) for i in range(5)]
    assert spelled(it.extend([5], [5], [1, 2, 3, 4, 5])) == want
    assert it.seen(5) == virtual[-(width - 1) :]


def test_width_five_spells_five_rows(lab: MakeLab) -> None:
    it = lab(rows={5: 1}, width=5)
    assert spelled(it.extend([5], [5], [1, 2, 3, 4, 5])) == [10000, 21000, 32100, 43210, 54321]


def test_weights_of_another_width_are_refused_by_name(lab: MakeLab) -> None:
    it = lab(rows={5: 1})
    it.weight = torch.ones(1, 5, device=it.device)
    with pytest.raises(WidthError, match="conv_extend: weight: got width 5, wanted width 4"):
        it.extend([5], [2], [1, 2])


def test_rows_behind_the_live_count_are_ignored_whatever_they_hold(lab: MakeLab) -> None:
    it = lab(rows={1: 1, 2: 2, 3: 3})
    for row in (1, 2, 3):
        it.put(row, [1, 2, 3])
    before = it.snapshot()
    y = it.extend([1, 2, 3], [2, 0, 0], [4, 5], num_reqs=1)
    assert spelled(y) == [4321, 5432]
    batch = it.extend_batch([1, 2, 12], [1, 3, 7], num_reqs=1, num_tokens=5)
    metadata = it.prepare(batch)
    assert metadata.query_start_loc.tolist() == [0, 1, 1, 1]
    assert metadata.seq_idx.tolist() == [0, -1, -1, -1, -1]
    assert metadata.cache_indices.tolist() == [1, -1, -1]
    assert metadata.has_initial_state.tolist() == [True, False, False]
    assert spelled(it.conv(batch, metadata, it.tokens([6, 9, 9, 9, 9]))) == [6543, 0, 0, 0, 0]
    assert same_bits(it.state.tensor[2:4], before[2:4])


def test_the_device_side_live_count_pads_rows_too(lab: MakeLab) -> None:
    it = lab(rows={1: 1, 2: 2})
    it.put(1, [1, 2, 3])
    it.put(2, [4, 5, 6])
    live = it.ints([1], torch.int32)
    assert spelled(it.decode([1, 2], [4, 9], num_reqs_device=live)) == [4321, 0]


@pytest.mark.parametrize("mode", [ForwardMode.IDLE, ForwardMode.DECODE])
def test_a_step_without_live_rows_changes_no_slot(lab: MakeLab, mode: ForwardMode) -> None:
    it = lab(rows={1: 1})
    it.put(1, [1, 2, 3])
    before = it.snapshot()
    batch = it.decode_batch([1, 0])
    batch.forward_mode, batch.num_reqs = mode, 0
    assert spelled(it.conv(batch, it.prepare(batch), it.tokens([8, 9]))) == [0, 0]
    assert same_bits(it.state.tensor, before)


def test_request_rows_are_not_slots(lab: MakeLab) -> None:
    it = lab(rows={5: 1, 3: 2})
    it.put(5, [1, 2, 3])
    it.put(3, [4, 5, 6])
    assert spelled(it.decode([5, 3], [4, 7])) == [4321, 7654]
    assert spelled(it.verify([5, 3], [1, 2, 3, 4, 5, 6])) == [1432, 2143, 3214, 4765, 5476, 6547]
    it.commit([5, 3], [2, 1])
    assert it.seen(5) == [4, 1, 2]
    assert it.seen(3) == [6, 7, 4]
    assert it.state.tensor[[3, 5]].isnan().all()


@pytest.mark.parametrize("count", [1, 2, 3, 6])
@pytest.mark.parametrize("state", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_pair_of_activation_and_state_dtype_is_exact(
    lab: MakeLab, dtype: torch.dtype, state: torch.dtype, count: int
) -> None:
    it = lab(rows={5: 1}, dtype=dtype, state_dtype=state, taps=BITS)
    x, y = [1, 0, 1, 1, 0, 1], [8, 4, 10, 13, 6, 11]
    got = [value for at in range(0, 6, count) for value in spelled(it.extend([5], [count], x[at : at + count]))]
    assert got == y
    assert it.seen(5) == x[-3:]


def test_an_undeclared_pair_of_dtypes_is_refused_by_name(lab: MakeLab) -> None:
    it = lab(rows={5: 1}, dtype=torch.float64, state_dtype=torch.float32)
    with pytest.raises(DtypeError, match="conv_extend: x: got"):
        it.extend([5], [2], [1, 2])


@pytest.mark.parametrize("dim", [8])
def test_seventy_thousand_requests_of_one_token(target: tuple[str, str], layout: str, dim: int) -> None:
    count = 70_000
    it = Lab(*target, layout, dim=dim, slots=count + 1, requests=count, drafts=0)
    it.pool.mamba_index_mapping.copy_(torch.arange(1, count + 1, dtype=torch.int32))
    y = it.extend(range(count), [1] * count, torch.ones(count, dim))
    assert torch.equal(y, torch.full_like(y, 1000.0))


def test_a_column_slice_of_a_fused_projection_gives_the_same_bits(lab: MakeLab) -> None:
    rows = torch.randn(7, 15, generator=torch.Generator().manual_seed(3))
    one, two = lab(rows={5: 1}, dim=5), lab(rows={5: 1}, dim=5)
    for it in (one, two):
        it.weight = torch.randn(5, 4, generator=torch.Generator().manual_seed(4)).to(it.device)
    sliced = rows.to(one.device)[:, 5:10]
    batch = one.extend_batch([5], [7])
    got = one.conv(batch, one.prepare(batch), sliced)
    assert torch.equal(got, two.extend([5], [7], rows[:, 5:10]))
    assert same_bits(one.state.tensor[1], two.state.tensor[1])


def test_requests_that_continue_and_that_begin_share_a_batch(lab: MakeLab) -> None:
    it = lab(rows={1: 1, 2: 2})
    it.put(1, [1, 2, 3])
    assert spelled(it.extend([1, 2], [1, 2], [4, 1, 2])) == [4321, 1000, 2100]


def test_an_empty_request_in_the_middle_keeps_its_slot(lab: MakeLab) -> None:
    it = lab(rows={1: 1, 2: 2, 3: 3})
    it.put(2, [4, 5, 6])
    assert spelled(it.extend([1, 2, 3], [2, 0, 3], [1, 2, 3, 4, 5])) == [1000, 2100, 3000, 4300, 5430]
    assert [it.seen(row) for row in (1, 2, 3)] == [[0, 1, 2], [4, 5, 6], [3, 4, 5]]


def test_preparing_a_step_twice_or_for_nothing_shifts_no_window(lab: MakeLab) -> None:
    it = lab(rows={1: 1})
    it.put(1, [1, 2, 3])
    batch = it.decode_batch([1])
    it.prepare(batch)
    assert spelled(it.decode([1], [4])) == [4321]
    it.prepare(it.decode_batch([1]))
    assert spelled(it.decode([1], [5])) == [5432]


def test_running_a_step_twice_gives_the_same_state_on_a_ring(target: tuple[str, str]) -> None:
    it = Lab(*target, "ring", rows={1: 1})
    it.put(1, [1, 2, 3])
    batch = it.decode_batch([1])
    metadata = it.prepare(batch)
    first, state = it.conv(batch, metadata, it.tokens([4])), it.snapshot()
    assert torch.equal(it.conv(batch, metadata, it.tokens([4])), first)
    assert same_bits(it.state.tensor, state)
    once = it.verify([1], [1, 2, 3])
    state = it.snapshot()
    assert torch.equal(it.verify([1], [1, 2, 3]), once)
    assert same_bits(it.state.tensor, state)


@pytest.mark.parametrize(("accepted", "after"), [(0, 5987), (1, 5198), (2, 5219), (3, 5321)])
def test_a_verify_rolls_back_to_every_count(lab: MakeLab, accepted: int, after: int) -> None:
    it = lab(rows={5: 1})
    if it.layout == "lazy" and accepted == 0:
        accepted, after = 1, 5198  # the layout keeps v_b[1:], so at least one token is kept
    it.put(5, [7, 8, 9])
    assert spelled(it.verify([5], [1, 2, 3])) == [1987, 2198, 3219]
    it.commit([5], [accepted])
    assert spelled(it.decode([5], [5])) == [after]


def test_a_padded_draft_row_that_names_a_live_slot_writes_nothing(lab: MakeLab) -> None:
    it = lab(rows={1: 1, 2: 2}, drafts=2)
    it.put(1, [3, 4, 5])
    it.put(2, [6, 7, 8])
    before = [tensor.clone() for tensor in (*it.pool.storages(), *it.pool.draft_storages())]
    assert spelled(it.draft_extend([1], [-1], [91, 92])) == [0, 0]
    after = [*it.pool.storages(), *it.pool.draft_storages()]
    assert all(same_bits(a, b) for a, b in zip(after, before, strict=True))
    assert spelled(it.draft_extend([1, 1, 2], [-1, 2, 1], [91, 92, 1, 2, 3, 4])) == [0, 0, 1543, 2154, 3876, 4387]
    assert it.seen(1) == [5, 1, 2]
    assert it.seen(2) == [7, 8, 3]


@pytest.mark.parametrize(("accepted", "window"), [(0, [7, 8, 9]), (1, [8, 9, 1]), (2, [9, 1, 2]), (3, [1, 2, 3])])
def test_a_draft_extend_leaves_the_accepted_window(lab: MakeLab, accepted: int, window: list[float]) -> None:
    it = lab(rows={5: 1})
    it.put(5, [7, 8, 9])
    assert spelled(it.draft_extend([5], [accepted], [1, 2, 3])) == [1987, 2198, 3219]
    assert it.seen(5) == window


def test_a_fresh_draft_extend_reads_and_writes_zeros(lab: MakeLab) -> None:
    it = lab(rows={5: 1})
    it.lengths[5] = 7
    fresh = torch.tensor([False], device=it.device)
    assert spelled(it.draft_extend([5], [1], [1, 2, 3], has_initial_state=fresh)) == [1000, 2100, 3210]
    assert it.window(1, 8)[:, 0].tolist() == [0, 0, 1]


def test_a_commit_takes_its_slots_from_the_requests(lab: MakeLab) -> None:
    it = lab(rows={5: 1, 6: 2})
    it.put(5, [7, 8, 9])
    it.put(6, [4, 5, 6])
    it.verify([5], [1, 2, 3])
    length = it.lengths[5]
    it.decode([6], [7])  # a later step takes over the step's buffers
    it.commit([5], [2])
    assert it.lengths[5] == length + 2
    assert it.seen(5) == [9, 1, 2]
    assert it.seen(6) == [5, 6, 7]
    it.lengths[5] = length
    it.commit([5], [2])
    assert it.seen(5) == [9, 1, 2]


def test_a_commit_of_padded_or_negative_rows_changes_nothing(lab: MakeLab) -> None:
    it = lab(rows={5: 1, 6: 10})
    it.put(5, [7, 8, 9])
    it.put(6, [1, 2, 3])
    it.verify([5, 6], [1, 2, 3, 4, 5, 6])
    before = it.snapshot()
    it.hooks.update_mamba_state_after_mtp_verify(it.pool, it.ints([PAD, 0, 5]), it.ints([2, 2, -1]))
    assert same_bits(it.state.tensor, before)


def test_virtual_slots_are_translated_everywhere(lab: MakeLab) -> None:
    it = lab(rows={5: 3}, v2p=[0, 7, 4, 2, 9])
    it.put_slot(2, [1, 2, 3], 3)
    it.lengths[5] = 3
    mask = torch.tensor([True], device=it.device)
    y = it.decode([5], [4], mamba_track_mask=mask, mamba_track_indices=it.ints([4]))
    assert spelled(y) == [4321]
    assert it.window(2, 4)[:, 0].tolist() == [2, 3, 4]
    assert it.window(9, 4)[:, 0].tolist() == [2, 3, 4]
    it.verify([5], [5, 6, 7])
    it.commit([5], [1])
    assert it.window(2, 5)[:, 0].tolist() == [3, 4, 5]


EXTEND_TRACKS = [
    # length before, tokens, track length, window (None: nothing is written); interval 2, history 7 8 9
    (3, 5, 7, [2, 3, 4]),
    (3, 1, 5, None),
    (3, 2, 5, [9, 1, 2]),
    (3, 5, 3, [7, 8, 9]),
    (3, 5, -1, None),
    (3, 5, 2, None),
    (3, 3, 9, None),
]


@pytest.mark.parametrize(("before", "count", "length", "window"), EXTEND_TRACKS)
def test_an_extend_snapshots_the_chunk_aligned_window(
    lab: MakeLab, before: int, count: int, length: int, window: list[float] | None
) -> None:
    it = lab(rows={5: 1})
    it.put(5, [7, 8, 9], before)
    it.state.tensor[6] = -5
    extra: dict[str, Any] = {
        "mamba_track_mask": torch.tensor([True], device=it.device),
        "mamba_track_indices": it.ints([6]),
        "mamba_track_seqlens": it.ints([length]),
    }
    it.extend([5], [count], range(1, count + 1), **extra)
    taken = (length - before) // 2 * 2
    found = it.window(6, before + taken)[:, 0].tolist()
    assert found == (window if window is not None else [-5, -5, -5])


@pytest.mark.parametrize(
    ("before", "accepted", "window"), [(3, 1, [8, 9, 1]), (3, 0, None), (4, 1, None), (4, 3, [9, 1, 2])]
)
def test_a_draft_extend_snapshots_when_a_boundary_is_crossed(
    lab: MakeLab, before: int, accepted: int, window: list[float] | None
) -> None:
    it = lab(rows={5: 1})
    it.put(5, [7, 8, 9], before)
    it.state.tensor[6] = -5
    mask = torch.tensor([True], device=it.device)
    it.draft_extend([5], [accepted], [1, 2, 3], mamba_track_mask=mask, mamba_track_indices=it.ints([6]))
    end = (before + accepted) // 2 * 2
    assert it.window(6, end)[:, 0].tolist() == (window if window is not None else [-5, -5, -5])


@pytest.mark.parametrize("step", [-1, 0, 1, 2])
def test_a_commit_snapshots_the_tracked_step(lab: MakeLab, step: int) -> None:
    it = lab(rows={5: 1}, ssm_shape=(3,))
    it.put(5, [7, 8, 9])
    it.verify([5], [1, 2, 3])
    it.state.tensor[6] = -5
    assert it.pool.ssm_state is not None
    assert it.pool.intermediate_ssm is not None
    it.pool.intermediate_ssm[:, 5] = torch.arange(9.0, device=it.device).view(3, 3)
    extra = {"mamba_track_indices": it.ints([6]), "mamba_steps_to_track": it.ints([step])}
    it.commit([5], [3], computed_lens=it.ints([3]), **extra)
    virtual = [7, 8, 9, 1, 2, 3]
    want = virtual[step + 1 : step + 4] if step >= 0 else [-5, -5, -5]
    assert it.window(6, 3 + step + 1)[:, 0].tolist() == want
    assert it.seen(5) == [1, 2, 3]
    assert it.pool.ssm_state[0, 1].tolist() == [6, 7, 8]
    assert it.pool.ssm_state[0, 6].tolist() == ([step * 3 + i for i in range(3)] if step >= 0 else [0, 0, 0])


def test_clear_and_copy_reach_every_layer_and_stream(lab: MakeLab) -> None:
    it = lab(rows={5: 1}, streams=("k", "v"), layers=2, ssm_shape=(3,), poison=0.0)
    numbers = torch.Generator().manual_seed(5)
    tensors = [*it.pool.conv_streams.values(), it.pool.ssm_state]
    for tensor in tensors:
        assert tensor is not None
        tensor.copy_(torch.randn(tensor.shape, generator=numbers))
    before = [tensor.clone() for tensor in tensors if tensor is not None]
    it.hooks.copy_slots(it.pool, it.ints([3, PAD, 4, 0]), it.ints([7, 2, 0, 9]))
    it.hooks.clear_slots(it.pool, it.ints([5, PAD, 0]))
    for tensor, old in zip(tensors, before, strict=True):
        assert tensor is not None
        old[:, 7], old[:, 5] = old[:, 3].clone(), 0
        assert torch.equal(tensor, old)


@pytest.mark.parametrize("hook", ["conv_target_verify", "conv_extend"])
def test_two_neighbouring_streams_run_as_one_conv(lab: MakeLab, hook: str) -> None:
    both = lab(rows={5: 1}, streams=("k", "v"), dim=3, poison=0.0)
    both.lengths[5] = 0
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(6)).to(both.device)
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(7)).to(both.device)
    merged = both.pool.conv_state(("k", "v"), 0)
    phase = ForwardMode.EXTEND if hook == "conv_extend" else ForwardMode.TARGET_VERIFY
    batch = both.extend_batch([5], [3]) if phase is ForwardMode.EXTEND else both.draft_batch(phase, [5])
    metadata = both.prepare(batch)
    function = getattr(both.hooks, hook)
    together = function(x, weight, None, merged, metadata)
    after = merged.tensor.clone()
    apart = lab(rows={5: 1}, streams=("k", "v"), dim=3, poison=0.0)
    metadata = apart.prepare(batch)
    halves = [
        getattr(apart.hooks, hook)(x[:, part], weight[part], None, apart.pool.conv_state(name, 0), metadata)
        for name, part in (("k", slice(0, 3)), ("v", slice(3, 6)))
    ]
    assert torch.equal(together, torch.cat(halves, 1))
    assert torch.equal(after, apart.pool.conv_state(("k", "v"), 0).tensor)
