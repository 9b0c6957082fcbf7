"""Puts the plugin's classes into vLLM through its two official override points, and says what they serve."""

from __future__ import annotations

from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadataBuilder

from hwbackends.engines.activation import hold_overrides
from hwbackends.engines.vllm.short_conv import HwBackendsShortConv, HwBackendsShortConvBuilder
from hwbackends.errors import UnsupportedError

BACKEND = "hwbackends.engines.vllm.short_conv.HwBackendsShortConvBackend"


def install() -> str:
    """Register the metadata builder and the layer; registering twice changes nothing.

    Returns:
        What is served, for the log.

    Raises:
        UnsupportedError: another plugin has registered the layer already.
    """
    hold_overrides(HwBackendsShortConv, ShortConv, own=("state_rows", "_step", "_run"))
    hold_overrides(HwBackendsShortConvBuilder, ShortConvAttentionMetadataBuilder, own=("_decodes", "_bind", "prepared"))
    taken = op_registry_oot.get(ShortConv.__name__)
    if taken is None:
        ShortConv.register_oot(HwBackendsShortConv)
    elif taken is not HwBackendsShortConv:
        hint = "leave one of the two plugins out with VLLM_PLUGINS"
        raise UnsupportedError("vLLM plugin", "ShortConv", f"{taken.__module__}.{taken.__name__}", "no other", hint)
    register_backend(MambaAttentionBackendEnum.SHORT_CONV, BACKEND, is_mamba=True)
    return "LFM2 runs its short convs on hwbackends, speculative decoding on a CPU included"
