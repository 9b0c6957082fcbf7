"""The conv in torch's own ops: gather, concatenate, `F.conv1d`, scatter. What a model without any kernel does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hwbackends.bench.peers.common import Prefill
from hwbackends.errors import ArgumentError


class TorchNative:
    """`F.conv1d` over a cache [slots, D, W - 1]. A prefill's requests are of one length, so that one call serves
    them all: torch's best case."""

    name = "torch"
    note = ""

    def __init__(self) -> None:
        self.version = str(torch.__version__)

    def cache(self, windows: Tensor) -> Tensor:
        return windows.transpose(1, 2).contiguous()

    def windows(self, cache: Tensor) -> Tensor:
        return cache.transpose(1, 2)

    def ready(self, size: int) -> None:
        """Nothing is tuned."""

    def indices(self, slots: Tensor) -> Tensor:
        return slots.long()

    def decode(self, x: Tensor, weight: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        window = torch.cat([cache.index_select(0, slots), x[:, :, None]], dim=2)
        cache.index_copy_(0, slots, window[:, :, 1:])
        return functional.conv1d(window, weight[:, None], groups=len(weight))[:, :, 0] + x

    def plan(self, prefill: Prefill) -> Any:
        if len(set(prefill.lengths)) > 1:
            raise ArgumentError("torch", "lengths", prefill.lengths, "requests of one length")
        return prefill.initial[:, None, None], self.indices(prefill.slots), self.indices(prefill.tracks)

    def extend(self, x: Tensor, weight: Tensor, cache: Tensor, plan: Any) -> Tensor:
        initial, slots, tracks = plan
        rows = x.view(len(slots), -1, x.shape[1])
        history = cache.index_select(0, slots) * initial
        window = torch.cat([history, rows.transpose(1, 2)], dim=2)
        last = window[:, :, -cache.shape[2] :]
        cache.index_copy_(0, slots, last)
        cache.index_copy_(0, tracks, last)
        y = functional.conv1d(window, weight[:, None], groups=len(weight)).transpose(1, 2) + rows
        return y.reshape(x.shape)
