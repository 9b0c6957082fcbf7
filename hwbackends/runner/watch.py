"""Whether a model is still the one that a runner's state was computed with: weights, adapters, attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def fingerprint(model: nn.Module) -> list[Any]:
    """What changes when a model does: address and version of every weight, adapters that are active, implementations
    of attention and experts, and whether it was compiled. Nothing reads a weight or waits for the device.

    A write through `tensor.data` changes neither address nor version: nobody can see it here.
    """
    config: Any = model.config
    found: list[Any] = [config._attn_implementation, getattr(config, "_experts_implementation", None)]
    _walk(model, found)
    return found


def _walk(module: nn.Module, found: list[Any]) -> None:
    # by hand: `modules()` and `parameters()` take several times as long, and this runs once per step
    for parameter in module._parameters.values():
        if parameter is not None:
            found.append(_weight(parameter))
    if "_disable_adapters" in module.__dict__:
        found.append(_adapters(module))
    if module._compiled_call_impl is not None:
        found.append("compiled")
    for child in module._modules.values():
        if child is not None:
            _walk(child, found)


def _weight(tensor: Tensor) -> tuple[int, int]:
    version = 0 if tensor.is_inference() else tensor._version
    try:
        return tensor.data_ptr(), version
    except RuntimeError:  # a tensor without storage of its own, on an emulated device
        return id(tensor), version


def _adapters(module: Any) -> tuple[object, ...]:
    """The state of a tuner layer of PEFT."""
    active = module.active_adapters if hasattr(module, "active_adapters") else ()
    scaling = getattr(module, "scaling", {})
    return (
        module._disable_adapters,
        tuple(active),
        tuple(getattr(module, "merged_adapters", ())),
        tuple(sorted((str(name), str(value)) for name, value in scaling.items())),
    )


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype to which torch casts in this thread; None where it does not."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
