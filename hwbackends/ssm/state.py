"""SSM state as tensors: one state of a pool before it has storage (`SSMStream`), in every layer (`SSMStorage`), and in
one layer as its hooks take it (`SSMState`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hwbackends.errors import ArgumentError, DeviceError, DtypeError, MissingArgumentError, ShapeError, UnsupportedError
from hwbackends.ssm.layouts import (
    KINDS,
    LAYOUTS,
    SSMKind,
    SSMLayout,
    default_ring_rows,
    least_ring_rows,
    lens_tiles,
)

if TYPE_CHECKING:
    from hwbackends.step.families import Extents

STATE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
RING = ("ring_k", "ring_u", "ring_d", "state_lens")


@dataclass(frozen=True, slots=True)
class SSMStream:
    """One SSM state per layer of a pool that makes its own tensors.

    Attributes:
        name: what modules ask for.
        kind: `gdn`, `kda` or `mamba2`.
        num_k_heads: H, heads of q and k; Mamba2: groups of B and C.
        num_v_heads: HV, heads of v, a multiple of H; Mamba2: heads.
        head_k_dim: K; Mamba2: dstate.
        head_v_dim: V; Mamba2: head dim.
        dtype: of the state; float16, bfloat16 or float32.
        layout: `ring` or `intermediate`.
        ring_rows: C, at least 2N; None: a power of two of at least 4N.
        ring_dtype: of k in the ring: float32, or the dtype of the model's k, which loses nothing.
    """

    name: str
    kind: SSMKind
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    dtype: torch.dtype = torch.float32
    layout: SSMLayout = "ring"
    ring_rows: int | None = None
    ring_dtype: torch.dtype = torch.float32

    def allocate(self, extents: Extents) -> SSMStorage:
        """Zeroed storage of a pool's extents."""
        for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim"):
            if getattr(self, name) < 1:
                raise ArgumentError("SSMStream", name, getattr(self, name), "at least 1")
        shape = (extents.layers, extents.num_slots, self.num_v_heads, self.head_v_dim, self.head_k_dim)
        if self.dtype not in STATE_DTYPES:
            raise DtypeError("SSMStream", "dtype", self.dtype, "float16, bfloat16 or float32")
        tensor = torch.zeros(shape, dtype=self.dtype, device=extents.device)
        middle = None
        if self.layout == "intermediate" and extents.draft_token_num:
            lead = (extents.layers, extents.request_rows, extents.draft_token_num)
            middle = tensor.new_zeros(*lead, *shape[2:])
        return SSMStorage.wrap(
            tensor,
            kind=self.kind,
            layout=self.layout,
            num_k_heads=self.num_k_heads,
            draft_token_num=extents.draft_token_num,
            request_rows=extents.request_rows,
            intermediate=middle,
            ring_rows=self.ring_rows,
            ring_dtype=self.ring_dtype,
        )


@dataclass(slots=True, eq=False)
class SSMState:
    """The state of one SSM in one layer, as its hooks take it. It keeps the tensors that it was made with, because
    launch plans hold their addresses; `dataclasses.replace` makes another state.

    Attributes:
        tensor: [slots, HV, V, K], any slot stride, a slot's elements packed. Mutated.
        kind: `gdn`, `kda` or `mamba2`: what a token does to the state.
        layout: `intermediate`: `tensor` is the committed state. `ring`: `tensor` is a checkpoint, and the tokens behind
            it lie in the ring until it is written again.
        num_k_heads: H, heads of q and k.
        draft_token_num: N, most tokens per request of a verify or draft-extend step, at least 1.
        intermediate: [R, N, HV, V, K] of `tensor`'s dtype, `intermediate` only: the state after each draft, by request
            row. None: no drafts. Mutated by verify.
        ring_k: [R, C, H, K] float32 or k's dtype, `ring` only: k of the token at position p in row p mod C, as it came.
        ring_u: [R, C, HV, V] float32: its u.
        ring_d: [R, C, HV] float32, for kda [R, C, HV, K]: its decay.
        state_lens: [slots, HV, ceil(V / 8)] int32: the position up to which each 8 rows of V of the checkpoint stand.
            It lies by slot and travels with the checkpoint, so that a copied snapshot brings its own.
        cache: for a backend's launch plans, keyed as it likes.
    """

    tensor: Tensor
    kind: SSMKind
    layout: SSMLayout
    num_k_heads: int
    draft_token_num: int = 1
    intermediate: Tensor | None = None
    ring_k: Tensor | None = None
    ring_u: Tensor | None = None
    ring_d: Tensor | None = None
    state_lens: Tensor | None = None
    cache: dict[object, object] = field(default_factory=dict, repr=False, init=False)

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, name):
            hint = "write into it, or make another state with dataclasses.replace"
            raise ArgumentError("SSMState", name, "another value", "the one that it was made with", hint)
        object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        _check("SSMState", self, lead=0)

    @property
    def slots(self) -> int:
        """Slots, slot 0 counted."""
        return self.tensor.shape[0]

    @property
    def num_v_heads(self) -> int:
        """HV, heads of v and of the state."""
        return self.tensor.shape[1]

    @property
    def head_v_dim(self) -> int:
        """V."""
        return self.tensor.shape[2]

    @property
    def head_k_dim(self) -> int:
        """K."""
        return self.tensor.shape[3]

    @property
    def ring_rows(self) -> int:
        """C, rows of the ring; 0 where there is none."""
        return 0 if self.ring_u is None else self.ring_u.shape[1]


