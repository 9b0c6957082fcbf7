"""Test tool, an SGLang plugin beside the one under test: random weights under which greedy tokens depend on every part,
counters of which short-conv code ran, time spent in the metadata hooks, accepted counts, and what the pools hold at
every flush of the cache. Written to $PROBE.PID as JSON, one file per process of the engine."""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import math
import os
import time
import zlib
from typing import Any

COUNTS: dict[str, int] = {}
SECONDS: dict[str, float] = {}
ACCEPTED: dict[str, int] = {}
POOLS: list[dict[str, Any]] = []
_written = [0.0]
_HEAD = 0.3
"""Scale of the logits: far enough apart for equal tokens, near enough for logprobs that say something."""

STOCK = {
    "models.inkling_common.sconv.ShortConvolution": (
        "_apply_decode_sconv_kernel", "_apply_training_sconv_kernel", "_apply_causal_sconv_kernel",
        "_prepare_extend_sconv_cache", "_save_intermediate_conv_windows", "_update_sconv_cache_for_draft_extend",
        "decode_fused_ar_inputs", "verify_fused_ar_inputs", "extend_fused_ar_inputs",
    ),
    "layers.attention.linear.inkling_sconv_backend.InklingShortConvAttnBackend": (
        "init_forward_metadata", "init_forward_metadata_out_graph", "init_forward_metadata_in_graph",
        "commit_conv_state_after_mtp_verify",
    ),
    "layers.attention.linear.short_conv_backend.ShortConvAttnBackend": (
        "init_forward_metadata", "init_forward_metadata_out_graph", "init_forward_metadata_in_graph",
        "conv_state_metadata",
    ),
    "models.lfm2.Lfm2ShortConv": ("forward",),
}  # fmt: skip
STOCK_KERNELS = {
    "models.inkling_common.sconv": (
        "causal_conv1d", "fused_causal_conv1d_update_decode", "save_intermediate_conv_windows", "update_sconv_cache",
        "fused_gather_scatter_to_sconv_cache", "fused_draft_extend_sconv_cache",
    ),
    "models.lfm2": ("causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_update_triton"),
    "layers.attention.linear.inkling_sconv_backend": ("scatter_mamba_states_after_mtp_verify",),
}  # fmt: skip


def write(force: bool = False) -> None:
    """Keep what was seen; seldom, because it is on the way of every step."""
    path = os.environ.get("PROBE")
    if path and (force or time.time() - _written[0] > 0.5):
        _written[0] = time.time()
        found = {"counts": COUNTS, "seconds": SECONDS, "accepted": ACCEPTED, "pools": POOLS}
        with open(f"{path}.{os.getpid()}.new", "w") as file:
            json.dump(found, file)
        os.replace(f"{path}.{os.getpid()}.new", f"{path}.{os.getpid()}")


def count(owner: Any, name: str, label: str) -> None:
    """Count the calls of a function, and add up the seconds that they take on the host."""
    function = vars(owner).get(name)
    if function is None:
        return

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        COUNTS[label] = COUNTS.get(label, 0) + 1
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            SECONDS[label] = SECONDS.get(label, 0.0) + time.perf_counter() - start
            write()

    setattr(owner, name, counted)


def weights(model: Any, low: float = 0.0, high: float = 0.0, seed: int = 1234) -> None:
    """Every parameter from its name's seed on the CPU: the same in every run, on every device."""
    import torch

    noise = float(os.environ.get("PROBE_NOISE", "0.6"))
    with torch.no_grad():
        for name, param in model.state_dict().items():
            if torch.is_floating_point(param):
                param.data.copy_(_value(torch, name, tuple(param.shape), noise, seed).to(param.dtype))


