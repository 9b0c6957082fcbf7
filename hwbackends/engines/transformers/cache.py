"""The cache for `model.generate`: attention state as Transformers keeps it, conv state in a pool of ours. Greedy and
sampled generation, batches with left padding, prompt lookup and the model's own MTP heads all work through it."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from hwbackends.conv.layouts import Layout
from hwbackends.engines.transformers.models import AttentionShape, ModelSpec, describe
from hwbackends.engines.transformers.patches import patch_model
from hwbackends.errors import ArgumentError, UnsupportedError
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.pool import StatePool
from hwbackends.step.sidecar import ConvStateSidecar


class ConvOnlyLayer:
    """The place of a layer without keys and values in a cache's list of layers."""

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def get_max_length(self) -> int:
        """-1: no maximum."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing: the conv state is rolled back by the cache as a whole."""


class WindowLayer(DynamicLayer):
    """Keys and values of one sliding-window layer. What slid out is dropped before the next tokens come, not after, so
    that `crop` finds everything that it may need."""

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
        excess = self._stored - (self.sliding_window - 1)
        if excess > 0:
            self._keep(slice(excess, None))
            self._dropped += excess
        seen: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
        return seen

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


class ConvStateCache(Cache):
    """A cache of one `generate` call after another, whose convs run through a backend.

    A forward is one step: decode for one token per sequence, extend for more. While Transformers records the past
    (assisted decoding) the newest `draft_tokens + 1` tokens of each forward go through the verify hook instead, and
    `crop` commits those that were kept.

    Args:
        model: `InklingForCausalLM` or `Lfm2ForCausalLM`; its short convs are patched in place.
        backend: a bound backend, as `hwbackends.load` returns it.
        layout: state layout.
        max_batch: sequences, at most.
        max_tokens: tokens of one forward over all sequences that buffers are made for; more make them grow.
        draft_tokens: drafts of one forward in assisted decoding, at most.

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

    # what Transformers asks

    def activate_past_recording(self) -> None:
        """From now on the newest tokens of each forward may be taken back by `crop`."""
        super().activate_past_recording()  # type: ignore[no-untyped-call]
        self._recording = True

    def is_recording_past(self, layer_idx: int) -> bool:
        """True: stock convs must never take their in-place path on this cache."""
        return True

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether any token was computed."""
        return self._computed + self._pending > 0

    @property
    def drafted(self) -> int:
        """Tokens of the last forward that `crop` may still take back, and the one before them."""
        return self._tail

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest `-tokens_to_remove` tokens of the last forward.

        Raises:
            ArgumentError: more tokens than that forward's drafts, or a positive number.
        """
        removed = -tokens_to_remove
        if removed < 0 or (removed and removed >= self._tail):
            wanted = f"-{max(0, self._tail - 1)} to 0, the drafts of the last forward"
            raise ArgumentError(
                "ConvStateCache.crop",
                "tokens_to_remove",
                tokens_to_remove,
                wanted,
                "construct it with more draft_tokens",
            )
        super().crop(tokens_to_remove)
        self._commit(removed)

    def reset(self) -> None:
        """Forget everything; the cache serves another text."""
        self.layers = _layers(self.spec)
        self._computed = self._head = self._tail = self._pending = 0
        slots = torch.arange(1, self.pool.num_slots, device=self.pool.device)
        self._backend.clear_slots(self.pool, slots)

    def reorder_cache(self, beam_idx: Tensor) -> NoReturn:
        """Refused: beam search reorders state, which this cache does not."""
        raise UnsupportedError(
            "ConvStateCache.reorder_cache", "num_beams", "more than 1", "1", "use a cache of Transformers"
        )

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Refused: sequences of this cache are not multiplied."""
        raise UnsupportedError("ConvStateCache.batch_repeat_interleave", "repeats", repeats, "separate sequences")

    def batch_select_indices(self, indices: Tensor) -> NoReturn:
        """Refused: sequences of this cache are not selected."""
        raise UnsupportedError("ConvStateCache.batch_select_indices", "indices", list(indices.shape), "all sequences")

    # the convs

    def conv(
        self, layer_idx: int, conv_idx: int, x: Tensor, weight: Tensor, bias: Tensor | None, residual: bool
    ) -> Tensor:
        """The conv of one module over x [batch, tokens, D]; the first module of a forward prepares the step."""
        batch, _, dim = x.shape
        if (layer_idx, conv_idx) == self._first:
            self._begin(batch, x.shape[1])
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
        if batch > self._max_batch:
            hint = f"construct the cache with max_batch >= {batch}"
            raise ArgumentError("ConvStateCache", "batch", batch, f"at most {self._max_batch}", hint)
        self._tail = min(tokens, self._window) if self._recording else 0
        self._head, self._pending, self._batch = tokens - self._tail, tokens, batch
        if self._head:
            self._kept.init_forward_metadata(self._step(batch, self._head, self._computed, draft=False))
        if self._tail:
            self._drafts.init_forward_metadata(self._step(batch, self._tail, self._computed + self._head, draft=True))

    def _step(self, batch: int, tokens: int, computed: int, draft: bool) -> StepBatch:
        def column(value: int) -> Tensor:
            return torch.full((batch,), value, dtype=torch.int64, device=self.pool.device)

        mode = ForwardMode.DECODE if tokens == 1 and computed else ForwardMode.EXTEND
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
            return DynamicLayer()  # type: ignore[no-untyped-call]
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
