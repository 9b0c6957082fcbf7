"""A small laboratory around one backend: a pool with one or more streams, requests with known lengths, and one method
per phase. Memory is poisoned: slots that no test fills hold NaN, outputs are NaN before a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hwbackends.conv.state import ConvStream
from hwbackends.registry.loading import load
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.metadata import MetadataBuffers, MetadataLimits, StepMetadata
from hwbackends.step.pool import StatePool

DIGITS = (1.0, 10.0, 100.0, 1000.0, 10000.0)
BITS = (1.0, 2.0, 4.0, 8.0)
PAD = -1


class Lab:
    """One backend, one pool. Request row r is named by the tests; `rows` maps it to a slot."""

    def __init__(
        self,
        backend: str = "reference",
        device: str = "cpu",
        layout: str = "window",
        *,
        rows: dict[int, int] | None = None,
        dim: int = 1,
        width: int = 4,
        slots: int = 11,
        drafts: int = 3,
        requests: int = 13,
        dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype | None = None,
        taps: Sequence[float] = DIGITS,
        index_dtype: torch.dtype = torch.int32,
        track_interval: int = 2,
        streams: Sequence[str] = ("k",),
        layers: int = 1,
        ssm_shape: tuple[int, ...] | None = None,
        ring_rows: int | None = None,
        v2p: Sequence[int] | None = None,
        poison: float = float("nan"),
    ) -> None:
        self.hooks: Any = load(backend, device)
        self.device, self.dtype, self.layout = torch.device(device), dtype, layout
        self.width, self.history, self.drafts = width, width - 1, drafts
        table = None if v2p is None else torch.tensor(v2p, dtype=torch.int64, device=device)
        self.pool = StatePool(
            [ConvStream(name, dim, state_dtype or dtype) for name in streams],
            num_slots=slots,
            width=width,
            layers=layers,
            layout=layout,  # type: ignore[arg-type]
            draft_token_num=drafts,
            request_rows=requests,
            device=device,
            ring_rows=ring_rows,
            ssm_shape=ssm_shape,
            mamba_v2p_table=table,
            track_interval=track_interval,
        )
        for tensor in (*self.pool.storages(), *self.pool.draft_storages()):
            tensor.fill_(poison)
        for request, slot in (rows or {}).items():
            self.pool.mamba_index_mapping[request] = slot
        self.lengths: dict[int, int] = dict.fromkeys(rows or {}, 0)
        self.accepted: dict[int, int] = {}
        self.weight = torch.tensor(taps[:width], dtype=dtype, device=device).expand(dim, width)
        self.buffers = MetadataBuffers(MetadataLimits(80_000, 80_000, max(1, drafts)), device, index_dtype)
        self.state = self.pool.conv_state(streams[0], 0)

    # -- state -------------------------------------------------------------------------------------------------------

    def put(self, request: int, window: Sequence[Any], length: int | None = None) -> None:
        """Give a request a history: S rows, oldest first, after `length` tokens (default: exactly S)."""
        length = self.history if length is None else length
        self.put_slot(self.slot(request), window, length)
        self.lengths[request] = length
        self.accepted[request] = 1

    def put_slot(self, slot: int, window: Sequence[Any], length: int) -> None:
        for index, value in enumerate(window):
            self.state.tensor[slot, self._row(length, index)] = torch.as_tensor(value, dtype=self.state.tensor.dtype)

    def slot(self, request: int) -> int:
        return int(self.pool.mamba_index_mapping[request])

    def window(self, slot: int, length: int, offset: int = 0) -> Tensor:
        """The S rows that a reader at `length` tokens finds in a slot, [S, D]."""
        rows = [self._row(length, index) + offset for index in range(self.history)]
        return self.state.tensor[slot, rows]

    def seen(self, request: int) -> list[float]:
        """The window of a request, first channel, as the next step reads it."""
        length = self.lengths[request]
        offset = self.accepted.get(request, 1) - 1 if self.layout == "lazy" else 0
        found = self.window(self.slot(request), length, offset)[:, 0].float().tolist()
        if self.layout != "ring":
            return found
        return [value if length - self.history + index >= 0 else 0.0 for index, value in enumerate(found)]

    def _row(self, length: int, index: int) -> int:
        return (length - self.history + index) % self.state.rows if self.layout == "ring" else index

    def snapshot(self) -> Tensor:
        return self.state.tensor.clone()

    # -- steps -------------------------------------------------------------------------------------------------------

    def ints(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=self.device)

    def tokens(self, values: Any) -> Tensor:
        """[T] numbers or [T, D] rows as activations."""
        found = torch.as_tensor(values, dtype=self.dtype)
        if found.dim() == 1:
            found = found[:, None].expand(len(found), self.weight.shape[0])
        return found.contiguous().to(self.device)

    def nan_like(self, x: Tensor) -> Tensor:
        return torch.full_like(x, float("nan"), memory_format=torch.contiguous_format)

    def known(self, rows: Sequence[int]) -> list[int]:
        return [self.lengths.get(row, 0) for row in rows]

    def decode_batch(self, rows: Sequence[int], **extra: Any) -> StepBatch:
        lengths = self.ints(self.known(rows))
        accepted = self.ints([self.accepted.get(row, 1) for row in rows])
        given: dict[str, Any] = {
            "num_reqs": len(rows),
            "num_tokens": len(rows),
            "num_accepted_tokens": accepted,
            "seq_lens": lengths + 1,
        }
        return StepBatch(ForwardMode.DECODE, self.ints(rows), **(given | extra))

    def prepare(self, batch: StepBatch) -> StepMetadata:
        tracks = batch.mamba_track_mask is not None
        view = self.buffers.view(batch.forward_mode, batch.padded_reqs, batch.num_tokens, batch.tokens_per_req, tracks)
        getattr(self.hooks, f"prepare_{PHASE[batch.forward_mode]}_metadata")(batch, self.pool, view)
        return view

    def conv(self, batch: StepBatch, metadata: StepMetadata, x: Tensor, **kwargs: Any) -> Tensor:
        hook = getattr(self.hooks, f"conv_{PHASE[batch.forward_mode]}")
        kwargs.setdefault("out", self.nan_like(x))
        bias = kwargs.pop("bias", None)
        result: Tensor = hook(x, self.weight, bias, self.state, metadata, **kwargs)
        return result

    def decode(self, rows: Sequence[int], values: Any, *, conv: dict[str, Any] | None = None, **extra: Any) -> Tensor:
        """One token for each request row; PAD marks a padded row."""
        batch = self.decode_batch(rows, **extra)
        y = self.conv(batch, self.prepare(batch), self.tokens(values), **(conv or {}))
        for row in rows[: batch.num_reqs]:
            if row in self.lengths:
                self.lengths[row] += 1
                self.accepted[row] = 1
        return y

    def extend_batch(self, rows: Sequence[int], lengths: Sequence[int], **extra: Any) -> StepBatch:
        given: dict[str, Any] = {"num_reqs": len(rows), "num_tokens": sum(lengths)}
        return StepBatch(
            ForwardMode.EXTEND,
            self.ints(rows),
            extend_seq_lens=self.ints(lengths),
            extend_prefix_lens=self.ints(self.known(rows)),
            **(given | extra),
        )

    def extend(
        self,
        rows: Sequence[int],
        lengths: Sequence[int],
        values: Any,
        *,
        conv: dict[str, Any] | None = None,
        **extra: Any,
    ) -> Tensor:
        """`lengths[b]` tokens for each request row, packed in `values`."""
        batch = self.extend_batch(rows, lengths, **extra)
        y = self.conv(batch, self.prepare(batch), self.tokens(values), **(conv or {}))
        for row, length in zip(rows[: batch.num_reqs], lengths, strict=False):
            if row in self.lengths:
                self.lengths[row] += length
                self.accepted[row] = 1
        return y

    def draft_batch(self, mode: ForwardMode, rows: Sequence[int], **extra: Any) -> StepBatch:
        count = self.drafts
        given: dict[str, Any] = {
            "num_reqs": len(rows),
            "num_tokens": len(rows) * count,
            "draft_token_num": count,
            "num_accepted_tokens": self.ints([self.accepted.get(row, 1) for row in rows]),
        }
        lengths = self.ints(self.known(rows)) + count
        return StepBatch(mode, self.ints(rows), seq_lens=lengths, **(given | extra))

    def verify(self, rows: Sequence[int], values: Any, *, conv: dict[str, Any] | None = None, **extra: Any) -> Tensor:
        """N drafts for each request row; commit with `commit`."""
        batch = self.draft_batch(ForwardMode.TARGET_VERIFY, rows, **extra)
        return self.conv(batch, self.prepare(batch), self.tokens(values), **(conv or {}))

    def commit(self, rows: Sequence[int], accepted: Sequence[int], **extra: Any) -> None:
        """Keep `accepted[b]` drafts of the last verify of each row."""
        steps = self.ints([count - 1 for count in accepted])
        self.hooks.update_mamba_state_after_mtp_verify(self.pool, self.ints(rows), steps, **extra)
        for row, count in zip(rows, accepted, strict=True):
            if row in self.lengths:
                self.lengths[row] += count
                self.accepted[row] = count

    def draft_extend(
        self, rows: Sequence[int], accepted: Sequence[int], values: Any, *, conv: Any = None, **extra: Any
    ) -> Tensor:
        """N drafts for each row, of which `accepted[b]` are kept at once; negative marks a padded row."""
        batch = self.draft_batch(ForwardMode.DRAFT_EXTEND, rows, num_accept_tokens=self.ints(accepted), **extra)
        y = self.conv(batch, self.prepare(batch), self.tokens(values), **(conv or {}))
        for row, count in zip(rows, accepted, strict=True):
            if row in self.lengths and count >= 0:
                self.lengths[row] += count
                self.accepted[row] = 1
        return y


PHASE = {
    ForwardMode.DECODE: "decode",
    ForwardMode.IDLE: "decode",
    ForwardMode.EXTEND: "extend",
    ForwardMode.TARGET_VERIFY: "target_verify",
    ForwardMode.DRAFT_EXTEND: "draft_extend",
}


def spelled(y: Tensor) -> list[float]:
    """First channel of an output as numbers."""
    return [float(value) for value in y[:, 0].double().cpu()]


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Equal element by element, NaN equal to NaN."""
    return torch.equal(one.nan_to_num(-7), two.nan_to_num(-7)) and torch.equal(one.isnan(), two.isnan())
