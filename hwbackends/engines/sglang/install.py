"""Puts the plugin's classes into SGLang through its hook registry, and says what they serve."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from hwbackends.engines.sglang import inkling

_log = logging.getLogger(__name__)
_LINEAR = "sglang.srt.layers.attention"


def install() -> str:
    """Register every replacement; SGLang applies them after all plugins have run.

    Returns:
        What is served, for the log.
    """
    for switch in inkling.FUSED_SWITCHES:
        os.environ[switch] = "0"
    _replace(f"{_LINEAR}.linear.inkling_sconv_backend.InklingShortConvAttnBackend", inkling.InklingConvStateBackend)
    _replace("sglang.srt.models.inkling_common.sconv.ShortConvolution", inkling.InklingShortConvolution)
    served = ["Inkling"]
    for name, part in _OTHERS.items():
        try:
            part()
        except (ImportError, AttributeError) as error:  # a model file of SGLang that cannot be imported here
            _log.warning("hwbackends: SGLang keeps its own code for %s: %s: %s", name, type(error).__name__, error)
        else:
            served.append(name)
    return f"{', '.join(served)} run their short convs on hwbackends"


def _replace(target: str, replacement: Callable[..., Any]) -> None:
    HookRegistry.register(target, replacement, HookType.REPLACE)


def _short_conv() -> None:
    short_conv = import_module("hwbackends.engines.sglang.short_conv")
    _replace(f"{_LINEAR}.linear.short_conv_backend.ShortConvAttnBackend", short_conv.ShortConvStateBackend)
    _replace(f"{_LINEAR}.hybrid_linear_attn_backend.ShortConvHybridAttnBackend", short_conv.ShortConvHybridBackend)
    _replace("sglang.srt.models.lfm2.Lfm2ShortConv", short_conv.Lfm2Conv)
    _replace("sglang.srt.models.lfm2_moe.Lfm2MoeShortConv", short_conv.Lfm2MoeConv)


def _npu() -> None:
    npu = import_module("hwbackends.engines.sglang.npu")
    HookRegistry.register(f"{_LINEAR}.attention_registry.attn_backend_wrapper", npu.wrap, HookType.AROUND)


_OTHERS = {"LFM2": _short_conv, "LFM2 and ZAYA1 on NPU": _npu}
