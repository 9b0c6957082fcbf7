"""Launching without a GPU: a stand-in for triton's compiled kernel shows what is compiled when, and which addresses and
constants each launch gets."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton ships for Linux only")

from hwbackends.cuda import dependent
from hwbackends.cuda.traits import CUDA
from hwbackends.triton_ops import launch as launching
from hwbackends.triton_ops.launch import Launch


class Kernel:
    """Counts compilations; a warm launch appends its arguments to `warm`."""

    def __init__(self) -> None:
        self.compiled: list[bool] = []
        self.warm: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self._compile(options)

    def warmup(self, *arguments: Any, **options: Any) -> Any:
        return self._compile(options)

    def _compile(self, options: dict[str, Any]) -> Any:
        self.compiled.append(options.get("launch_pdl", False))
        return SimpleNamespace(run=lambda *given: self.warm.append(given), function="f", packed_metadata="m")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(launching, "interpreting", lambda: False)
    monkeypatch.setattr(dependent, "dependent_launch", lambda: True)
    monkeypatch.setattr(launching, "_current_device", lambda: -1)
    monkeypatch.setattr(launching, "_current_stream", lambda device: 7)
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launching.triton, "__version__", "3.9.0")
    return Kernel()


def make(kernel: Kernel, rows: int = 3, block: int = 64, fixed: tuple[torch.Tensor, ...] = ()) -> Launch:
    return Launch(CUDA, kernel, 5, [rows], {"D": 8, "PDL": False, "BLOCK": block}, 4, fixed)


def test_the_first_call_compiles_both_forms_and_the_next_passes_addresses(kernel: Kernel) -> None:
    x, state = torch.zeros(64), torch.zeros(64)
    launch = make(kernel, fixed=(state,))
    launch([x])
    assert kernel.compiled == [False, True]
    assert kernel.warm == []
    launch([x])
    launch([x], dependent=True)
    head = (5, 1, 1, 7, "f", "m", None, None, None, x.data_ptr(), state.data_ptr(), 3)
    assert kernel.warm == [(*head, 8, False, 64), (*head, 8, True, 64)]


def test_a_launch_of_another_extent_reuses_what_was_compiled(kernel: Kernel) -> None:
    x = torch.zeros(64)
    make(kernel, rows=3)([x])
    make(kernel, rows=9)([x])
    assert kernel.compiled == [False, True]
    assert kernel.warm[0][-4:] == (9, 8, False, 64)


@pytest.mark.parametrize("other", ["constants", "dtype"])
def test_other_constants_or_dtypes_are_compiled_anew(kernel: Kernel, other: str) -> None:
    make(kernel)([torch.zeros(64)])
    if other == "constants":
        make(kernel, block=128)([torch.zeros(64)])
    else:
        make(kernel)([torch.zeros(64, dtype=torch.float16)])
    assert kernel.compiled == [False, True, False, True]
    assert kernel.warm == []


def test_an_address_that_16_does_not_divide_goes_through_triton_itself(kernel: Kernel) -> None:
    aligned = torch.zeros(64)
    launch = make(kernel)
    launch([aligned])
    launch([aligned[1:]])
    assert kernel.compiled == [False, True, False]
    assert kernel.warm == []


@pytest.mark.parametrize("capture", [False, True])
def test_a_form_is_compiled_without_a_launch_but_never_inside_a_capture(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, capture: bool
) -> None:
    monkeypatch.setattr(launching, "capturing", lambda: capture)
    x, launch = torch.zeros(64), make(kernel)
    launch.compile_dependent([x])
    assert kernel.compiled == ([] if capture else [True])
    assert kernel.warm == []
    assert launch.at([x.data_ptr()], dependent=True) is not capture


class Ahead:
    """A form that fetches ahead and writes down what it was asked."""

    def __init__(self, chained: bool, knows: bool = True) -> None:
        self.chained, self.knows = chained, knows
        self.asked: list[str] = []

    def compile(self, tensors: Any) -> None:
        self.asked.append("compile")

    def __call__(self, tensors: Any) -> bool:
        self.asked.append("launch")
        return self.knows


def test_the_form_that_fetches_ahead_is_compiled_with_the_first_call(kernel: Kernel) -> None:
    launch = make(kernel)
    launch.ahead = ahead = Ahead(chained=False)
    launch([torch.zeros(64)])
    assert ahead.asked == ["compile"]


@pytest.mark.parametrize(
    ("chained", "behind_ours", "asked"),
    [(False, False, True), (False, True, False), (True, False, True), (True, True, True)],
)
def test_a_dependent_conv_fetches_ahead_behind_another_s_kernel_or_where_that_pays_behind_ours(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, chained: bool, behind_ours: bool, asked: bool
) -> None:
    chain, nodes = dependent.Chain(), iter([5, 5 if behind_ours else 9, 0, 0])
    monkeypatch.setattr(dependent, "chain_of_capture", lambda: chain)
    monkeypatch.setattr(dependent, "last_node", lambda: next(nodes))
    chain.changed, chain.last = False, next(nodes)
    launch = make(kernel)
    launch.ahead = ahead = Ahead(chained)
    dependent.launch_in_capture(launch, [torch.zeros(64)], (0, 8), 3)
    assert ("launch" in ahead.asked) is asked


def test_a_plain_launch_in_a_capture_fetches_nothing(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependent, "chain_of_capture", dependent.Chain)
    monkeypatch.setattr(dependent, "last_node", lambda: 9)
    launch = make(kernel)
    launch.ahead = ahead = Ahead(chained=True)
    dependent.launch_in_capture(launch, [torch.zeros(64)], (0, 8), 3)
    assert "launch" not in ahead.asked


def test_an_empty_grid_launches_nothing(kernel: Kernel) -> None:
    Launch(CUDA, kernel, 0, [1], {"D": 8}, 4)([torch.zeros(0)])
    assert kernel.compiled == []
