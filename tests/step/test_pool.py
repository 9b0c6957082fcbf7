"""The state pool and the slot allocator: layouts, wrapping, parts, and who owns which slot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hwbackends.conv.layouts import layout_rows
from hwbackends.conv.state import ConvState, ConvStream
from hwbackends.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    OutOfSlotsError,
    ShapeError,
    SlotError,
    UnsupportedError,
    WidthError,
)
from hwbackends.step.batch import ForwardMode
from hwbackends.step.metadata import MetadataBuffers, MetadataLimits
from hwbackends.step.pool import PoolParts, StatePool
from hwbackends.step.slots import SlotAllocator


def pool(**changes: Any) -> StatePool:
    given: dict[str, Any] = {"num_slots": 11, "width": 4, "layers": [3, 7], "draft_token_num": 5, "request_rows": 13}
    return StatePool([ConvStream("k", 5), ConvStream("v", 7), ConvStream("attn", 9, torch.bfloat16)], **given | changes)


@pytest.mark.parametrize(("layout", "rows"), [("window", 3), ("ring", 8), ("lazy", 7)])
def test_each_layout_has_its_rows_per_slot(layout: str, rows: int) -> None:
    it = pool(layout=layout)
    assert it.rows == layout_rows(layout, 4, 5) == rows  # type: ignore[arg-type]
    assert it.conv_streams["v"].shape == (2, 11, rows, 7)
    assert it.conv_streams["attn"].dtype == torch.bfloat16
    assert not any(tensor.any() for tensor in it.conv_streams.values())


def test_only_the_window_layout_keeps_draft_rows() -> None:
    assert pool().draft_rows["v"].shape == (2, 13, 3 + 5, 7)
    assert pool(draft_token_num=0).draft_rows == {}
    assert pool(layout="ring").draft_rows == {}
    assert pool().conv_state("v", 7).draft_rows is not None


def test_a_conv_state_is_a_view_and_always_the_same_object() -> None:
    it = pool()
    state = it.conv_state("v", 7)
    assert it.conv_state("v", 7) is state
    state.tensor[4, 2] = 1
    assert it.conv_streams["v"][1, 4, 2].eq(1).all()
    assert it.conv_streams["k"].eq(0).all()


def test_neighbouring_streams_of_one_dtype_are_one_view() -> None:
    it = pool()
    both = it.conv_state(("k", "v"), 3)
    both.tensor[2, 1] = torch.arange(12.0)
    assert it.conv_streams["k"][0, 2, 1].tolist() == [0, 1, 2, 3, 4]
    assert it.conv_streams["v"][0, 2, 1].tolist() == [5, 6, 7, 8, 9, 10, 11]
    assert both.draft_rows is not None
    assert both.draft_rows.shape == (13, 8, 12)


@pytest.mark.parametrize("names", [("v", "k"), ("k", "attn")])
def test_other_streams_cannot_be_merged(names: tuple[str, ...]) -> None:
    with pytest.raises(ArgumentError, match="call the conv once per stream"):
        pool().conv_state(names, 3)


def test_a_view_of_no_stream_is_refused() -> None:
    with pytest.raises(ArgumentError, match="stream: got no stream, wanted at least one"):
        pool().conv_state((), 3)


@pytest.mark.parametrize(
    ("stream", "layer", "text"),
    [("q", 3, "got 'q', wanted one of k, v, attn"), ("k", 0, r"got 0, wanted one of \[3, 7\]")],
)
def test_an_unknown_stream_or_layer_is_named(stream: str, layer: int, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        pool().conv_state(stream, layer)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"layout": "heap"}, UnsupportedError, "layout: got 'heap', wanted one of window, ring, lazy"),
        ({"width": 1}, WidthError, "width: got 1, wanted at least 2"),
        ({"num_slots": 1}, SlotError, "slot 0 is reserved"),
        ({"draft_token_num": -1}, ArgumentError, "draft_token_num: got -1"),
        ({"track_interval": 0}, ArgumentError, "track_interval: got 0"),
        ({"layers": []}, ArgumentError, "layers"),
        ({"layers": [3, 3]}, ArgumentError, "each once"),
        ({"ring_rows": 9}, ArgumentError, "ring_rows: got 9, wanted None on layout window"),
        ({"layout": "ring", "ring_rows": 7}, ShapeError, "ring_rows: got 7, wanted at least 8"),
        ({"mamba_index_mapping": torch.zeros(13)}, DtypeError, r"mamba_index_mapping: got \(13,\) torch.float32"),
        ({"mamba_v2p_table": torch.zeros(13, dtype=torch.int32)}, DtypeError, "mamba_v2p_table"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_pool_that_cannot_work_is_refused(changes: dict[str, Any], error: type[ArgumentError], text: str) -> None:
    with pytest.raises(error, match=text):
        pool(**changes)


@pytest.mark.parametrize("dim", [0, -3])
def test_a_stream_without_channels_is_refused(dim: int) -> None:
    with pytest.raises(ArgumentError, match=f"streams: got v of {dim} channels, wanted at least 1"):
        StatePool([ConvStream("k", 5), ConvStream("v", dim)], num_slots=3, width=4)


@pytest.mark.parametrize(
    ("streams", "error"),
    [([], ArgumentError), ([ConvStream("k", 3)] * 2, ArgumentError), ([ConvStream("k", 3, torch.int32)], DtypeError)],
)
def test_streams_are_named_once_and_floating(streams: list[ConvStream], error: type[ArgumentError]) -> None:
    with pytest.raises(error, match="streams"):
        StatePool(streams, num_slots=3, width=4)


def test_a_larger_ring_is_allowed() -> None:
    assert pool(layout="ring", ring_rows=16).rows == 16


def test_ssm_state_and_its_steps_are_optional() -> None:
    it = pool(ssm_shape=(2, 3), ssm_dtype=torch.float64)
    assert it.ssm_state is not None
    assert it.intermediate_ssm is not None
    assert it.ssm_state.shape == (2, 11, 2, 3)
    assert it.intermediate_ssm.shape == (2, 13, 5, 2, 3)
    assert pool().ssm_state is None


def wrapped(**changes: Any) -> StatePool:
    engine = changes.pop("engine", torch.zeros(2, 11, 3, 5))
    given: dict[str, Any] = {"width": 4, "mamba_index_mapping": torch.zeros(13, dtype=torch.int32)}
    return StatePool.wrap({"k": engine}, **given | changes)


def test_a_wrapped_pool_shares_the_engines_memory() -> None:
    engine = torch.zeros(2, 11, 5, 3)
    it = wrapped(engine=engine.transpose(-1, -2))
    it.conv_state("k", 1).tensor[4, 2, 3] = 8
    assert engine[1, 4, 3, 2] == 8
    assert it.addresses()["conv[k]"] == engine.data_ptr()


def test_a_wrapped_pool_gets_draft_rows_when_it_speculates() -> None:
    assert wrapped(draft_token_num=3).draft_rows["k"].shape == (2, 13, 6, 5)
    assert wrapped().draft_rows == {}


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"engine": torch.zeros(11, 3, 5)}, ShapeError, "conv_streams"),
        ({"engine": torch.zeros(2, 11, 4, 5)}, ShapeError, "4 rows, wanted exactly 3 rows"),
        ({"engine": torch.zeros(2, 11, 3, 5, dtype=torch.int8)}, DtypeError, "k: got torch.int8"),
        ({"engine": torch.zeros(2, 11, 3, 5, device="meta")}, DeviceError, "k: got meta"),
        ({"layers": [1]}, ShapeError, "layers: got 1 layer ids, wanted 2"),
        ({"ssm_state": torch.zeros(2, 7, 4)}, ShapeError, "ssm_state"),
        ({"draft_rows": {"k": torch.zeros(2, 13, 4, 5)}, "draft_token_num": 3}, ShapeError, "draft_rows"),
        (
            {"ssm_state": torch.zeros(2, 11, 4), "intermediate_ssm": torch.zeros(2, 13, 2, 4), "draft_token_num": 3},
            ShapeError,
            "intermediate_ssm",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changes: dict[str, Any], error: type[ArgumentError], text: str) -> None:
    with pytest.raises(error, match=text):
        wrapped(**changes)


@pytest.mark.parametrize(
    ("layout", "rows", "error"), [("ring", 3, ShapeError), ("lazy", 2, ShapeError), ("heap", 3, UnsupportedError)]
)
def test_a_conv_state_has_rows_for_its_width(layout: Any, rows: int, error: type[ArgumentError]) -> None:
    with pytest.raises(error):
        ConvState(torch.zeros(5, rows, 7), layout, 4)


def test_a_conv_state_is_three_dimensional_and_wide_enough() -> None:
    with pytest.raises(ShapeError, match="slots, rows, D"):
        ConvState(torch.zeros(5, 3), "window", 4)
    with pytest.raises(WidthError):
        ConvState(torch.zeros(5, 0, 7), "window", 1)
    assert ConvState(torch.zeros(5, 3, 7), "window", 4).slots == 5


def test_parts_share_slots_and_the_map() -> None:
    target = pool()
    draft = pool(layers=1, mamba_index_mapping=target.mamba_index_mapping)
    parts = PoolParts({"target": target, "draft": draft})
    assert list(parts) == [target, draft]
    assert parts["draft"] is draft
    with pytest.raises(ArgumentError, match="one mamba_index_mapping"):
        PoolParts({"target": target, "draft": pool()})
    with pytest.raises(ArgumentError, match="at least one pool"):
        PoolParts({})


def test_every_address_that_a_graph_may_hold_is_listed() -> None:
    it = pool(ssm_shape=(2,), mamba_v2p_table=torch.zeros(3, dtype=torch.int64))
    assert set(it.addresses()) == {
        *(f"{kind}[{name}]" for kind in ("conv", "draft_rows") for name in ("k", "v", "attn")),
        "ssm_state",
        "intermediate_ssm",
        "mamba_index_mapping",
        "mamba_v2p_table",
    }
    assert it.num_layers == 2
    assert len(it.storages()) == len(it.draft_storages()) == 2


def test_metadata_views_share_the_buffers_and_are_made_once() -> None:
    buffers = MetadataBuffers(MetadataLimits(5, 9, 3), "cpu", torch.int64)
    before = buffers.addresses()
    small, large = buffers.view(ForwardMode.DECODE, 2, 2), buffers.view(ForwardMode.DECODE, 5, 5)
    assert buffers.view(ForwardMode.DECODE, 2, 2) is small
    assert small.cache_indices.data_ptr() == large.cache_indices.data_ptr() == before["cache_indices"]
    assert small.query_start_loc.shape == (3,)
    assert small.cache_indices.dtype == torch.int64
    assert buffers.view(ForwardMode.TARGET_VERIFY, 5, 15, 3).seq_idx.shape == (15,)
    assert buffers.addresses() == before


def test_slot_zero_is_never_handed_out() -> None:
    slots = SlotAllocator(4)
    assert slots.alloc(3) == [1, 2, 3]
    assert slots.available == 0


def test_running_out_of_slots_loses_nothing() -> None:
    slots = SlotAllocator(4)
    slots.alloc(2)
    with pytest.raises(OutOfSlotsError, match="count: got 2, wanted at most 1 free slots"):
        slots.alloc(2)
    assert slots.alloc() == [3]


@pytest.mark.parametrize("given", [[1, 1], [2], [0], [7], [-1], [1, 2]], ids=str)
def test_a_wrong_free_is_refused_and_frees_nothing(given: list[int]) -> None:
    slots = SlotAllocator(4)
    slots.alloc(1)
    with pytest.raises(SlotError, match=r"SlotAllocator\.free: slots"):
        slots.free(given)
    assert slots.used == {1}


def test_slots_come_back_as_a_tensor_too() -> None:
    slots = SlotAllocator(11)
    given = torch.tensor(slots.alloc(3))
    slots.free(given)
    assert not slots.used
    with pytest.raises(SlotError, match="not handed out"):
        slots.free(given)


def test_a_count_or_pool_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(SlotError, match="num_slots"):
        SlotAllocator(1)
    with pytest.raises(SlotError, match="count: got -1"):
        SlotAllocator(3).alloc(-1)


class Slots(RuleBasedStateMachine):
    """Any order of alloc, free and clear keeps each slot free or used, never both, never lost."""

    def __init__(self) -> None:
        super().__init__()
        self.slots, self.mine = SlotAllocator(7), set[int]()

    @rule(count=st.integers(0, 6))
    def alloc(self, count: int) -> None:
        if count > self.slots.available:
            with pytest.raises(OutOfSlotsError):
                self.slots.alloc(count)
        else:
            taken = self.slots.alloc(count)
            assert self.mine.isdisjoint(taken)
            self.mine.update(taken)

    @precondition(lambda self: self.mine)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        given = data.draw(st.sets(st.sampled_from(sorted(self.mine)), min_size=1))
        self.slots.free(given)
        self.mine -= given

    @rule()
    def clear(self) -> None:
        self.slots.clear()
        self.mine.clear()

    @invariant()
    def every_slot_is_free_or_used(self) -> None:
        assert self.slots.used == self.mine
        assert self.slots.available == 6 - len(self.mine)


TestSlots = Slots.TestCase
