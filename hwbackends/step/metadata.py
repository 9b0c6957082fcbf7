"""What every conv of a step reads: the prepared metadata (`StepMetadata`) and its graph-static buffers
(`MetadataBuffers`). Types and storage only: the numbers are written by a backend's `prepare_*_metadata` hooks."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hwbackends.errors import ArgumentError, GraphLimitError
from hwbackends.step.batch import ForwardMode

if TYPE_CHECKING:
    from hwbackends.step.handle import HostMirrors, LayerHandle

LAST_POSITION = 2**31 - 33
"""Largest computed length: positions are 32 bits wide."""
PADDED = -1
"""The value that prepared index tensors hold in padded rows. Convs treat every slot <= 0 as padded."""


@dataclass(slots=True, eq=False)
class StepMetadata:
    """What every conv of a step reads. Written by one `prepare_*_metadata` call, then only read: what the tensors hold
    changes, the tensors do not, because launch plans hold their addresses. `dataclasses.replace` makes another one.

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
    handles: dict[int, LayerHandle] = field(default_factory=dict, repr=False, compare=False)
    """The sidecar's: each layer's view of the step."""
    host_mirrors: HostMirrors | None = field(default=None, repr=False, compare=False)
    """The sidecar's: host copies for a model that loops over requests in Python."""
    engine: dict[object, object] = field(default_factory=dict, repr=False, compare=False)
    """The engine's: what its adapter keeps for the step."""
    cache: dict[object, object] = field(default_factory=dict, repr=False, compare=False, init=False)
    """The backend's: launch plans, keyed by whatever it likes."""

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(getattr(self, name, None), Tensor):
            hint = "write into it, or make other metadata with dataclasses.replace"
            raise ArgumentError("StepMetadata", name, "another tensor", "the one that it was made with", hint)
        object.__setattr__(self, name, value)

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
        cut: dict[str, Any] = {
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
            handles={},
            host_mirrors=None,
            engine={},
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
