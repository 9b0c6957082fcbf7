"""Inkling in SGLang: the conv-state backend and the conv module that run on a backend of hwbackends. SGLang's own
`ShortConvolution.forward` and attention wrapper stay; only what they call is replaced."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.linear.inkling_sconv_backend import (
    InklingShortConvAttnBackend,
    InklingShortConvMetadata,
)
from sglang.srt.models.inkling_common.sconv import SconvType, ShortConvolution
from sglang.srt.runtime_context import get_exec, get_spec
from torch import Tensor

from hwbackends.engines.sglang.pools import wrap_pool
from hwbackends.engines.sglang.steps import Limits, Steps
from hwbackends.errors import UnsupportedError
from hwbackends.registry.loading import load
from hwbackends.step.handle import LayerHandle

FUSED_SWITCHES = (
    "SGLANG_OPT_USE_INKLING_FUSED_AR_SCONV_NORM",
    "SGLANG_OPT_USE_INKLING_FUSED_AR_SCONV",
    "SGLANG_OPT_USE_INKLING_FUSED_ATTN_PROLOGUE",
)
"""SGLang's switches of CUDA kernels that hold a short conv of their own and pass by `ShortConvolution.forward`."""

STREAMS = tuple(kind.name.lower() for kind in SconvType)


class InklingConvStateBackend(InklingShortConvAttnBackend):  # type: ignore[misc]
    """SGLang's Inkling conv-state backend with every phase and the commit on hwbackends.

    `self.steps` prepares each step once and resolves slots from `req_pool_indices` in the recorded launch. SGLang's
    hybrid wrapper, its pool and its graph runners are used as they are.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        _refuse_breakable_prefill()
        pool = self.req_to_token_pool
        history = int(self.conv_state_len)
        dims = [stream.shape[-1] for stream in self._mamba_cache.conv]
        drafts = not self.is_draft_worker
        wrapped = wrap_pool(pool, STREAMS, history, dims, drafts, int(self.mamba_cache_chunk_size))
        tracks = bool(get_exec().mamba.enable_mamba_extra_buffer)
        self.steps = Steps(
            load(device=torch.device(self.device).type),
            pool,
            wrapped,
            self._limits(),
            topk=int(self.topk or 1),
            index_dtype=self.cache_indices_dtype,
            draft_track_interval=int(get_exec().mamba.mamba_track_interval) if tracks else None,
        )

    def _limits(self) -> Limits:
        """SGLang's configured capture shapes, as its own buffers have them."""
        bufs = self._graph_bufs
        requests = bufs["query_start_loc"].shape[0] - 1
        drafts = int(get_spec().speculative_num_draft_tokens or 1)
        return Limits(requests, max(bufs["si"].shape[0], requests * drafts), drafts)

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

    def _refresh_sconv_metadata(self, forward_batch: Any, *, on_graph_path: bool) -> None:
        """Recorded, for a draft extend whose slots SGLang stages: its own code gathers them before each replay, so that
        the graph reads nothing that the scheduler may change meanwhile."""
        assert on_graph_path
        slots = self._cache_indices_buf[: forward_batch.batch_size]
        self.steps.in_graph(forward_batch, slots, self.sconv_metadata.track_cache_indices)

    def conv_state_metadata(self, layer_id: int, forward_batch: Any) -> InklingShortConvMetadata:
        """The step's metadata in SGLang's struct; `precomputed` is the layer's handle of hwbackends."""
        handle = self.steps.handle(layer_id, forward_batch)
        if handle is None:
            return InklingShortConvMetadata()
        cache = handle.metadata.engine
        found = cache.get((InklingConvStateBackend, layer_id))
        if found is None:
            found = cache[InklingConvStateBackend, layer_id] = _as_sglang(handle)
        return found

    def commit_conv_state_after_mtp_verify(
        self,
        *,
        req_pool_indices: Tensor,
        last_correct_step_indices: Tensor,
        mamba_track_indices: Tensor | None,
        mamba_steps_to_track: Tensor | None,
    ) -> None:
        """Commit verify's windows; slots come from `req_pool_indices` whether or not the pool's translation is
        fusable, because the step's own slot buffer may hold a later step."""
        self.steps.commit(req_pool_indices, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track)


