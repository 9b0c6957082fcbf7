"""Packed steps: the tokens of many requests as one row of a model's input, and the cache that lets each request attend
over its own pages and no others. Attention state only; conv state goes to the sidecar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from hwbackends.engines.transformers.attention import Attention
from hwbackends.engines.transformers.models import ModelSpec
from hwbackends.runner.pages import NOTHING, SCRATCH, PageStore, pages_of


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of one request in one step.

    Args:
        pages: the request's pages, in the order of its positions.
        start: tokens of the request that are computed already.
        tokens: this step's token ids.
        tail: padded tokens behind them, for steps in which every request has the same extent.
    """

    pages: Sequence[int]
    start: int
    tokens: Sequence[int]
    tail: int = 0

    @property
    def extent(self) -> int:
        """Tokens of the step that are this request's, padded ones counted."""
        return len(self.tokens) + self.tail

    @property
    def end(self) -> int:
        """Tokens that are computed after the step."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that lie side by side in a step with the same number of tokens: one batch of the stock attention.

    Attributes:
        first: first token of the group in the step.
        batch: B requests.
        count: N tokens of each.
        length: K places that are read for each; place k holds position k.
        read: [B * K] int64, rows of the store; `NOTHING` where a request has not written.
        masks: window (None: full attention) to [B, 1, N, K] bool, or additive where the model runs `eager`.
    """

    first: int
    batch: int
    count: int
    length: int
    read: Tensor
    masks: dict[int | None, Tensor]


