"""The cache for `model.generate`: attention state as Transformers keeps it, conv state in a pool of ours. Greedy and
sampled generation, beams, batches with left padding, prompt lookup, assistants and the model's own MTP heads all work
through it, and so do a second call on the same text and taking tokens back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from hwbackends.conv.layouts import Layout
from hwbackends.engines.transformers.models import AttentionShape, ModelSpec, describe
from hwbackends.engines.transformers.patches import patch_model
from hwbackends.errors import ArgumentError
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.pool import StatePool
from hwbackends.step.sidecar import ConvStateSidecar

REMEMBERED = 256
"""Tokens before those that `crop` left which may still be taken back, while the past is recorded."""


class ConvOnlyLayer:
    """The place of a layer without keys and values in a cache's list of layers."""

    record_past = False
    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def get_max_length(self) -> int:
        """-1: no maximum."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing: the conv state is rolled back by the cache as a whole."""

    def activate_past_recording(self) -> None:
        """Nothing: the cache as a whole records."""

    def rearrange(self, index: Tensor) -> None:
        """Nothing: the conv state is rearranged by the cache as a whole."""


class FullLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one layer of full attention."""

    record_past = False

    def activate_past_recording(self) -> None:
        """Nothing: it keeps everything."""

    def rearrange(self, index: Tensor) -> None:
        """Sequences `index` of those that there are."""
        if self.keys is not None and self.values is not None and self.keys.dim() == 4:
            self.keys, self.values = self.keys.index_select(0, index), self.values.index_select(0, index)


class WindowLayer(FullLayer):
    """Keys and values of one sliding-window layer. What slid out is dropped before the next tokens come, not after, so
    that `crop` finds everything that it may need; while the past is recorded, `crop` alone drops."""

    is_sliding = True

    def __init__(self, sliding_window: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sliding_window = sliding_window
        self._dropped = 0

    @property
    def _stored(self) -> int:
        # before the first tokens Transformers keeps an empty tensor of another rank
        return self.keys.shape[2] if self.keys is not None and self.keys.dim() == 4 else 0

    def _keep(self, part: slice) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:, :, part], self.values[:, :, part]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append [batch, heads, tokens, head_dim]; return what these tokens may see."""
        if not self.record_past:
            self._drop(0)
        seen = min(self._stored, self.sliding_window - 1) + key_states.shape[2]
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys[:, :, -seen:], values[:, :, -seen:]

    def _drop(self, spare: int) -> None:
        """Drop what slid out more than `spare` tokens ago."""
        excess = self._stored - (self.sliding_window - 1) - spare
        if excess > 0:
            self._keep(slice(excess, None))
            self._dropped += excess

    def activate_past_recording(self) -> None:
        """Keep what slides out."""
        self.record_past = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that the next `query_length` tokens see, and the position of the first one."""
        kept = min(self._stored, self.sliding_window - 1)
        return kept + query_length, self.get_seq_length() - kept

    def get_seq_length(self) -> int:
        """Tokens so far, dropped ones counted."""
        return self._dropped + self._stored

    def get_max_length(self) -> int:
        """The window."""
        return self.sliding_window

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest `-tokens_to_remove` tokens."""
        if tokens_to_remove:
            self._keep(slice(tokens_to_remove))
        self._drop(REMEMBERED)


