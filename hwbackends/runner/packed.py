"""Packed steps: the tokens of many requests as one row of a model's input, and the cache that gives each token the keys
and values of its own request. Attention state only; conv state goes to the sidecar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hwbackends.engines.transformers.models import ModelSpec

NOTHING = 0
"""Row of the key/value store that stays 0: what padded tokens attend, and what is read in place of rows that hold
nothing of a request. A masked row must be a number: 0 times NaN is NaN."""
SCRATCH = 1
"""Row of the key/value store that padded tokens write; nobody reads it."""
FIRST = 2
"""Row of the key/value store at which those of request row 0 begin."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of one request in one step.

    Args:
        row: request row.
        start: tokens of the request that are computed already.
        tokens: this step's token ids.
        tail: padded tokens behind them, for steps in which every request has the same extent.
    """

    row: int
    start: int
    tokens: Sequence[int]
    tail: int = 0


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Device tensors of one packed step; T tokens (padded ones counted), K key/value rows that any of them may see.

    Attributes:
        input_ids: [1, T] int64.
        position_ids: [1, T] int64.
        kv_write: [T] int64, row of the key/value store that each token fills.
        kv_read: [K] int64, rows that the step attends over; the first is `NOTHING`.
        kv_length: K.
        query_offset: [T] int64, position less index in the row, as `Cache.get_query_offset` gives it.
        kv_offset: [K] int64, the same for keys.
        masks: mask dict of the model: [1, 1, T, K], bool for `sdpa`, additive for `eager`; None for convs.
    """

    input_ids: Tensor
    position_ids: Tensor
    kv_write: Tensor
    kv_read: Tensor
    kv_length: int
    query_offset: Tensor
    kv_offset: Tensor
    masks: dict[str, Tensor | None]


def pack(segments: Sequence[Segment], spec: ModelSpec, max_len: int, padded: int, device: torch.device) -> PackedStep:
    """Lay the segments of a step side by side.

    Args:
        segments: one per live request.
        max_len: rows of the key/value store per request row.
        padded: T; padded tokens are token 0 at position 0 and attend `NOTHING` alone.
    """
    tokens: list[int] = []
    position: list[Tensor] = []
    write: list[Tensor] = []
    read: list[Tensor] = [torch.tensor([NOTHING])]
    kv_position: list[Tensor] = [torch.tensor([0])]
    owner: list[Tensor] = []
    kv_owner: list[Tensor] = [torch.tensor([-1])]
    for index, segment in enumerate(segments):
        count, end = len(segment.tokens), segment.start + len(segment.tokens)
        base = FIRST + segment.row * max_len
        tokens.extend([*segment.tokens, *[0] * segment.tail])
        context, nothing = torch.arange(end), torch.zeros(segment.tail, dtype=torch.int64)
        position += [context[segment.start :], nothing]
        write += [context[segment.start :] + base, nothing + SCRATCH]
        owner += [torch.full((count,), index), nothing - 1]
        read.append(context + base)
        kv_position.append(context)
        kv_owner.append(torch.full((end,), index))
    tail = padded - len(tokens)
    tokens.extend([0] * tail)
    nothing = torch.zeros(tail, dtype=torch.int64)
    position.append(nothing)
    write.append(nothing + SCRATCH)
    owner.append(nothing - 1)
    host = [torch.tensor(tokens), *(torch.cat(part) for part in (position, write, read, kv_position, owner, kv_owner))]
    ids, q_position, kv_write, kv_read, k_position, q_owner, k_owner = (part.to(device) for part in host)
    masks = _masks(q_position, k_position, q_owner, k_owner, spec)
    return PackedStep(
        input_ids=ids.unsqueeze(0),
        position_ids=q_position.unsqueeze(0),
        kv_write=kv_write,
        kv_read=kv_read,
        kv_length=kv_read.shape[0],
        query_offset=q_position - torch.arange(padded, device=device),
        kv_offset=k_position - torch.arange(kv_read.shape[0], device=device),
        masks=masks,
    )


