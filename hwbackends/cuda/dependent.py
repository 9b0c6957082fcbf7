"""The rule that makes programmatic dependent launch safe, and launching inside a capture by it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hwbackends.triton_ops.launch import Launch

PLAIN_ROWS = 128
"""Rows of x from which on a launch behind somebody else's kernel is plain. Behind a large matrix product a dependent
launch of this size costs more than it hides (docs/cuda.md)."""


class Chain:
    """The rule of dependent launch, kept per stream while a graph is captured.

    A dependent kernel reads weights, metadata and its own history before it waits, while any kernel since the last
    plain launch may still run. So a launch is dependent only where a plain launch of ours lies between it and the
    last preparation or change of state, and where no launch since that plain one writes the state that it reads.
    Everything else is launched plainly, which waits for all before it. Outside a capture every launch is plain:
    there the host is the bottleneck, and state may have been written by code that this class does not see.

    Attributes:
        changed: metadata or state was written since the last plain conv.
        written: addresses of the states that were written since the last plain conv.
        last: node of our last launch in the captured graph; 0: unknown.
    """

    __slots__ = ("changed", "last", "written")

    def __init__(self) -> None:
        self.changed = True
        self.written: list[tuple[int, int]] = []
        self.last = 0

    def may_depend(self, first: int, last: int, wanted: bool = True) -> bool:
        """Whether a conv over the state at addresses [first, last) may be launched as a dependent; notes the write.
        `wanted` false asks for a plain launch."""
        clear = not self.changed and not any(first < end and begin < last for begin, end in self.written)
        if not (clear and wanted):
            self.changed = False
            self.written.clear()
        self.written.append((first, last))
        return clear and wanted


_chains: dict[int, Chain] = {}


def chain_of_capture() -> Chain | None:
    """The chain of the current stream, which is being captured; None without dependent launch."""
    if not dependent_launch():
        return None
    return _chains.setdefault(torch.cuda.current_stream().cuda_stream, Chain())


def launch_in_capture(launch: Launch, tensors: Sequence[Tensor], span: tuple[int, int], rows: int) -> None:
    """A conv launch while the current stream is captured: dependent where `Chain` allows it and it pays.

    Args:
        launch: the conv.
        tensors: its leading tensors.
        span: addresses of the state that the launch reads early and writes.
        rows: rows of x.
    """
    chain = chain_of_capture()
    if chain is None:
        launch(tensors)
        return
    behind_ours = chain.last in (0, last_node())
    dependent = chain.may_depend(*span, wanted=rows < PLAIN_ROWS or behind_ours)
    ahead = launch.ahead if dependent else None
    if ahead is None or (behind_ours and not ahead.chained) or not ahead(tensors):
        launch(tensors, dependent)
    chain.last = last_node()


def last_node() -> int:
    """Address of the node that the next launch of the captured stream will follow; 0 where it cannot be told."""
    try:
        runtime: Any = import_module("cuda.bindings.runtime")
    except ModuleNotFoundError:
        return 0
    found = runtime.cudaStreamGetCaptureInfo(torch.cuda.current_stream().cuda_stream)
    nodes = found[4] if not int(found[0]) and len(found) > 4 else None
    return int(nodes[0]) if nodes and len(nodes) == 1 else 0


def note_change() -> None:
    """While the current stream is captured: metadata or state was written by a plain launch of ours."""
    chain = chain_of_capture()
    if chain is not None:
        chain.changed = True
        chain.written.clear()


def dependent_launch() -> bool:
    """Whether the device has programmatic dependent launch and nobody switched it off (HWBACKENDS_CUDA_PDL=0)."""
    if os.environ.get("HWBACKENDS_CUDA_PDL", "1") == "0":
        return False
    return torch.cuda.get_device_capability()[0] >= 9
