"""The modules that stand in for those of Transformers: subclasses that hand their conv, or their attention over pages,
to the cache when the cache is one of ours, and are the stock module with any other cache. Registration for
`from_pretrained`, and conversion of a model that already exists."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from hwbackends.engines.transformers.attention import PagedConfig, PageOwner, active, attending
from hwbackends.engines.transformers.models import check_version
from hwbackends.errors import UnsupportedError


@runtime_checkable
class ConvStateOwner(Protocol):
    """A cache that runs the convs of its model: what the patched modules look for."""

    def conv(
        self, layer_idx: int, conv_idx: int, x: Tensor, weight: Tensor, bias: Tensor | None, residual: bool
    ) -> Tensor:
        """The conv of one module over x [batch, tokens, D]; weight [D, W]; returns a tensor like x."""
        ...


def _owner(cache: object, past_key_values: object) -> ConvStateOwner | None:
    found = cache if cache is not None else past_key_values
    return found if isinstance(found, ConvStateOwner) else None


def _stock_arguments(cache: object, past_key_values: object) -> dict[str, object]:
    return {"cache": cache} if past_key_values is None else {"past_key_values": past_key_values}


def _stock_classes() -> dict[str, Any]:
    check_version()
    from transformers.models.inkling import modeling_inkling
    from transformers.models.lfm2 import modeling_lfm2

    found = {name: getattr(modeling_inkling, name) for name in ("InklingShortConvolution", "InklingAttention")}
    return {**found, **{name: getattr(modeling_lfm2, name) for name in ("Lfm2ShortConv", "Lfm2Attention")}}


def patched_classes() -> dict[str, type[nn.Module]]:
    """Name of each stock class to the class that replaces it.

    Raises:
        UnsupportedError: Transformers is not there, too old, or lacks both models.
    """
    return {name: _CLASSES.get(f"Hw{name}") or _make(name, stock) for name, stock in _stock_classes().items()}


_CLASSES: dict[str, type[nn.Module]] = {}


def _make(name: str, stock: Any) -> type[nn.Module]:
    """The class that replaces `stock`. Its name is one of this module (`__getattr__`), so that a patched model can be
    pickled."""
    builder = _attention_class if name.endswith("Attention") else _inkling_class if "Inkling" in name else _lfm2_class
    made = builder(stock)
    made.__name__ = made.__qualname__ = f"Hw{name}"
    made.__module__ = __name__
    return _CLASSES.setdefault(made.__name__, made)


def __getattr__(name: str) -> Any:
    """The patched classes by name (PEP 562): what unpickling asks for."""
    if name.startswith("Hw") and (found := patched_classes().get(name.removeprefix("Hw"))) is not None:
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _inkling_class(stock: Any) -> type[nn.Module]:
    class HwInklingShortConvolution(stock):  # type: ignore[misc]
        """y = conv(x) + x, in float32 inside, over the rows of the cache's batch."""

        def forward(
            self,
            hidden_states: Tensor,
            cache: Any = None,
            conv_mask: Tensor | None = None,
            past_key_values: Any = None,
            **kwargs: Any,
        ) -> Tensor:
            owner = _owner(cache, past_key_values)
            if owner is None:
                given = _stock_arguments(cache, past_key_values)
                out: Tensor = stock.forward(self, hidden_states, conv_mask=conv_mask, **given, **kwargs)
                return out
            if conv_mask is not None:
                hidden_states = hidden_states * conv_mask[:, :, None].to(hidden_states.dtype)
            weight = self.conv1d.weight.squeeze(1)
            return owner.conv(self.layer_idx, self.conv_idx, hidden_states, weight, self.conv1d.bias, True)

    return HwInklingShortConvolution


