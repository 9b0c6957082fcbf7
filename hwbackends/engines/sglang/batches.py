"""SGLang's forward batches as step batches over the same tensors. Knows SGLang's names but imports nothing of SGLang.

Four kinds of object reach the metadata hooks: `ForwardBatch` (eager steps, captures, replays of full prefill graphs),
the views that the decode and the draft-extend runners make for a replay, and the view that the multi-layer draft runner
makes to stage metadata. Only a `ForwardBatch` is converted: the views leave fields out, and a replay needs none of
them, because its preparation was recorded over the runner's own buffers. From a view two fields are read, which all of
them have: `forward_mode` and `batch_size`.

Of a `ForwardBatch` every field is there. These may be None when a step is prepared, and then:

- `spec_info.num_accept_tokens`, in a draft extend that is prepared ahead of the verify's answer: the step waits, and is
  prepared at its first conv, which is where SGLang's own code reads the counts.
- `spec_info.num_tokens_per_req` (-1), in kinds of draft extend that leave it unset: `extend_num_tokens` over requests.
- `spec_info.ragged_verify_layout`: every request has equally many drafts, as it has where a kind of `spec_info` does
  not have the field. A layout is refused.
- `extend_prefix_lens`: `seq_lens - extend_seq_lens`, as in SGLang.
- `mamba_track_mask`, `mamba_track_indices`: no prefix cache takes snapshots.
- `mamba_track_seqlens`, in a decode that SGLang labels an extend for data parallelism: it is prepared as a decode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hwbackends.errors import MissingArgumentError, TreeDraftsError, UnsupportedError
from hwbackends.step.batch import ForwardMode, StepBatch


def forward_mode(mode: Any) -> ForwardMode:
    """SGLang's forward mode as the contract's.

    Raises:
        UnsupportedError: a mode that runs no conv.
    """
    if mode.is_idle():
        return ForwardMode.IDLE
    if mode.is_decode():
        return ForwardMode.DECODE
    if mode.is_target_verify():
        return ForwardMode.TARGET_VERIFY
    if mode.is_draft_extend_v2():
        return ForwardMode.DRAFT_EXTEND
    if mode.is_extend():
        return ForwardMode.EXTEND
    raise UnsupportedError("SGLang plugin", "forward_mode", mode, "decode, idle, extend, target verify or draft extend")


def settle(batch: StepBatch, forward_batch: Any) -> None:
    """Fill in the accepted counts of a draft extend, which SGLang may set after the step was prepared.

    Raises:
        MissingArgumentError: it did not.
    """
    counts = forward_batch.spec_info.num_accept_tokens
    if counts is None:
        wanted = "the accepted tokens of each request, set before the first conv of a draft extend"
        raise MissingArgumentError("SGLang plugin", "spec_info.num_accept_tokens", None, wanted)
    batch.num_accept_tokens = fit(counts, batch.padded_reqs, -1)


class Batches:
    """Makes step batches.

    Args:
        device: of the pool.
        max_batch: most requests of a captured step, whose constants must stay where they are.
        topk: drafts per position; more than one is refused at the first verify.
        tracks_drafts: whether draft extend takes snapshots for the prefix cache.
    """

    def __init__(self, device: torch.device, max_batch: int, topk: int, tracks_drafts: bool) -> None:
        self._topk, self._tracks_drafts = max(1, topk), tracks_drafts
        self._every_row = torch.ones(max_batch, dtype=torch.bool, device=device)
        self._fresh = torch.zeros(max_batch, dtype=torch.bool, device=device)
        self._fill: dict[ForwardMode, Callable[[StepBatch, Any], None]] = {
            ForwardMode.EXTEND: self._extend,
            ForwardMode.TARGET_VERIFY: self._verify,
            ForwardMode.DRAFT_EXTEND: self._draft_extend,
        }

    def step_batch(self, forward_batch: Any) -> StepBatch:
        """A `ForwardBatch` as a `StepBatch` over the same tensors.

        Padded rows of SGLang carry request row 0, which maps to slot 0, or a negative accepted count. An idle step has
        no live row, however many rows it is padded to.
        """
        mode = forward_mode(forward_batch.logical_forward_mode)
        rows = forward_batch.batch_size
        requests = fit(forward_batch.req_pool_indices, rows, 0)
        assert requests is not None
        live = 0 if mode is ForwardMode.IDLE else rows
        batch = StepBatch(mode, requests, num_reqs=live, num_tokens=rows)
        self._fill.get(mode, self._track)(batch, forward_batch)
        return batch

    def _extend(self, batch: StepBatch, forward_batch: Any) -> None:
        rows = batch.padded_reqs
        batch.num_tokens = int(forward_batch.extend_num_tokens)
        batch.extend_seq_lens = fit(forward_batch.extend_seq_lens, rows, 0)
        prefix = forward_batch.extend_prefix_lens
        if prefix is None:
            prefix = forward_batch.seq_lens - forward_batch.extend_seq_lens
        batch.extend_prefix_lens = fit(prefix, rows, 0)
        self._track(batch, forward_batch)
        if batch.mamba_track_mask is not None:
            batch.mamba_track_seqlens = fit(forward_batch.mamba_track_seqlens, rows, -1)

    def _verify(self, batch: StepBatch, forward_batch: Any) -> None:
        spec = forward_batch.spec_info
        if getattr(spec, "ragged_verify_layout", None) is not None:
            wanted = "the same number of drafts for every request"
            hint = "serve with SGLANG_RAGGED_VERIFY_MODE=static, or without the plugin"
            raise UnsupportedError("SGLang plugin", "ragged_verify_layout", "a ragged layout", wanted, hint)
        self._drafts(batch, int(spec.draft_token_num))

    def _draft_extend(self, batch: StepBatch, forward_batch: Any) -> None:
        spec, rows = forward_batch.spec_info, batch.padded_reqs
        # where SGLang has padded the requests, extend_num_tokens still counts the tokens before
        width = spec.num_tokens_per_req
        self._drafts(batch, width if width > 0 else int(forward_batch.extend_num_tokens) // max(1, rows))
        batch.num_accept_tokens = fit(spec.num_accept_tokens, rows, -1)
        batch.seq_lens = fit(forward_batch.seq_lens, rows, 0)
        if spec.num_front_tokens > 0:
            batch.has_initial_state = sized(self._fresh, rows)
        if self._tracks_drafts and forward_batch.mamba_track_indices is not None:
            batch.mamba_track_mask = sized(self._every_row, rows)
            batch.mamba_track_indices = fit(forward_batch.mamba_track_indices, rows, 0)

    def _drafts(self, batch: StepBatch, draft_token_num: int) -> None:
        if self._topk != 1:
            hint = "run with --speculative-eagle-topk 1, or without the plugin"
            raise TreeDraftsError("SGLang plugin", "speculative_eagle_topk", self._topk, "1", hint)
        batch.draft_token_num = draft_token_num
        batch.num_tokens = batch.padded_reqs * draft_token_num

    def _track(self, batch: StepBatch, forward_batch: Any) -> None:
        mask, slots = forward_batch.mamba_track_mask, forward_batch.mamba_track_indices
        if mask is None or slots is None:
            return
        batch.mamba_track_mask = fit(mask, batch.padded_reqs, 0)
        batch.mamba_track_indices = fit(slots, batch.padded_reqs, 0)


def fit(tensor: Tensor | None, rows: int, fill: int) -> Tensor | None:
    """[n] as [rows]: cut, or padded with `fill` where SGLang passes the live rows only."""
    if tensor is None or tensor.shape[0] == rows:
        return tensor
    if tensor.shape[0] > rows:
        return tensor[:rows]
    padded = tensor.new_full((rows,), fill)
    padded[: tensor.shape[0]] = tensor
    return padded


def sized(static: Tensor, rows: int) -> Tensor:
    """The first rows of a constant buffer; a larger eager step gets its own."""
    return static[:rows] if rows <= static.shape[0] else static[:1].expand(rows).contiguous()
