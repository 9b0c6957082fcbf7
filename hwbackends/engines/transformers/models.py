"""Which models of Transformers have conv state, and what their streams and attention layers look like. Read from the
model's config alone; anything not listed here is refused by name."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import nn

from hwbackends.conv.state import ConvStream
from hwbackends.errors import UnsupportedError

MIN_VERSION = (5, 17)
"""First release of Transformers whose InklingForCausalLM and Lfm2ForCausalLM this adapter was run with."""
SUPPORTED = ("InklingForCausalLM", "Lfm2ForCausalLM")
_INKLING_STREAMS = ("k", "v", "attn", "mlp")


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Key/value heads of one attention layer, their size, and its sliding window (None: full attention)."""

    kv_heads: int
    head_dim: int
    sliding_window: int | None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the adapter must know about one model.

    Attributes:
        architecture: class name of the causal language model.
        width: W of every short conv.
        streams: conv streams of the state pool, in channel order.
        stream_names: (layer, index of the conv in the layer) to stream name.
        conv_layers: layers that hold conv state.
        attention: layer to shape, for layers that keep keys and values.
        mask_keys: key of the mask dict to whether that mask slides; conv masks are always None.
        conv_mask_key: key under which the model looks for its conv mask.
        cache_argument: keyword under which the model's forward takes the cache.
        attention_kind: `sdpa`, `eager`, ...: the implementation of attention that the model runs.
        expert_loop: whether experts are looped over on the host, which waits for the device in each such layer.
    """

    architecture: str
    width: int
    streams: tuple[ConvStream, ...]
    stream_names: dict[tuple[int, int], str]
    conv_layers: tuple[int, ...]
    attention: dict[int, AttentionShape]
    mask_keys: dict[str, int | None]
    conv_mask_key: str
    cache_argument: str
    attention_kind: str
    expert_loop: bool = False


def check_version() -> tuple[int, int]:
    """The installed (major, minor) of Transformers.

    Raises:
        UnsupportedError: not installed, or older than 5.17.
    """
    wanted = "transformers >= 5.17, < 6"
    hint = "pip install 'hwbackends[transformers]'"
    try:
        text = metadata.version("transformers")
    except metadata.PackageNotFoundError as error:
        raise UnsupportedError("engines.transformers", "transformers", "not installed", wanted, hint) from error
    major, minor = (int(part) for part in text.split(".")[:2])
    if (major, minor) < MIN_VERSION or major > MIN_VERSION[0]:
        raise UnsupportedError("engines.transformers", "transformers", text, wanted, hint)
    return major, minor


def describe(model: nn.Module) -> ModelSpec:
    """The spec of a causal language model of Transformers.

    Raises:
        UnsupportedError: the class is not one of `SUPPORTED`, or Transformers is not there or too old.
    """
    check_version()
    architecture = type(model).__name__
    if architecture not in SUPPORTED:
        wanted = f"one of {', '.join(SUPPORTED)}"
        raise UnsupportedError("engines.transformers", "model", architecture, wanted, "see docs/transformers.md")
    argument = cache_argument(model)
    config: Any = model.config
    if architecture == "InklingForCausalLM":
        return describe_inkling(config, _conv_dtype(model), argument)
    return _describe_lfm2(config, _conv_dtype(model), argument)


def cache_argument(model: nn.Module) -> str:
    """`cache` in releases from 5.18 on, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _conv_dtype(model: nn.Module) -> torch.dtype:
    """dtype of the rows that the convs see; their weights may stay float32 in a model of fewer bits."""
    module: Any = model
    dtype: torch.dtype = module.get_input_embeddings().weight.dtype
    return dtype


def describe_inkling(config: Any, dtype: torch.dtype, argument: str) -> ModelSpec:
    """The spec of an Inkling text config: four convs per layer; k and v of sliding layers may have their own size."""
    attention: dict[int, AttentionShape] = {}
    names: dict[tuple[int, int], str] = {}
    dims: dict[str, int] = {}
    layers = range(config.num_hidden_layers)
    for layer in layers:
        slides = config.layer_types[layer] == "hybrid_sliding"
        attention[layer] = AttentionShape(
            config.swa_num_key_value_heads if slides else config.num_key_value_heads,
            config.swa_head_dim if slides else config.head_dim,
            config.sliding_window_size if slides else None,
        )
    kv_sizes = {shape.kv_heads * shape.head_dim for shape in attention.values()}
    for layer in layers:
        shape = attention[layer]
        prefix = "swa_" if len(kv_sizes) > 1 and shape.sliding_window is not None else ""
        for index, stream in enumerate(_INKLING_STREAMS):
            name = prefix + stream if stream in "kv" else stream
            names[layer, index] = name
            dims[name] = shape.kv_heads * shape.head_dim if stream in "kv" else config.hidden_size
    order = [n for n in ("k", "v", "swa_k", "swa_v", "attn", "mlp") if n in dims]
    return ModelSpec(
        architecture="InklingForCausalLM",
        width=config.conv_kernel_size,
        streams=tuple(ConvStream(name, dims[name], dtype) for name in order),
        stream_names=names,
        conv_layers=tuple(layers),
        attention=attention,
        mask_keys={"full_attention": None, "sliding_attention": config.sliding_window_size},
        conv_mask_key="linear_attention",
        cache_argument=argument,
        attention_kind=config._attn_implementation,
        expert_loop="sparse" in config.mlp_layer_types and config._experts_implementation in (None, "eager"),
    )


def _describe_lfm2(config: Any, dtype: torch.dtype, argument: str) -> ModelSpec:
    """The spec of an LFM2 config: one conv in each conv layer, full attention in the others."""
    conv_layers = tuple(i for i, kind in enumerate(config.layer_types) if kind == "conv")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = AttentionShape(config.num_key_value_heads, head_dim, None)
    if not conv_layers:
        raise UnsupportedError("engines.transformers", "config.layer_types", "no conv layer", "at least one")
    return ModelSpec(
        architecture="Lfm2ForCausalLM",
        width=config.conv_L_cache,
        streams=(ConvStream("conv", config.hidden_size, dtype),),
        stream_names={(layer, 0): "conv" for layer in conv_layers},
        conv_layers=conv_layers,
        attention={i: shape for i, kind in enumerate(config.layer_types) if kind != "conv"},
        mask_keys={"full_attention": None},
        conv_mask_key="conv",
        cache_argument=argument,
        attention_kind=config._attn_implementation,
    )
