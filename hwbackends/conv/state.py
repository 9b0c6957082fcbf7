"""Conv state as tensors: one stream of a pool (`ConvStream`), the state of one conv as its hooks take it (`ConvState`),
and how streams share a storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hwbackends.conv.layouts import LAYOUTS, Layout, history_rows
from hwbackends.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError, WidthError

STATE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class ConvStream:
    """One conv state per layer: its name (Inkling: k, v, attn, mlp), channels D and dtype."""

    name: str
    dim: int
    dtype: torch.dtype = torch.float32


@dataclass(slots=True, eq=False)
class ConvState:
    """The state of one conv stream in one layer, as conv hooks take it. It keeps the tensors that it was made with,
    because launch plans hold their addresses; `dataclasses.replace` makes another state.

    Attributes:
        tensor: [slots, rows, D], any strides; rows are raw inputs. Mutated by decode, extend, draft extend, and by
            verify on the `ring` and `lazy` layouts.
        layout: meaning of the rows. `window`: oldest first, rows = S. `ring`: row of absolute position p is
            p mod rows. `lazy`: history starts at row `history_offset`.
        width: W of the weights that this state serves.
        draft_rows: [R, S + N, D], `window` only: verify saves history ++ x here, by request row. None: no drafts.
        cache: for a backend's launch plans, keyed as it likes.
    """

    tensor: Tensor
    layout: Layout
    width: int
    draft_rows: Tensor | None = None
    cache: dict[object, object] = field(default_factory=dict, repr=False, init=False)

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, name):
            hint = "write into it, or make another state with dataclasses.replace"
            raise ArgumentError("ConvState", name, "another value", "the one that it was made with", hint)
        object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise UnsupportedError("ConvState", "layout", repr(self.layout), f"one of {', '.join(LAYOUTS)}")
        if self.width < 2:
            raise WidthError("ConvState", "width", self.width, "at least 2")
        if self.tensor.dim() != 3:
            raise ShapeError("ConvState", "tensor", tuple(self.tensor.shape), "[slots, rows, D]")
        least = history_rows(self.width) + (1 if self.layout == "ring" else 0)
        exact = self.layout == "window"
        if self.rows < least or (exact and self.rows != least):
            wanted = f"{'exactly' if exact else 'at least'} {least} rows for width {self.width} on {self.layout}"
            raise ShapeError("ConvState", "tensor", f"{self.rows} rows", wanted)

    @property
    def slots(self) -> int:
        """Slots, slot 0 counted."""
        return self.tensor.shape[0]

    @property
    def rows(self) -> int:
        """Rows per slot."""
        return self.tensor.shape[1]

    @property
    def dim(self) -> int:
        """Channels D."""
        return self.tensor.shape[2]

    @property
    def history(self) -> int:
        """S = W - 1."""
        return self.width - 1


def allocate(
    streams: Sequence[ConvStream], lead: tuple[int, ...], device: torch.device | str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One zeroed storage per dtype, and each stream as a channel slice of it, in the order given."""
    names = [stream.name for stream in streams]
    if not names or len(set(names)) != len(names):
        raise ArgumentError("StatePool", "streams", names, "at least one stream, each name once")
    for stream in streams:
        if stream.dim < 1:
            raise ArgumentError("StatePool", "streams", f"{stream.name} of {stream.dim} channels", "at least 1")
    by_dtype: dict[torch.dtype, list[ConvStream]] = {}
    for stream in streams:
        if stream.dtype not in STATE_DTYPES:
            raise DtypeError("StatePool", f"streams[{stream.name!r}]", stream.dtype, "a floating dtype of 16 bits up")
        by_dtype.setdefault(stream.dtype, []).append(stream)
    slices: dict[str, Tensor] = {}
    groups: dict[str, Tensor] = {}
    for dtype, members in by_dtype.items():
        storage = torch.zeros(*lead, sum(member.dim for member in members), dtype=dtype, device=device)
        groups[str(dtype)] = storage
        start = 0
        for member in members:
            slices[member.name] = storage[..., start : start + member.dim]
            start += member.dim
    return {name: slices[name] for name in names}, groups


def merge(parts: list[Tensor]) -> Tensor:
    """Neighbouring channel slices as one view."""
    first = parts[0]
    if len(parts) == 1:
        return first
    offset, total = first.storage_offset(), 0
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.storage_offset() != offset + total or part.stride() != first.stride():
            raise ArgumentError(
                "StatePool.conv_state",
                "stream",
                "streams that are not neighbours in one storage",
                "streams of one dtype that were declared one after the other",
                "call the conv once per stream",
            )
        total += part.shape[-1]
    return first.as_strided((*first.shape[:-1], total), first.stride(), offset)
