"""Transformers' Inkling and LFM2 models through a backend: one call of `model.generate` with our cache, or packed
continuous batching of many requests.

    backend = hwbackends.load("cuda")
    model.generate(**inputs, **ConvStateCache(model, backend).keyword)

    runner = PackedRunner(model, backend, RunnerSettings(layout="ring", draft_tokens=4), NGramDrafter())
    for token in runner.add(token_ids, max_new_tokens=64):
        ...

Names are imported on first use: this package alone imports neither torch nor Transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hwbackends.engines.transformers.cache import ConvStateCache as ConvStateCache
    from hwbackends.engines.transformers.models import text_model as text_model
    from hwbackends.engines.transformers.mtp import MtpDrafter as MtpDrafter
    from hwbackends.engines.transformers.patches import patch_model as patch_model
    from hwbackends.engines.transformers.patches import register as register
    from hwbackends.engines.transformers.patches import unregister as unregister
    from hwbackends.runner.drafters import Drafter as Drafter
    from hwbackends.runner.drafters import NGramDrafter as NGramDrafter
    from hwbackends.runner.drafters import SeededDrafter as SeededDrafter
    from hwbackends.runner.graphs import CudaRecorder as CudaRecorder
    from hwbackends.runner.requests import Request as Request
    from hwbackends.runner.serving import PackedRunner as PackedRunner
    from hwbackends.runner.settings import RunnerSettings as RunnerSettings

_HOMES = {
    "ConvStateCache": "hwbackends.engines.transformers.cache",
    "CudaRecorder": "hwbackends.runner.graphs",
    "Drafter": "hwbackends.runner.drafters",
    "MtpDrafter": "hwbackends.engines.transformers.mtp",
    "NGramDrafter": "hwbackends.runner.drafters",
    "PackedRunner": "hwbackends.runner.serving",
    "Request": "hwbackends.runner.requests",
    "RunnerSettings": "hwbackends.runner.settings",
    "SeededDrafter": "hwbackends.runner.drafters",
    "patch_model": "hwbackends.engines.transformers.patches",
    "text_model": "hwbackends.engines.transformers.models",
    "register": "hwbackends.engines.transformers.patches",
    "unregister": "hwbackends.engines.transformers.patches",
}

__all__ = [
    "ConvStateCache",
    "CudaRecorder",
    "Drafter",
    "MtpDrafter",
    "NGramDrafter",
    "PackedRunner",
    "Request",
    "RunnerSettings",
    "SeededDrafter",
    "patch_model",
    "register",
    "text_model",
    "unregister",
]


def __getattr__(name: str) -> Any:
    """Import the module that holds `name` on first use (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
