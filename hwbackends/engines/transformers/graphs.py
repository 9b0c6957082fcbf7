"""Decode and verify metadata as recorded graphs: static inputs per bucket of batch sizes, filled before each replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hwbackends.metadata import PADDED, ForwardMode, StepBatch

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Records what a function launches and returns what replays it."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """What decode and verify metadata needs to know of one live request."""

    row: int
    computed: int
    kept_tokens: int
    track_slot: int = PADDED


def record_cuda(launch: Callable[[], None]) -> Callable[[], None]:
    """Record with `torch.cuda.CUDAGraph`, after warming up on a side stream."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launch()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    replay: Callable[[], None] = graph.replay
    return replay


def buckets(max_batch: int) -> list[int]:
    """Batch sizes that are recorded: powers of two, and the largest batch."""
    sizes = [1 << power for power in range(max_batch.bit_length()) if 1 << power < max_batch]
    return [*sizes, max_batch]


class MetadataGraphs:
    """Recorded metadata preparation of decode and verify steps.

    Attributes:
        replayed: replays so far.

    Args:
        sidecar: its `init_forward_metadata_in_graph` is what gets recorded.
        max_batch: largest batch.
        draft_token_num: tokens per request in a verify step; 0: no verify steps.
        device: device of the pool.
        record: how to record; None: the in-graph hook is called anew each step.
        tracks: whether decode steps may ask for snapshots.
    """

    def __init__(
        self,
        sidecar: Any,
        max_batch: int,
        draft_token_num: int,
        device: torch.device,
        record: Record | None,
        tracks: bool,
    ) -> None:
        self._sidecar = sidecar
        self._buckets = buckets(max_batch)
        self._draft_token_num = draft_token_num
        self._record = record
        self._tracks = tracks
        self.replayed = 0
        self._replays: dict[tuple[ForwardMode, int], Callable[[], None]] = {}
        self._batches: dict[tuple[ForwardMode, int], StepBatch] = {}
        # columns of the static inputs: request row, computed length, kept tokens, track slot
        self._inputs = torch.zeros(4, max_batch, dtype=torch.int64, device=device)
        self._live = torch.zeros(1, dtype=torch.int32, device=device)
        self._track_mask = torch.zeros(max_batch, dtype=torch.bool, device=device)
        self._device = device

    def capture(self) -> None:
        """Record every bucket, largest first, so that the largest decides what is allocated."""
        modes = [ForwardMode.DECODE] + [ForwardMode.TARGET_VERIFY] * bool(self._draft_token_num)
        for mode in modes:
            for bucket in reversed(self._buckets):
                batch = self._static_batch(mode, bucket)
                self._batches[mode, bucket] = batch
                self._sidecar.init_forward_metadata_out_graph(batch, in_capture=True)
                if self._record is not None:
                    self._replays[mode, bucket] = self._record(self._launch(batch))

    def _launch(self, batch: StepBatch) -> Callable[[], None]:
        def launch() -> None:
            self._sidecar.init_forward_metadata_in_graph(batch)

        return launch

    def _static_batch(self, mode: ForwardMode, bucket: int) -> StepBatch:
        verify = mode is ForwardMode.TARGET_VERIFY
        tokens = self._draft_token_num if verify else 1
        rows, computed, kept, track = self._inputs[:, :bucket]
        tracks = self._tracks and not verify
        return StepBatch(
            forward_mode=mode,
            req_pool_indices=rows,
            num_reqs=bucket,
            num_tokens=bucket * tokens,
            computed_lens=computed,
            draft_token_num=tokens,
            num_accepted_tokens=kept,
            mamba_track_mask=self._track_mask[:bucket] if tracks else None,
            mamba_track_indices=track if tracks else None,
            num_reqs_device=self._live,
        )

    def bucket(self, live: int) -> int:
        """The smallest recorded batch size that holds `live` requests."""
        return next(size for size in self._buckets if size >= live)

    def prepare(self, mode: ForwardMode, rows: Sequence[StepRow]) -> StepBatch:
        """Fill the static inputs and replay; returns the batch, padded to its bucket."""
        bucket = self.bucket(len(rows))
        self._fill(rows, bucket)
        batch = self._batches[mode, bucket]
        self._sidecar.init_forward_metadata_out_graph(batch, in_capture=False)
        replay = self._replays.get((mode, bucket))
        if replay is None:
            self._sidecar.init_forward_metadata_in_graph(batch)
        else:
            replay()
            self.replayed += 1
        return batch

    def _fill(self, rows: Sequence[StepRow], bucket: int) -> None:
        tail = bucket - len(rows)
        columns = [
            [row.row for row in rows] + [PADDED] * tail,
            [row.computed for row in rows] + [0] * tail,
            [row.kept_tokens for row in rows] + [1] * tail,
            [row.track_slot for row in rows] + [PADDED] * tail,
        ]
        self._inputs[:, :bucket].copy_(torch.tensor(columns, dtype=torch.int64))
        self._live.fill_(len(rows))
        self._track_mask[:bucket].copy_(torch.tensor(columns[3], dtype=torch.int64) > 0)

    def addresses(self) -> dict[str, int]:
        """Address of each static input."""
        named: dict[str, Tensor] = {"inputs": self._inputs, "live": self._live, "track_mask": self._track_mask}
        return {name: tensor.data_ptr() for name, tensor in named.items()}
