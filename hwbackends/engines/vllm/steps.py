"""vLLM's caches and steps as hwbackends sees them: one `lazy` pool over a cache group, and the prepared decode and
prefill halves of a step. Knows vLLM's field names but imports nothing of vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.handle import LayerHandle
from hwbackends.step.pool import StatePool
from hwbackends.step.sidecar import ConvBackend, ConvStateSidecar

LAYER = 0
"""vLLM gives each layer a cache of its own: a pool has one layer, and a stream per layer of vLLM."""


@dataclass(slots=True)
class Half:
    """The decode or the prefill requests of a step, which vLLM puts one behind the other.

    Attributes:
        handle: the prepared metadata and the phase's conv.
        tokens: rows of x that belong to this half.
        spread: [B * N] for each row of the conv the row of x that it reads, where requests bring unequal numbers of
            drafts; None where rows are x's own.
        gather: [tokens] row of the conv that answers each row of x; with `spread`.
    """

    handle: LayerHandle
    tokens: int
    spread: Tensor | None = None
    gather: Tensor | None = None

    def conv(self, layer: str, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """[tokens, D] to [tokens, D], into `out` if given; the layer's cache changes as the phase says."""
        if self.spread is None or self.gather is None:
            return self.handle.conv(layer, x, weight, bias, out=out)
        answers = self.handle.conv(layer, x[self.spread], weight, bias)
        return answers[self.gather] if out is None else torch.index_select(answers, 0, self.gather, out=out)


