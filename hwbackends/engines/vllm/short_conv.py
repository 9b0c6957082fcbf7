"""vLLM's ShortConv on a backend of hwbackends: the attention backend whose builder describes a step, and the layer that
runs the convs. State stays in vLLM's cache, which is the contract's `lazy` layout.

A step is prepared by the first conv of its cache group that runs. While vLLM captures a graph that is inside the
capture: a replay prepares its step by itself, from the block tables and counts that vLLM keeps at the same addresses,
and costs the host nothing. Steps that run from Python are prepared in the same place, once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.model_executor.layers.utils import default_unquantized_gemm
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
        group: the builder of the layers' cache group.
        recorded: the step is being captured.
        padded_prompts: see `steps.padded_prompts`.
        step: the prepared step, once the group's first conv has run.
    """

    group: HwBackendsShortConvBuilder | None = None
    recorded: bool = False
    padded_prompts: tuple[int, ...] = ()
    step: VllmStep | None = None


class HwBackendsShortConvBackend(ShortConvAttentionBackend):  # type: ignore[misc]
    """vLLM's short-conv attention backend with our metadata builder."""

    @staticmethod
    def get_builder_cls() -> type[HwBackendsShortConvBuilder]:
        """The builder."""
        return HwBackendsShortConvBuilder


class HwBackendsShortConvBuilder(ShortConvAttentionMetadataBuilder):  # type: ignore[misc]
    """vLLM's builder. A step of nothing but decodes, without speculation and prefix caching, is described by its block
    table alone; everything else is vLLM's own metadata. Nothing is launched here for decodes."""

    metadata_cls = HwBackendsShortConvMetadata

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        scheduler = vllm_config.scheduler_config
        self.steps = Steps(
            load(device=torch.device(device).type),
            drafts=self.num_spec_tokens,
            max_batch=max(int(scheduler.max_num_seqs), int(self.decode_cudagraph_max_bs)),
            max_tokens=int(scheduler.max_num_batched_tokens),
        )
        self._names = list(layer_names)
        self._layers = vllm_config.compilation_config.static_forward_context
        self._seen: list[Any] = []
        self._capturing = False
        self._recorded: Tensor | None = None  # the block table whose address graphs hold
        # otherwise which block holds a request's state follows from its length, too
        self._from_table = not self.num_spec_tokens and vllm_config.cache_config.mamba_cache_mode == "none"

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's metadata of a step; see the class."""
        common = common_attn_metadata
        if self._from_table and common.max_query_len == 1 and not common.is_prefilling.any():
            return self._decodes(common.block_table_tensor, common.num_reqs, common.num_actual_tokens, common.seq_lens)
        metadata = super().build(common_prefix_len, common, *args, **kwargs)
        metadata.group, metadata.recorded = self, self._capturing
        if metadata.num_prefills and common.max_query_len == 1:
            # new prompts of one token: a runner that goes by shapes alone takes a graph of decodes for this step, in
            # which they go on from what their slots hold
            self._bind()
            self.steps.clear(metadata.state_indices_tensor_p)
        if self.num_spec_tokens:
            drafts, each = kwargs.get("num_decode_draft_tokens_cpu"), self.num_spec_tokens + 1
            metadata.padded_prompts = padded_prompts(metadata, common.query_start_loc_cpu, drafts, each)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """The metadata of a step whose preparation the graph records."""
        self._capturing = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._capturing = False

    def update_block_table(self, metadata: Any, blk_table: Tensor, slot_mapping: Tensor) -> Any:
        """The metadata of this cache group made from that of another, whose blocks differ."""
        if self._from_table and not metadata.num_prefills:
            self._capturing = metadata.recorded
            try:
                return self._decodes(blk_table, metadata.num_reqs, metadata.num_decode_tokens, metadata.seq_lens)
            finally:
                self._capturing = False
        metadata = super().update_block_table(metadata, blk_table, slot_mapping)
        metadata.group, metadata.step = self, None
        return metadata

    def _decodes(self, table: Tensor, rows: int, tokens: int, seq_lens: Tensor) -> HwBackendsShortConvMetadata:
        """One token per request, each with a state in the first block of its row; rows that a graph pads have block
        0 there."""
        held = self._recorded
        if self._capturing:
            if held is None or held.data_ptr() != table.data_ptr() or held.shape[0] < rows:
                self._recorded = table
        elif held is not None and held.data_ptr() != table.data_ptr():  # a graph would read the one that it holds
            held[:rows, :1].copy_(table[:rows, :1])
        return HwBackendsShortConvMetadata(
            num_prefills=0,
            num_prefill_tokens=0,
            num_decodes=rows,
            num_decode_tokens=tokens,
            num_reqs=rows,
            has_initial_states_p=None,
            query_start_loc_p=None,
            state_indices_tensor_p=None,
            state_indices_tensor_d=table,
            query_start_loc_d=None,
            num_accepted_tokens=None,
            seq_lens=seq_lens,
            group=self,
            recorded=self._capturing,
        )

    def prepared(self, metadata: HwBackendsShortConvMetadata) -> VllmStep:
        """The prepared step, for the first conv of the group that asks."""
        self._bind()
        metadata.step = self.steps.prepare(metadata, metadata.recorded)
        return metadata.step

    def _bind(self) -> None:
        """Wrap the caches that the layers have now."""
        layers = [self._layers[name] for name in self._names]
        caches = [layer.kv_cache for layer in layers]
        if len(caches) != len(self._seen) or any(a is not b for a, b in zip(caches, self._seen, strict=True)):
            rows = {name: layer.state_rows() for name, layer in zip(self._names, layers, strict=True)}
            self.steps.bind(rows, layers[0].L_cache)
            self._seen = caches


