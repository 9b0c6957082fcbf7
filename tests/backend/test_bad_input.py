"""Bad input gets a named error that says hook, parameter, got and wanted, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hwbackends.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    GraphLimitError,
    MissingArgumentError,
    ShapeError,
    SlotError,
    StrideError,
    TreeDraftsError,
    UnsupportedError,
    WidthError,
)
from hwbackends.step.batch import ForwardMode
from hwbackends.step.checks import checked
from tests.backend.lab import Lab, same_bits

MakeLab = Callable[..., Lab]
DIM = 5


def ready(lab: MakeLab, **extra: Any) -> Lab:
    it = lab(rows={5: 1, 6: 2}, dim=DIM, **extra)
    it.weight = torch.randn(DIM, 4, generator=torch.Generator().manual_seed(1)).to(it.device)
    it.extend([5, 6], [4, 3], torch.randn(7, DIM, generator=torch.Generator().manual_seed(2)))
    return it


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


CONV: list[tuple[str, dict[str, Any], type[ArgumentError], str]] = [
    ("x of another width", {"x": ones(2, 3)}, ShapeError, r"x: got \[2, 3\], wanted \[any, 5\]"),
    ("x of one dimension", {"x": ones(5)}, ShapeError, r"x: got \[5\]"),
    ("too few rows", {"x": ones(1, DIM)}, ShapeError, "x: got 1 rows, wanted at least 2"),
    ("integer x", {"x": ones(2, DIM, dtype=torch.int32)}, DtypeError, "x: got torch.int32, wanted torch.float16 or"),
    ("x that is no tensor", {"x": [[1.0] * DIM]}, ArgumentError, "x: got list, wanted a tensor"),
    ("x on another device", {"x": torch.empty(2, DIM, device="meta")}, DeviceError, "x: got meta, wanted"),
    ("weights of another width", {"weight": ones(DIM, 3)}, WidthError, "weight: got width 3, wanted width 4"),
    ("weights of other channels", {"weight": ones(7, 4)}, ShapeError, r"weight: got \[7, 4\], wanted \[5, 4\]"),
    ("integer weights", {"weight": ones(DIM, 4, dtype=torch.int64)}, DtypeError, "weight: got torch.int64"),
    ("bias of another shape", {"bias": ones(3)}, ShapeError, r"bias: got \[3\], wanted \[5\]"),
    ("unknown activation", {"activation": "gelu"}, UnsupportedError, "activation: got 'gelu', wanted None or 'silu'"),
    ("out of another shape", {"out": ones(3, DIM)}, ShapeError, r"out: got \[3, 5\], wanted \[2, 5\]"),
    ("out of another dtype", {"out": ones(2, DIM, dtype=torch.bfloat16)}, DtypeError, "out: got torch.bfloat16"),
    ("transposed out", {"out": ones(DIM, 2).t()}, StrideError, "out: got strides"),
]


@pytest.mark.parametrize(("bad", "error", "text"), [c[1:] for c in CONV], ids=[c[0] for c in CONV])
def test_a_conv_refuses_it_by_name_and_writes_nothing(
    lab: MakeLab, bad: dict[str, Any], error: type[ArgumentError], text: str
) -> None:
    it = ready(lab)
    metadata = it.prepare(it.decode_batch([5, 6]))
    before = it.snapshot()
    here = {k: v.to(it.device) if isinstance(v, torch.Tensor) and v.device.type == "cpu" else v for k, v in bad.items()}
    given = {"x": ones(2, DIM).to(it.device), "weight": it.weight, "bias": None, **here}
    with pytest.raises(error, match=f"conv_decode: {text}"):
        it.hooks.conv_decode(state=it.state, metadata=metadata, **given)
    assert same_bits(it.state.tensor, before)


def test_a_conv_refuses_metadata_of_another_phase(lab: MakeLab) -> None:
    it = ready(lab)
    metadata = it.prepare(it.decode_batch([5, 6]))
    with pytest.raises(ArgumentError, match="conv_extend: metadata: got DECODE, wanted EXTEND"):
        it.hooks.conv_extend(ones(2, DIM).to(it.device), it.weight, None, it.state, metadata)


def test_a_prepare_refuses_an_engine_s_own_forward_mode_and_a_pool_that_is_none(lab: MakeLab) -> None:
    it = ready(lab)
    batch = it.decode_batch([5, 6])
    view = it.prepare(batch)
    with pytest.raises(ArgumentError, match=r"batch.forward_mode: got builtins.str, wanted a hwbackends\S+ForwardMode"):
        it.hooks.prepare_decode_metadata(replace(batch, forward_mode="DECODE"), it.pool, view)
    with pytest.raises(ArgumentError, match="prepare_decode_metadata: pool: got None, wanted a hwbackends"):
        it.hooks.prepare_decode_metadata(batch, None, view)


def test_a_verify_needs_room_for_its_drafts(lab: MakeLab) -> None:
    it = ready(lab)
    batch = it.draft_batch(ForwardMode.TARGET_VERIFY, [5])
    metadata = it.prepare(batch)
    small = lab(rows={5: 1}, dim=DIM, drafts=0)
    with pytest.raises(ShapeError, match=r"conv_target_verify: state: got . rows for drafts"):
        it.hooks.conv_target_verify(ones(3, DIM).to(it.device), it.weight, None, small.state, metadata)


PREPARE: list[tuple[str, ForwardMode, dict[str, Any], type[ArgumentError], str]] = [
    ("a tree", ForwardMode.TARGET_VERIFY, {"topk": 2}, TreeDraftsError, "batch.topk: got 2, wanted 1"),
    ("a tree of drafts", ForwardMode.DRAFT_EXTEND, {"topk": 4}, TreeDraftsError, "batch.topk: got 4, wanted 1"),
    ("no accepted counts", ForwardMode.DRAFT_EXTEND, {"num_accept_tokens": None}, MissingArgumentError, "num_accept"),
    (
        "float rows",
        ForwardMode.DECODE,
        {"req_pool_indices": ones(2)},
        DtypeError,
        "req_pool_indices: got torch.float32",
    ),
    ("short lengths", ForwardMode.DECODE, {"seq_lens": ones(1, dtype=torch.int32)}, ShapeError, r"seq_lens: got \[1\]"),
    ("no lengths", ForwardMode.EXTEND, {"extend_seq_lens": None}, MissingArgumentError, "extend_seq_lens"),
    ("no prefixes", ForwardMode.EXTEND, {"extend_prefix_lens": None}, MissingArgumentError, "extend_prefix_lens"),
    ("int mask", ForwardMode.DECODE, {"mamba_track_mask": ones(2, dtype=torch.int32)}, DtypeError, "mamba_track_mask"),
    (
        "a mask without slots",
        ForwardMode.DECODE,
        {"mamba_track_mask": ones(2, dtype=torch.bool)},
        MissingArgumentError,
        "mamba_track_indices",
    ),
    ("more live than there", ForwardMode.DECODE, {"num_reqs": 3}, ShapeError, "num_reqs: got 3"),
    (
        "another device",
        ForwardMode.DECODE,
        {"seq_lens": torch.empty(2, dtype=torch.int32, device="meta")},
        DeviceError,
        "seq_lens: got meta",
    ),
]


@pytest.mark.parametrize(("mode", "bad", "error", "text"), [c[1:] for c in PREPARE], ids=[c[0] for c in PREPARE])
def test_a_prepare_refuses_it_by_name(
    lab: MakeLab, mode: ForwardMode, bad: dict[str, Any], error: type[ArgumentError], text: str
) -> None:
    it = ready(lab)
    batch = it.decode_batch([5, 6])
    if mode is ForwardMode.EXTEND:
        batch = it.extend_batch([5, 6], [1, 2])
    elif mode is not ForwardMode.DECODE:
        batch = it.draft_batch(mode, [5, 6], num_accept_tokens=it.ints([1, 1]))
    here = {k: v.to(it.device) if isinstance(v, torch.Tensor) and v.device.type == "cpu" else v for k, v in bad.items()}
    wrong = replace(batch, **here)
    with pytest.raises(error, match=text):
        it.prepare(wrong)


def test_a_ring_needs_lengths(target: tuple[str, str]) -> None:
    it = Lab(*target, "ring", rows={5: 1})
    with pytest.raises(MissingArgumentError, match=r"batch\.seq_lens: got None"):
        it.prepare(it.decode_batch([5], seq_lens=None))


@pytest.mark.parametrize(("batch", "tokens"), [(17, 17), (3, 99)])
def test_a_step_beyond_the_buffers_names_the_setting(batch: int, tokens: int) -> None:
    from hwbackends.step.metadata import MetadataBuffers, MetadataLimits

    buffers = MetadataBuffers(MetadataLimits(16, 64), "cpu", torch.int32)
    with pytest.raises(GraphLimitError, match="construct the sidecar with max_"):
        buffers.view(ForwardMode.EXTEND, batch, tokens)


COMMIT: list[tuple[str, dict[str, Any], type[ArgumentError], str]] = [
    ("no requests", {"req_pool_indices": None}, MissingArgumentError, "req_pool_indices: got None"),
    ("float steps", {"last_correct_step_indices": ones(1)}, DtypeError, "last_correct_step_indices"),
    (
        "another length",
        {"last_correct_step_indices": ones(2, dtype=torch.int64)},
        ShapeError,
        r"got \[2\], wanted \[1\]",
    ),
    (
        "steps without slots",
        {"mamba_steps_to_track": ones(1, dtype=torch.int32)},
        MissingArgumentError,
        "mamba_track_ind",
    ),
    (
        "slots without steps",
        {"mamba_track_indices": ones(1, dtype=torch.int32)},
        MissingArgumentError,
        "mamba_steps_to_t",
    ),
]


@pytest.mark.parametrize(("bad", "error", "text"), [c[1:] for c in COMMIT], ids=[c[0] for c in COMMIT])
def test_a_commit_refuses_it_by_name_and_writes_nothing(
    lab: MakeLab, bad: dict[str, Any], error: type[ArgumentError], text: str
) -> None:
    it = ready(lab)
    it.verify([5], ones(3, DIM))
    before = it.snapshot()
    here = {k: v.to(it.device) if isinstance(v, torch.Tensor) else v for k, v in bad.items()}
    given = {"req_pool_indices": it.ints([5]), "last_correct_step_indices": it.ints([1]), **here}
    with pytest.raises(error, match=text):
        it.hooks.update_mamba_state_after_mtp_verify(it.pool, **given)
    assert same_bits(it.state.tensor, before)


def test_a_commit_without_requests_is_a_type_error(lab: MakeLab) -> None:
    it = ready(lab)
    with pytest.raises(TypeError, match="req_pool_indices"):
        it.hooks.update_mamba_state_after_mtp_verify(it.pool, last_correct_step_indices=it.ints([1]))


def test_a_ring_snapshot_needs_positions(target: tuple[str, str]) -> None:
    it = Lab(*target, "ring", rows={5: 1})
    extra = {"mamba_track_indices": it.ints([3]), "mamba_steps_to_track": it.ints([0])}
    with pytest.raises(MissingArgumentError, match="computed_lens: got None"):
        it.hooks.update_mamba_state_after_mtp_verify(it.pool, it.ints([5]), it.ints([0]), **extra)


def test_a_pool_without_drafts_cannot_commit(target: tuple[str, str]) -> None:
    it = Lab(*target, "window", rows={5: 1}, drafts=0)
    with pytest.raises(MissingArgumentError, match="draft rows"):
        it.hooks.update_mamba_state_after_mtp_verify(it.pool, it.ints([5]), it.ints([0]))


def deep(it: Lab, hook: str) -> Callable[..., Any]:
    return checked(hook, getattr(it.hooks, hook))


@pytest.mark.parametrize(
    ("slots", "text"),
    [([1, 1], "slot 1 in two live rows"), ([1, 11], "slot 11, wanted below 11")],
    ids=["twice", "far"],
)
def test_checked_mode_finds_bad_slots_before_a_launch(lab: MakeLab, slots: list[int], text: str) -> None:
    it = ready(lab)
    metadata = it.prepare(it.decode_batch([5, 6]))
    metadata.cache_indices.copy_(it.ints(slots))
    before = it.snapshot()
    with pytest.raises(SlotError, match=text):
        deep(it, "conv_decode")(ones(2, DIM).to(it.device), it.weight, None, it.state, metadata)
    assert same_bits(it.state.tensor, before)
    batch = it.decode_batch([5, 6])
    it.pool.mamba_index_mapping[6] = slots[1]
    with pytest.raises(SlotError, match=text):
        deep(it, "prepare_decode_metadata")(batch, it.pool, metadata)
    with pytest.raises(SlotError, match=text):
        deep(it, "update_mamba_state_after_mtp_verify")(it.pool, it.ints([5, 6]), it.ints([0, 0]))


def test_checked_mode_finds_rows_and_steps_out_of_range(lab: MakeLab) -> None:
    it = ready(lab)
    commit = deep(it, "update_mamba_state_after_mtp_verify")
    with pytest.raises(SlotError, match="request row 13, wanted below 13"):
        commit(it.pool, it.ints([13]), it.ints([0]))
    with pytest.raises(ArgumentError, match="last_correct_step_indices: got 3, wanted below 3"):
        commit(it.pool, it.ints([5]), it.ints([3]))
    batch = it.draft_batch(ForwardMode.DRAFT_EXTEND, [5], num_accept_tokens=it.ints([4]))
    view = it.buffers.view(ForwardMode.DRAFT_EXTEND, 1, 3, 3)
    with pytest.raises(ArgumentError, match="num_accept_tokens: got 4, wanted at most 3"):
        deep(it, "prepare_draft_extend_metadata")(batch, it.pool, view)


def test_checked_mode_finds_bad_virtual_and_track_slots(lab: MakeLab) -> None:
    it = lab(rows={5: 9}, v2p=[0, 7, 4])
    view = it.buffers.view(ForwardMode.DECODE, 1, 1, 1, True)
    prepare = deep(it, "prepare_decode_metadata")
    with pytest.raises(SlotError, match="virtual slot 9, wanted below 3"):
        prepare(it.decode_batch([5]), it.pool, view)
    it.pool.mamba_index_mapping[5] = 2
    mask = torch.tensor([True], device=it.device)
    with pytest.raises(SlotError, match="virtual slot 8"):
        prepare(it.decode_batch([5], mamba_track_mask=mask, mamba_track_indices=it.ints([8])), it.pool, view)
    prepare(it.decode_batch([5], mamba_track_mask=mask, mamba_track_indices=it.ints([1])), it.pool, view)
    assert view.mamba_track_indices.tolist() == [7]


def test_checked_mode_refuses_a_copy_onto_a_source(lab: MakeLab) -> None:
    it = ready(lab)
    with pytest.raises(SlotError, match="not also a source"):
        deep(it, "copy_slots")(it.pool, it.ints([1, 2]), it.ints([2, 3]))
    with pytest.raises(SlotError, match="slot 11, wanted below 11"):
        deep(it, "clear_slots")(it.pool, it.ints([11]))


def test_checked_mode_lets_good_calls_through(lab: MakeLab) -> None:
    it = ready(lab)
    metadata = it.prepare(it.decode_batch([5, -1]))
    y = deep(it, "conv_decode")(ones(2, DIM).to(it.device), it.weight, None, it.state, metadata)
    assert y[0].isfinite().all()
    assert not y[1].any()
    assert checked("probe", it.hooks.probe) is it.hooks.probe