class ConvStateCache(Cache):
    """A cache of one `generate` call after another, whose convs run through a backend.

    A forward is one step: decode for one token per sequence, extend for more. While the past is recorded (assisted
    decoding, or a caller's `activate_past_recording`) the newest `draft_tokens + 1` tokens of each forward go through
    the verify hook instead, and `crop` commits those that were kept. The inputs of the convs are kept as well, so that
    `crop` may reach further back: it then writes the window anew, through the extend hook.

    Args:
        model: `InklingForCausalLM` or `Lfm2ForCausalLM`; its short convs are patched in place.
        backend: a bound backend, as `hwbackends.load` returns it.
        layout: state layout.
        max_batch: sequences, at most; beams count.
        max_tokens: tokens of one forward over all sequences that buffers are made for; more make them grow.
        draft_tokens: newest tokens of a forward that `crop` takes back without writing anything.

    Raises:
        UnsupportedError: model or version that is not supported.
    """

    def __init__(
        self,
        model: nn.Module,
        backend: Any,
        *,
        layout: Layout = "window",
        max_batch: int = 1,
        max_tokens: int = 4096,
        draft_tokens: int = 16,
    ) -> None:
        self.spec = describe(model)
        patch_model(model)
        super().__init__(layers=_layers(self.spec))
        self._window = draft_tokens + 1
        self._max_batch = max_batch
        device = next(model.parameters()).device
        self.pool = _pool(self.spec, layout, max_batch, self._window, device)
        # two parts of one forward: what is surely kept, and what may be cropped
        self._kept, self._drafts = (
            ConvStateSidecar(backend, self.pool, max_batch=max_batch, max_tokens=max_tokens, draft_tokens=self._window)
            for _ in range(2)
        )
        self._backend = backend
        self._first = (self.spec.conv_layers[0], 0)
        self._recording = False
        self._computed = 0
        self._last_kept, self._batch = 1, 0
        self._head = self._tail = self._pending = 0
        # inputs of every conv [batch, tokens, D] from the position `_recorded_from` less the history on
        self._past: dict[tuple[int, int], Tensor] = {}
        self._recorded_from = 0

    # what Transformers asks

    def activate_past_recording(self) -> None:
        """From now on the newest tokens of each forward may be taken back by `crop`."""
        if self._recording:
            return
        if self._pending:
            self._commit(0)
        layers: list[Any] = self.layers
        for layer in layers:
            layer.activate_past_recording()
        self._recording = True
        self._recorded_from = self._computed
        self._past = {place: self._history(*place) for place in self.spec.stream_names} if self._computed else {}

    def is_recording_past(self, layer_idx: int) -> bool:
        """True: stock convs must never take their in-place path on this cache."""
        return True

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether any token was computed."""
        return self._computed + self._pending > 0

    @property
    def keyword(self) -> dict[str, ConvStateCache]:
        """This cache under the name by which `generate` of the installed Transformers takes it."""
        return {self.spec.cache_argument: self}

    @property
    def drafted(self) -> int:
        """Tokens of the last forward that `crop` may still take back, and the one before them."""
        return self._tail

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest `-tokens_to_remove` tokens.

        Raises:
            ArgumentError: more tokens than were recorded, or a positive number.
        """
        removed = -tokens_to_remove
        length = self._computed + self._pending
        most = length - self._recorded_from if self._recording else 0
        if not 0 <= removed <= most:
            hint = "call activate_past_recording() before tokens are computed that shall be taken back"
            wanted = f"-{most} to 0, the tokens that were recorded"
            raise ArgumentError("ConvStateCache.crop", "tokens_to_remove", tokens_to_remove, wanted, hint)
        super().crop(tokens_to_remove)
        if removed < max(1, self._tail):
            self._commit(removed)
            self._forget(removed)
        else:
            self._commit(0)
            self._forget(removed)
            self._write_back(length - removed)

    def reset(self) -> None:
        """Forget everything; the cache serves another text."""
        self.layers = _layers(self.spec)
        self._recording = False
        self._past = {}
        self._computed = self._head = self._tail = self._pending = self._recorded_from = 0
        self._last_kept = 1
        slots = torch.arange(1, self.pool.num_slots, device=self.pool.device)
        self._backend.clear_slots(self.pool, slots)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence b goes on from sequence `beam_idx[b]`: beam search."""
        self._rearrange(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence `repeats` times, side by side."""
        self._rearrange(torch.arange(self._batch, device=self.pool.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only the sequences `indices`, in that order."""
        self._rearrange(indices)

    def _rearrange(self, index: Tensor) -> None:
        if self._pending:
            self._commit(0)
        self._check_batch(len(index))
        index = index.to(self.pool.device)
        layers: list[Any] = self.layers
        for layer in layers:
            layer.rearrange(index)
        for state in self._states():
            state[1 : len(index) + 1] = state[index + 1]
        self._past = {place: past.index_select(0, index) for place, past in self._past.items()}
        self._batch = len(index)

    # the past

    def _states(self) -> list[Tensor]:
        """The state [slots, rows, D] of each conv."""
        places = {(name, layer) for (layer, _), name in self.spec.stream_names.items()}
        return [self.pool.conv_state(name, layer).tensor for name, layer in sorted(places)]

    def _history(self, layer_idx: int, conv_idx: int) -> Tensor:
        """The rows [batch, S, D] that stand before the next token of each sequence."""
        state = self.pool.conv_state(self.spec.stream_names[layer_idx, conv_idx], layer_idx).tensor
        rows = torch.arange(self.spec.width - 1, device=state.device)
        if self.pool.layout == "lazy":
            rows = rows + self._last_kept - 1
        if self.pool.layout == "ring":
            position = rows + self._computed - (self.spec.width - 1)
            found = state[1 : self._batch + 1, position % state.shape[1]]
            return found * (position >= 0)[:, None]
        return state[1 : self._batch + 1, rows].clone()

    def _record(self, place: tuple[int, int], x: Tensor) -> None:
        before = self._past.get(place)
        if before is None:
            # nothing was computed when recording began: the history is zeros
            before = x.new_zeros(x.shape[0], self.spec.width - 1, x.shape[2])
        self._past[place] = torch.cat([before, x], dim=1)

    def _forget(self, removed: int) -> None:
        """Drop what was taken back, and what nobody may take back any more."""
        most = REMEMBERED + self.spec.width - 1
        for place, past in self._past.items():
            kept = past[:, : past.shape[1] - removed]
            self._past[place] = kept[:, -most:]
        self._recorded_from = max(self._recorded_from, self._computed - REMEMBERED)

    def _write_back(self, length: int) -> None:
        """Make the state the one after `length` tokens: their newest inputs, extended from nothing."""
        self._computed, self._last_kept = length, 1
        self._recorded_from = min(self._recorded_from, length)
        tokens = min(length, self.spec.width - 1)
        if not tokens:
            return
        sidecar = self._kept
        sidecar.init_forward_metadata(self._step(self._batch, tokens, length - tokens, draft=False, fresh=True))
        for (layer, index), past in self._past.items():
            stream = self.spec.stream_names[layer, index]
            rows = past[:, past.shape[1] - tokens :].flatten(0, 1)
            weight = rows.new_zeros(rows.shape[1], self.spec.width)
            sidecar.conv_state_metadata(layer).conv(stream, rows, weight, None, activation=None, residual=False)

    # the convs

    def conv(
        self, layer_idx: int, conv_idx: int, x: Tensor, weight: Tensor, bias: Tensor | None, residual: bool
    ) -> Tensor:
        """The conv of one module over x [batch, tokens, D]; the first module of a forward prepares the step."""
        batch, _, dim = x.shape
        if (layer_idx, conv_idx) == self._first:
            self._begin(batch, x.shape[1])
        if self._recording:
            self._record((layer_idx, conv_idx), x)
        stream = self.spec.stream_names[layer_idx, conv_idx]
        parts: list[Tensor] = []
        for sidecar, part in ((self._kept, x[:, : self._head]), (self._drafts, x[:, self._head :])):
            if part.shape[1]:
                handle = sidecar.conv_state_metadata(layer_idx)
                rows = part.reshape(-1, dim)
                y = handle.conv(stream, rows, weight, bias, activation=None, residual=residual)
                parts.append(y.view(batch, -1, dim))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _begin(self, batch: int, tokens: int) -> None:
        if self._pending:
            self._commit(0)
        self._check_batch(batch)
        self._tail = min(tokens, self._window) if self._recording else 0
        self._head, self._pending, self._batch = tokens - self._tail, tokens, batch
        if self._head:
            self._kept.init_forward_metadata(self._step(batch, self._head, self._computed, draft=False))
        if self._tail:
            self._drafts.init_forward_metadata(self._step(batch, self._tail, self._computed + self._head, draft=True))

    def _check_batch(self, batch: int) -> None:
        if batch > self._max_batch:
            hint = f"construct the cache with max_batch >= {batch}"
            raise ArgumentError("ConvStateCache", "batch", batch, f"at most {self._max_batch}", hint)

    def _step(self, batch: int, tokens: int, computed: int, draft: bool, fresh: bool = False) -> StepBatch:
        def column(value: int) -> Tensor:
            return torch.full((batch,), value, dtype=torch.int64, device=self.pool.device)

        mode = ForwardMode.DECODE if tokens == 1 and computed and not fresh else ForwardMode.EXTEND
        return StepBatch(
            forward_mode=ForwardMode.TARGET_VERIFY if draft else mode,
            req_pool_indices=torch.arange(batch, device=self.pool.device),
            num_reqs=batch,
            num_tokens=batch * tokens,
            computed_lens=column(computed),
            extend_seq_lens=column(tokens),
            extend_prefix_lens=column(computed),
            draft_token_num=tokens if draft else 1,
            num_accepted_tokens=column(1 if self._head and draft else self._last_kept),
            has_initial_state=torch.zeros(batch, dtype=torch.bool, device=self.pool.device) if fresh else None,
        )

    def _commit(self, removed: int) -> None:
        """Settle the last forward, less its newest `removed` tokens."""
        if self._tail:
            rows = torch.arange(self._batch, device=self.pool.device)
            last = torch.full_like(rows, self._tail - removed - 1)
            self._drafts.update_mamba_state_after_mtp_verify(req_pool_indices=rows, last_correct_step_indices=last)
        self._last_kept = self._tail - removed if self._tail else 1
        self._computed += self._pending - removed
        self._head = self._tail = self._pending = 0


def _layers(spec: ModelSpec) -> list[Any]:
    """A fresh place for each layer of the model."""

    def layer(shape: AttentionShape | None) -> Any:
        if shape is None:
            return ConvOnlyLayer()
        if shape.sliding_window is None:
            return FullLayer()  # type: ignore[no-untyped-call]
        return WindowLayer(shape.sliding_window)

    depth = 1 + max([*spec.attention, *spec.conv_layers])
    return [layer(spec.attention.get(index)) for index in range(depth)]


def _pool(spec: ModelSpec, layout: Layout, batch: int, draft_token_num: int, device: torch.device) -> StatePool:
    """A pool in which row b of the batch owns slot b + 1."""
    mapping = torch.arange(1, batch + 1, dtype=torch.int32, device=device)
    return StatePool(
        spec.streams,
        num_slots=batch + 1,
        width=spec.width,
        layers=spec.conv_layers,
        layout=layout,
        draft_token_num=draft_token_num,
        device=device,
        mamba_index_mapping=mapping,
    )