@dataclass(slots=True)
class VllmStep:
    """A prepared step: decodes first, then prefills.

    Attributes:
        halves: decodes, prefills.
        prompts: prompts that bring drafts; their answers replace the prefills'.
    """

    halves: tuple[Half, ...]
    prompts: Half | None = None

    def conv(self, layer: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The conv of one layer.

        Args:
            layer: vLLM's name of the layer.
            x: [T, D]; rows behind the step's tokens are padding.
            weight: [D, W].
            bias: [D] or None.

        Returns:
            [live tokens, D], a tensor of its own.
        """
        if len(self.halves) == 1:
            half = self.halves[0]
            y = half.conv(layer, x[: half.tokens], weight, bias)
        else:
            y, start = x.new_empty(sum(half.tokens for half in self.halves), x.shape[1]), 0
            for half in self.halves:
                part = slice(start, start + half.tokens)
                half.conv(layer, x[part], weight, bias, out=y[part])
                start += half.tokens
        if self.prompts is not None:
            assert self.prompts.spread is not None
            y[self.prompts.spread] = self.prompts.handle.conv(layer, x[self.prompts.spread], weight, bias)
        return y


class Steps:
    """Prepares the steps of one cache group of vLLM.

    Decodes and prefills of one step have a sidecar each, because both are read in one forward. The buffers of decodes
    are as large as any step, so that addresses which a CUDA graph of vLLM holds never move.

    Args:
        backend: a bound backend of hwbackends.
        drafts: speculative tokens per request, 0 without speculation.
        max_batch: most requests of a step.
        max_tokens: most tokens of a prefill; more make the prefill's buffers grow.

    Attributes:
        resolutions: preparations launched from Python so far; a replay is not counted.
    """

    def __init__(self, backend: ConvBackend, drafts: int, max_batch: int, max_tokens: int) -> None:
        self._backend, self._tokens_per_req = backend, drafts + 1
        self._max_batch, self._max_tokens = max_batch, max_tokens
        self._bound: dict[str, Tensor] = {}
        self._decode: ConvStateSidecar | None = None
        self._prefill: ConvStateSidecar | None = None
        self._prompts: ConvStateSidecar | None = None

    @property
    def resolutions(self) -> int:
        """See the class."""
        own = (self._decode, self._prefill, self._prompts)
        return sum(sidecar.resolutions for sidecar in own if sidecar is not None)

    def bind(self, caches: dict[str, Tensor], width: int) -> None:
        """Wrap the group's caches [blocks, S + num_spec, D]; again only when vLLM has allocated others."""
        if caches.keys() == self._bound.keys() and all(_same(caches[n], self._bound[n]) for n in caches):
            return
        self._bound = caches
        first = next(iter(caches.values()))
        blocks = torch.arange(first.shape[0], dtype=torch.int32, device=first.device)
        pool = StatePool.wrap(
            {name: cache.unsqueeze(0) for name, cache in caches.items()},
            width=width,
            mamba_index_mapping=blocks,  # a request's row is its block: vLLM hands out blocks, block 0 is padding
            layout="lazy",
            draft_token_num=self._tokens_per_req,
        )
        self._decode = self._sidecar(pool, self._max_batch * self._tokens_per_req, self._tokens_per_req)
        self._prefill = self._sidecar(pool, self._max_tokens, 1)
        self._prompts = self._sidecar(pool, self._max_batch * self._tokens_per_req, self._tokens_per_req)

    def _sidecar(self, pool: StatePool, max_tokens: int, draft_tokens: int) -> ConvStateSidecar:
        return ConvStateSidecar(
            self._backend, pool, max_batch=self._max_batch, max_tokens=max_tokens, draft_tokens=draft_tokens
        )

    def clear(self, blocks: Tensor) -> None:
        """Zero the state of blocks [M], in every layer."""
        assert self._decode is not None
        self._decode.clear_slots(blocks.flatten())

    def prepare(self, metadata: Any, recorded: bool = False) -> VllmStep:
        """Prepare both halves of a step of vLLM's short-conv metadata.

        Args:
            metadata: the step's.
            recorded: the step is captured: what is launched here belongs into the graph, and reads at every replay
                what vLLM then has at the same addresses.
        """
        halves = []
        if metadata.num_decodes > 0:
            halves.append(self._decodes(metadata, recorded))
        if metadata.num_prefills > 0:
            halves.append(self._prefills(metadata))
        return VllmStep(tuple(halves), self._padded_prompts(metadata) if metadata.padded_prompts else None)

    def _decodes(self, metadata: Any, recorded: bool) -> Half:
        assert self._decode is not None
        blocks = metadata.state_indices_tensor_d[:, 0].contiguous()
        rows, tokens = blocks.shape[0], int(metadata.num_decode_tokens)
        accepted = metadata.num_accepted_tokens
        batch = StepBatch(
            ForwardMode.DECODE,
            blocks,
            num_reqs=rows,
            num_tokens=rows,
            cache_indices=blocks,
            num_accepted_tokens=None if accepted is None else accepted[:rows],
        )
        spread = gather = None
        if tokens > metadata.num_decodes:
            each = self._tokens_per_req
            batch.forward_mode, batch.draft_token_num, batch.num_tokens = ForwardMode.TARGET_VERIFY, each, rows * each
            if tokens != metadata.num_decodes * each:
                spread, gather = ragged(metadata.query_start_loc_d[: rows + 1], tokens, each)
        if recorded:
            self._decode.init_forward_metadata_in_graph(batch)
        else:
            self._decode.init_forward_metadata(batch)
        # without a spread every request, padded ones of a CUDA graph too, has its tokens in x
        taken = batch.num_tokens if spread is None else tokens
        return Half(self._decode.conv_state_metadata(LAYER), taken, spread, gather)

    def _prefills(self, metadata: Any) -> Half:
        assert self._prefill is not None
        blocks = metadata.state_indices_tensor_p.flatten()
        offsets = metadata.query_start_loc_p
        lengths = offsets[1:] - offsets[:-1]
        end = metadata.num_reqs
        if metadata.padded_prompts:  # as padded rows here: they run as drafts
            blocks = blocks.index_fill(0, _index(metadata.padded_prompts, blocks), 0)
        batch = StepBatch(
            ForwardMode.EXTEND,
            blocks,
            num_reqs=blocks.shape[0],
            num_tokens=int(metadata.num_prefill_tokens),
            extend_seq_lens=lengths,
            extend_prefix_lens=metadata.seq_lens[end - blocks.shape[0] : end] - lengths,
            has_initial_state=metadata.has_initial_states_p,
            cache_indices=blocks,
        )
        self._prefill.init_forward_metadata(batch)
        return Half(self._prefill.conv_state_metadata(LAYER), batch.num_tokens)

    def _padded_prompts(self, metadata: Any) -> Half:
        """Prompts that bring drafts, as a verify step from an empty history."""
        assert self._prompts is not None
        each = self._tokens_per_req
        rows = _index(metadata.padded_prompts, metadata.state_indices_tensor_p)
        blocks = metadata.state_indices_tensor_p.flatten()[rows]
        batch = StepBatch(
            ForwardMode.TARGET_VERIFY,
            blocks,
            num_reqs=blocks.shape[0],
            num_tokens=blocks.shape[0] * each,
            draft_token_num=each,
            cache_indices=blocks,
        )
        self._prompts.clear_slots(blocks)
        self._prompts.init_forward_metadata(batch)
        first = metadata.num_decode_tokens + metadata.query_start_loc_p[rows].long()
        spread = (first[:, None] + torch.arange(each, device=first.device)).flatten()
        return Half(self._prompts.conv_state_metadata(LAYER), batch.num_tokens, spread)


def padded_prompts(metadata: Any, offsets: Tensor, drafts: Tensor | None, each: int) -> tuple[int, ...]:
    """Rows among the prefills that are one-token prompts padded with drafts.

    vLLM's scheduler gives such a prompt placeholder drafts to verify, and its metadata still calls it a prefill; a
    prefill would keep the state behind the drafts, rejected ones too. Reads host tensors only.

    Args:
        metadata: the step's short-conv metadata.
        offsets: [requests + 1] on the host, offsets of the requests' tokens.
        drafts: [requests] on the host, drafts of each request, -1 for none; None without speculation.
        each: speculative tokens and one, to which vLLM pads.
    """
    count = metadata.num_prefills
    if drafts is None or not count or each == 1:
        return ()
    end = metadata.num_decodes + count
    lengths = (offsets[1:] - offsets[:-1])[metadata.num_decodes : end]
    own = drafts[metadata.num_decodes : end]
    return tuple(((own == each - 1) & (lengths == each)).nonzero().flatten().tolist())


def _index(rows: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=like.device)


def ragged(offsets: Tensor, tokens: int, each: int) -> tuple[Tensor, Tensor]:
    """Rows that give every request `each` tokens, where some bring fewer: a lazy slot's rows behind the accepted ones
    are never read, so what the filled-up rows hold does not matter.

    Args:
        offsets: [B + 1] offsets of the requests' tokens.
        tokens: their sum.
        each: N.

    Returns:
        spread [B * N], row of x for each row of the conv; gather [tokens], row of the conv for each row of x.
    """
    offsets = offsets.long()
    place = torch.arange(each, device=offsets.device)
    spread = (offsets[:-1, None] + place).clamp(max=tokens - 1).flatten()
    token = torch.arange(tokens, device=offsets.device)
    owner = torch.searchsorted(offsets[1:].contiguous(), token, right=True)
    return spread, owner * each + token - offsets[owner]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
