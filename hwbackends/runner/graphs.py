"""Whole decode and verify forwards as recorded graphs: static inputs per bucket of batch sizes, filled before each
replay. One graph holds everything between tokens and tokens: metadata, embedding, layers, logits, argmax."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hwbackends.engines.transformers.models import ModelSpec
from hwbackends.errors import ArgumentError, DeviceError
from hwbackends.runner.packed import PackedStep, pack_rows
from hwbackends.runner.pages import pages_of
from hwbackends.runner.settings import RunnerSettings
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.metadata import PADDED
from hwbackends.step.sidecar import ConvStateSidecar

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Records what a function launches and returns what replays it."""

GENERATING = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)
"""Phases whose forwards are recorded; prompts go through eager extend steps."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """What a decode or verify step needs to know of one live request; `tokens` are this step's, `pages` reach to the
    last of them."""

    row: int
    computed: int
    kept_tokens: int
    tokens: Sequence[int]
    pages: Sequence[int]
    track_slot: int = PADDED


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What one forward gives: logits [T, vocabulary], their greedy tokens [T], and the last hidden states [T, D] where
    a drafter wants them. A graph fills the same tensors at each replay: read them before the next one."""

    logits: Tensor
    tokens: Tensor
    hidden: Tensor | None


Forward = Callable[[PackedStep], ForwardOutput]


class CudaRecorder:
    """Records with `torch.cuda.CUDAGraph`, after warming up on a side stream: kernels are compiled there, and cuBLAS
    finds its workspaces.

    The graphs of one recorder share the memory between their launches. So replay them one at a time, and give each
    runner a recorder of its own; what a graph leaves behind stays until its own next replay.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Record `launch`, which runs twice; returns what replays it.

        Raises:
            DeviceError: there is no NVIDIA GPU.
        """
        if not torch.cuda.is_available():
            wanted, hint = "an NVIDIA GPU", "record=None runs every step from Python"
            raise DeviceError("CudaRecorder", "torch.cuda.is_available()", "False", wanted, hint)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            launch()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            launch()
        self._pool = graph.pool()
        replay: Callable[[], None] = graph.replay
        return replay


SHORTEST_EXTENT = 128
"""Tokens of context that the smallest graph holds, where attention reads an extent and not a length."""


def extents(row_len: int, page_size: int, varlen: bool) -> list[int]:
    """Pages per request that are recorded: doubled from `SHORTEST_EXTENT` tokens up to `row_len`; only the last where
    attention reads no more than each request's length."""
    last = pages_of(row_len, page_size)
    sizes: list[int] = []
    pages = pages_of(SHORTEST_EXTENT, page_size)
    while pages < last and not varlen:
        sizes.append(pages)
        pages *= 2
    return [*sizes, last]


def buckets(max_batch: int) -> list[int]:
    """Batch sizes that are recorded: powers of two, and the largest batch."""
    sizes = [1 << power for power in range(max_batch.bit_length()) if 1 << power < max_batch]
    return [*sizes, max_batch]


@dataclass(slots=True)
class _Bucket:
    """One phase at one batch size and extent: its static batch, what the last launch or replay gave, and how to replay.

    `reads` counts the convs that ask for metadata in one forward.
    """

    batch: StepBatch
    pages: int
    output: ForwardOutput | None = None
    replay: Callable[[], None] | None = None
    reads: int = 0


@dataclass(slots=True)
class GraphCounters:
    """Steps by forward mode that a graph replayed, and that ran eagerly; convs that replays ran."""

    replayed: Counter[str] = field(default_factory=Counter)
    eager: Counter[str] = field(default_factory=Counter)
    convs: int = 0


