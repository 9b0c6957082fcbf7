"""LFM2 (and, for the bookkeeping, ZAYA1) in SGLang: the conv-state backend, the hybrid wrapper's commit, and LFM2's
conv modules. ZAYA1's convs are grouped and run in SGLang's own code on the slots that are prepared here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import ShortConvHybridAttnBackend
from sglang.srt.layers.attention.linear.short_conv_backend import ShortConvAttnBackend
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.models.lfm2 import Lfm2ShortConv
from sglang.srt.models.lfm2_moe import Lfm2MoeShortConv
from sglang.srt.runtime_context import get_exec, get_spec, mamba_cache_chunk_size
from torch import Tensor

from hwbackends.engines.sglang.pools import wrap_pool
from hwbackends.engines.sglang.steps import Limits, Steps
from hwbackends.errors import GraphError, UnsupportedError
from hwbackends.registry.loading import load
from hwbackends.step.handle import LayerHandle

STREAM = "conv"


@dataclass(slots=True)
class ShortConvStep:
    """What SGLang's conv modules read of a step: the fields of its `ShortConvMetadata`, and the layer's handle."""

    handle: LayerHandle
    layer_cache: Any
    cache_indices: Tensor
    query_start_loc: Tensor | None = None
    has_initial_state: Tensor | None = None
    slot_ids_cpu: list[int] | None = None
    has_prefix_cpu: list[bool] | None = None


class ShortConvStateBackend(ShortConvAttnBackend):  # type: ignore[misc]
    """SGLang's short-conv backend with every phase and the commit on hwbackends, for [L, slots, D, S] pools, and on
    NPU, where SGLang has none, for its [L, slots, rows, D] pools."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        pool = self.req_to_token_pool
        config = _conv_config(model_runner)
        # ZAYA1's second state and its windows are committed by SGLang's code
        self.owns_convs = hasattr(config, "conv_L_cache")
        dim, history = config.mamba2_cache_params.shape.conv[0]
        interval = int(mamba_cache_chunk_size())
        drafts = self.owns_convs and not self.is_draft_worker
        wrapped = wrap_pool(pool, (STREAM,), int(history), (int(dim),), drafts, interval)
        self.steps = Steps(
            load(device=torch.device(self.device).type),
            pool,
            wrapped,
            _limits(pool),
            topk=int(self.topk or 1) if self.owns_convs else 1,
            index_dtype=self.cache_indices_dtype,
            host_mirrors=self.needs_extend_host_mirrors and not self.owns_convs,
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """SGLang's own buffers, and ours as large as the runner that reports here needs them."""
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.steps.reserve(max_bs, max_num_tokens)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Eager step."""
        self.steps.eager(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """What this phase cannot record."""
        self.steps.out_graph(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Recorded."""
        self.steps.in_graph(forward_batch)

    def init_forward_metadata_capture_cpu_graph(self, *args: Any, **kwargs: Any) -> None:
        """Refused: CPU graphs replay through the eager hook, whose buffers may grow."""
        hint = "serve with --disable-cuda-graph, or without the plugin"
        raise UnsupportedError("SGLang plugin", "init_forward_metadata_capture_cpu_graph", "a CPU graph", "none", hint)

    def conv_state_metadata(self, layer_id: int, forward_batch: Any) -> ShortConvStep:
        """The step as one layer's conv reads it; the same object for the same step and layer."""
        handle = self.steps.handle(layer_id, forward_batch)
        if handle is None:
            raise GraphError("conv_state_metadata: no step is prepared; call init_forward_metadata before the forward")
        cache = handle.metadata.engine
        found = cache.get((ShortConvStateBackend, layer_id))
        if not isinstance(found, ShortConvStep):
            found = cache[ShortConvStateBackend, layer_id] = self._step(handle)
        mirrors = handle.host_mirrors
        if mirrors is not None:
            found.slot_ids_cpu, found.has_prefix_cpu = mirrors.cache_indices, mirrors.has_initial_state
        return found

    def _step(self, handle: LayerHandle) -> ShortConvStep:
        step = handle.metadata
        return ShortConvStep(
            handle=handle,
            layer_cache=self.req_to_token_pool.mamba2_layer_cache(handle.layer_id),
            cache_indices=step.cache_indices,
            query_start_loc=step.query_start_loc,
            has_initial_state=step.has_initial_state,
        )

    def commit(self, req_pool_indices: Tensor, steps: Tensor, track: Tensor | None, track_steps: Tensor | None) -> None:
        """Commit a verify step; slots come from `req_pool_indices`.

        Raises:
            UnsupportedError: ZAYA1, whose windows SGLang's own code saved.
        """
        if not self.owns_convs:
            raise UnsupportedError("SGLang plugin", "commit", "ZAYA1 with speculation", "speculation off")
        self.steps.commit(req_pool_indices, steps, track, track_steps)


def _conv_config(model_runner: Any) -> Any:
    from sglang.srt.configs.hybrid_arch import mamba2_config

    return mamba2_config(model_runner.model_config)


def _limits(pool: Any) -> Limits:
    """Captured shapes, as SGLang is configured."""
    graphs = get_exec().graph.cuda_graph_config
    decode = [*(graphs.decode.bs or []), graphs.decode.max_bs or 0] if graphs is not None else []
    prefill = list(graphs.prefill.bs or []) if graphs is not None else []
    requests = max([pool.size, *decode])
    drafts = int(get_spec().speculative_num_draft_tokens or 1)
    return Limits(requests, max([requests * drafts, *prefill]), drafts)


class ShortConvHybridBackend(ShortConvHybridAttnBackend):  # type: ignore[misc]
    """SGLang's hybrid wrapper whose commit takes its slots from `req_pool_indices` instead of the last step's."""

    def update_mamba_state_after_mtp_verify(
        self,
        last_correct_step_indices: Tensor,
        mamba_track_indices: Tensor | None,
        mamba_steps_to_track: Tensor | None,
        model: Any = None,
        req_pool_indices: Tensor | None = None,
    ) -> None:
        """Commit a verify step; `model` is not needed."""
        own = self.short_conv_backend
        if not (isinstance(own, ShortConvStateBackend) and own.owns_convs):
            super().update_mamba_state_after_mtp_verify(
                last_correct_step_indices, mamba_track_indices, mamba_steps_to_track, model, req_pool_indices
            )
            return
        if req_pool_indices is None:
            raise UnsupportedError("SGLang plugin", "req_pool_indices", "nothing", "request rows of the verify step")
        own.commit(req_pool_indices, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track)


def _forward(conv: Any, hidden_states: Tensor, forward_batch: Any) -> Tensor:
    """LFM2's gated short conv, `out_proj(C * conv(B * x))`, with the conv and its state on hwbackends."""
    if forward_batch.forward_mode.is_idle():
        return hidden_states
    step = get_attn_backend().conv_state_metadata(conv.layer_idx, forward_batch)
    projected, _ = conv.in_proj(hidden_states)
    gate_before, gate_after, x = projected.chunk(3, dim=-1)
    y = step.handle.conv(STREAM, gate_before * x, conv.conv_weight, conv.conv_bias)
    output, _ = conv.out_proj(gate_after * y)
    result: Tensor = output
    return result


class Lfm2Conv(Lfm2ShortConv):  # type: ignore[misc]
    """LFM2's conv module on hwbackends."""

    def forward(self, hidden_states: Tensor, forward_batch: Any) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        return _forward(self, hidden_states, forward_batch)


class Lfm2MoeConv(Lfm2MoeShortConv):  # type: ignore[misc]
    """LFM2-MoE's conv module on hwbackends."""

    def forward(self, hidden_states: Tensor, forward_batch: Any) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        return _forward(self, hidden_states, forward_batch)