def _lfm2_class(stock: Any) -> type[nn.Module]:
    class HwLfm2ShortConv(stock):  # type: ignore[misc]
        """out_proj(C * conv(B * x)) with B, C, x from one projection."""

        def forward(
            self,
            hidden_states: Tensor,
            cache: Any = None,
            attention_mask: Tensor | None = None,
            past_key_values: Any = None,
            **kwargs: Any,
        ) -> Tensor:
            owner = _owner(cache, past_key_values)
            if owner is None:
                given = _stock_arguments(cache, past_key_values)
                out: Tensor = stock.forward(self, hidden_states, attention_mask=attention_mask, **given, **kwargs)
                return out
            if attention_mask is not None:
                hidden_states = hidden_states * attention_mask[:, :, None].to(hidden_states.dtype)
            gate_in, gate_out, x = self.in_proj(hidden_states).chunk(3, dim=-1)
            weight = self.conv.weight.squeeze(1)
            y = owner.conv(self.layer_idx, 0, gate_in * x, weight, self.conv.bias, False)
            projected: Tensor = self.out_proj(gate_out * y)
            return projected

    return HwLfm2ShortConv


def _attention_class(stock: Any) -> type[nn.Module]:
    class HwAttention(stock):  # type: ignore[misc]
        """The stock attention; in a packed step its scores are taken over each request's own pages."""

        @property
        def config(self) -> Any:
            """The model's config. While a step of ours runs in this thread, attention goes through its pages; the
            config itself belongs to the user's model, and other threads see it as it is."""
            own = self.__dict__["config"]
            return own if active() is None else PagedConfig(own)

        @config.setter
        def config(self, value: Any) -> None:
            self.__dict__["config"] = value

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            # decoder layers pass the cache by name, under one of two names
            cache = kwargs.get("cache")
            cache = kwargs.get("past_key_values") if cache is None else cache
            if not isinstance(cache, PageOwner):
                return stock.forward(self, *args, **kwargs)
            with attending(cache):
                return stock.forward(self, *args, **kwargs)

    return HwAttention


def patch_model(model: nn.Module) -> int:
    """Turn the short convs and attention layers of a model that already exists into ours, in place; returns how many
    short convs there are.

    Parameters, names and state dict stay as they are, and with a cache of Transformers the model computes what it did.
    Modules that accelerate has hooked call the forward that they had before; it is replaced as well.

    Raises:
        UnsupportedError: the model has no short conv that this adapter knows.
    """
    classes = patched_classes()
    ours = set(classes.values())
    count = 0
    for module in model.modules():
        replacement = classes.get(type(module).__name__)
        if replacement is not None:
            module.__class__ = replacement
            _follow_hook(module)
        count += type(module) in ours and "Short" in type(module).__name__
    if not count:
        wanted = "a model with one of InklingShortConvolution, Lfm2ShortConv"
        raise UnsupportedError("engines.transformers.patch_model", "model", type(model).__name__, wanted)
    return count


def _follow_hook(module: nn.Module) -> None:
    """accelerate keeps the bound forward of the stock class in `_old_forward` and calls that."""
    if hasattr(module, "_hf_hook") and "_old_forward" in module.__dict__:
        forward: Callable[..., Any] = type(module).forward
        module.__dict__["_old_forward"] = types.MethodType(forward, module)


def register() -> None:
    """Have `from_pretrained`, `from_config` and `apply_patches` of Transformers build our modules.

    Raises:
        UnsupportedError: this Transformers has no `transformers.monkey_patching`; use `patch_model` instead.
    """
    _monkey_patching().register_patch_mapping(patched_classes(), overwrite=True)


def unregister() -> None:
    """Undo `register`."""
    _monkey_patching().unregister_patch_mapping(list(patched_classes()))


def _monkey_patching() -> Any:
    try:
        from transformers import monkey_patching
    except ImportError as error:
        raise UnsupportedError(
            "engines.transformers.register",
            "transformers",
            "a release without transformers.monkey_patching",
            "a later one",
            "build the model, then call patch_model(model)",
        ) from error
    return monkey_patching
