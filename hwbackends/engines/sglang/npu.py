"""SGLang on NPU: the conv-state backend of LFM2 and ZAYA1, where SGLang raises NotImplementedError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def wrap(original: Callable[..., Any], runner: Any, full_attn_backend: Any) -> Any:
    """Around `attn_backend_wrapper`: the hybrid wrapper with our conv-state backend for short-conv models on NPU, and
    SGLang's own answer in every other case."""
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import ShortConvHybridAttnBackend
    from sglang.srt.layers.attention.linear.short_conv_backend import ShortConvAttnBackend
    from sglang.srt.utils import is_npu

    config = _short_conv_config(runner) if is_npu() else None
    if config is None:
        return original(runner, full_attn_backend)
    layers = [0] if runner.is_draft_worker else config.full_attention_layer_ids
    return ShortConvHybridAttnBackend(full_attn_backend, ShortConvAttnBackend(runner), layers)


def _short_conv_config(runner: Any) -> Any | None:
    """The configuration of an LFM2 or ZAYA1 model, None for others."""
    from sglang.srt.configs.hybrid_arch import mamba2_config
    from sglang.srt.configs.lfm2 import Lfm2Config
    from sglang.srt.configs.lfm2_moe import Lfm2MoeConfig
    from sglang.srt.configs.lfm2_vl import Lfm2VlConfig
    from sglang.srt.configs.zaya import ZayaConfig

    config = mamba2_config(runner.model_config)
    return config if isinstance(config, (ZayaConfig, Lfm2Config, Lfm2MoeConfig, Lfm2VlConfig)) else None
