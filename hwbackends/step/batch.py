"""One step as the engine knows it: its phase (`ForwardMode`) and its requests (`StepBatch`). What is derived from it is
`metadata`'s."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch import Tensor

from hwbackends.errors import ArgumentError


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
