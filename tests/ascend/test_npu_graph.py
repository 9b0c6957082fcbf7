"""Captures on an NPU go through `torch.npu.NPUGraph` where torch_npu brings it, and through the recorder elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from hwbackends.testing.recorder import CpuGraph, NpuGraph, graph_for
from tests.ascend.conftest import NPU

pytestmark = pytest.mark.skipif(NPU, reason="there is an NPU: the sidecar's tests capture on it")


def test_an_emulated_npu_is_captured_by_the_recorder() -> None:
    assert isinstance(graph_for("npu"), CpuGraph)


def test_npu_graphs_are_captured_and_replayed_as_torch_npu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class NPUGraph:
        def replay(self) -> None:
            calls.append("replay")

    @contextlib.contextmanager
    def graph(captured: NPUGraph) -> Iterator[None]:
        assert isinstance(captured, NPUGraph)
        calls.append("begin")
        yield
        calls.append("end")

    monkeypatch.setattr(torch.npu, "NPUGraph", NPUGraph, raising=False)
    monkeypatch.setattr(torch.npu, "graph", graph, raising=False)
    made = graph_for("npu:0")
    assert isinstance(made, NpuGraph)
    with made.capture():
        calls.append("work")
    made.replay()
    assert calls == ["begin", "work", "end", "replay"]
