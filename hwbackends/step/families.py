"""What a pool asks of the states of any family that lie beside its conv streams: how one is declared (`StateStream`)
and what it is once it has storage (`StateStorage`). A new family implements both; nothing here knows one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Extents:
    """What a pool decides for all of its states.

    Attributes:
        layers: L, layers that hold state.
        num_slots: slots, reserved slot 0 counted.
        request_rows: R, rows of the engine's request pool.
        draft_token_num: N, tokens per request in a verify step; 0: no speculation.
        device: where everything lies.
    """

    layers: int
    num_slots: int
    request_rows: int
    draft_token_num: int
    device: torch.device | str


class StateStorage(Protocol):
    """One named state of a pool, in every layer and slot."""

    @property
    def family(self) -> str:
        """Name of the contract whose hooks take it."""

    @property
    def positions(self) -> bool:
        """Whether its steps and snapshots need to know computed lengths."""

    @property
    def one_chain(self) -> bool:
        """Whether it can follow one chain of drafts only, no tree."""

    @property
    def drafts(self) -> int:
        """Most tokens per request of a verify step; 0: it was made without drafts."""

    def layer(self, index: int) -> Any:
        """The state of one layer, as the family's hooks take it."""

    def slot_tensors(self) -> list[Tensor]:
        """What belongs to slots, each [L, slots, ...]: what a clear zeroes and a copy moves."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Every tensor by name; addresses that a graph may hold."""

    def check(self, name: str, layers: int, num_slots: int, device: torch.device) -> None:
        """Hold the storage to its pool.

        Raises:
            ArgumentError: another number of layers or slots than the pool's, or another device.
        """

    def refuse_commit(self) -> str:
        """What a commit would miss, in words; empty where it can run."""


class StateStream(Protocol):
    """A state before it has storage: its name, and how to make it."""

    @property
    def name(self) -> str:
        """What modules ask for."""

    def allocate(self, extents: Extents) -> StateStorage:
        """Zeroed storage of a pool's extents."""
