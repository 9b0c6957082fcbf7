"""Puts the plugin's classes into SGLang through its hook registry, and says what they serve."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from hwbackends.engines.activation import hold_overrides
from hwbackends.engines.sglang import inkling
from hwbackends.errors import UnsupportedError

_log = logging.getLogger(__name__)
_LINEAR = "sglang.srt.layers.attention"


def install() -> str:
    """Register every replacement; SGLang applies them after all plugins have run.

    Returns:
        What is served, for the log.
    """
    backend, conv = inkling.InklingConvStateBackend, inkling.InklingShortConvolution
    hold_overrides(backend, backend.__base__, own=("_limits",))
    hold_overrides(conv, conv.__base__, own=("_hook",))
    for switch in inkling.FUSED_SWITCHES:
        os.environ[switch] = "0"
    _replace(f"{_LINEAR}.linear.inkling_sconv_backend.InklingShortConvAttnBackend", backend)
    _replace("sglang.srt.models.inkling_common.sconv.ShortConvolution", conv)
    served = ["Inkling"]
    for name, part in _OTHERS.items():
        try:
            part()
        except (ImportError, AttributeError, UnsupportedError) as error:  # a file of SGLang that does not load or fit
            _log.warning("hwbackends: SGLang keeps its own code for %s: %s: %s", name, type(error).__name__, error)
        else:
            served.append(name)
    return f"{', '.join(served)} run their short convs on hwbackends"


def _replace(target: str, replacement: Callable[..., Any]) -> None:
    HookRegistry.register(target, replacement, HookType.REPLACE)


def _short_conv() -> None:
    short_conv = import_module("hwbackends.engines.sglang.short_conv")
    backend = short_conv.ShortConvStateBackend
    hold_overrides(backend, backend.__base__, own=("_step", "commit"))
    for replacement in (short_conv.ShortConvHybridBackend, short_conv.Lfm2Conv, short_conv.Lfm2MoeConv):
        hold_overrides(replacement, replacement.__base__)
    _replace(f"{_LINEAR}.linear.short_conv_backend.ShortConvAttnBackend", backend)
    _replace(f"{_LINEAR}.hybrid_linear_attn_backend.ShortConvHybridAttnBackend", short_conv.ShortConvHybridBackend)
    _replace("sglang.srt.models.lfm2.Lfm2ShortConv", short_conv.Lfm2Conv)
    _replace("sglang.srt.models.lfm2_moe.Lfm2MoeShortConv", short_conv.Lfm2MoeConv)


def _npu() -> None:
    npu = import_module("hwbackends.engines.sglang.npu")
    HookRegistry.register(f"{_LINEAR}.attention_registry.attn_backend_wrapper", npu.wrap, HookType.AROUND)


_OTHERS = {"LFM2": _short_conv, "LFM2 and ZAYA1 on NPU": _npu}