class StepGraphs:
    """Recorded forwards of decode and verify steps.

    Attributes:
        counters: what ran how; captures and warm-ups are no steps.

    Args:
        sidecar: its `init_forward_metadata_in_graph` opens each graph.
        spec: the model's.
        settings: limits; they fix every extent.
        forward: runs the model over a step, without a host synchronisation.
        record: how to record; None: every step runs eagerly, over the same static inputs.
        page_size: tokens per page.
        varlen: attention goes through `varlen_attn`.
    """

    def __init__(
        self,
        sidecar: ConvStateSidecar,
        spec: ModelSpec,
        settings: RunnerSettings,
        forward: Forward,
        record: Record | None,
        page_size: int,
        varlen: bool,
    ) -> None:
        self._sidecar, self._spec, self._settings = sidecar, spec, settings
        self._forward, self._record = forward, record
        self._page_size, self._varlen = page_size, varlen
        self.counters = GraphCounters()
        self._sizes = buckets(settings.max_batch)
        self._extents = extents(settings.row_len, page_size, varlen)
        self._buckets: dict[tuple[ForwardMode, int, int], _Bucket] = {}
        device, width = sidecar.pool.device, max(1, settings.draft_token_num)
        # rows of the static inputs: request row, computed length, kept tokens, track slot
        self._inputs = torch.zeros(4, settings.max_batch, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(settings.max_batch * width, dtype=torch.int64, device=device)
        self._live = torch.zeros(1, dtype=torch.int32, device=device)
        self._track_mask = torch.zeros(settings.max_batch, dtype=torch.bool, device=device)
        self._tables = torch.zeros(settings.max_batch, self._extents[-1], dtype=torch.int64, device=device)
        self._host_tables = torch.zeros(settings.max_batch, self._extents[-1], dtype=torch.int64)
        self._filled: list[list[int]] = [[] for _ in range(settings.max_batch)]

    @property
    def recorded(self) -> bool:
        """Whether steps are replayed."""
        return self._record is not None

    @torch.no_grad()
    def capture(self) -> None:
        """Record every bucket, largest first, so that the largest decides what is allocated.

        Every row is padded meanwhile: what runs to warm up or to be recorded changes no state.
        """
        modes = GENERATING if self._settings.draft_token_num else GENERATING[:1]
        for mode in modes:
            for size in reversed(self._sizes):
                for pages in reversed(self._extents):
                    self._capture(mode, size, pages)

    def _capture(self, mode: ForwardMode, size: int, pages: int) -> None:
        bucket = self._buckets[mode, size, pages] = _Bucket(self._static_batch(mode, size), pages)
        self._fill(mode, [], size)
        self._sidecar.init_forward_metadata_out_graph(bucket.batch, in_capture=True)
        if self._record is None:
            return
        bucket.replay = replay = self._record(self._launch(bucket))
        if not callable(replay) or bucket.output is None:
            wanted = "a function that runs what it is given and returns what replays it"
            raise ArgumentError("StepGraphs", "record", f"a function that returned {replay!r}", wanted)

    def _launch(self, bucket: _Bucket) -> Callable[[], None]:
        """Metadata and forward of one bucket: what a graph records, and what runs where nothing is recorded."""
        batch = bucket.batch
        rows, computed = self._inputs[:2, : batch.num_reqs]
        tokens = self._tokens[: batch.num_tokens].view(batch.num_reqs, -1)
        tables = self._tables[: batch.num_reqs, : bucket.pages]

        def launch() -> None:
            before = self._sidecar.reads
            # first of all: convs may start before the launch ahead of them has ended, but not before this one
            self._sidecar.init_forward_metadata_in_graph(batch)
            step = pack_rows(rows, computed, tokens, tables, self._spec, self._page_size, self._varlen)
            bucket.output = self._forward(step)
            bucket.reads = self._sidecar.reads - before

        return launch

    def _width(self, mode: ForwardMode) -> int:
        return self._settings.draft_token_num if mode is ForwardMode.TARGET_VERIFY else 1

    def _static_batch(self, mode: ForwardMode, size: int) -> StepBatch:
        rows, computed, kept, track = self._inputs[:, :size]
        tracks = self._settings.prefix_slots > 0 and mode is ForwardMode.DECODE
        return StepBatch(
            forward_mode=mode,
            req_pool_indices=rows,
            num_reqs=size,
            num_tokens=size * self._width(mode),
            computed_lens=computed,
            draft_token_num=self._width(mode),
            num_accepted_tokens=kept,
            mamba_track_mask=self._track_mask[:size] if tracks else None,
            mamba_track_indices=track if tracks else None,
            num_reqs_device=self._live,
        )

    def largest(self, verify: bool) -> list[_Bucket]:
        """The buckets of the largest batch, by extent: what a benchmark replays alone."""
        mode = ForwardMode.TARGET_VERIFY if verify else ForwardMode.DECODE
        return [self._buckets[mode, self._sizes[-1], pages] for pages in self._extents]

    def size(self, live: int) -> int:
        """The smallest recorded batch size that holds `live` requests."""
        return next(size for size in self._sizes if size >= live)

    @torch.no_grad()
    def run(self, mode: ForwardMode, rows: Sequence[StepRow]) -> ForwardOutput:
        """One step: fill the static inputs, padded to the bucket, and replay its graph.

        Returns:
            Outputs of all rows of the bucket; those of live requests come first, in order.

        Raises:
            ArgumentError: a phase or a batch that was not captured, or rows that would touch those of others.
        """
        self._check(mode, rows)
        size = self.size(len(rows))
        width = self._width(mode)
        needed = max((pages_of(row.computed + width, self._page_size) for row in rows), default=1)
        bucket = self._buckets[mode, size, next(pages for pages in self._extents if pages >= needed)]
        self._fill(mode, rows, size)
        self._sidecar.init_forward_metadata_out_graph(bucket.batch, in_capture=False)
        if bucket.replay is None:
            self._launch(bucket)()
            self.counters.eager[mode.value] += 1
        else:
            bucket.replay()
            self.counters.replayed[mode.value] += 1
            self.counters.convs += bucket.reads
        assert bucket.output is not None
        return bucket.output

    def _check(self, mode: ForwardMode, rows: Sequence[StepRow]) -> None:
        """On the host, from Python numbers: a graph would take anything, and write it."""
        captured = sorted({mode.value for mode, _, _ in self._buckets})
        if mode.value not in captured:
            hint = "capture() first; target_verify needs draft_tokens above 0"
            raise ArgumentError("StepGraphs.run", "mode", mode.value, f"one of {captured}", hint)
        if len(rows) > self._settings.max_batch:
            wanted = f"at most {self._settings.max_batch}"
            raise ArgumentError("StepGraphs.run", "rows", f"{len(rows)} requests", wanted, "make max_batch larger")
        width, limit = self._width(mode), self._settings.row_len
        for row in rows:
            if not 0 <= row.row < self._settings.max_batch:
                wanted = f"a request row from 0 to {self._settings.max_batch - 1}"
                raise ArgumentError("StepGraphs.run", "row", row.row, wanted)
            if len(row.tokens) != width:
                wanted = f"{width} in a {mode.value} step"
                raise ArgumentError("StepGraphs.run", "tokens", f"{len(row.tokens)} of row {row.row}", wanted)
            if not 0 <= row.computed <= limit - width:
                wanted = f"from 0 to {limit - width}: a row holds {limit} tokens"
                raise ArgumentError("StepGraphs.run", "computed", row.computed, wanted, "make max_len larger")
            if len(row.pages) < pages_of(row.computed + width, self._page_size):
                got, wanted = f"{len(row.pages)} of row {row.row}", f"pages for {row.computed + width} tokens"
                raise ArgumentError("StepGraphs.run", "pages", got, wanted)
        if len({row.row for row in rows}) < len(rows):
            raise ArgumentError("StepGraphs.run", "rows", [row.row for row in rows], "each request row once")

    def _fill(self, mode: ForwardMode, rows: Sequence[StepRow], size: int) -> None:
        tail, width = size - len(rows), self._width(mode)
        columns = [
            [row.row for row in rows] + [PADDED] * tail,
            [row.computed for row in rows] + [0] * tail,
            [row.kept_tokens for row in rows] + [1] * tail,
            [row.track_slot for row in rows] + [PADDED] * tail,
        ]
        tokens = [token for row in rows for token in row.tokens] + [0] * (tail * width)
        self._inputs[:, :size].copy_(torch.tensor(columns, dtype=torch.int64))
        self._tokens[: size * width].copy_(torch.tensor(tokens, dtype=torch.int64))
        self._fill_tables(rows)
        self._live.fill_(len(rows))
        self._track_mask[:size].copy_(torch.tensor(columns[3], dtype=torch.int64) > 0)

    def _fill_tables(self, rows: Sequence[StepRow]) -> None:
        """Pages change rarely: only rows that did are written, and the table is copied once."""
        changed = False
        for index, row in enumerate(rows):
            pages = list(row.pages)
            if self._filled[index] != pages:
                self._host_tables[index].zero_()
                self._host_tables[index, : len(pages)] = torch.tensor(pages, dtype=torch.int64)
                self._filled[index] = pages
                changed = True
        if changed:
            self._tables.copy_(self._host_tables)

    def addresses(self) -> dict[str, int]:
        """Address of each static input, and of each output that a graph fills."""
        named = {"inputs": self._inputs, "tokens": self._tokens, "live": self._live, "track_mask": self._track_mask}
        named["tables"] = self._tables
        for (mode, size, pages), bucket in self._buckets.items():
            if bucket.replay is not None and bucket.output is not None:
                named[f"logits.{mode.value}.{size}.{pages}"] = bucket.output.logits
        return {name: tensor.data_ptr() for name, tensor in named.items()}
