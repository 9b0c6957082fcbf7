"""SGLang's pool and batches as hwbackends sees them: the wrapped state pool, `ForwardBatch` to `StepBatch`, and the
sidecars of one attention backend. Knows SGLang's names but imports nothing of SGLang."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hwbackends.errors import ShapeError, TreeDraftsError, UnsupportedError
from hwbackends.step.metadata import ForwardMode, StepBatch
from hwbackends.step.pool import StatePool
from hwbackends.step.sidecar import ConvStateSidecar, LayerHandle

_POOLS: weakref.WeakKeyDictionary[Any, StatePool] = weakref.WeakKeyDictionary()
"""Wrapped pools by SGLang's `MambaPool`: every attention backend over one pool shares its draft rows."""


def as_rows(tensor: Tensor, history: int, dim: int) -> Tensor:
    """A conv pool of SGLang as [L, slots, S, D], whatever its orientation; nothing is copied.

    SGLang keeps [L, slots, S, D] (Inkling), [L, slots, D, S] (LFM2), and on NPU more rows than S, of which the first
    S are the window.

    Args:
        tensor: [L, slots, a, b].
        history: S.
        dim: D.

    Raises:
        ShapeError: neither of the last two dimensions is D.
    """
    rows, columns = tensor.shape[-2:]
    if columns == dim and rows >= history:
        return tensor[:, :, :history]
    if rows == dim and columns >= history:
        return tensor.transpose(-1, -2)[:, :, :history]
    raise ShapeError(
        "SGLang plugin", "conv state", tuple(tensor.shape), f"[L, slots, {history}, {dim}] or its transpose"
    )


def as_draft_rows(windows: Tensor | None, rows: int, count: int, dim: int) -> Tensor | None:
    """SGLang's buffer of verify windows as draft rows [L, R, count, D], where it is large enough; nothing is copied.

    Args:
        windows: [L, max requests, N, ...], what SGLang allocated for the windows after each draft.
        rows: R, rows of the request pool: draft rows are kept by request row, not by batch row.
        count: S + N.
        dim: D.

    Returns:
        The view, or None where it does not fit.
    """
    if windows is None or not windows.is_contiguous() or windows.shape[1] < rows:
        return None
    flat = windows.flatten(2)
    if flat.shape[2] < count * dim:
        return None
    return flat[:, :rows, : count * dim].view(flat.shape[0], rows, count, dim)


def wrap_pool(
    req_to_token_pool: Any, streams: Sequence[str], history: int, dims: Sequence[int], drafts: bool, track_interval: int
) -> StatePool:
    """SGLang's `HybridReqToTokenPool` as a `StatePool` over the same tensors; one per `MambaPool`.

    Args:
        req_to_token_pool: brings the map, the virtual-to-physical table, the layers and the `MambaPool`.
        streams: name of each tensor of the pool's `conv` list.
        history: S.
        dims: D of each stream.
        drafts: whether the pool's owner verifies drafts, which needs draft rows.
        track_interval: tokens between snapshots in extend.
    """
    mamba_pool = req_to_token_pool.mamba_pool
    found = _POOLS.get(mamba_pool)
    if found is None:
        found = _POOLS[mamba_pool] = _wrap(req_to_token_pool, streams, history, dims, drafts, track_interval)
    return found


