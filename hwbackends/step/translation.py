"""Slots whose translation is the engine's Python code: a physical copy of the request map, and of the track slots, at
addresses that stay, so that a graph can record the gather although it cannot record the translation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from hwbackends.errors import ArgumentError, ShapeError
from hwbackends.step.batch import StepBatch
from hwbackends.step.pool import StatePool

Translate = Callable[[Tensor], Tensor]
"""Virtual slots [n] >= 0 to physical slots [n]; 0 stays 0."""


class SlotTranslation:
    """Keeps `pool`, which is the engine's pool over a physical map, up to date for the rows that a step names.

    Args:
        pool: the engine's pool; its `mamba_index_mapping` holds virtual slots.
        translate: virtual to physical slots.
        max_batch: most rows of a step.

    Attributes:
        pool: the same tensors with a physical `mamba_index_mapping` of its own.
    """

    def __init__(self, pool: StatePool, translate: Translate, max_batch: int) -> None:
        if pool.mamba_v2p_table is not None:
            hint = "leave translate out: the table is read inside the graph"
            raise ArgumentError("ConvStateSidecar", "translate", "a function", "None beside a mamba_v2p_table", hint)
        self._virtual = pool.mamba_index_mapping
        self._translate = translate
        self.pool = copy.copy(pool)
        self.pool.cache = {}
        self.pool.mamba_index_mapping = torch.zeros_like(self._virtual)
        self.grow(max_batch)

    def grow(self, max_batch: int) -> None:
        """Make room for larger steps; only before a capture."""
        device = self._virtual.device
        self._static = {
            name: torch.zeros(max_batch, dtype=torch.int64, device=device)
            for name in ("mamba_track_indices", "source_indices")
        }

    def refresh(self, batch: StepBatch) -> None:
        """Translate what the step names; out of graph, before preparation or replay."""
        self.refresh_requests(_live(batch, batch.req_pool_indices))
        for name, static in self._static.items():
            virtual = getattr(batch, name)
            if virtual is not None:
                static[: virtual.shape[0]].copy_(self._physical(_live(batch, virtual)))

    def refresh_requests(self, req_pool_indices: Tensor) -> None:
        """Translate the slots of request rows [B]. A padded row refreshes row 0, rightly too."""
        there = (req_pool_indices >= 0) & (req_pool_indices < self._virtual.shape[0])
        rows = torch.where(there, req_pool_indices, 0).long()
        slots = self._physical(self._virtual[rows])
        self.pool.mamba_index_mapping.index_copy_(0, rows, slots.to(self._virtual.dtype))

    def physical(self, slots: Tensor | None) -> Tensor | None:
        """Translated slots [n]; values that are not positive stay padding."""
        return None if slots is None else self._physical(slots)

    def physical_batch(self, batch: StepBatch) -> StepBatch:
        """The batch over the static buffers that `refresh` fills."""
        track = None if batch.mamba_track_indices is None else self._static["mamba_track_indices"][: batch.padded_reqs]
        source = None if batch.source_indices is None else self._static["source_indices"][: batch.padded_reqs]
        return replace(batch, mamba_track_indices=track, source_indices=source)

    def addresses(self) -> dict[str, int]:
        """Address of each static buffer."""
        found = {name: static.data_ptr() for name, static in self._static.items()}
        return found | {"mamba_index_mapping": self.pool.mamba_index_mapping.data_ptr()}

    def _physical(self, slots: Tensor) -> Tensor:
        found = self._translate(slots.clamp(min=0))
        if found.shape != slots.shape:
            raise ShapeError("ConvStateSidecar", "translate", tuple(found.shape), f"{tuple(slots.shape)}, as given")
        return torch.where(slots > 0, found, 0)


def _live(batch: StepBatch, indices: Tensor) -> Tensor:
    """Indices [B] with 0 behind the live rows, where anything may stand."""
    number = torch.arange(indices.shape[0], device=indices.device)
    live = number < batch.num_reqs
    if batch.num_reqs_device is not None:
        live = live & (number < batch.num_reqs_device)
    return torch.where(live, indices, 0)
