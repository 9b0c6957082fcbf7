"""Our hooks made ready for measuring: pools, inputs and metadata of one size, one callable per work."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hwbackends.bench import sizes
from hwbackends.bench.sizes import DRAFTS, WIDTH
from hwbackends.conv.state import ConvStream
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.metadata import MetadataBuffers, MetadataLimits, StepMetadata
from hwbackends.step.pool import StatePool

BF16 = torch.bfloat16


def random(*shape: int) -> Tensor:
    """bfloat16 noise on the current device."""
    return torch.randn(*shape, device="cuda").to(BF16)


def rotating(count: int, *shape: int) -> list[Tensor]:
    """`count` tensors of noise, neighbours in memory."""
    return list(random(count, *shape))


def taps(count: int, dim: int) -> list[Tensor]:
    """Weights [D, W] whose channels are contiguous, `count` of them."""
    return [(random(WIDTH, dim) / 2).t() for _ in range(count)]


class Bench:
    """One backend over one pool of `layers` equal layers."""

    def __init__(
        self, hooks: Any, layout: str, batch: int, streams: tuple[tuple[str, int], ...], layers: int, slots: int = 0
    ) -> None:
        self.hooks, self.layout, self.batch = hooks, layout, batch
        self.pool = StatePool(
            [ConvStream(name, dim, BF16) for name, dim in streams],
            num_slots=slots or 2 * batch + 1,
            width=WIDTH,
            layers=layers,
            layout=layout,  # type: ignore[arg-type]
            draft_token_num=DRAFTS,
            request_rows=batch + 1,
            device="cuda",
            ring_rows=sizes.RING_ROWS if layout == "ring" else None,
        )
        for tensor in self.pool.storages():
            tensor.normal_()
        self.pool.mamba_index_mapping[1:].copy_(torch.randperm(batch, device="cuda") + 1)
        self.rows = torch.arange(1, batch + 1, device="cuda")
        self.lengths = torch.full((batch,), 40, device="cuda")
        self.tracks = torch.arange(batch + 1, 2 * batch + 1, device="cuda")

    def decode_batch(self) -> StepBatch:
        return StepBatch(ForwardMode.DECODE, self.rows, self.batch, self.batch, seq_lens=self.lengths)

    def verify_batch(self) -> StepBatch:
        tokens = self.batch * DRAFTS
        return StepBatch(
            ForwardMode.TARGET_VERIFY, self.rows, self.batch, tokens, seq_lens=self.lengths, draft_token_num=DRAFTS
        )

    def draft_extend_batch(self) -> StepBatch:
        tokens = self.batch * DRAFTS
        return StepBatch(
            ForwardMode.DRAFT_EXTEND,
            self.rows,
            self.batch,
            tokens,
            seq_lens=torch.arange(self.batch, device="cuda") % 64 + 64,
            draft_token_num=DRAFTS,
            num_accept_tokens=torch.arange(self.batch, device="cuda") % DRAFTS + 1,
            mamba_track_mask=torch.ones(self.batch, dtype=torch.bool, device="cuda"),
            mamba_track_indices=self.tracks,
        )

    def extend_batch(self, tokens: int) -> StepBatch:
        lengths = torch.full((self.batch,), tokens // self.batch, device="cuda")
        lengths[: tokens % self.batch] += 1
        prefix = torch.arange(self.batch, device="cuda") % 2 * 64
        return StepBatch(
            ForwardMode.EXTEND,
            self.rows,
            self.batch,
            tokens,
            extend_seq_lens=lengths,
            extend_prefix_lens=prefix,
            mamba_track_mask=torch.ones(self.batch, dtype=torch.bool, device="cuda"),
            mamba_track_indices=self.tracks,
            mamba_track_seqlens=prefix + lengths,
        )

    def prepare(self, batch: StepBatch, view: StepMetadata | None = None) -> StepMetadata:
        """Metadata of a batch, in `view` or in new buffers."""
        if view is None:
            limits = MetadataLimits(batch.padded_reqs, batch.num_tokens, batch.tokens_per_req)
            buffers = MetadataBuffers(limits, "cuda", torch.int32)
            tracks = batch.mamba_track_mask is not None
            view = buffers.view(batch.forward_mode, batch.padded_reqs, batch.num_tokens, batch.tokens_per_req, tracks)
        name = {"DECODE": "decode", "EXTEND": "extend", "TARGET_VERIFY": "target_verify"}
        phase = name.get(batch.forward_mode.name, "draft_extend")
        getattr(self.hooks, f"prepare_{phase}_metadata")(batch, self.pool, view)
        return view

    def commit_arguments(self) -> tuple[Any, ...]:
        """Of a commit that keeps 1..N drafts of each request."""
        return self.pool, self.rows, torch.arange(self.batch, device="cuda") % DRAFTS
