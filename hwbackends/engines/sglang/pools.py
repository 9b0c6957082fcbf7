"""SGLang's state pool as a `StatePool` over the same tensors. Knows SGLang's names but imports nothing of SGLang."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hwbackends.errors import ShapeError
from hwbackends.step.pool import StatePool

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


def draft_extend_pool(pool: StatePool, track_interval: int) -> StatePool:
    """The pool as draft extend prepares over it: SGLang tracks there at another interval, and widens the window by
    front tokens, which verify never does. State and map are the pool's own."""
    draft = copy.copy(pool)
    draft.cache = {}
    draft.track_interval = track_interval
    draft.draft_token_num = max(pool.draft_token_num, _WIDEST_DRAFT)
    return draft


_WIDEST_DRAFT = 1024
"""Draft extend keeps no draft rows, so its tokens per request are not bound by any buffer of the pool."""
