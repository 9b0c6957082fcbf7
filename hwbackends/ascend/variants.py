"""The compile-time variants of the kernels: what the launchers pass as constants, and therefore what the lowering job
compiles. Imports neither torch nor triton."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from hwbackends.conv.layouts import LAYOUT_CODES

WIDTHS = (2, 3, 4, 5)
"""Kernel widths that have variants; other widths are served by torch ops."""
MAX_TOKENS = 8
"""Tokens per request in verify and draft extend that have variants; more are served by torch ops."""
FLOATS = ("fp16", "bf16", "fp32")
"""Dtypes of activations, weights and state that have variants; float64 is served by torch ops."""
MODES = {"decode": 0, "target_verify": 1, "draft_extend": 2}
LAYOUTS = LAYOUT_CODES
EXTEND_ROWS = 8
"""Tokens of one work item behind a request's head."""
SCAN = 1024
"""Lengths that the extend preparation sums at once, and tokens that it labels at once."""
TILE = 4096
"""Elements of the largest tile of a work item, so that a handful of float32 tiles fit the unified buffer."""

SSM_BLOCK = 1024
"""Elements of an SSM state that one work item copies."""


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(0, value - 1).bit_length()


def uniform_tiles(mode: str, width: int, tokens: int) -> dict[str, int]:
    """Tile extents of `conv_uniform_kernel`: window rows, output rows, saved rows, channels."""
    history = width - 1
    saved = history if mode == "decode" else history + tokens
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


Constants = dict[str, int | bool]
_BOTH = (False, True)
_INTS = ("i32", "i64")
_PLAIN: Constants = {
    "BIAS": False, "SILU": False, "RESIDUAL": True, "TRACK": False, "W_UNIT": True, "S_UNIT": True,
}  # fmt: skip

_GIVEN_INTS = (
    "req_pool_indices", "cache_indices", "source_indices", "lens", "num_accept_tokens", "num_accepted_tokens",
    "track_indices", "extend_seq_lens", "track_seqlens", "draft_indices", "last_steps", "track_steps", "computed_lens",
)  # fmt: skip
"""What an engine hands to a prepare hook or a commit; the launchers make it one dtype."""
_WRITTEN_SLOTS = ("out_cache", "out_source", "out_track")
_READ_SLOTS = ("cache_indices", "source_indices", "mamba_track_indices")
"""Slots as metadata holds them, in the dtype of the metadata's buffers."""
_STATE = ("state", "draft_rows")
_FLOAT_POINTERS = ("x", "weight", "bias", "out", *_STATE, "ssm_state", "intermediate_ssm")
_BYTE_POINTERS = ("has_initial_state", "track_mask", "out_initial")


@dataclass(frozen=True, slots=True)
class Variant:
    """One compilation of one kernel.

    Attributes:
        kernel: name of the kernel.
        module: module of `hwbackends.ascend` that defines it.
        constants: its compile-time parameters.
        types: triton types of pointers where they are not the usual ones: bf16 rows, int32 metadata, int64 from the
            engine.
    """

    kernel: str
    module: str
    constants: Constants
    types: dict[str, str] = field(default_factory=dict)

    def pointer(self, parameter: str) -> str | None:
        """Triton type of a pointer parameter; None for an integer."""
        if parameter in self.types:
            return self.types[parameter]
        if parameter in _FLOAT_POINTERS:
            return "*bf16"
        if parameter in _BYTE_POINTERS:
            return "*i8"
        if self.module != "kernels_conv" and parameter in (*_GIVEN_INTS, "v2p_table"):
            return "*i64"
        if (parameter.startswith("out_") and parameter != "out_row") or parameter in _METADATA:
            return "*i32"
        return None


_METADATA = (
    *_READ_SLOTS, "query_start_loc", "seq_idx", "computed_lens", "draft_indices", "num_accept_tokens", "history_offset",
    "mamba_track_tokens", "mamba_index_mapping", "num_reqs_device",
)  # fmt: skip


def all_variants() -> Iterator[Variant]:
    """Every variant of every kernel."""
    yield from conv_variants()
    yield from metadata_variants()
    yield from commit_variants()


def conv_variants() -> Iterator[Variant]:
    """Every combination of flags at W = 4 and N = 4; every width and token count, every dtype of x, weight, state and
    slots, with every phase and layout."""
    for layout in LAYOUTS.values():
        for flags in _product(BIAS=_BOTH, SILU=_BOTH, RESIDUAL=_BOTH, TRACK=_BOTH, W_UNIT=_BOTH, S_UNIT=_BOTH):
            yield from _phases(layout, flags)
        for width in WIDTHS:
            yield _uniform("decode", layout, width, 1, _PLAIN)
            yield _extend(layout, width, _PLAIN)
            for tokens in range(1, MAX_TOKENS + 1):
                yield _uniform("target_verify", layout, width, tokens, _PLAIN)
                yield _uniform("draft_extend", layout, width, tokens, _PLAIN)
        for types in _conv_types():
            yield from _phases(layout, {**_PLAIN, "TRACK": True}, types)


def _conv_types() -> Iterator[dict[str, str]]:
    for x, state in itertools.product(FLOATS, FLOATS):
        for weight in dict.fromkeys((x, "fp32")):
            rows = {"x": x, "out": x, "weight": weight, "bias": weight, **dict.fromkeys(_STATE, state)}
            yield {name: f"*{dtype}" for name, dtype in rows.items()}
    yield dict.fromkeys(_READ_SLOTS, "*i64")


