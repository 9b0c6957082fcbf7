"""Holds every launch of a kernel against the variants that the lowering job compiles."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from hwbackends.ascend.variants import Variant, all_variants

SHAPES = {"W", "N", "S", "S_TILE", "N_TILE", "V_TILE", "BLOCK", "ROWS", "SCAN"}
ANCHORS = ("MODE", "LAYOUT", "DRAFT_EXTEND")
TYPES = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int8: "*i8", torch.int32: "*i32",
    torch.int64: "*i64",
}  # fmt: skip

Key = tuple[object, ...]


def keys(kernel: str, constants: dict[str, Any], types: dict[str, str]) -> list[Key]:
    """A launch is covered when each of these is: its flags, its shape, and the type of each pointer, all of them with
    its phase and layout."""
    anchor = (kernel, *(constants.get(name) for name in ANCHORS))
    flags = tuple(sorted((k, v) for k, v in constants.items() if k not in SHAPES and k not in ANCHORS))
    shape = tuple(sorted((k, v) for k, v in constants.items() if k in SHAPES))
    return [(*anchor, flags), (*anchor, shape), *((*anchor, name, kind) for name, kind in types.items())]


@functools.cache
def compiled() -> frozenset[Key]:
    """The keys of all variants."""
    from hwbackends.ascend import kernels_commit, kernels_conv, kernels_metadata

    homes = {"kernels_conv": kernels_conv, "kernels_metadata": kernels_metadata, "kernels_commit": kernels_commit}
    found: set[Key] = set()
    for variant in all_variants():
        function = getattr(homes[variant.module], variant.kernel).fn
        found.update(keys(variant.kernel, variant.constants, _pointers(variant, function)))
    return frozenset(found)


def _pointers(variant: Variant, function: Any) -> dict[str, str]:
    named = {name: variant.pointer(name) for name in inspect.signature(function).parameters}
    return {name: kind for name, kind in named.items() if kind is not None and name not in variant.constants}


def check(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Fail if a launch is not among the compiled variants."""
    passed = dict(zip(inspect.signature(kernel.fn).parameters, args, strict=False))
    types = {name: TYPES[value.dtype] for name, value in passed.items() if isinstance(value, torch.Tensor)}
    constants = {name: value for name, value in kwargs.items() if name.isupper()}
    missing = [key for key in keys(kernel.fn.__name__, constants, types) if key not in compiled()]
    assert not missing, f"launched, but not lowered in tools/lowering: {missing}"