@dataclass(frozen=True, slots=True)
class Pages:
    """What `varlen_attn` wants to know of a step: [B + 1] int32 offsets, [B, P] int32 tables, [B] int32 lengths."""

    query_start_loc: Tensor
    block_table: Tensor
    seq_lens: Tensor
    longest_query: int
    longest_key: int


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Device tensors of one packed step of T tokens, padded ones counted.

    Attributes:
        input_ids: [1, T] int64.
        position_ids: [1, T] int64.
        kv_write: [T] int64, row of the store that each token fills.
        query_offset: [T] int64, position less index in the row, as `Cache.get_query_offset` gives it.
        kv_length: places that the longest request reads; place k is position k for every request.
        groups: how the requests attend; none where `pages` says it.
        pages: how the requests attend through `varlen_attn`.
        masks: mask dict of the model: None for every kind, masks are those of the groups.
    """

    input_ids: Tensor
    position_ids: Tensor
    kv_write: Tensor
    query_offset: Tensor
    kv_length: int
    groups: tuple[Group, ...]
    pages: Pages | None
    masks: dict[str, Tensor | None]


def pack(
    segments: Sequence[Segment], spec: ModelSpec, page_size: int, device: torch.device, varlen: bool = False
) -> PackedStep:
    """Lay the segments of a step side by side; padded tokens are token 0 at position 0 and write `SCRATCH`.

    Args:
        segments: one per live request.
        page_size: tokens per page.
        varlen: attention goes through `varlen_attn`.
    """
    tokens: list[int] = []
    positions: list[Tensor] = []
    writes: list[Tensor] = []
    for segment in segments:
        tokens += [*segment.tokens, *[0] * segment.tail]
        own, tail = torch.arange(segment.start, segment.end), torch.zeros(segment.tail, dtype=torch.int64)
        table = torch.tensor(list(segment.pages), dtype=torch.int64)
        positions += [own, tail]
        writes += [table[own // page_size] * page_size + own % page_size, tail + SCRATCH]
    position = torch.cat(positions)
    groups = () if varlen else tuple(_groups(segments, spec, page_size, device))
    ids, place, write = (part.to(device) for part in (torch.tensor(tokens), position, torch.cat(writes)))
    return PackedStep(
        input_ids=ids[None],
        position_ids=place[None],
        kv_write=write,
        query_offset=place - torch.arange(len(tokens), device=device),
        kv_length=max((group.length for group in groups), default=0),
        groups=groups,
        pages=_pages_of_segments(segments, page_size, device) if varlen else None,
        masks=_no_masks(spec),
    )


def _pages_of_segments(segments: Sequence[Segment], page_size: int, device: torch.device) -> Pages:
    used = [pages_of(segment.end, page_size) for segment in segments]
    table = torch.zeros(len(segments), max(used), dtype=torch.int32)
    for row, (segment, count) in enumerate(zip(segments, used, strict=True)):
        table[row, :count] = torch.tensor(segment.pages[:count], dtype=torch.int32)
    counts = torch.tensor([0, *(segment.extent for segment in segments)], dtype=torch.int32)
    lengths = torch.tensor([segment.end for segment in segments], dtype=torch.int32)
    return Pages(
        counts.cumsum(0, dtype=torch.int32).to(device),
        table.to(device),
        lengths.to(device),
        max(segment.extent for segment in segments),
        int(lengths.max()),
    )


def _groups(segments: Sequence[Segment], spec: ModelSpec, page_size: int, device: torch.device) -> list[Group]:
    """Neighbours with equal extents and comparable lengths attend as one batch."""
    groups: list[Group] = []
    first = index = 0
    while index < len(segments):
        batch = _neighbours(segments[index:])
        count, length = batch[0].extent, max(segment.end for segment in batch)
        read = torch.full((len(batch), length), NOTHING, dtype=torch.int64)
        start = torch.zeros(len(batch), dtype=torch.int64)
        for row, segment in enumerate(batch):
            own = torch.arange(segment.end)
            table = torch.tensor(list(segment.pages), dtype=torch.int64)
            read[row, : segment.end] = table[own // page_size] * page_size + own % page_size
            start[row] = segment.start
        position = (start[:, None] + torch.arange(count)).to(device)
        masks = _masks(position, length, spec)
        groups.append(Group(first, len(batch), count, length, read.flatten().to(device), masks))
        first += len(batch) * count
        index += len(batch)
    return groups


def _neighbours(segments: Sequence[Segment]) -> list[Segment]:
    """The first segments that make one batch: none is padded to more than twice its length."""
    batch = [segments[0]]
    least = most = segments[0].end
    for segment in segments[1:]:
        least, most = min(least, segment.end), max(most, segment.end)
        if segment.extent != batch[0].extent or most > 2 * least + 32:
            break
        batch.append(segment)
    return batch


def pack_rows(
    rows: Tensor, computed: Tensor, tokens: Tensor, tables: Tensor, spec: ModelSpec, page_size: int, varlen: bool
) -> PackedStep:
    """The step of a batch whose requests all have the same number of tokens, out of device tensors alone: nothing is
    read on the host and every extent follows from the arguments' shapes, so that a graph may record it.

    Args:
        rows: [B] int64, request rows; negative: padded, its tokens write `SCRATCH` and attend `NOTHING`.
        computed: [B] int64, tokens of each request that are computed already.
        tokens: [B, N] int64, this step's token ids.
        tables: [B, P] int64, pages of each request; what lies behind those it owns is not read.
        page_size: tokens per page.
        varlen: attention goes through `varlen_attn`.
    """
    batch, count = tokens.shape
    length = tables.shape[1] * page_size
    live = (rows >= 0)[:, None]
    position = (computed[:, None] + torch.arange(count, device=rows.device)) * live
    own = tables.gather(1, position.clamp(max=length - 1) // page_size) * page_size + position % page_size
    groups: tuple[Group, ...] = ()
    pages = None
    if varlen:
        used = ((computed + count) * live[:, 0]).to(torch.int32)
        offsets = torch.arange(0, batch * count + 1, count, dtype=torch.int32, device=rows.device)
        pages = Pages(offsets, tables.to(torch.int32), used, count, length)
    else:
        context = torch.arange(length, device=rows.device)
        place = tables.repeat_interleave(page_size, dim=1) * page_size + context % page_size
        written = live & (context < computed[:, None] + count)
        read = torch.where(written, place, NOTHING)
        groups = (Group(0, batch, count, length, read.flatten(), _masks(position, length, spec)),)
    flat = position.flatten()
    return PackedStep(
        input_ids=tokens.reshape(1, -1),
        position_ids=flat[None],
        kv_write=torch.where(live, own, SCRATCH).flatten(),
        query_offset=flat - torch.arange(flat.shape[0], device=rows.device),
        kv_length=length,
        groups=groups,
        pages=pages,
        masks=_no_masks(spec),
    )


def _no_masks(spec: ModelSpec) -> dict[str, Tensor | None]:
    return dict.fromkeys([spec.conv_mask_key, *spec.mask_keys])


def _masks(position: Tensor, length: int, spec: ModelSpec) -> dict[int | None, Tensor]:
    """Causal masks [B, 1, N, K] by window: a token sees itself and what stands before it, within the window."""
    distance = position[:, None, :, None] - torch.arange(length, device=position.device)
    masks: dict[int | None, Tensor] = {}
    for window in {shape.sliding_window for shape in spec.attention.values()}:
        mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        masks[window] = mask if spec.attention_kind == "sdpa" else _additive(mask, spec.streams[0].dtype)
    return masks


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `mask` holds, the lowest number elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


class PackedCache(Cache):
    """What a model of Transformers takes as its cache in a packed step.

    Args:
        store: keys and values by page.
        convs: runs the convs; see `patches.ConvStateOwner`.
        spec: the model's.
    """

    def __init__(self, store: PageStore, convs: Any, spec: ModelSpec) -> None:
        super().__init__(layers=[])
        self.store = store
        self.convs = convs
        self.spec = spec
        self.step: PackedStep | None = None
        self.touched = False
        """Whether the step has written keys, values or conv state."""

    @property
    def _now(self) -> PackedStep:
        assert self.step is not None, "a forward outside of a step"
        return self.step

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store this step's keys and values [1, heads, T, head_dim], and return them: `attend` reads the pages."""
        self.touched = True
        for store, states in ((self.store.keys, key_states), (self.store.values, value_states)):
            rows = states[0].transpose(0, 1)
            store[layer_idx].index_copy_(0, self._now.kv_write, rows.to(store[layer_idx].dtype))
        return key_states, value_states

    def attend(
        self, stock: Attention, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Each request's queries [1, heads, T, head_dim] over its own pages; returns [1, T, heads, head_dim]."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        window = self.spec.attention[layer].sliding_window
        if (pages := self._now.pages) is not None:
            return self._varlen(pages, layer, window, query, kwargs["scaling"]), None
        bias = kwargs.pop("position_bias", None)
        parts = []
        for group in self._now.groups:
            tokens = slice(group.first, group.first + group.batch * group.count)
            keys, values = (self._read(store[layer], group) for store in (self.store.keys, self.store.values))
            given = dict(kwargs)
            if bias is not None:
                given["position_bias"] = _batched(bias[..., : group.length], tokens, group)
            queries = _batched(query, tokens, group).to(keys.dtype)
            out, _ = stock(module, queries, keys, values, group.masks[window], **given)
            parts.append(out.flatten(0, 1))
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None

    def _varlen(self, pages: Pages, layer: int, window: int | None, query: Tensor, scale: float) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        shape = (-1, self.store.page_size, *self.store.keys[layer].shape[1:])
        out: Any = varlen_attn(
            query[0].transpose(0, 1).contiguous(),
            self.store.keys[layer].view(shape),
            self.store.values[layer].view(shape),
            pages.query_start_loc,
            None,
            pages.longest_query,
            pages.longest_key,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=True,
            seqused_k=pages.seq_lens,
            block_table=pages.block_table,
        )
        found: Tensor = out[None]
        return found

    @staticmethod
    def _read(store: Tensor, group: Group) -> Tensor:
        """[B, kv_heads, K, head_dim] of the places that a group reads."""
        return store.index_select(0, group.read).view(group.batch, group.length, *store.shape[1:]).transpose(1, 2)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, Any]:
        """K, and the offset of each key: models add it to `arange(K)` to get key positions."""
        return self._now.kv_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """The offset of each query: models add it to `arange(T)` to get query positions."""
        return self._now.query_offset

    def conv(
        self, layer_idx: int, conv_idx: int, x: Tensor, weight: Tensor, bias: Tensor | None, residual: bool
    ) -> Tensor:
        """The conv of one module over x [1, T, D]."""
        self.touched = True
        out: Tensor = self.convs.conv(layer_idx, conv_idx, x[0], weight, bias, residual)
        return out[None]


def _batched(states: Tensor, tokens: slice, group: Group) -> Tensor:
    """[1, heads, T, X] of a step as [B, heads, N, X] of one of its groups."""
    part = states[0][:, tokens]
    return part.reshape(part.shape[0], group.batch, group.count, part.shape[-1]).transpose(0, 1)