@dataclass(slots=True, eq=False)
class SSMStorage:
    """One SSM state of a pool in every layer: the tensors of `SSMState` with a leading axis L.

    `wrap` makes the ring, the lengths or the intermediate states that an engine's own state lacks.
    """

    tensor: Tensor
    kind: SSMKind
    layout: SSMLayout
    num_k_heads: int
    draft_token_num: int = 0
    intermediate: Tensor | None = None
    ring_k: Tensor | None = None
    ring_u: Tensor | None = None
    ring_d: Tensor | None = None
    state_lens: Tensor | None = None

    def __post_init__(self) -> None:
        _check("SSMStorage", self, lead=1)

    @classmethod
    def wrap(
        cls,
        tensor: Tensor,
        *,
        kind: SSMKind,
        num_k_heads: int,
        request_rows: int,
        layout: SSMLayout = "intermediate",
        draft_token_num: int = 0,
        intermediate: Tensor | None = None,
        ring_rows: int | None = None,
        ring_dtype: torch.dtype = torch.float32,
    ) -> SSMStorage:
        """A state over an engine's own tensor; nothing is copied.

        Args:
            tensor: [L, slots, HV, V, K], any stride of layers and slots.
            kind: what a token does to it.
            num_k_heads: H, heads of q and k.
            request_rows: R, rows of the ring that is made.
            layout: `intermediate` as engines have it, or `ring`: then `tensor` becomes a checkpoint, whose `state_lens`
                must move with it (clear, copy and transfer).
            draft_token_num: N of verify steps; 0: none.
            intermediate: [L, R, N, HV, V, K], the engine's own, `intermediate` only. Not made here: a pool without it
                does not verify on that layout.
            ring_rows: C, at least 2N; `ring` only.
            ring_dtype: dtype of k in the ring.

        Raises:
            ArgumentError: its subclass says what does not fit.
        """
        if tensor.dim() != 5:
            raise ShapeError("SSMStorage", "tensor", tuple(tensor.shape), "[L, slots, HV, V, K]")
        layers, slots, heads, rows, width = tensor.shape
        made: dict[str, Tensor] = {}
        if layout == "ring":
            count = default_ring_rows(draft_token_num) if ring_rows is None else ring_rows
            lead = (layers, request_rows, count)
            made["ring_k"] = tensor.new_zeros(*lead, num_k_heads, width, dtype=ring_dtype)
            made["ring_u"] = tensor.new_zeros(*lead, heads, rows, dtype=torch.float32)
            decays = (heads, width) if kind == "kda" else (heads,)
            made["ring_d"] = tensor.new_zeros(*lead, *decays, dtype=torch.float32)
            made["state_lens"] = tensor.new_zeros(layers, slots, heads, lens_tiles(rows), dtype=torch.int32)
        elif ring_rows is not None:
            raise ArgumentError("SSMStorage", "ring_rows", ring_rows, f"None on layout {layout}")
        return cls(tensor, kind, layout, num_k_heads, draft_token_num, intermediate, **made)

    @property
    def family(self) -> str:
        """The contract whose hooks take it."""
        return "ssm"

    @property
    def positions(self) -> bool:
        """A ring is addressed by positions."""
        return self.layout == "ring"

    @property
    def one_chain(self) -> bool:
        """A ring's rows are positions, of which a tree has several drafts."""
        return self.layout == "ring"

    @property
    def drafts(self) -> int:
        """Most tokens per request of a verify step."""
        held = self.layout == "ring" or self.intermediate is not None
        return self.draft_token_num if held else 0

    def layer(self, index: int) -> SSMState:
        """The state of one layer."""
        cut = {name: None if tensor is None else tensor[index] for name, tensor in self._held().items()}
        tensor = cut.pop("tensor")
        assert tensor is not None
        return SSMState(tensor, self.kind, self.layout, self.num_k_heads, max(1, self.draft_token_num), **cut)

    def slot_tensors(self) -> list[Tensor]:
        """The state and, on a ring, its lengths: a checkpoint without its length is worth nothing."""
        return [self.tensor] if self.state_lens is None else [self.tensor, self.state_lens]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name."""
        return {name: tensor for name, tensor in self._held().items() if tensor is not None}

    def check(self, name: str, layers: int, num_slots: int, device: torch.device) -> None:
        """Hold the storage to its pool. See `StateStorage.check`."""
        found, slots = self.tensor.shape[:2]
        if found != layers:
            raise ShapeError("StatePool", name, f"{found} layers", f"{layers}, as the pool")
        if slots != num_slots:
            raise ShapeError("StatePool", name, f"{slots} slots", f"{num_slots}, as the pool")
        if self.tensor.device != device:
            raise DeviceError("StatePool", name, self.tensor.device, f"{device}, as mamba_index_mapping")

    def refuse_commit(self) -> str:
        """A commit on `intermediate` needs the intermediate states."""
        return "" if self.layout == "ring" or self.intermediate is not None else "intermediate states"

    def _held(self) -> dict[str, Tensor | None]:
        return {name: getattr(self, name) for name in ("tensor", "intermediate", *RING)}


def _check(owner: str, state: SSMState | SSMStorage, lead: int) -> None:
    """Hold the tensors of a state to each other."""
    if state.kind not in KINDS:
        raise UnsupportedError(owner, "kind", repr(state.kind), f"one of {', '.join(KINDS)}")
    if state.layout not in LAYOUTS:
        raise UnsupportedError(owner, "layout", repr(state.layout), f"one of {', '.join(LAYOUTS)}")
    if state.tensor.dim() != 4 + lead:
        raise ShapeError(owner, "tensor", tuple(state.tensor.shape), f"{'[L, ' if lead else '['}slots, HV, V, K]")
    if state.tensor.dtype not in STATE_DTYPES:
        raise DtypeError(owner, "tensor", state.tensor.dtype, "float16, bfloat16 or float32")
    heads = state.tensor.shape[1 + lead]
    if state.num_k_heads < 1 or heads % state.num_k_heads:
        raise ShapeError(owner, "num_k_heads", state.num_k_heads, f"a divisor of {heads}, the heads of the state")
    if state.draft_token_num < 1 - lead:
        raise ArgumentError(owner, "draft_token_num", state.draft_token_num, f"at least {1 - lead}")
    _check_layout(owner, state, lead)


def _check_layout(owner: str, state: SSMState | SSMStorage, lead: int) -> None:
    ring = state.layout == "ring"
    for name in ("intermediate", *RING):
        value, wanted = getattr(state, name), ring == (name in RING)
        if value is not None and not wanted:
            raise ArgumentError(owner, name, "a tensor", f"None on layout {state.layout}")
        if value is None and wanted and ring:
            raise MissingArgumentError(owner, name, None, "a tensor on layout ring")
    layers = tuple(state.tensor.shape[:lead])
    slots, heads, rows, width = state.tensor.shape[lead:]
    if not ring:
        if state.intermediate is not None:
            shape: tuple[int | None, ...] = (*layers, None, max(1, state.draft_token_num), heads, rows, width)
            _held_to(owner, "intermediate", state.intermediate, shape, (state.tensor.dtype,), state.tensor.device)
        return
    assert state.ring_u is not None
    requests, count = state.ring_u.shape[lead : lead + 2] if state.ring_u.dim() == 4 + lead else (None, None)
    least = least_ring_rows(state.draft_token_num)
    if count is not None and count < least:
        hint = "make the ring larger: a step must not overwrite rows that it replays"
        raise ShapeError(owner, "ring_u", f"{count} rows", f"at least {least} = 2 * draft_token_num", hint)
    decays = (heads, width) if state.kind == "kda" else (heads,)
    wanted_shapes: dict[str, tuple[int | None, ...]] = {
        "ring_u": (*layers, None, None, heads, rows),
        "ring_k": (*layers, requests, count, state.num_k_heads, width),
        "ring_d": (*layers, requests, count, *decays),
        "state_lens": (*layers, slots, heads, lens_tiles(rows)),
    }
    for name, shape in wanted_shapes.items():
        dtypes = STATE_DTYPES if name == "ring_k" else (torch.int32,) if name == "state_lens" else (torch.float32,)
        _held_to(owner, name, getattr(state, name), shape, dtypes, state.tensor.device)


def _held_to(
    owner: str,
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    fits = tensor.dim() == len(shape) and all(w in (None, g) for w, g in zip(shape, tensor.shape, strict=True))
    if not fits:
        wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise ShapeError(owner, name, tuple(tensor.shape), f"[{wanted}]")
    if tensor.dtype not in dtypes:
        raise DtypeError(owner, name, tensor.dtype, " or ".join(map(str, dtypes)))
    if tensor.device != device:
        raise DeviceError(owner, name, tensor.device, f"{device}, as the state")
