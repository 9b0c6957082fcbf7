"""SGLang on a machine without a GPU: a stand-in for torchvision, SGLang's configuration for a dummy model, and the
plugin, loaded as SGLang loads it, through its entry point."""

from __future__ import annotations

import enum
import importlib.machinery
import os
import sys
import types
from collections.abc import Iterator

import pytest

os.environ["HWBACKENDS_SGLANG"] = "1"
for variable in ("HWBACKENDS_BACKEND", "SGLANG_PLUGINS"):
    os.environ.pop(variable, None)


def stand_in_for_torchvision() -> None:
    """SGLang's configurations import one enum of torchvision, whose builds do not load beside a CPU torch. Transformers
    has to find it missing first, or it would ask the stand-in for much more."""
    from transformers.utils import import_utils

    if import_utils.is_torchvision_available():
        return
    modes = enum.Enum("InterpolationMode", "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS")
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
        module = types.ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.InterpolationMode = modes  # type: ignore[attr-defined]
        sys.modules[name] = module


stand_in_for_torchvision()


@pytest.fixture(scope="session", autouse=True)
def plugin() -> None:
    """SGLang's own plugin loading, once."""
    from sglang.srt.plugins import load_plugins

    from hwbackends.engines.activation import require_active
    from hwbackends.engines.sglang.record import ENGINE

    load_plugins()
    assert "Inkling" in require_active(ENGINE)


@pytest.fixture(autouse=True)
def server_args() -> Iterator[None]:
    """SGLang's published configuration, for a dummy model on a CPU, alone in its tensor-parallel group."""
    from sglang.srt.runtime_context import get_context, get_parallel
    from world import CHUNK, DRAFTS, TRACK_INTERVAL

    fields = {
        "device": "cpu",
        "speculative_num_draft_tokens": DRAFTS,
        "speculative_eagle_topk": 1,
        "mamba_track_interval": TRACK_INTERVAL,
        "_mamba_cache_chunk_size": CHUNK,
    }
    group = types.SimpleNamespace(world_size=1, rank_in_group=0)
    with get_context().override_server_args(**fields), get_parallel().override(tp_group=group):
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The figure that the results page gives."""
    from world import World

    terminalreporter.write_line(f"largest difference to Transformers' math, relative: {World.largest:.2e}")
