"""What a peer beside SGLang is to the benchmark: a conv of a decode step and one of a prefill step over a cache of its
own layout, state slots and all. Whoever has the peer's package gets its figures in the same run."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prefill step of B requests, prepared once: what every layer's conv then reads.

    Attributes:
        lengths: tokens of each request, on the host.
        starts: first token of each request, and the end; int32 [B + 1].
        slots: state slot of each request; int32 [B].
        initial: whether a request has a history; bool [B].
        tracks: slot that takes a copy of each request's final state; int32 [B].
    """

    lengths: list[int]
    starts: Tensor
    slots: Tensor
    initial: Tensor
    tracks: Tensor


class Peer(Protocol):
    """One peer. Weights are contiguous [D, W], x is [tokens, D]."""

    name: str
    version: str
    note: str
    """What its calls leave out; empty where they do the work of ours."""

    def cache(self, windows: Tensor) -> Tensor:
        """A cache in its layout that holds `windows` [slots, W - 1, D], oldest row first."""

    def windows(self, cache: Tensor) -> Tensor:
        """The rows [slots, W - 1, D] of a cache."""

    def ready(self, size: int) -> None:
        """Called before the first call at a size (requests or tokens)."""

    def indices(self, slots: Tensor) -> Tensor:
        """State slots in the dtype that its calls take; once per step."""

    def decode(self, x: Tensor, weight: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        """Outputs [B, D] of one token each; moves the cache on."""

    def plan(self, prefill: Prefill) -> Any:
        """What `extend` reads of a step; once per step."""

    def extend(self, x: Tensor, weight: Tensor, cache: Tensor, plan: Any) -> Tensor:
        """Outputs [T, D] of a prefill step; moves the cache on."""


def package(name: str, path: Path) -> None:
    """A package whose own `__init__` is not run; its modules are found under `path`."""
    found = types.ModuleType(name)
    found.__path__ = [str(path)]
    sys.modules[name] = found


def module(name: str, **contents: Any) -> None:
    """A stand-in for a module of theirs."""
    made = types.ModuleType(name)
    vars(made).update(contents)
    sys.modules[name] = made
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, made)


def wheel_version(folder: Path, distribution: str) -> str:
    """Version that the metadata beside an unpacked package tells; empty where there is none."""
    found = sorted(folder.glob(f"{distribution}-*.dist-info"))
    return found[-1].name.removesuffix(".dist-info").rpartition("-")[2] if found else ""
