"""Time of device work: medians of graph replays over inputs that rotate past the cache, launches counted from the
captured graph, host time of eager calls."""
# mypy: allow-untyped-calls

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

Work = Callable[[int], object]
"""One call over the i-th set of inputs."""

CACHE_BYTES = 160 << 20
"""Bytes that one replay should touch, well past an L2 of 60 MB."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Median and spread (quartiles) of one call in microseconds, and the launches that one call makes."""

    us: float
    low: float
    high: float
    launches: float


def copies(bytes_per_call: int, most: int = 1024, least: int = 48) -> int:
    """Sets of inputs that one replay rotates through."""
    return max(least, min(most, CACHE_BYTES // max(1, bytes_per_call)))


def in_graph(work: Work, count: int, replays: int = 30) -> Timing:
    """Time of `work` over `count` sets of inputs, captured once and replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # every set, as an engine's warm-up runs every layer
        for i in range(count):
            work(i)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        for i in range(count):
            work(i)
    nodes = node_count(graph)
    graph.instantiate()
    times = replayed(graph, replays)
    quarter = statistics.quantiles(times, n=4)
    return Timing(statistics.median(times) / count, quarter[0] / count, quarter[2] / count, nodes / count)


def replayed(graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
    """Microseconds of each replay of a graph."""
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in events]


def node_count(graph: torch.cuda.CUDAGraph) -> int:
    """Nodes of a captured graph."""
    runtime: Any = import_module("cuda.bindings.runtime")
    error, _, count = runtime.cudaGraphGetNodes(runtime.cudaGraph_t(init_value=graph.raw_cuda_graph()), 0)
    if int(error):
        raise RuntimeError(f"cudaGraphGetNodes: {error}")
    return int(count)


def eager_host(work: Work, count: int = 300) -> float:
    """Host microseconds of one eager call, the device never waited for; median of five runs."""
    for i in range(20):
        work(i)
    runs = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for i in range(count):
            work(i)
        runs.append((time.perf_counter() - begin) / count * 1e6)
    torch.cuda.synchronize()
    return statistics.median(runs)


def interleaved(graphs: Sequence[torch.cuda.CUDAGraph], rounds: int = 15) -> list[float]:
    """Median microseconds of each graph, replayed in turns so that a drift of the clock reaches all alike."""
    times: list[list[float]] = [[] for _ in graphs]
    for graph in graphs:
        for _ in range(3):
            graph.replay()
    for _ in range(rounds):
        for i, graph in enumerate(graphs):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[i].append(begin.elapsed_time(end) * 1e3)
    return [statistics.median(each) for each in times]