class HwBackendsShortConv(ShortConv):  # type: ignore[misc]
    """vLLM's gated short conv, `out_proj(C * conv(B * x))`, with the conv and its state on hwbackends."""

    def state_rows(self) -> Tensor:
        """This layer's cache as [blocks, S + num_spec, D]."""
        cache: Tensor = self.kv_cache[0]
        return cache.transpose(-1, -2) if is_conv_state_dim_first() else cache

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
        """The prepared step; None in vLLM's profile run, which has no metadata or no cache."""
        steps = get_forward_context().attn_metadata
        metadata = None if steps is None else steps.get(self.prefix)
        if metadata is None or metadata.group is None or self.kv_cache[0].dim() != 3:
            return None
        step: VllmStep = metadata.step or metadata.group.prepared(metadata)
        return step

    def _run(self, step: VllmStep, hidden_states: Tensor, output: Tensor) -> None:
        projected, _ = self.in_proj(hidden_states)
        gate_before, gate_after, x = projected.chunk(3, dim=-1)
        weight = self.conv.weight.view(self.conv.weight.size(0), self.conv.weight.size(2))
        y = step.conv(self.prefix, gate_before * x, weight, self.conv.bias)
        live = y.shape[0]
        y.mul_(gate_after[:live])
        if writes_in_place(self.out_proj):
            torch.mm(y, self.out_proj.weight.t(), out=output[:live])
        else:
            output[:live], _ = self.out_proj(y)


def writes_in_place(projection: Any) -> bool:
    """Whether a projection is one plain matrix product on a GPU, which may then write where its caller wants it: vLLM's
    own call makes a tensor that is copied there afterwards."""
    from vllm import envs

    method = getattr(projection, "quant_method", None)
    return bool(
        type(projection) is RowParallelLinear
        and type(method) is UnquantizedLinearMethod
        and getattr(method, "_gemm_impl", None) is default_unquantized_gemm
        and projection.tp_size == 1
        and projection.bias is None
        and projection.weight.is_cuda
        and not envs.VLLM_BATCH_INVARIANT
    )