def pack_rows(rows: Tensor, computed: Tensor, tokens: Tensor, spec: ModelSpec, max_len: int) -> PackedStep:
    """The step of a batch whose requests all have the same number of tokens, out of device tensors alone: nothing is
    read on the host and every extent follows from the arguments' shapes, so that a graph may record it.

    Each request attends over its whole row of the store. Behind its newest token it is masked, and `NOTHING` is read:
    another request may have left anything there.

    Args:
        rows: [B] int64, request rows; negative: padded, its tokens write `SCRATCH` and attend `NOTHING`.
        computed: [B] int64, tokens of each request that are computed already.
        tokens: [B, N] int64, this step's token ids.
        max_len: rows of the key/value store per request row.
    """
    batch, count = tokens.shape
    live, index = rows >= 0, torch.arange(batch, device=rows.device)
    context = torch.arange(max_len, device=rows.device).repeat(batch, 1)
    base = (FIRST + rows * max_len)[:, None]
    written = live[:, None] & (context < computed[:, None] + count)
    position = (computed[:, None] + context[:, :count]).mul(live[:, None])
    write = torch.where(live[:, None], base + position, SCRATCH)
    read = torch.where(written, base + context, NOTHING)
    # padded queries meet the first key under -1; nobody asks for -2, the keys of padded requests
    q_owner = torch.where(live, index, -1).repeat_interleave(count)
    k_owner = torch.where(live, index, -2).repeat_interleave(max_len)
    q_position = position.flatten()
    kv_read, k_position = _behind(read.flatten(), NOTHING), _behind(context.flatten(), 0)
    return PackedStep(
        input_ids=tokens.reshape(1, -1),
        position_ids=q_position[None],
        kv_write=write.flatten(),
        kv_read=kv_read,
        kv_length=kv_read.shape[0],
        query_offset=q_position - torch.arange(q_position.shape[0], device=rows.device),
        kv_offset=k_position - torch.arange(kv_read.shape[0], device=rows.device),
        masks=_masks(q_position, k_position, q_owner, _behind(k_owner, -1), spec),
    )


def _behind(values: Tensor, first: int) -> Tensor:
    """`values` behind one number."""
    return torch.nn.functional.pad(values, (1, 0), value=first)


def _masks(
    q_position: Tensor, k_position: Tensor, q_owner: Tensor, k_owner: Tensor, spec: ModelSpec
) -> dict[str, Tensor | None]:
    """Block-diagonal causal masks: a token sees itself and what stands before in its request, within the window."""
    distance = q_position[:, None] - k_position[None, :]
    causal = (q_owner[:, None] == k_owner[None, :]) & (distance >= 0)
    masks: dict[str, Tensor | None] = {spec.conv_mask_key: None}
    for key, window in spec.mask_keys.items():
        mask = causal if window is None else causal & (distance < window)
        masks[key] = (mask if spec.attention_kind == "sdpa" else _additive(mask, spec.streams[0].dtype))[None, None]
    return masks


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `mask` holds, the lowest number elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


class KeyValueStore:
    """Keys and values of every request row and layer: [heads, FIRST + rows * max_len, head_dim]."""

    def __init__(self, spec: ModelSpec, rows: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows, self.max_len = rows, max_len

        def store(layer: int) -> Tensor:
            shape = spec.attention[layer]
            return torch.zeros(shape.kv_heads, FIRST + rows * max_len, shape.head_dim, dtype=dtype, device=device)

        self.keys = {layer: store(layer) for layer in spec.attention}
        self.values = {layer: store(layer) for layer in spec.attention}

    def save(self, row: int, length: int) -> list[Tensor]:
        """Copies of the first `length` keys and values of a request row, layer by layer."""
        span = slice(FIRST + row * self.max_len, FIRST + row * self.max_len + length)
        return [store[:, span].clone() for store in (*self.keys.values(), *self.values.values())]

    def restore(self, row: int, saved: Sequence[Tensor]) -> None:
        """Write what `save` returned to the start of a request row."""
        for store, part in zip((*self.keys.values(), *self.values.values()), saved, strict=True):
            start = FIRST + row * self.max_len
            store[:, start : start + part.shape[1]].copy_(part)


class PackedCache(Cache):
    """What a model of Transformers takes as its cache in a packed step.

    Args:
        store: keys and values by request row.
        convs: runs the convs; see `patches.ConvStateOwner`.
    """

    def __init__(self, store: KeyValueStore, convs: Any) -> None:
        super().__init__(layers=[])
        self.store = store
        self.convs = convs
        self.step: PackedStep | None = None

    @property
    def _now(self) -> PackedStep:
        assert self.step is not None, "a forward outside of a step"
        return self.step

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store this step's keys and values [1, heads, T, head_dim]; return [1, heads, K, head_dim] of the step."""
        step = self._now
        keys, values = self.store.keys[layer_idx], self.store.values[layer_idx]
        keys.index_copy_(1, step.kv_write, key_states[0])
        values.index_copy_(1, step.kv_write, value_states[0])
        return keys.index_select(1, step.kv_read)[None], values.index_select(1, step.kv_read)[None]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, Any]:
        """K, and the offset of each key: models add it to `arange(K)` to get key positions."""
        return self._now.kv_length, self._now.kv_offset

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """The offset of each query: models add it to `arange(T)` to get query positions."""
        return self._now.query_offset

    def conv(
        self, layer_idx: int, conv_idx: int, x: Tensor, weight: Tensor, bias: Tensor | None, residual: bool
    ) -> Tensor:
        """The conv of one module over x [1, T, D]."""
        out: Tensor = self.convs.conv(layer_idx, conv_idx, x[0], weight, bias, residual)
        return out[None]
