"""The conv modules that stand in for those of Transformers: subclasses that hand their conv to the cache when the cache
holds conv state of ours, and are the stock module with any other cache. Registration for `from_pretrained`, and
conversion of a model that already exists."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

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


def pack_weight(conv: nn.Conv1d) -> None:
    """Store a depthwise weight [D, 1, W] as [W, D] in memory: channels lie side by side; same shape and values."""
    weight = conv.weight
    if weight.stride(0) != 1:
        weight.data = weight.data.permute(2, 1, 0).contiguous().permute(2, 1, 0)


def _owner(cache: object, past_key_values: object) -> ConvStateOwner | None:
    found = cache if cache is not None else past_key_values
    return found if isinstance(found, ConvStateOwner) else None


def _stock_arguments(cache: object, past_key_values: object) -> dict[str, object]:
    return {"cache": cache} if past_key_values is None else {"past_key_values": past_key_values}


def patched_classes() -> dict[str, type[nn.Module]]:
    """Name of each stock class to the class that replaces it.

    Raises:
        UnsupportedError: Transformers is not there, too old, or lacks both models.
    """
    check_version()
    from transformers.models.inkling import modeling_inkling
    from transformers.models.lfm2 import modeling_lfm2

    stock_inkling: Any = modeling_inkling.InklingShortConvolution
    stock_lfm2: Any = modeling_lfm2.Lfm2ShortConv
    return {"InklingShortConvolution": _inkling_class(stock_inkling), "Lfm2ShortConv": _lfm2_class(stock_lfm2)}


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _inkling_class(stock: Any) -> type[nn.Module]:
    if stock in _CLASSES:
        return _CLASSES[stock]

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
                out: Tensor = super().forward(hidden_states, conv_mask=conv_mask, **given, **kwargs)
                return out
            if conv_mask is not None:
                hidden_states = hidden_states * conv_mask[:, :, None].to(hidden_states.dtype)
            weight = self.conv1d.weight.squeeze(1)
            return owner.conv(self.layer_idx, self.conv_idx, hidden_states, weight, self.conv1d.bias, True)

    _CLASSES[stock] = HwInklingShortConvolution
    return HwInklingShortConvolution


def _lfm2_class(stock: Any) -> type[nn.Module]:
    if stock in _CLASSES:
        return _CLASSES[stock]

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
                out: Tensor = super().forward(hidden_states, attention_mask=attention_mask, **given, **kwargs)
                return out
            if attention_mask is not None:
                hidden_states = hidden_states * attention_mask[:, :, None].to(hidden_states.dtype)
            gate_in, gate_out, x = self.in_proj(hidden_states).chunk(3, dim=-1)
            weight = self.conv.weight.squeeze(1)
            y = owner.conv(self.layer_idx, 0, gate_in * x, weight, self.conv.bias, False)
            projected: Tensor = self.out_proj(gate_out * y)
            return projected

    _CLASSES[stock] = HwLfm2ShortConv
    return HwLfm2ShortConv


def patch_model(model: nn.Module) -> int:
    """Turn the short convs of a model that already exists into ours, in place; returns how many there are.

    Parameters, names and state dict stay as they are, and with a cache of Transformers the model computes what it did.

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
        if type(module) in ours:
            pack_weight(module.conv1d if hasattr(module, "conv1d") else module.conv)  # type: ignore[arg-type]
            count += 1
    if not count:
        wanted = f"a model with one of {', '.join(classes)}"
        raise UnsupportedError("engines.transformers.patch_model", "model", type(model).__name__, wanted)
    return count


def register() -> None:
    """Have `from_pretrained`, `from_config` and `apply_patches` of Transformers build our conv modules.

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
