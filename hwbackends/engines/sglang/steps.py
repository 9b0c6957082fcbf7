"""The sidecars of one attention backend of SGLang; its three metadata hooks and its commit over them. Knows SGLang's
names but imports nothing of SGLang."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hwbackends.engines.sglang.batches import Batches, forward_mode, settle
from hwbackends.engines.sglang.pools import draft_extend_pool
from hwbackends.errors import GraphError, GraphLimitError
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.handle import LayerHandle
from hwbackends.step.pool import StatePool
from hwbackends.step.sidecar import ConvBackend, ConvStateSidecar


@dataclass(frozen=True, slots=True)
class Limits:
    """Extents of SGLang's captured steps: requests, tokens, and tokens per request in draft phases."""

    max_batch: int
    max_tokens: int
    draft_tokens: int = 1


class Steps:
    """The sidecars of one attention backend of SGLang. Each phase has one for eager steps, whose buffers may grow, and
    one for captured steps, whose buffers stay where they are; all of them share one wrapped pool.

    Args:
        backend: a bound backend of hwbackends.
        req_to_token_pool: SGLang's pool that `pool` wraps.
        pool: the wrapped pool.
        limits: extents of captured steps, as far as they are known before a graph runner reports its own.
        topk: drafts per position; more than one is refused at the first verify.
        index_dtype: dtype of slot indices that SGLang's own code reads.
        draft_track_interval: tokens between snapshots in draft extend; None: draft extend takes none.
        host_mirrors: see `ConvStateSidecar`.
    """

    def __init__(
        self,
        backend: ConvBackend,
        req_to_token_pool: Any,
        pool: StatePool,
        limits: Limits,
        *,
        topk: int = 1,
        index_dtype: torch.dtype = torch.int32,
        draft_track_interval: int | None = None,
        host_mirrors: bool = False,
    ) -> None:
        self.pool = pool
        self._backend, self._limits = backend, limits
        self._index_dtype, self._host_mirrors = index_dtype, host_mirrors
        fusable = req_to_token_pool.mamba_translate_is_fusable
        self._translate = None if fusable else req_to_token_pool.translate_mamba_indices
        self._draft_pool = draft_extend_pool(pool, draft_track_interval or pool.track_interval)
        self._batches = Batches(pool.device, limits.max_batch, topk, draft_track_interval is not None)
        self._sidecars: dict[tuple[ForwardMode, bool], ConvStateSidecar] = {}
        self._captured: dict[tuple[Any, int], StepBatch] = {}
        self._current: ConvStateSidecar | None = None
        self._waiting: StepBatch | None = None
        for mode in ForwardMode:
            self.sidecar(mode, graph=True)  # allocated here, before any capture

    def sidecar(self, mode: ForwardMode, graph: bool) -> ConvStateSidecar:
        """The sidecar of one phase, for captured or for eager steps."""
        if mode is ForwardMode.IDLE:
            mode = ForwardMode.DECODE
        found = self._sidecars.get((mode, graph))
        if found is None:
            found = self._sidecars[mode, graph] = self._make(mode)
        return found

    def _make(self, mode: ForwardMode) -> ConvStateSidecar:
        draft = mode is ForwardMode.DRAFT_EXTEND
        drafts = {ForwardMode.TARGET_VERIFY: max(1, self.pool.draft_token_num), ForwardMode.DRAFT_EXTEND: 1}
        return ConvStateSidecar(
            self._backend,
            self._draft_pool if draft else self.pool,
            max_batch=self._limits.max_batch,
            max_tokens=self._limits.max_tokens,
            draft_tokens=self._limits.draft_tokens if draft else drafts.get(mode, 1),
            index_dtype=self._index_dtype,
            translate=self._translate,
            host_mirrors=self._host_mirrors,
        )

    def reserve(self, max_batch: int, max_tokens: int) -> None:
        """Make room for what a graph runner of SGLang is about to capture. Each runner reports its extents before its
        first capture; the widest step per request (a draft extend with front tokens) is known from nowhere else.

        Raises:
            GraphLimitError: more requests than SGLang was configured for, or a phase is captured already and its
                buffers, which graphs hold, are too small.
        """
        have, width = self._limits, -(-max_tokens // max_batch)
        want = Limits(have.max_batch, max(have.max_tokens, max_tokens), max(have.draft_tokens, width))
        if max_batch > have.max_batch:
            hint = "the request pool and the captured batch sizes of SGLang's configuration set the limit"
            raise GraphLimitError("init_cuda_graph_state", "max_bs", max_batch, f"at most {have.max_batch}", hint)
        if want == have:
            return
        self._limits = want
        captured = {forward_mode(mode) for mode, _ in self._captured}
        for mode, graph in list(self._sidecars):
            if graph and mode not in captured:
                self._sidecars[mode, graph] = self._make(mode)

    # SGLang's three metadata hooks

    def eager(self, forward_batch: Any) -> None:
        """Prepare an eager step. A draft extend waits for its accepted counts, until its first conv asks."""
        batch = self._batches.step_batch(forward_batch)
        self._current = self.sidecar(batch.forward_mode, graph=False)
        self._waiting = batch if batch.forward_mode is ForwardMode.DRAFT_EXTEND else None
        if self._waiting is None:
            self._current.init_forward_metadata(batch)

    def out_graph(self, forward_batch: Any, in_capture: bool) -> None:
        """Before a capture or a replay. A replay is prepared over the batch that was captured, whose tensors are the
        buffers that the runner has filled; its view is asked for its shape alone.

        Raises:
            GraphError: a replay of a shape that was not captured.
        """
        mode = forward_batch.forward_mode
        if in_capture or forward_mode(mode) is ForwardMode.EXTEND:
            batch = self._batches.step_batch(forward_batch)
        else:
            found = self._captured.get((mode, forward_batch.batch_size))
            if found is None:
                shape = f"{mode.name} of {forward_batch.batch_size} requests"
                raise GraphError(f"init_forward_metadata_out_graph: {shape} was not captured")
            batch = found
        self._current, self._waiting = self.sidecar(batch.forward_mode, graph=True), None
        self._current.init_forward_metadata_out_graph(batch, in_capture=in_capture)

    def in_graph(self, forward_batch: Any, slots: Tensor | None = None, track_slots: Tensor | None = None) -> None:
        """Inside a capture.

        Args:
            forward_batch: over the runner's buffers.
            slots: [B] physical slots that SGLang gathers into a buffer of its own before each replay, None to gather
                them in the recorded launch.
            track_slots: [B] physical track slots, with `slots`.
        """
        batch = self._batches.step_batch(forward_batch)
        if slots is not None:
            batch = replace(batch, cache_indices=slots, mamba_track_indices=track_slots)
            batch.mamba_track_mask = batch.mamba_track_mask if track_slots is not None else None
        self._captured[forward_batch.forward_mode, forward_batch.batch_size] = batch
        self._current, self._waiting = self.sidecar(batch.forward_mode, graph=True), None
        self._current.init_forward_metadata_in_graph(batch)

    def handle(self, layer_id: int, forward_batch: Any) -> LayerHandle | None:
        """The current step as one layer sees it; None before the first step."""
        if self._current is None:
            return None
        if self._waiting is not None:
            settle(self._waiting, forward_batch)
            self._current.init_forward_metadata(self._waiting)
            self._waiting = None
        return self._current.conv_state_metadata(layer_id)  # hwbackends: ignore[sglang:HWB106] ours

    def commit(
        self,
        req_pool_indices: Tensor,
        last_correct_step_indices: Tensor,
        mamba_track_indices: Tensor | None,
        mamba_steps_to_track: Tensor | None,
    ) -> None:
        """Commit a verify step. Slots come from `req_pool_indices`, however SGLang translates its slots."""
        count = last_correct_step_indices.shape[0]
        tracks = mamba_track_indices is not None and mamba_steps_to_track is not None
        self.sidecar(ForwardMode.TARGET_VERIFY, graph=False).update_mamba_state_after_mtp_verify(
            req_pool_indices[:count],
            last_correct_step_indices,
            mamba_track_indices[:count] if tracks and mamba_track_indices is not None else None,
            mamba_steps_to_track if tracks else None,
        )
