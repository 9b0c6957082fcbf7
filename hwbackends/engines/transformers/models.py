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
from hwbackends.errors import DeviceError, UnsupportedError

MIN_VERSION = (5, 17)
"""First release of Transformers whose InklingForCausalLM and Lfm2ForCausalLM this adapter was run with."""
SUPPORTED = ("InklingForCausalLM", "Lfm2ForCausalLM")
_INKLING_STREAMS = ("k", "v", "attn", "mlp")
_INSTEAD = {
    "OptimizedModule": "pass model._orig_mod, the model that torch.compile was given",
    "DataParallel": "pass model.module",
    "DistributedDataParallel": "pass model.module",
    "FullyShardedDataParallel": "pass a model that lies whole on one device",
    "Lfm2Model": "pass the Lfm2ForCausalLM that holds it",
    "InklingTextModel": "pass the InklingForCausalLM that holds it",
    "Lfm2VlForConditionalGeneration": "pass text_model(model) of hwbackends.engines.transformers: its language model",
    "InklingForConditionalGeneration": "pass text_model(model) of hwbackends.engines.transformers: its language model",
}
"""What to pass in place of a class that holds a model or is held by one."""


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
        plain_attention: whether scores are products, a scale, and causal or sliding masks: nothing else.
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
    plain_attention: bool = False
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
        hint = _INSTEAD.get(architecture, "see docs/transformers.md")
        if hasattr(model, "get_base_model"):
            hint = "pass model.get_base_model(); adapters that are active in it stay active"
        raise UnsupportedError("engines.transformers", "model", architecture, wanted, hint)
    check_form(model)
    argument = cache_argument(model)
    config: Any = model.config
    if architecture == "InklingForCausalLM":
        return describe_inkling(config, _conv_dtype(model), argument)
    return _describe_lfm2(config, _conv_dtype(model), argument)


def check_form(model: nn.Module) -> None:
    """A model that is compiled, or does not lie whole on one device, would run other code than its own, or read
    weights that are elsewhere.

    Raises:
        UnsupportedError: a module of it was compiled.
        DeviceError: weights are offloaded, or lie on several devices.
    """
    hook = "engines.transformers"
    for name, module in model.named_modules():
        replaced = module.__dict__.get("forward")
        if module._compiled_call_impl is not None or hasattr(replaced, "_torchdynamo_orig_callable"):
            hint = "pass a model that was not compiled; recorded graphs (record=CudaRecorder()) save more on a GPU"
            raise UnsupportedError(hook, "model", f"a compiled {name or type(module).__name__}", "none", hint)
        hook_of = getattr(module, "_hf_hook", None)
        parts = [hook_of, *getattr(hook_of, "hooks", ())]
        if any(getattr(part, "offload", False) or type(part).__name__ == "CpuOffload" for part in parts):
            _refuse_devices(f"weights of {name or 'the model'} that accelerate offloads")
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if "meta" in devices:
        _refuse_devices("weights that are not loaded (device meta), as accelerate leaves those that it offloads")
    if len(devices) > 1:
        _refuse_devices(f"weights on {', '.join(devices)}")


def _refuse_devices(got: str) -> None:
    hint = "load it without device_map, or with a device_map of one device"
    raise DeviceError("engines.transformers", "model", got, "a model that lies whole on one device", hint)


def text_model(model: nn.Module) -> Any:
    """The language model of a multimodal one, over the same weights: for prompts of text.

    Args:
        model: `Lfm2VlForConditionalGeneration` or `InklingForConditionalGeneration`.

    Raises:
        UnsupportedError: another class.
    """
    check_version()
    import transformers

    outer: Any = model
    classes: dict[str, Any] = {
        "Lfm2VlForConditionalGeneration": transformers.Lfm2ForCausalLM,
        "InklingForConditionalGeneration": transformers.InklingForCausalLM,
    }
    found = classes.get(type(model).__name__)
    if found is None:
        wanted = f"one of {', '.join(classes)}"
        raise UnsupportedError("engines.transformers.text_model", "model", type(model).__name__, wanted)
    config = outer.config.get_text_config()
    with torch.device("meta"):
        text = found(config)
    text.model, text.lm_head = outer.model.language_model, outer.lm_head
    text.generation_config = outer.generation_config
    return text.train(outer.training)


def cache_argument(model: nn.Module) -> str:
    """`cache` in releases from 5.24 on, `past_key_values` before: of the model's forward, and of `generate`."""
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
        plain_attention=True,
    )
