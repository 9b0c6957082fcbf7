"""The three ways from a request row to a physical slot: the map, the map and a table, and the map and Python code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hwbackends.conv.layouts import Layout
from hwbackends.errors import ArgumentError, ShapeError
from hwbackends.step.batch import ForwardMode
from hwbackends.step.pool import StatePool
from hwbackends.testing.guards import frozen_addresses
from hwbackends.testing.recorder import CpuGraph, graph_for
from tests.step.sidecar_cases import (
    SLOT_OF_ROW,
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

OFFSET = 20
"""Virtual slot less physical slot in these tests."""


def virtual_pool(device: str = "cpu", layout: Layout = "window", **changes: Any) -> StatePool:
    """A pool whose map holds virtual slots."""
    mapping = torch.zeros(13, dtype=torch.int32, device=device)
    for row, slot in SLOT_OF_ROW.items():
        mapping[row] = slot + OFFSET
    return make_pool(layout, device, mamba_index_mapping=mapping, **changes)


class PythonTranslation:
    """A translation that no graph can record; counts its calls."""

    def __init__(self, offset: int = OFFSET) -> None:
        self.offset, self.calls = offset, 0

    def __call__(self, slots: Tensor) -> Tensor:
        self.calls += 1
        assert (slots >= 0).all(), "padding is never handed out"
        return torch.tensor([max(0, slot - self.offset) for slot in slots.tolist()], device=slots.device)


def table(device: str = "cpu") -> Tensor:
    """V = 33 virtual slots, entry 0 is 0."""
    return torch.tensor([max(0, slot - OFFSET) for slot in range(33)], device=device)


@devices
@pytest.mark.parametrize("kind", ["table", "python"])
def test_a_replay_sees_the_translation_as_it_is_now(kind: str, device: str) -> None:
    translate = PythonTranslation()
    pool = virtual_pool(device, mamba_v2p_table=table(device)) if kind == "table" else virtual_pool(device)
    sidecar = make_sidecar(pool, translate=translate if kind == "python" else None)
    static = StaticInputs(device)
    static.fill([5, 3, 8, 0, 12], [9] * 5, track=[29, 26])
    batch = static.step(ForwardMode.DECODE, tracks=True)
    sidecar.init_forward_metadata_out_graph(batch, in_capture=True)
    sidecar.init_forward_metadata_in_graph(batch)  # warm up
    graph = graph_for(device)
    with graph.capture():
        sidecar.init_forward_metadata_in_graph(batch)
    metadata = sidecar.conv_state_metadata(2).metadata
    with frozen_addresses(sidecar):
        sidecar.init_forward_metadata_out_graph(batch)
        graph.replay()
        assert metadata.cache_indices.tolist() == [1, 2, 4, 7, 10]
        assert metadata.mamba_track_indices.tolist() == [9, 6, -1, -1, -1]
        move_one_slot_up(pool, translate)
        static.fill([3, 5, -1], [9] * 3, track=[28])
        sidecar.init_forward_metadata_out_graph(batch)
        graph.replay()
        assert metadata.cache_indices.tolist() == [3, 2, -1, -1, -1]
        assert metadata.mamba_track_indices.tolist() == [9, -1, -1, -1, -1]


def move_one_slot_up(pool: StatePool, translate: PythonTranslation) -> None:
    if pool.mamba_v2p_table is not None:
        pool.mamba_v2p_table[1:] += pool.mamba_v2p_table[1:] > 0
    translate.offset -= 1


def test_python_code_runs_out_of_graph_only() -> None:
    translate = PythonTranslation()
    sidecar = make_sidecar(virtual_pool(), translate=translate)
    batch = StaticInputs().step(ForwardMode.DECODE)
    sidecar.init_forward_metadata_out_graph(batch, in_capture=True)
    calls = translate.calls
    graph = CpuGraph()
    with graph.capture():
        sidecar.init_forward_metadata_in_graph(batch)
    graph.replay()
    assert translate.calls == calls == 1, "a capture would fail on the translation's host reads"


@layouts
@pytest.mark.parametrize("kind", ["table", "python"])
def test_eager_steps_and_commits_equal_those_of_a_pool_with_physical_slots(kind: str, layout: Layout) -> None:
    options: dict[str, Any] = {"mamba_v2p_table": table()} if kind == "table" else {}
    pool, plain = virtual_pool("cpu", layout, **options), make_pool(layout)
    sidecar = make_sidecar(pool, translate=PythonTranslation() if kind == "python" else None)
    physical = make_sidecar(plain)
    rows = torch.tensor([3, -1, 8])
    for each, shift in ((sidecar, OFFSET), (physical, 0)):
        track = {
            "mamba_track_mask": torch.tensor([True, False]),
            "mamba_track_indices": torch.tensor([9 + shift, 0]),
            "mamba_track_seqlens": torch.tensor([8, -1]),
            "source_indices": torch.tensor([6 + shift, 0]),
        }
        each.init_forward_metadata(extend([5, 3], [4, 2], [4, 0], **track))
        each.conv_state_metadata(6).conv("k", *inputs(6))
        each.init_forward_metadata(verify([3, -1, 8], [9, 9, 9]))
        each.conv_state_metadata(6).conv("k", *inputs(9))
        each.init_forward_metadata(decode([12]))
        each.update_mamba_state_after_mtp_verify(
            rows,
            torch.tensor([1, 2, 0]),
            mamba_track_indices=torch.tensor([5 + shift, 8 + shift, -1]),
            mamba_steps_to_track=torch.tensor([1, 1, 1]),
            computed_lens=torch.tensor([6, 6, 6]),
        )
        each.conv_state_metadata(6).conv("k", *inputs(1))
    assert same(state_of(pool), state_of(plain))


def test_a_map_that_changes_between_steps_is_translated_anew() -> None:
    pool = virtual_pool()
    sidecar = make_sidecar(pool, translate=PythonTranslation())
    for slot in (9, 6, 0):
        pool.mamba_index_mapping[5] = slot + OFFSET if slot else 0
        sidecar.init_forward_metadata(decode([5, 3]))
        wanted = [slot or -1, 2]
        assert sidecar.conv_state_metadata(2).metadata.cache_indices.tolist() == wanted
    assert pool.mamba_index_mapping[3] == 2 + OFFSET, "the engine's own map stays virtual"


def test_a_commit_goes_to_where_the_slot_lies_by_then() -> None:
    pool, translate = virtual_pool(), PythonTranslation()
    sidecar = make_sidecar(pool, translate=translate)
    sidecar.init_forward_metadata(verify([5]))
    x, weight = inputs(3)
    sidecar.conv_state_metadata(6).conv("k", x, weight)
    translate.offset -= 5  # the engine compacted its pool: slot 1 moved to slot 6
    before = pool.conv_streams["k"][1, 1].clone()
    sidecar.update_mamba_state_after_mtp_verify(torch.tensor([5]), torch.tensor([2]))
    assert torch.equal(pool.conv_streams["k"][1, 6], x)
    assert torch.equal(pool.conv_streams["k"][1, 1], before)


def test_padding_stays_padding_whatever_the_translation_makes_of_it() -> None:
    sidecar = make_sidecar(make_pool(), translate=lambda slots: slots + 1)
    track = {"mamba_track_mask": torch.ones(4, dtype=torch.bool), "mamba_track_indices": torch.tensor([8, 0, -1, 5])}
    sidecar.init_forward_metadata(decode([5, 7, -1, 3], **track))
    metadata = sidecar.conv_state_metadata(2).metadata
    assert metadata.cache_indices.tolist() == [2, -1, -1, 3], "request row 7 maps to slot 0"
    assert metadata.mamba_track_indices.tolist() == [9, -1, -1, 6]


@pytest.mark.parametrize("counted", ["on the host", "on the device"])
def test_what_stands_behind_the_live_rows_is_never_handed_out(counted: str) -> None:
    sidecar = make_sidecar(virtual_pool(), translate=lambda slots: table()[slots])  # refuses what is no slot
    garbage = [2**40, -7, 13]
    track = {
        "mamba_track_mask": torch.ones(5, dtype=torch.bool),
        "mamba_track_indices": torch.tensor([29, 26, *garbage]),
    }
    live = torch.tensor([2], dtype=torch.int32)
    batch = replace(decode([5, 3, *garbage], **track), num_reqs=5 if counted == "on the device" else 2)
    sidecar.init_forward_metadata(replace(batch, num_reqs_device=live) if counted == "on the device" else batch)
    metadata = sidecar.conv_state_metadata(2).metadata
    assert metadata.cache_indices.tolist() == [1, 2, -1, -1, -1]
    assert metadata.mamba_track_indices.tolist() == [9, 6, -1, -1, -1]


def test_launch_plans_over_the_virtual_map_are_not_shared_with_the_physical_one() -> None:
    pool = virtual_pool()
    assert make_sidecar(pool, translate=PythonTranslation()).pool.cache is not pool.cache
    assert make_sidecar(pool).pool is pool


def test_translation_buffers_grow_with_the_metadata_before_a_capture() -> None:
    sidecar = make_sidecar(virtual_pool(), translate=PythonTranslation())
    tracked = {"mamba_track_mask": torch.ones(7, dtype=torch.bool), "mamba_track_indices": torch.arange(21, 28)}
    sidecar.init_forward_metadata(decode([5, 3, 8, 0, 12, -1, -1], **tracked))
    metadata = sidecar.conv_state_metadata(2).metadata
    assert metadata.mamba_track_indices.tolist() == [1, 2, 3, 4, 5, -1, -1]


def test_a_translation_beside_a_table_is_refused() -> None:
    with pytest.raises(ArgumentError, match="beside a mamba_v2p_table"):
        make_sidecar(virtual_pool(mamba_v2p_table=table()), translate=PythonTranslation())


def test_a_translation_of_another_shape_is_refused() -> None:
    sidecar = make_sidecar(virtual_pool(), translate=lambda slots: slots[:-1])
    with pytest.raises(ShapeError, match="translate"):
        sidecar.init_forward_metadata(decode([5, 3]))


def test_slots_that_an_engine_translated_itself_need_no_map() -> None:
    pool = make_pool(mamba_index_mapping=torch.full((13,), 6, dtype=torch.int32))
    sidecar = make_sidecar(pool)
    sidecar.init_forward_metadata(decode([5, 3, -1], cache_indices=torch.tensor([9, 0, 4])))
    assert sidecar.conv_state_metadata(2).metadata.cache_indices.tolist() == [9, -1, -1]
