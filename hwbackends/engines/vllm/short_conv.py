"""vLLM's ShortConv on a backend of hwbackends: the attention backend whose builder prepares a step once, and the layer
that runs the convs. State stays in vLLM's cache, which is the contract's `lazy` layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.v1.attention.backends.short_conv_attn import (
    ShortConvAttentionBackend,
    ShortConvAttentionMetadata,
    ShortConvAttentionMetadataBuilder,
)

from hwbackends.engines.vllm.steps import Steps, VllmStep, padded_prompts
from hwbackends.registry.loading import load


@dataclass
class HwBackendsShortConvMetadata(ShortConvAttentionMetadata):  # type: ignore[misc]
    """vLLM's metadata of a step, and what hwbackends adds.

    Attributes:
        step: the prepared step; None before the cache is allocated.
        padded_prompts: see `steps.padded_prompts`.
    """

    step: VllmStep | None = None
    padded_prompts: tuple[int, ...] = ()


class HwBackendsShortConvBackend(ShortConvAttentionBackend):  # type: ignore[misc]
    """vLLM's short-conv attention backend with our metadata builder."""

    @staticmethod
    def get_builder_cls() -> type[HwBackendsShortConvBuilder]:
        """The builder."""
        return HwBackendsShortConvBuilder


class HwBackendsShortConvBuilder(ShortConvAttentionMetadataBuilder):  # type: ignore[misc]
    """vLLM's builder; each `build` also prepares the step's metadata, once for every layer of the group."""

    metadata_cls = HwBackendsShortConvMetadata

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        scheduler = vllm_config.scheduler_config
        self._steps = Steps(
            load(device=torch.device(device).type),
            drafts=self.num_spec_tokens,
            max_batch=max(int(scheduler.max_num_seqs), int(self.decode_cudagraph_max_bs)),
            max_tokens=int(scheduler.max_num_batched_tokens),
        )
        self._names = list(layer_names)
        self._layers = vllm_config.compilation_config.static_forward_context

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's metadata with the prepared step."""
        metadata = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        drafts = kwargs.get("num_decode_draft_tokens_cpu")
        offsets = common_attn_metadata.query_start_loc_cpu
        metadata.padded_prompts = padded_prompts(metadata, offsets, drafts, self.num_spec_tokens + 1)
        return self._prepared(metadata)

    def update_block_table(self, metadata: Any, blk_table: Tensor, slot_mapping: Tensor) -> Any:
        """The metadata of another cache group whose blocks differ."""
        return self._prepared(super().update_block_table(metadata, blk_table, slot_mapping))

    def _prepared(self, metadata: Any) -> Any:
        layers = {name: self._layers[name] for name in self._names}
        if not all(isinstance(layer, HwBackendsShortConv) for layer in layers.values()):
            return metadata
        caches = {name: layer.state_rows() for name, layer in layers.items()}
        if any(cache is None for cache in caches.values()):
            return metadata
        width = next(iter(layers.values())).L_cache
        self._steps.bind(cast("dict[str, Tensor]", caches), width)
        metadata.step = self._steps.prepare(metadata)
        return metadata


class HwBackendsShortConv(ShortConv):  # type: ignore[misc]
    """vLLM's gated short conv, `out_proj(C * conv(B * x))`, with the conv and its state on hwbackends."""

    def state_rows(self) -> Tensor | None:
        """This layer's cache as [blocks, S + num_spec, D]; None before vLLM has allocated it."""
        cache = self.kv_cache[0]
        if cache.dim() != 3:
            return None
        rows: Tensor = cache.transpose(-1, -2) if is_conv_state_dim_first() else cache
        return rows

    def forward_native(self, hidden_states: Tensor, output: Tensor) -> Any:
        """On a CPU: [T, hidden] to `output`."""
        step = self._step()
        if step is None:
            return super().forward_native(hidden_states, output)
        return self._run(step, hidden_states, output)

    def forward_cuda(self, hidden_states: Tensor, output: Tensor) -> Any:
        """On a GPU: [T, hidden] to `output`."""
        step = self._step()
        if step is None:
            return super().forward_cuda(hidden_states, output)
        return self._run(step, hidden_states, output)

    def _step(self) -> VllmStep | None:
        """The prepared step; None in vLLM's profile run."""
        steps = get_forward_context().attn_metadata
        metadata = None if steps is None else steps.get(self.prefix)
        return getattr(metadata, "step", None)

    def _run(self, step: VllmStep, hidden_states: Tensor, output: Tensor) -> None:
        projected, _ = self.in_proj(hidden_states)
        gate_before, gate_after, x = projected.chunk(3, dim=-1)
        weight = self.conv.weight.view(self.conv.weight.size(0), self.conv.weight.size(2))
        y = step.conv(self.prefix, gate_before * x, weight, self.conv.bias)
        live = y.shape[0]
        output[:live], _ = self.out_proj(gate_after[:live] * y)