def _refuse_breakable_prefill() -> None:
    """Breakable prefill graphs record the convs over an eager step, whose number of requests is another at a replay.

    Raises:
        UnsupportedError: they are configured; SGLang's own choice for Inkling is full prefill graphs.
    """
    graphs = get_exec().graph.cuda_graph_config
    if graphs is not None and graphs.prefill.backend == "breakable":
        hint = "serve with --cuda-graph-backend-prefill full or --disable-prefill-cuda-graph, or without the plugin"
        raise UnsupportedError("SGLang plugin", "cuda_graph_backend_prefill", "breakable", "full or disabled", hint)


def _as_sglang(handle: LayerHandle) -> InklingShortConvMetadata:
    step = handle.metadata
    return InklingShortConvMetadata(
        cache_indices=step.cache_indices,
        query_start_loc=step.query_start_loc,
        has_initial_state=step.has_initial_state,
        precomputed=handle,
        track_cache_indices=step.mamba_track_indices if step.tracks else None,
    )


class InklingShortConvolution(ShortConvolution):  # type: ignore[misc]
    """SGLang's conv module: `forward` is SGLang's, its kernels are hwbackends' hooks.

    SGLang splits a phase into a conv and a state update; a hook does both, so the update's methods do nothing.
    """

    def _hook(self, hidden_states: Tensor, handle: LayerHandle) -> Tensor:
        if not hidden_states.shape[0]:
            return hidden_states  # a rank without work, for which SGLang prepares no step
        activation = "silu" if self.activation == "swish" else self.activation
        x = hidden_states.flatten(0, -2)
        stream = STREAMS[self.sconv_type.value]
        y = handle.conv(stream, x, self.weight[:, 0], None, activation, self.use_residual)
        return y.view(hidden_states.shape)

    def _apply_decode_sconv_kernel(self, hidden_states: Tensor, precomputed: LayerHandle, **kwargs: Any) -> Tensor:
        return self._hook(hidden_states, precomputed)

    def _apply_training_sconv_kernel(self, hidden_states: Tensor, precomputed: LayerHandle, **kwargs: Any) -> Tensor:
        return self._hook(hidden_states, precomputed)

    def _apply_causal_sconv_kernel(self, hidden_states: Tensor, precomputed: LayerHandle, **kwargs: Any) -> Tensor:
        return self._hook(hidden_states, precomputed)

    def _prepare_extend_sconv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Done by the conv: it takes the snapshot for the prefix cache itself."""

    def _save_intermediate_conv_windows(self, *args: Any, **kwargs: Any) -> None:
        """Done by the conv: verify saves one row per draft."""

    def _update_sconv_cache_for_draft_extend(self, *args: Any, **kwargs: Any) -> None:
        """Done by the conv."""

    def decode_fused_ar_inputs(self, forward_batch: Any) -> Any:
        """Refused, as are the two below: see `FUSED_SWITCHES`."""
        raise _passes_by("decode_fused_ar_inputs")

    def verify_fused_ar_inputs(self, forward_batch: Any) -> Any:
        raise _passes_by("verify_fused_ar_inputs")

    def extend_fused_ar_inputs(self, forward_batch: Any) -> Any:
        raise _passes_by("extend_fused_ar_inputs")


def _passes_by(caller: str) -> UnsupportedError:
    wanted = "SGLang's fused all-reduce and attention-prologue kernels off"
    hint = f"leave {', '.join(FUSED_SWITCHES)} at 0, or serve without the plugin"
    return UnsupportedError("SGLang plugin", caller, "a kernel with a short conv of its own", wanted, hint)