def _phases(layout: int, flags: Constants, types: dict[str, str] | None = None) -> Iterator[Variant]:
    yield _uniform("decode", layout, 4, 1, flags, types)
    yield _uniform("target_verify", layout, 4, 4, {**flags, "TRACK": False}, types)
    yield _uniform("draft_extend", layout, 4, 4, flags, types)
    yield _extend(layout, 4, flags, types)


def _uniform(
    mode: str, layout: int, width: int, tokens: int, flags: Constants, types: dict[str, str] | None = None
) -> Variant:
    constants = {"MODE": MODES[mode], "LAYOUT": layout, "W": width, "N": tokens, **flags}
    return Variant("conv_uniform_kernel", "kernels_conv", constants | uniform_tiles(mode, width, tokens), types or {})


def _extend(layout: int, width: int, flags: Constants, types: dict[str, str] | None = None) -> Variant:
    constants = {"LAYOUT": layout, "W": width, **flags, **extend_tiles(width)}
    return Variant("conv_extend_kernel", "kernels_conv", constants, types or {})


def metadata_variants() -> Iterator[Variant]:
    """Every combination of what a batch can bring, and every dtype of its indices, of the map and of the buffers."""
    plain: Constants = dict.fromkeys(("GIVEN", "V2P", "SOURCE", "DEVICE_COUNT", "LAZY", "TRACK"), False)
    for flags in _product(**dict.fromkeys(plain, _BOTH)):
        if flags["GIVEN"] and flags["V2P"]:
            continue  # slots that the engine translated are not translated again
        for lens, initial in itertools.product(_BOTH, _BOTH):
            yield _prepare("uniform", {**flags, "DRAFT_EXTEND": True, "LENS": lens, "ACCEPT": True, "INITIAL": initial})
            accept = initial
            yield _prepare(
                "uniform", {**flags, "DRAFT_EXTEND": False, "LENS": lens, "ACCEPT": accept, "INITIAL": False}
            )
        for initial in _BOTH:
            yield _prepare("extend", {**flags, "INITIAL": initial, "SCAN": SCAN})
    uniform = {**plain, "DRAFT_EXTEND": True, "LENS": True, "ACCEPT": True, "INITIAL": False, "TRACK": True}
    for types in _metadata_types():
        yield _prepare("uniform", uniform, types)
        yield _prepare("uniform", {**uniform, "DRAFT_EXTEND": False, "ACCEPT": False}, types)
        yield _prepare("extend", {**plain, "INITIAL": False, "TRACK": True, "SCAN": SCAN}, types)


def _prepare(phase: str, flags: Constants, types: dict[str, str] | None = None) -> Variant:
    return Variant(f"prepare_{phase}_kernel", "kernels_metadata", flags, types or {})


def _metadata_types() -> Iterator[dict[str, str]]:
    """Missing tensors are passed as the request rows, in their dtype."""
    for given, mapping, slots in itertools.product(_INTS, _INTS, _INTS):
        names = {**dict.fromkeys((*_GIVEN_INTS, "v2p_table", "num_reqs_device"), given), "mamba_index_mapping": mapping}
        names |= dict.fromkeys(_WRITTEN_SLOTS, slots)
        yield {name: f"*{dtype}" for name, dtype in names.items()}


def commit_variants() -> Iterator[Variant]:
    """Every combination of flags at W = 4, every width, and every dtype, with every layout."""
    for flags in _product(V2P=_BOTH, DRAFTS=_BOTH, TRACK=_BOTH):
        yield Variant("commit_ssm_kernel", "kernels_commit", {**flags, "BLOCK": SSM_BLOCK})
        for layout, unit in itertools.product(LAYOUTS.values(), _BOTH):
            yield _commit(layout, 4, {**flags, "S_UNIT": unit})
    plain: Constants = {"V2P": False, "DRAFTS": False, "TRACK": True, "S_UNIT": True}
    for layout in LAYOUTS.values():
        for width in WIDTHS:
            yield _commit(layout, width, plain)
        for types in _commit_types():
            yield _commit(layout, 4, plain, types)
    for types in _commit_types():
        flags = {name: plain[name] for name in ("V2P", "DRAFTS", "TRACK")}
        yield Variant("commit_ssm_kernel", "kernels_commit", {**flags, "BLOCK": SSM_BLOCK}, types)


def _commit(layout: int, width: int, flags: Constants, types: dict[str, str] | None = None) -> Variant:
    return Variant(
        "commit_conv_kernel", "kernels_commit", {"LAYOUT": layout, **flags, **commit_tiles(width)}, types or {}
    )


def _commit_types() -> Iterator[dict[str, str]]:
    for given, mapping, dtype in itertools.product(_INTS, _INTS, FLOATS):
        names = {**dict.fromkeys((*_GIVEN_INTS, "v2p_table"), given), "mamba_index_mapping": mapping}
        names |= dict.fromkeys((*_STATE, "ssm_state", "intermediate_ssm"), dtype)
        yield {name: f"*{kind}" for name, kind in names.items()}


def _product(**choices: tuple[bool, ...]) -> Iterator[Constants]:
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))
