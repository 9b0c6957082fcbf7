"""Drafts from the model's own multi-token-prediction heads, for a whole batch: head k reads the hidden state of a
position and the token k + 1 places on, and names the token after that. The heads are a part of the model with a state
pool of their own over the target's slots: prompts reach it through extend, drafting through draft extend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hwbackends.engines.transformers.convs import SidecarConvs
from hwbackends.engines.transformers.models import ModelSpec, cache_argument, describe_inkling
from hwbackends.engines.transformers.patches import patch_model
from hwbackends.errors import UnsupportedError
from hwbackends.runner.drafters import Drafter, DrafterHost
from hwbackends.runner.packed import PackedCache, PackedStep, Segment, pack
from hwbackends.runner.pages import RESERVED, PageStore, pages_of
from hwbackends.runner.requests import Request
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.pool import StatePool
from hwbackends.step.sidecar import ConvStateSidecar

PAGE = 16
"""Tokens per page of the heads' keys and values."""


class HeadCache(PackedCache):
    """The packed cache of the heads: head k stands k + 1 positions ahead of the model."""

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, Any]:
        """K, and the offset of each key."""
        length, offset = super().get_mask_sizes(query_length, layer_idx)
        return length, offset + layer_idx + 1

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """The offset of each query."""
        return super().get_query_offset(layer_idx) + layer_idx + 1


@dataclass(slots=True)
class _Row:
    """What the heads know of one request: rows that every head has consumed for good, and hidden states after them."""

    committed: int
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class _Work:
    """Rows of one request in one pass of the heads: `count` rows from `start` on, `keep` of them for good."""

    request: Request
    start: int
    count: int
    keep: int
    hidden: Tensor


class MtpDrafter(Drafter):
    """Drafts greedily with the heads of an Inkling model.

    Args:
        heads: a `transformers.modeling_layers.MtpModel` of the model that verifies; None: loaded from its checkpoint.
    """

    needs_hidden = True

    def __init__(self, heads: Any = None) -> None:
        self.heads = heads
        self._rows: dict[int, _Row] = {}

    def attach(self, host: DrafterHost) -> None:
        """Make the state of the heads.

        Raises:
            UnsupportedError: the model has no heads, or fewer than `draft_tokens`.
        """
        self.heads = self.heads if self.heads is not None else _load_heads(host.model)
        self.depth = len(self.heads.layers)
        if host.draft_tokens > self.depth:
            wanted = f"at most {self.depth}, the model's heads"
            raise UnsupportedError("MtpDrafter", "draft_tokens", host.draft_tokens, wanted, "lower draft_tokens")
        patch_model(self.heads)
        self.spec = _describe_heads(self.heads)
        device = host.pool.device
        # at most the accepted tokens of a verify step, and what the deeper heads could not keep before
        self.width = host.draft_tokens + self.depth
        self.pool = _draft_pool(self.spec, host, self.width)
        self.sidecar = ConvStateSidecar(
            host.backend,
            self.pool,
            max_batch=host.max_batch,
            max_tokens=host.max_batch * max(host.chunk_size, self.width),
            draft_tokens=self.width,
            part="draft",
        )
        self._chunk = host.chunk_size
        # a request row owns the same pages for good: the heads share no prefixes
        self._row_pages = pages_of(host.max_len + self.width, PAGE)
        dtype = host.model.get_input_embeddings().weight.dtype
        store = PageStore(self.spec, RESERVED + host.max_batch * self._row_pages, PAGE, dtype, device)
        self.cache = HeadCache(store, SidecarConvs(self.sidecar, self.spec), self.spec)
        self.device = device

    def _pages(self, request: Request) -> range:
        first = RESERVED + request.row * self._row_pages
        return range(first, first + self._row_pages)

    def observe(self, requests: Sequence[Request], hidden: Sequence[Tensor]) -> None:
        """Keep hidden states until the heads have consumed them."""
        for request, new in zip(requests, hidden, strict=True):
            row = self._rows.get(request.request_id)
            if row is None:
                self._rows[request.request_id] = _Row(0, new)
            else:
                row.hidden = torch.cat([row.hidden, new])

    def finish(self, request: Request) -> None:
        """Forget a request."""
        self._rows.pop(request.request_id, None)

    def propose(self, requests: Sequence[Request], count: int) -> list[list[int]]:
        """One token of each of the first `count` heads."""
        while lagging := [work for request in requests if (work := self._behind(request)) is not None]:
            self._run(lagging, ForwardMode.EXTEND, self.depth)
            self._commit(lagging)
        works = [self._newest(request) for request in requests]
        drafts = self._run(works, ForwardMode.DRAFT_EXTEND, count)
        self._commit(works)
        return drafts

    def _settled(self, request: Request) -> int:
        """Rows whose inputs no later token can change: head k of row p reads token p + 1 + k."""
        return max(0, request.computed - self.depth + 1)

    def _behind(self, request: Request) -> _Work | None:
        """A chunk of settled rows, if more are left than a draft-extend pass takes; it leaves the last row."""
        row = self._rows[request.request_id]
        if request.computed - row.committed <= self.width:
            return None
        end = min(self._settled(request), request.computed - 1)
        count = min(self._chunk, end - row.committed)
        return _Work(request, row.committed, count, count, row.hidden[:count])

    def _newest(self, request: Request) -> _Work:
        row = self._rows[request.request_id]
        keep = max(0, self._settled(request) - row.committed)
        return _Work(request, row.committed, request.computed - row.committed, keep, row.hidden)

    def _commit(self, works: Sequence[_Work]) -> None:
        for work in works:
            row = self._rows[work.request.request_id]
            row.committed += work.keep
            row.hidden = row.hidden[work.keep :]

    def _run(self, works: Sequence[_Work], mode: ForwardMode, heads: int) -> list[list[int]]:
        """Run the heads over the rows of `works`; returns the token that each head names after each request's last."""
        width = self.width if mode is ForwardMode.DRAFT_EXTEND else 0
        extents = [max(width, work.count) for work in works]
        self.sidecar.init_forward_metadata(self._batch(works, mode, sum(extents)))
        segments = [
            Segment(self._pages(work.request), work.start, [0] * work.count, extent - work.count)
            for work, extent in zip(works, extents, strict=True)
        ]
        step = self.cache.step = pack(segments, self.spec, PAGE, self.device)
        hidden = _padded([work.hidden for work in works], extents)
        last = torch.tensor(_last_rows(works, extents)).to(self.device)
        drafts: list[list[int]] = [[] for _ in works]
        # every head consumes the settled rows; heads beyond the drafts that are asked for only keep up
        for head in range(self.depth):
            tokens = _head_tokens(works, extents, drafts, head)
            hidden = self._head(head, tokens.to(self.device), hidden, step)
            if mode is ForwardMode.DRAFT_EXTEND:
                logits = self.heads._project_to_logits(hidden[last])
                for row, token in enumerate(logits.argmax(dim=-1).tolist()):
                    drafts[row].append(token)
        return [named[:heads] for named in drafts]

    def _head(self, head: int, tokens: Tensor, hidden: Tensor, step: PackedStep) -> Tensor:
        """Hidden states [T, D] of one head from those of the one before it, and the tokens [T]."""
        layer = self.heads.layers[head]
        out: Tensor = layer(
            self.heads.embed_tokens(tokens[None]),
            hidden[None],
            position_embeddings=None,
            attention_mask=None,
            position_ids=step.position_ids + head + 1,
            conv_mask=None,
            **{self.spec.cache_argument: self.cache},
        )
        if self.heads.use_shared_post_norm:
            out = self.heads.shared_post_norm(out)
        return out[0]

    def _batch(self, works: Sequence[_Work], mode: ForwardMode, tokens: int) -> StepBatch:
        columns = [
            [work.request.row for work in works],
            [work.start for work in works],
            [work.count for work in works],
            [work.keep for work in works],
        ]
        rows, start, count, keep = torch.tensor(columns).to(self.device)
        drafting = mode is ForwardMode.DRAFT_EXTEND
        return StepBatch(
            forward_mode=mode,
            req_pool_indices=rows,
            num_reqs=len(works),
            num_tokens=tokens,
            computed_lens=start,
            extend_seq_lens=count,
            extend_prefix_lens=start,
            draft_token_num=self.width if drafting else 1,
            num_accept_tokens=keep if drafting else None,
            has_initial_state=start > 0,
        )


