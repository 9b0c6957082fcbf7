"""NumPy views of CPU tensors, and the refusal of what NumPy cannot hold."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hwbackends.errors import DtypeError, UnsupportedError

Array = NDArray[Any]
NAMES = ("float16", "float32", "float64")


def view(hook: str, parameter: str, tensor: Tensor) -> Array:
    """The tensor's memory as an array of the same strides.

    Raises:
        DtypeError: a dtype that NumPy does not have.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_floating_point() and name not in NAMES:
        raise DtypeError(hook, parameter, tensor.dtype, f"one of {', '.join(NAMES)}", "use another backend")
    return tensor.detach().numpy()


def only_window(hook: str, layout: str) -> None:
    """Refuse the layouts that are not served.

    Raises:
        UnsupportedError: not `window`.
    """
    if layout != "window":
        raise UnsupportedError(hook, "layout", repr(layout), "'window'", "use another backend")


def translate(table: Tensor | None, slots: Array) -> Array:
    """Physical slots; whatever is padding or translates to padding becomes -1."""
    found = slots if table is None else table.numpy()[np.maximum(slots, 0)]
    return np.where((slots > 0) & (found > 0), found, -1)
