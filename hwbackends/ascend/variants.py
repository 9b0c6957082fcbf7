"""The compile-time variants of the kernels: what the launchers pass as constants, and therefore what the lowering job
compiles. Imports neither torch nor triton."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

WIDTHS = (2, 3, 4, 5)
"""Kernel widths that have variants; other widths are served by torch ops."""
MAX_TOKENS = 8
"""Tokens per request in verify and draft extend that have variants; more are served by torch ops."""
FLOATS = ("fp16", "bf16", "fp32")
"""Dtypes of activations, weights and state that have variants; float64 is served by torch ops."""
MODES = {"decode": 0, "target_verify": 1, "draft_extend": 2}
LAYOUTS = {"window": 0, "ring": 1, "lazy": 2}
EXTEND_ROWS = 8
"""Tokens of one work item behind a request's head."""
SCAN = 1024
"""Lengths that the extend preparation sums at once, and tokens that it labels at once."""
TILE = 4096
"""Elements of the largest tile of a work item, so that a handful of float32 tiles fit the unified buffer."""


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(0, value - 1).bit_length()


def uniform_tiles(mode: int, layout: int, width: int, tokens: int) -> dict[str, int]:
    """Tile extents of `conv_uniform_kernel`: window rows, output rows, saved rows, channels."""
    history = width - 1
    saved = history if mode == MODES["decode"] else history + tokens
    tiles = {"S_TILE": history, "N_TILE": tokens, "V_TILE": saved}
    tiles = {name: power_of_two(extent) for name, extent in tiles.items()}
    return {**tiles, "BLOCK": TILE // max(tiles.values())}


def extend_tiles(width: int) -> dict[str, int]:
    """Tile extents of `conv_extend_kernel`."""
    return {"S_TILE": power_of_two(width - 1), "ROWS": EXTEND_ROWS, "BLOCK": TILE // EXTEND_ROWS}


def commit_tiles(width: int) -> dict[str, int]:
    """Tile extents of `commit_conv_kernel`."""
    rows = power_of_two(width - 1)
    return {"S": width - 1, "S_TILE": rows, "BLOCK": TILE // rows}


@dataclass(frozen=True, slots=True)
class Variant:
    """One compilation of one kernel.

    Attributes:
        kernel: name of the kernel.
        module: module of `hwbackends.ascend` that defines it.
        constants: its compile-time parameters.
        types: triton types of its pointers, where they are not the kernel's usual ones.
    """

    kernel: str
    module: str
    constants: dict[str, int | bool]
    types: dict[str, str] = field(default_factory=dict)


def _product(**choices: tuple[int | bool, ...]) -> Iterator[dict[str, int | bool]]:
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


_BOTH = (False, True)
_EPILOGUE = {"BIAS": _BOTH, "SILU": _BOTH, "RESIDUAL": _BOTH}
_PLAIN: dict[str, int | bool] = {
    "BIAS": False, "SILU": False, "RESIDUAL": True, "TRACK": False, "W_UNIT": True, "S_UNIT": True,
}  # fmt: skip


def _uniform(mode: str, layout: int, width: int, tokens: int, flags: dict[str, int | bool], **types: str) -> Variant:
    constants = {"MODE": MODES[mode], "LAYOUT": layout, "W": width, "N": tokens, **flags}
    constants |= uniform_tiles(MODES[mode], layout, width, tokens)
    return Variant("conv_uniform_kernel", "kernels_conv", constants, types)


def _extend(layout: int, width: int, flags: dict[str, int | bool], **types: str) -> Variant:
    return Variant(
        "conv_extend_kernel", "kernels_conv", {"LAYOUT": layout, "W": width, **flags, **extend_tiles(width)}, types
    )


def conv_variants() -> Iterator[Variant]:
    """Every combination of flags at W = 4 and N = 4; every width, token count and pair of dtypes with every phase and
    layout."""
    for layout in LAYOUTS.values():
        for flags in _product(**_EPILOGUE, TRACK=_BOTH, W_UNIT=_BOTH, S_UNIT=_BOTH):
            yield _uniform("decode", layout, 4, 1, flags)
            yield _uniform("draft_extend", layout, 4, 4, flags)
            yield _extend(layout, 4, flags)
            if not flags["TRACK"]:
                yield _uniform("target_verify", layout, 4, 4, flags)
        for width in WIDTHS:
            yield _uniform("decode", layout, width, 1, _PLAIN)
            yield _extend(layout, width, _PLAIN)
            for tokens in range(1, MAX_TOKENS + 1):
                yield _uniform("target_verify", layout, width, tokens, _PLAIN)
                yield _uniform("draft_extend", layout, width, tokens, {**_PLAIN, "TRACK": True})
        for x, state in itertools.product(FLOATS, FLOATS):
            types = {"x": x, "out": x, "state": state, "draft_rows": state, "weight": x}
            pointers = {name: f"*{dtype}" for name, dtype in types.items()}
            yield _uniform("decode", layout, 4, 1, _PLAIN, **pointers)
            yield _uniform("target_verify", layout, 4, 4, _PLAIN, **pointers)
            yield _uniform("draft_extend", layout, 4, 4, {**_PLAIN, "TRACK": True}, **pointers)
            yield _extend(layout, 4, {**_PLAIN, "TRACK": True}, **pointers)