def _load_heads(model: Any) -> Any:
    if getattr(model.config.get_text_config(), "num_mtp_layers", None) is None:
        hint = "draft with NGramDrafter, or use a checkpoint with MTP weights"
        raise UnsupportedError("MtpDrafter", "model", "a config without num_mtp_layers", "a model with heads", hint)
    from transformers.modeling_layers import MtpModel

    heads: Any = MtpModel.from_pretrained(model)
    return heads.eval().to(model.device)


def _describe_heads(heads: Any) -> ModelSpec:
    """The spec of the heads: layers of the model's own kind, numbered from 0."""
    return describe_inkling(heads.config, heads.embed_tokens.weight.dtype, cache_argument(heads.layers[0]))


def _draft_pool(spec: ModelSpec, host: DrafterHost, width: int) -> StatePool:
    """The state of the heads, over the slots and the map of the target."""
    return StatePool(
        spec.streams,
        num_slots=host.pool.num_slots,
        width=spec.width,
        layers=spec.conv_layers,
        layout=host.pool.layout,
        draft_token_num=width,
        device=host.pool.device,
        mamba_index_mapping=host.pool.mamba_index_mapping,
        track_interval=host.pool.track_interval,
    )


def _padded(parts: Sequence[Tensor], extents: Sequence[int]) -> Tensor:
    """The parts one after the other, each followed by zeros up to its extent."""
    pieces: list[Tensor] = []
    for part, extent in zip(parts, extents, strict=True):
        pieces += [part, part.new_zeros(extent - part.shape[0], part.shape[1])]
    return torch.cat(pieces)


def _last_rows(works: Sequence[_Work], extents: Sequence[int]) -> list[int]:
    rows, offset = [], 0
    for work, extent in zip(works, extents, strict=True):
        rows.append(offset + work.count - 1)
        offset += extent
    return rows


def _head_tokens(works: Sequence[_Work], extents: Sequence[int], drafts: Sequence[Sequence[int]], head: int) -> Tensor:
    """Token p + 1 + head of each row p: known ones, then drafts of the heads before; padded rows are token 0."""
    tokens: list[int] = []
    for work, extent, named in zip(works, extents, drafts, strict=True):
        first, end = work.start + 1 + head, work.start + work.count + 1 + head
        known = work.request.span(first, min(end, work.request.length))
        tokens += [*known, *named[: work.count - len(known)]]
        tokens += [0] * (extent - work.count)
    return torch.tensor(tokens)
