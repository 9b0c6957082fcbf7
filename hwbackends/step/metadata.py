"""What one step is and what every conv of the step reads: forward modes, the engine's batch (`StepBatch`), the
prepared metadata (`StepMetadata`) and its graph-static buffers (`MetadataBuffers`). Types and storage only: the
numbers are written by a backend's `prepare_*_metadata` hooks."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from hwbackends.errors import ArgumentError, GraphLimitError

PADDED = -1
"""The value that prepared index tensors hold in padded rows. Convs treat every slot <= 0 as padded."""


class ForwardMode(enum.Enum):
    """Phase of a step. `EXTEND` covers prefill, chunked prefill and mixed batches; `IDLE` has no live row."""

    DECODE = "decode"
    EXTEND = "extend"
    TARGET_VERIFY = "target_verify"
    DRAFT_EXTEND = "draft_extend"
    IDLE = "idle"


@dataclass(slots=True)
class StepBatch:
    """One step as the engine knows it. B counts rows of `req_pool_indices`, live and padded.

    A row b is padded when b >= `num_reqs` (or >= `num_reqs_device`), its request row is negative, its slot is <= 0,
    or, in draft extend, its `num_accept_tokens` is negative. Nothing is written for a padded row.

    Args:
        forward_mode: phase of the step.
        req_pool_indices: [B] int32/int64, request rows; padding value: any negative, or a row that maps to slot 0.
        num_reqs: live rows; what stands behind them is ignored, whatever it holds.
        num_tokens: rows of x this step, padded extent; decode B, verify and draft extend B * `draft_token_num`.
        seq_lens: [B] int32/int64, tokens of each request after this step (unit: tokens). Decode, verify and draft
            extend derive the computed length from it: `seq_lens - tokens of this step`.
        computed_lens: [B] int32/int64, rows that the conv of this part consumed before this step; wins over
            `seq_lens`.
        extend_seq_lens: [B] int32/int64, tokens of each request in an extend step, 0 allowed.
        extend_prefix_lens: [B] int32/int64, tokens before this step in an extend step; the computed length there.
        draft_token_num: tokens per request in verify and draft extend.
        topk: drafts per position; anything but 1 is a tree and is refused.
        num_accept_tokens: [B] int32/int64, draft extend: tokens to keep; negative marks a padded row.
        has_initial_state: [B] bool, extend and draft extend: false reads zeros as history. Default: extend
            `computed length > 0`, draft extend true.
        mamba_track_mask: [B] bool, rows that want a snapshot for the prefix cache.
        mamba_track_indices: [B] int32/int64, track slots, in the name space of `mamba_index_mapping`'s values.
        mamba_track_seqlens: [B] int32/int64, extend: sequence length whose chunk-aligned part is snapshot; -1 masked.
        source_indices: [B] int32/int64, extend: slot that holds the history, when it is not the request's own.
        num_accepted_tokens: [B] int32/int64, `lazy` layout: tokens that the previous step of each request kept,
            at least 1 (1 after an extend).
        cache_indices: [B] int32/int64, physical slots translated by the engine, for translations that are Python
            code; then neither `mamba_index_mapping` nor `mamba_v2p_table` is read.
        num_reqs_device: [1] int32, live rows as a graph replay reads them; the smaller of both counts holds.
    """

    forward_mode: ForwardMode
    req_pool_indices: Tensor
    num_reqs: int
    num_tokens: int
    seq_lens: Tensor | None = None
    computed_lens: Tensor | None = None
    extend_seq_lens: Tensor | None = None
    extend_prefix_lens: Tensor | None = None
    draft_token_num: int = 1
    topk: int = 1
    num_accept_tokens: Tensor | None = None
    has_initial_state: Tensor | None = None
    mamba_track_mask: Tensor | None = None
    mamba_track_indices: Tensor | None = None
    mamba_track_seqlens: Tensor | None = None
    source_indices: Tensor | None = None
    num_accepted_tokens: Tensor | None = None
    cache_indices: Tensor | None = None
    num_reqs_device: Tensor | None = None

    @property
    def padded_reqs(self) -> int:
        """B: rows of `req_pool_indices`, padded ones counted.

        Raises:
            ArgumentError: `req_pool_indices` is no tensor.
        """
        if not isinstance(self.req_pool_indices, Tensor):
            got = type(self.req_pool_indices).__name__
            raise ArgumentError("StepBatch", "req_pool_indices", got, "a tensor [B] of request rows")
        return self.req_pool_indices.shape[0]

    @property
    def tokens_per_req(self) -> int:
        """Tokens of each request in a uniform phase: 1 in decode, `draft_token_num` in verify and draft extend."""
        return self.draft_token_num if self.forward_mode in UNIFORM_DRAFT_MODES else 1


UNIFORM_DRAFT_MODES = frozenset({ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND})
"""Phases in which every request has exactly `draft_token_num` tokens."""


@dataclass(slots=True)
class StepMetadata:
    """What every conv of a step reads. Written by one `prepare_*_metadata` call, then only read.

    B is the padded extent of requests, T of tokens. Every row of every tensor is valid, padded ones too.

    Attributes:
        forward_mode: phase that the tensors were prepared for.
        num_reqs: B.
        num_tokens: T.
        draft_token_num: tokens per request in verify and draft extend, else 1.
        cache_indices: [B] int32/int64, physical slot that the step writes; padded rows -1.
        source_indices: [B], same dtype, physical slot that holds the history; equal to `cache_indices` unless the
            batch said otherwise; padded rows -1.
        query_start_loc: [B + 1] int32, token offsets. In extend, rows at or behind the live count have length 0, and
            a padded row inside it keeps its tokens; in the other phases it is `arange(B + 1) * tokens per request`.
            `cache_indices` alone tells the padded rows.
        has_initial_state: [B] bool; padded rows false.
        computed_lens: [B] int32, rows consumed before the step (n_b); padded rows 0.
        seq_idx: [T] int32, request of each token; -1 behind the last live token.
        draft_indices: [B] int32, row of the draft buffers: the request row; padded rows -1.
        num_accept_tokens: [B] int32, draft extend: tokens to keep; padded rows -1.
        history_offset: [B] int32, `lazy`: row at which the slot's history starts; 0 elsewhere.
        mamba_track_indices: [B], dtype of `cache_indices`, physical track slot; -1 writes nothing.
        mamba_track_tokens: [B] int32, k of the window `win_b(k)` that the track slot gets; -1 writes nothing.
    """

    forward_mode: ForwardMode
    num_reqs: int
    num_tokens: int
    draft_token_num: int
    cache_indices: Tensor
    source_indices: Tensor
    query_start_loc: Tensor
    has_initial_state: Tensor
    computed_lens: Tensor
    seq_idx: Tensor
    draft_indices: Tensor
    num_accept_tokens: Tensor
    history_offset: Tensor
    mamba_track_indices: Tensor
    mamba_track_tokens: Tensor
    tracks: bool = False
    """Whether the batch asked for snapshots at all; false lets a conv leave out its track part."""
    cache: dict[object, object] = field(default_factory=dict, repr=False, compare=False)
    """For a backend's launch plans; keyed by whatever the backend likes, dropped with the metadata."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensor fields by name; the same storages that the convs read."""
        return {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}


