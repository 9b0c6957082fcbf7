"""What a decode conv knows of the conv behind it; launches here only write down their arguments, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton ships for Linux only")

from hwbackends.conv.state import ConvState
from hwbackends.cuda import ahead, conv
from hwbackends.cuda.ahead import FetchAhead, Trail
from hwbackends.triton_ops import conv as shared
from hwbackends.triton_ops.launch import Launch
from tests.backend.lab import Lab

SLOTS, ROWS = 11, 8


class Written:
    """Stands for a launch."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], bool, tuple[int, ...]]] = []

    def at(self, pointers: Sequence[int], dependent: bool, first: tuple[int, ...]) -> bool:
        self.calls.append((list(pointers), dependent, first))
        return True


def state(dim: int, slots: int = SLOTS, rows: int = ROWS, dtype: torch.dtype = torch.float32) -> ConvState:
    return ConvState(torch.zeros(slots, rows, dim, dtype=dtype), "ring", 4)


def fetch(of: ConvState, trail: Trail, weight: Tensor | None = None) -> tuple[FetchAhead, Written]:
    written: Any = Written()
    taps = torch.zeros(of.dim, of.width) if weight is None else weight
    return FetchAhead(of, taps, written, trail, chained=False), written


def test_a_conv_fetches_for_the_one_that_was_planned_after_it() -> None:
    trail, x = Trail(), torch.zeros(64)
    small, large, taps = state(5), state(16), torch.zeros(16, 4)
    first, written = fetch(small, trail)
    fetch(large, trail, taps)
    assert first([x])
    pointers = [x.data_ptr(), large.tensor.data_ptr(), taps.data_ptr()]
    assert written.calls == [(pointers, True, (16, large.tensor.stride(0), large.tensor.stride(1)))]


def test_the_last_conv_of_a_step_fetches_nothing() -> None:
    last, written = fetch(state(5), Trail())
    assert not last([torch.zeros(64)])
    assert written.calls == []


@pytest.mark.parametrize("other", [{"slots": 13}, {"rows": 9}, {"dtype": torch.float16}], ids=str)
def test_a_state_of_another_form_is_not_fetched_with_this_one_s_slots(other: dict[str, Any]) -> None:
    trail = Trail()
    first, written = fetch(state(5), trail)
    fetch(state(7, **other), trail)
    assert not first([torch.zeros(64)])
    assert written.calls == []


def test_an_address_that_16_does_not_divide_leaves_the_launch_to_the_plain_form() -> None:
    trail = Trail()
    first, written = fetch(state(5), trail)
    fetch(state(7), trail)
    assert not first([torch.zeros(64)[1:]])
    assert written.calls == []


@pytest.mark.parametrize(("rows", "fetches"), [(3, True), (64, True), (65, False)])
def test_a_decode_conv_fetches_ahead_up_to_64_rows(rows: int, fetches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "interpreting", lambda: False)
    monkeypatch.setattr(ahead, "dependent_launch", lambda: True)
    monkeypatch.setattr(shared, "check_device", lambda *given: None)
    launched: list[Launch] = []
    monkeypatch.setattr(Launch, "at", lambda self, *arguments: launched.append(self) or True)
    lab = Lab(layout="ring", rows={row: row for row in range(1, rows + 1)}, dim=5, slots=rows + 1, requests=rows + 1)
    metadata = lab.prepare(lab.decode_batch(list(range(1, rows + 1))))
    conv.conv_decode(torch.zeros(rows, 5), torch.zeros(5, 4), None, lab.pool.conv_state("k", 0), metadata)
    assert [launch.ahead is not None for launch in launched] == [fetches]