def _wrap(
    req_to_token_pool: Any, streams: Sequence[str], history: int, dims: Sequence[int], drafts: bool, track_interval: int
) -> StatePool:
    cache = req_to_token_pool.mamba_pool.mamba_cache
    mapping: Tensor = req_to_token_pool.req_index_to_mamba_index_mapping
    windows: Sequence[Tensor] = getattr(cache, "intermediate_conv_window", None) or ()
    draft_token_num = windows[0].shape[2] if drafts and windows else 0
    conv = {name: as_rows(cache.conv[i], history, dims[i]) for i, name in enumerate(streams)}
    rows: dict[str, Tensor] = {}
    if draft_token_num:
        count, requests = history + draft_token_num, mapping.shape[0]
        for i, (name, tensor) in enumerate(conv.items()):
            shared = as_draft_rows(windows[i], requests, count, dims[i])
            rows[name] = tensor.new_zeros(len(tensor), requests, count, dims[i]) if shared is None else shared
    return StatePool.wrap(
        conv,
        width=history + 1,
        mamba_index_mapping=mapping,
        layers=sorted(req_to_token_pool.mamba_map, key=req_to_token_pool.mamba_map.__getitem__),
        draft_token_num=draft_token_num,
        draft_rows=rows,
        mamba_v2p_table=req_to_token_pool.mamba_v2p_table,
        track_interval=track_interval,
    )


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
        limits: extents of captured steps.
        topk: drafts per position; more than one is refused at the first verify.
        index_dtype: dtype of slot indices that SGLang's own code reads.
        draft_track_interval: tokens between snapshots in draft extend; None: draft extend takes none.
        host_mirrors: see `ConvStateSidecar`.
    """

    def __init__(
        self,
        backend: object,
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
        self._backend, self._limits, self._topk = backend, limits, max(1, topk)
        self._index_dtype, self._host_mirrors = index_dtype, host_mirrors
        fusable = req_to_token_pool.mamba_translate_is_fusable
        self._translate = None if fusable else req_to_token_pool.translate_mamba_indices
        self._track_drafts = draft_track_interval is not None
        self._draft_pool = _draft_extend_pool(pool, draft_track_interval or pool.track_interval)
        self._every_row = torch.ones(limits.max_batch, dtype=torch.bool, device=pool.device)
        self._no_prefix = torch.zeros(limits.max_batch, dtype=torch.int32, device=pool.device)
        self._fresh = torch.zeros(limits.max_batch, dtype=torch.bool, device=pool.device)
        self._sidecars: dict[tuple[ForwardMode, bool], ConvStateSidecar] = {}
        self._current: ConvStateSidecar | None = None
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

    def check_limits(self, max_batch: int, max_tokens: int) -> None:
        """Hold the extents that SGLang's graph runner reports against the buffers.

        Raises:
            GraphLimitError: a captured step would not fit.
        """
        self.sidecar(ForwardMode.DECODE, graph=True).init_graph_state(max_batch, max_tokens)

    # SGLang's three metadata hooks

    def eager(self, forward_batch: Any) -> None:
        """Prepare an eager step."""
        batch = self.step_batch(forward_batch)
        self._select(batch, graph=False).init_forward_metadata(batch)

    def out_graph(self, forward_batch: Any, in_capture: bool) -> None:
        """Before a capture or a replay."""
        batch = self.step_batch(forward_batch)
        self._select(batch, graph=True).init_forward_metadata_out_graph(batch, in_capture=in_capture)

    def in_graph(self, forward_batch: Any) -> None:
        """Inside a capture."""
        batch = self.step_batch(forward_batch)
        self._select(batch, graph=True).init_forward_metadata_in_graph(batch)

    def _select(self, batch: StepBatch, graph: bool) -> ConvStateSidecar:
        self._current = self.sidecar(batch.forward_mode, graph)
        return self._current

    def handle(self, layer_id: int) -> LayerHandle | None:
        """The current step as one layer sees it; None before the first step."""
        if self._current is None:
            return None
        return self._current.conv_state_metadata(layer_id)  # hwbackends: ignore[HWB106] the sidecar's, not SGLang's

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

    # ForwardBatch to StepBatch

    def step_batch(self, forward_batch: Any) -> StepBatch:
        """A `ForwardBatch` as a `StepBatch` over the same tensors.

        Padded rows of SGLang carry request row 0, which maps to slot 0, or a negative accepted count.
        """
        mode = forward_mode(forward_batch.forward_mode)
        requests = forward_batch.req_pool_indices
        fill = {
            ForwardMode.EXTEND: self._extend,
            ForwardMode.TARGET_VERIFY: self._verify,
            ForwardMode.DRAFT_EXTEND: self._draft_extend,
        }.get(mode, self._decode)
        batch = StepBatch(mode, requests, num_reqs=requests.shape[0], num_tokens=requests.shape[0])
        fill(batch, forward_batch)
        return batch

    def _decode(self, batch: StepBatch, forward_batch: Any) -> None:
        self._track(batch, forward_batch)

    def _extend(self, batch: StepBatch, forward_batch: Any) -> None:
        rows = batch.padded_reqs
        batch.num_tokens = int(forward_batch.extend_num_tokens)
        batch.extend_seq_lens = fit(forward_batch.extend_seq_lens, rows, 0)
        prefix = fit(forward_batch.extend_prefix_lens, rows, 0)
        batch.extend_prefix_lens = prefix if prefix is not None else _sized(self._no_prefix, rows)
        self._track(batch, forward_batch)
        if batch.mamba_track_mask is not None:
            batch.mamba_track_seqlens = fit(forward_batch.mamba_track_seqlens, rows, -1)

    def _verify(self, batch: StepBatch, forward_batch: Any) -> None:
        spec = forward_batch.spec_info
        if getattr(spec, "ragged_verify_layout", None) is not None:
            wanted = "the same number of drafts for every request"
            raise UnsupportedError("SGLang plugin", "ragged_verify_layout", "a ragged layout", wanted)
        self._drafts(batch, int(spec.draft_token_num))

    def _draft_extend(self, batch: StepBatch, forward_batch: Any) -> None:
        spec, rows = forward_batch.spec_info, batch.padded_reqs
        self._drafts(batch, int(forward_batch.extend_num_tokens) // max(1, rows))
        batch.num_accept_tokens = fit(spec.num_accept_tokens, rows, -1)
        batch.seq_lens = fit(forward_batch.seq_lens, rows, 0)
        if getattr(spec, "num_front_tokens", 0) > 0:
            batch.has_initial_state = _sized(self._fresh, rows)
        if self._track_drafts and forward_batch.mamba_track_indices is not None:
            batch.mamba_track_mask = _sized(self._every_row, rows)
            batch.mamba_track_indices = fit(forward_batch.mamba_track_indices, rows, 0)

    def _drafts(self, batch: StepBatch, draft_token_num: int) -> None:
        if self._topk != 1:
            hint = "run with --speculative-eagle-topk 1, or without the plugin"
            raise TreeDraftsError("SGLang plugin", "speculative_eagle_topk", self._topk, "1", hint)
        batch.draft_token_num = draft_token_num
        batch.num_tokens = batch.padded_reqs * draft_token_num

    def _track(self, batch: StepBatch, forward_batch: Any) -> None:
        mask = forward_batch.mamba_track_mask
        if mask is None or forward_batch.mamba_track_indices is None:
            return
        rows = batch.padded_reqs
        batch.mamba_track_mask = fit(mask, rows, 0)
        batch.mamba_track_indices = fit(forward_batch.mamba_track_indices, rows, 0)


def fit(tensor: Tensor | None, rows: int, fill: int) -> Tensor | None:
    """[n] as [rows]: cut, or padded with `fill` where SGLang passes the live rows only."""
    if tensor is None or tensor.shape[0] == rows:
        return tensor
    if tensor.shape[0] > rows:
        return tensor[:rows]
    padded = tensor.new_full((rows,), fill)
    padded[: tensor.shape[0]] = tensor
    return padded


def _sized(static: Tensor, rows: int) -> Tensor:
    """The first rows of a constant buffer; a larger eager step gets its own."""
    return static[:rows] if rows <= static.shape[0] else static[:1].expand(rows).contiguous()


def _draft_extend_pool(pool: StatePool, track_interval: int) -> StatePool:
    """The pool as draft extend prepares over it: SGLang tracks there at another interval, and widens the window by
    front tokens, which verify never does. State and map are the pool's own."""
    draft = copy.copy(pool)
    draft.cache = {}
    draft.track_interval = track_interval
    draft.draft_token_num = max(pool.draft_token_num, _WIDEST_DRAFT)
    return draft


_WIDEST_DRAFT = 1024
"""Draft extend keeps no draft rows, so its tokens per request are not bound by any buffer of the pool."""