@dataclass(frozen=True, slots=True)
class MetadataLimits:
    """Extents of the graph-static buffers: requests, tokens, and tokens per request in draft phases."""

    max_batch: int
    max_tokens: int
    draft_tokens: int = 1


KEPT_VIEWS = 1024
"""Views that `MetadataBuffers` remembers, a few KiB each."""


class MetadataBuffers:
    """Graph-static storage of one pool's metadata: allocated once, sliced per step, addresses never move.

    Args:
        limits: extents; `max_tokens` must cover `max_batch * draft_tokens`.
        device: device of the pool.
        index_dtype: dtype of slot indices handed to kernels, torch.int32 or torch.int64.
    """

    def __init__(self, limits: MetadataLimits, device: torch.device | str, index_dtype: torch.dtype) -> None:
        self.limits = limits
        self.index_dtype = index_dtype
        batch, tokens = limits.max_batch, max(limits.max_tokens, limits.max_batch * limits.draft_tokens)

        def rows(extent: int, dtype: torch.dtype, value: int) -> Tensor:
            return torch.full((extent,), value, dtype=dtype, device=device)

        self._full = StepMetadata(
            forward_mode=ForwardMode.IDLE,
            num_reqs=batch,
            num_tokens=tokens,
            draft_token_num=limits.draft_tokens,
            cache_indices=rows(batch, index_dtype, PADDED),
            source_indices=rows(batch, index_dtype, PADDED),
            query_start_loc=rows(batch + 1, torch.int32, 0),
            has_initial_state=rows(batch, torch.bool, 0),
            computed_lens=rows(batch, torch.int32, 0),
            seq_idx=rows(tokens, torch.int32, PADDED),
            draft_indices=rows(batch, torch.int32, PADDED),
            num_accept_tokens=rows(batch, torch.int32, PADDED),
            history_offset=rows(batch, torch.int32, 0),
            mamba_track_indices=rows(batch, index_dtype, PADDED),
            mamba_track_tokens=rows(batch, torch.int32, PADDED),
        )
        self._views: dict[tuple[ForwardMode, int, int, int, bool], StepMetadata] = {}

    def view(
        self, forward_mode: ForwardMode, num_reqs: int, num_tokens: int, draft_token_num: int = 1, tracks: bool = False
    ) -> StepMetadata:
        """The buffers cut to one step's extents; the same object for the same arguments, within `KEPT_VIEWS` extents.

        Raises:
            GraphLimitError: an extent is beyond the limits.
        """
        key = (forward_mode, num_reqs, num_tokens, draft_token_num, tracks)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= KEPT_VIEWS:  # eager prefills have ever new extents
                self._views.clear()
            found = self._views[key] = self._cut(*key)
        return found

    def _cut(self, mode: ForwardMode, batch: int, tokens: int, draft_token_num: int, tracks: bool) -> StepMetadata:
        self._check("batch", batch, self._full.num_reqs, "max_batch")
        self._check("num_tokens", tokens, self._full.num_tokens, "max_tokens")
        cut = {
            name: tensor[: tokens if name == "seq_idx" else batch + 1 if name == "query_start_loc" else batch]
            for name, tensor in self._full.tensors().items()
        }
        return replace(
            self._full,
            forward_mode=mode,
            num_reqs=batch,
            num_tokens=tokens,
            draft_token_num=draft_token_num,
            tracks=tracks,
            cache={},
            **cut,
        )

    @staticmethod
    def _check(parameter: str, got: int, limit: int, setting: str) -> None:
        if got > limit:
            hint = f"construct the sidecar with {setting} >= {got}"
            raise GraphLimitError("prepare metadata", parameter, got, f"at most {limit}", hint)

    def addresses(self) -> dict[str, int]:
        """Address of each buffer, to prove that none moved."""
        return {name: tensor.data_ptr() for name, tensor in self._full.tensors().items()}