def _value(torch: Any, name: str, shape: tuple[int, ...], noise: float, seed: int) -> Any:
    key = "embed" if "embed_tokens" in name else "head" if "lm_head" in name else name
    g = torch.Generator().manual_seed(seed + zlib.crc32(key.encode()) % 100_000)
    if "embed_tokens" in name:
        return _embedding(torch, shape)
    if "lm_head" in name:  # the next token is a permutation of this one, more or less
        value = torch.empty(shape)
        value[torch.randperm(shape[0], generator=torch.Generator().manual_seed(3))] = _embedding(torch, shape)
        return value * (_HEAD / shape[1] ** 0.5)
    if "conv" in name:
        return torch.randn(shape, generator=g) * 0.5
    if "input_proj" in name:  # a draft head reads mostly the embedding
        value = torch.randn(shape, generator=g) * 0.05 / math.sqrt(shape[1])
        value[:, shape[0] :] += torch.eye(shape[0])
        return value
    if len(shape) == 1:
        drawn = torch.randn(shape, generator=g)
        return 1.0 + 0.1 * drawn if "norm" in name else 0.02 * drawn
    out = any(part in name for part in ("o_proj", "down_proj", "wo", "out_proj", "w2"))
    return torch.randn(shape, generator=g) * ((noise if out else 1.0) / math.sqrt(shape[-1]))


def _embedding(torch: Any, shape: tuple[int, ...]) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _pools(scheduler: Any, when: str) -> None:
    import torch

    pool, stats = scheduler.req_to_token_pool, scheduler.pool_stats_observer.get_pool_stats()
    held = {name: getattr(stats, name) for name in dir(stats) if name.endswith("_size") and "usage" not in name}
    held = {name: value for name, value in held.items() if isinstance(value, int)}
    POOLS.append({
        "when": when, "free_request_rows": len(pool.free_slots), "request_rows": pool.size, **held,
        "mamba_slots": pool.mamba_pool.size, "bytes": torch.cuda.memory_allocated(),
    })  # fmt: skip
    write(True)


def _watch_pools() -> None:
    scheduler = importlib.import_module("sglang.srt.managers.scheduler").Scheduler
    flush = scheduler.flush_cache

    @functools.wraps(flush)
    def flushed(self: Any, *args: Any, **kwargs: Any) -> Any:
        _pools(self, "before")
        result = flush(self, *args, **kwargs)
        _pools(self, "after")
        return result

    scheduler.flush_cache = flushed


def _watch_accepted(owner: Any, name: str, place: int | str) -> None:
    function = vars(owner)[name]

    @functools.wraps(function)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps = kwargs[place] if isinstance(place, str) else args[place]
        for step in steps.tolist():
            ACCEPTED[str(step)] = ACCEPTED.get(str(step), 0) + 1
        return function(self, *args, **kwargs)

    setattr(owner, name, watched)


def _resolve(path: str) -> Any:
    module, name = f"sglang.srt.{path}".rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def activate() -> None:
    """Entry point; runs in each process of the engine, before SGLang puts the plugins' classes in."""
    if os.environ.get("PROBE_WEIGHTS", "1") == "1":
        importlib.import_module("sglang.srt.model_loader.loader").initialize_dummy_weights = weights
    _watch_pools()
    if os.environ.get("PROBE_COUNT", "1") != "1":
        atexit.register(write, True)
        return
    for path, names in STOCK.items():
        for name in names:
            count(_resolve(path), name, f"sglang.{path.rsplit('.', 1)[1]}.{name}")
    for path, names in STOCK_KERNELS.items():
        for name in names:
            count(importlib.import_module(f"sglang.srt.{path}"), name, f"sglang.{name}")
    hybrid = _resolve("layers.attention.linear.inkling_sconv_backend.InklingShortConvHybridAttnBackend")
    if os.environ.get("PROBE_ACCEPTED"):
        _watch_accepted(hybrid, "update_mamba_state_after_mtp_verify", "last_correct_step_indices")
    if os.environ.get("HWBACKENDS_SGLANG") == "1":
        from hwbackends.engines.sglang.steps import Steps
        from hwbackends.step.handle import LayerHandle

        for name in ("eager", "out_graph", "in_graph", "commit"):
            count(Steps, name, f"hwbackends.Steps.{name}")
        count(LayerHandle, "conv", "hwbackends.LayerHandle.conv")
    atexit.register(write, True)
