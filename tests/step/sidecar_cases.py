"""Pools, batches and a counting backend for the tests of the sidecar. Sizes are pairwise different and odd where the
layouts let them be, so that a swapped axis cannot pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hwbackends import load
from hwbackends.conv.layouts import Layout
from hwbackends.conv.state import ConvStream
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.pool import StatePool
from hwbackends.step.sidecar import ConvStateSidecar

WIDTH, DIM, SLOTS, REQUESTS, DRAFTS = 4, 5, 11, 13, 3
BATCH, TOKENS = 5, 33
LAYERS = (2, 6)
SLOT_OF_ROW = {5: 1, 3: 2, 12: 10, 8: 4, 0: 7}
ROWS = list(SLOT_OF_ROW)

LAYOUTS: tuple[Layout, ...] = ("window", "ring", "lazy")
GRAPH_PHASES = (ForwardMode.DECODE, ForwardMode.IDLE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
layouts = pytest.mark.parametrize("layout", LAYOUTS)
graph_phases = pytest.mark.parametrize("mode", GRAPH_PHASES, ids=lambda mode: mode.value)


class CountingBackend:
    """The reference, and how often each hook was called."""

    def __init__(self) -> None:
        self._backend = load("reference")
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        hook = getattr(self._backend, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return hook(*args, **kwargs)

        return call


def make_pool(layout: Layout = "window", device: str = "cpu", **changes: Any) -> StatePool:
    """A pool of two neighbouring streams whose state is random and whose map is `SLOT_OF_ROW`."""
    settings: dict[str, Any] = {"draft_token_num": DRAFTS, "request_rows": REQUESTS, "track_interval": 4, **changes}
    streams = [ConvStream("k", DIM), ConvStream("v", DIM + 2)]
    pool = StatePool(streams, num_slots=SLOTS, width=WIDTH, layers=LAYERS, layout=layout, device=device, **settings)
    if "mamba_index_mapping" not in changes:
        for row, slot in SLOT_OF_ROW.items():
            pool.mamba_index_mapping[row] = slot
    generator = torch.Generator().manual_seed(41)
    for tensor in pool.storages():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return pool


def make_sidecar(pool: Any, backend: object = None, **changes: Any) -> ConvStateSidecar:
    """A sidecar with limits of 5 requests, 33 tokens and 3 drafts."""
    settings: dict[str, Any] = {"max_batch": BATCH, "max_tokens": TOKENS, "draft_tokens": DRAFTS, **changes}
    return ConvStateSidecar(backend or load("reference"), pool, **settings)


class StaticInputs:
    """What an engine with graphs owns: one tensor per field at an address that stays, filled before each step."""

    def __init__(self, device: str = "cpu", batch: int = BATCH) -> None:
        self.device, self.batch = device, batch
        self.req_pool_indices = torch.zeros(batch, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.num_accept_tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.track_mask = torch.zeros(batch, dtype=torch.bool, device=device)
        self.track_indices = torch.zeros(batch, dtype=torch.int64, device=device)
        self.num_reqs = torch.zeros(1, dtype=torch.int32, device=device)

    def fill(self, rows: Sequence[int], lens: Sequence[int], tail: int = ROWS[0], track: Sequence[int] = ()) -> None:
        """One step of `rows`; what stands behind them is `tail`, by default a live request's row."""
        behind = self.batch - len(rows)
        self._set(self.req_pool_indices, [*rows, *[tail] * behind])
        self._set(self.seq_lens, [*lens, *[99] * behind])
        self._set(self.num_accept_tokens, [*[(index % DRAFTS) + 1 for index in range(len(rows))], *[2] * behind])
        self._set(self.track_mask, [index < len(track) for index in range(self.batch)])
        self._set(self.track_indices, [*track, *[0] * (self.batch - len(track))])
        self.num_reqs.fill_(len(rows))

    def _set(self, tensor: Tensor, values: Sequence[int]) -> None:
        tensor.copy_(torch.tensor(values))

    def step(self, mode: ForwardMode, tracks: bool = False) -> StepBatch:
        """The captured batch: padded extents, live count on the device."""
        tokens = DRAFTS if mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND) else 1
        return StepBatch(
            forward_mode=mode,
            req_pool_indices=self.req_pool_indices,
            num_reqs=0 if mode is ForwardMode.IDLE else self.batch,
            num_tokens=self.batch * tokens,
            seq_lens=self.seq_lens,
            draft_token_num=tokens,
            num_accept_tokens=self.num_accept_tokens if mode is ForwardMode.DRAFT_EXTEND else None,
            mamba_track_mask=self.track_mask if tracks else None,
            mamba_track_indices=self.track_indices if tracks else None,
            num_reqs_device=self.num_reqs,
        )


def decode(rows: Sequence[int], lens: Sequence[int] | None = None, device: str = "cpu", **changes: Any) -> StepBatch:
    """An eager decode step."""
    lengths = torch.tensor(lens or [9] * len(rows), device=device)
    indices = torch.tensor(rows, device=device)
    return StepBatch(ForwardMode.DECODE, indices, len(rows), len(rows), seq_lens=lengths, **changes)


def verify(rows: Sequence[int], lens: Sequence[int] | None = None, **changes: Any) -> StepBatch:
    """An eager verify step of three drafts; `lens` counts the drafts."""
    lengths = torch.tensor(lens or [9] * len(rows))
    count = len(rows)
    return StepBatch(
        ForwardMode.TARGET_VERIFY,
        torch.tensor(rows),
        count,
        count * DRAFTS,
        seq_lens=lengths,
        draft_token_num=DRAFTS,
        **changes,
    )


def extend(
    rows: Sequence[int], lens: Sequence[int], prefixes: Sequence[int], device: str = "cpu", **changes: Any
) -> StepBatch:
    """An eager prefill step."""
    return StepBatch(
        ForwardMode.EXTEND,
        torch.tensor(rows, device=device),
        len(rows),
        changes.pop("num_tokens", sum(lens)),
        extend_seq_lens=torch.tensor(lens, device=device),
        extend_prefix_lens=torch.tensor(prefixes, device=device),
        **changes,
    )


def inputs(tokens: int, dim: int = DIM, seed: int = 1, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Random x [tokens, dim] and weight [dim, W]."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(tokens, dim, generator=generator), torch.randn(dim, WIDTH, generator=generator)
    return x.to(device), weight.to(device)


def state_of(pool: StatePool) -> list[Tensor]:
    """A copy of every tensor that hooks write."""
    tensors = [*pool.storages(), *pool.draft_storages(), pool.ssm_state, pool.intermediate_ssm]
    return [tensor.clone() for tensor in tensors if tensor is not None]


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Bit equality, NaN of one payload equal to itself."""
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
