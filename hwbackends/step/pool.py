"""The pooled per-request state of one part of a model (`StatePool`) and the parts that share slots (`PoolParts`).
Storage and bookkeeping only: hooks read and write it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hwbackends.conv.layouts import LAYOUTS, Layout, history_rows, layout_rows
from hwbackends.conv.state import STATE_DTYPES, ConvState, ConvStream, allocate, merge
from hwbackends.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    ShapeError,
    SlotError,
    UnsupportedError,
    WidthError,
)
from hwbackends.step.families import Extents, StateStorage, StateStream

NO_CONV = 2
"""The width of a pool without conv streams, whose history nobody reads."""


class StatePool:
    """The state of one part of a model (the target, or one draft head), for every layer, stream and slot.

    Streams of one dtype are channel slices of one storage, so that neighbours (k and v) can be served as one conv.
    Everything is zeroed at construction. Use `wrap` for tensors that an engine already owns.

    Args:
        streams: conv streams, in channel order; may be empty beside states.
        num_slots: slots, reserved slot 0 counted.
        width: W, kernel width of every conv that uses the pool; needed with conv streams.
        states: states of other families, each by its own name; they share slots, map and layers with the convs.
        layers: ids of the layers that hold state, in the order of the pool's first axis; an int means 0..n-1.
        layout: `window`, `ring` or `lazy`.
        draft_token_num: N, tokens per request in a verify step (the target's own token counted); 0: no speculation.
        request_rows: R, rows of the engine's request pool; the extent of `mamba_index_mapping` and draft buffers.
        device: where everything lies.
        ring_rows: C, at least S + max(1, N) (the default); larger lets N grow later.
        ssm_shape: shape of one request's SSM state in one layer; None: no SSM state.
        ssm_dtype: its dtype.
        mamba_index_mapping: [R] int32, request row to slot; made (all 0) if not given, shared between parts if given.
        mamba_v2p_table: [V] int64, virtual to physical slot, entry 0 is 0; None: the map holds physical slots.
        track_interval: tokens between snapshots (`mamba_cache_chunk_size`).
    """

    def __init__(
        self,
        streams: Sequence[ConvStream],
        *,
        num_slots: int,
        width: int = 0,
        states: Sequence[StateStream] = (),
        layers: int | Sequence[int] = 1,
        layout: Layout = "window",
        draft_token_num: int = 0,
        request_rows: int | None = None,
        device: torch.device | str = "cpu",
        ring_rows: int | None = None,
        ssm_shape: Sequence[int] | None = None,
        ssm_dtype: torch.dtype = torch.float32,
        mamba_index_mapping: Tensor | None = None,
        mamba_v2p_table: Tensor | None = None,
        track_interval: int = 64,
    ) -> None:
        width = width if streams or not states else NO_CONV
        _check_sizes(layout, width, num_slots, draft_token_num, track_interval)
        layer_ids = _layer_ids(layers)
        requests = request_rows if request_rows is not None else num_slots
        if mamba_index_mapping is None:
            mamba_index_mapping = torch.zeros(requests, dtype=torch.int32, device=device)
        requests = mamba_index_mapping.shape[0]
        rows = _ring_rows(ring_rows, layout, width, draft_token_num)
        lead = (len(layer_ids), num_slots, rows)
        conv, groups = allocate(streams, lead, device) if streams or not states else ({}, {})
        drafts: dict[str, Tensor] = {}
        draft_groups: dict[str, Tensor] = {}
        if conv and layout == "window" and draft_token_num:
            lead = (len(layer_ids), requests, history_rows(width) + draft_token_num)
            drafts, draft_groups = allocate(streams, lead, device)
        ssm = intermediate = None
        if ssm_shape is not None:
            ssm = torch.zeros(len(layer_ids), num_slots, *ssm_shape, dtype=ssm_dtype, device=device)
            if draft_token_num:
                shape = (len(layer_ids), requests, draft_token_num, *ssm_shape)
                intermediate = torch.zeros(shape, dtype=ssm_dtype, device=device)
        self._set(layer_ids, layout, width, draft_token_num, track_interval, mamba_index_mapping, mamba_v2p_table)
        extents = Extents(len(layer_ids), num_slots, requests, draft_token_num, device)
        self._own(conv, drafts, ssm, intermediate, _allocate_states(states, extents))
        self._groups, self._draft_groups = groups, draft_groups

    @classmethod
    def wrap(
        cls,
        conv_streams: Mapping[str, Tensor],
        *,
        width: int = 0,
        mamba_index_mapping: Tensor,
        states: Mapping[str, StateStorage] | None = None,
        layers: Sequence[int] | None = None,
        layout: Layout = "window",
        draft_token_num: int = 0,
        draft_rows: Mapping[str, Tensor] | None = None,
        ssm_state: Tensor | None = None,
        intermediate_ssm: Tensor | None = None,
        mamba_v2p_table: Tensor | None = None,
        track_interval: int = 64,
    ) -> StatePool:
        """A pool over an engine's own tensors; nothing is copied.

        Args:
            conv_streams: name to [L, slots, rows, D], any strides. A pool of [L, slots, D, rows] is passed as
                `tensor.transpose(-1, -2)`. May be empty beside states.
            states: name to a family's storage over the engine's tensors, such as `SSMStorage.wrap`.
            draft_rows: name to [L, R, S + N, D], `window` with drafts; made here if left out.
            intermediate_ssm: [L, R, N, ...], state of each draft step by request row.

        The other arguments are those of the constructor.

        Raises:
            ShapeError, DtypeError, DeviceError: tensors that do not fit together.
        """
        held = dict(states or {})
        lead = _lead(conv_streams, held)
        width = width if conv_streams else NO_CONV
        _check_sizes(layout, width, lead[1], draft_token_num, track_interval)
        if draft_rows is None and layout == "window" and draft_token_num:
            extent = (lead[0], mamba_index_mapping.shape[0], history_rows(width) + draft_token_num)
            draft_rows = {n: t.new_zeros(*extent, t.shape[-1]) for n, t in conv_streams.items()}
        pool = cls.__new__(cls)
        layer_ids = _layer_ids(lead[0] if layers is None else layers)
        pool._set(layer_ids, layout, width, draft_token_num, track_interval, mamba_index_mapping, mamba_v2p_table)
        pool._own(dict(conv_streams), dict(draft_rows or {}), ssm_state, intermediate_ssm, held)
        pool._groups, pool._draft_groups = {}, {}
        return pool

    def _set(
        self,
        layer_ids: tuple[int, ...],
        layout: Layout,
        width: int,
        draft_token_num: int,
        track_interval: int,
        mamba_index_mapping: Tensor,
        mamba_v2p_table: Tensor | None,
    ) -> None:
        if mamba_index_mapping.dim() != 1 or mamba_index_mapping.dtype not in (torch.int32, torch.int64):
            got = f"{tuple(mamba_index_mapping.shape)} {mamba_index_mapping.dtype}"
            raise DtypeError("StatePool", "mamba_index_mapping", got, "[R] int32 or int64")
        if mamba_v2p_table is not None and (mamba_v2p_table.dim() != 1 or mamba_v2p_table.dtype != torch.int64):
            got = f"{tuple(mamba_v2p_table.shape)} {mamba_v2p_table.dtype}"
            raise DtypeError("StatePool", "mamba_v2p_table", got, "[V] int64")
        self.layer_ids = layer_ids
        self.layout: Layout = layout
        self.width = width
        self.draft_token_num = draft_token_num
        self.track_interval = track_interval
        self.mamba_index_mapping = mamba_index_mapping
        self.mamba_v2p_table = mamba_v2p_table
        self.cache: dict[object, object] = {}
        self._layer_index = {layer: index for index, layer in enumerate(layer_ids)}
        self._states: dict[tuple[str | tuple[str, ...], int], ConvState] = {}
        self._family_states: dict[tuple[str, int], Any] = {}

    def _own(
        self,
        conv_streams: dict[str, Tensor],
        draft_rows: dict[str, Tensor],
        ssm_state: Tensor | None,
        intermediate_ssm: Tensor | None,
        states: dict[str, StateStorage],
    ) -> None:
        layers, slots = _lead(conv_streams, states)
        rows = next((t.shape[2] for t in conv_streams.values()), 0)
        requests = self.mamba_index_mapping.shape[0]
        drafts = history_rows(self.width) + self.draft_token_num
        expected: list[tuple[str, Tensor, tuple[int, ...]]] = [
            *((name, t, (layers, slots, rows, t.shape[-1])) for name, t in conv_streams.items()),
            *((f"draft_rows[{n!r}]", t, (layers, requests, drafts, conv_streams[n].shape[-1]))
              for n, t in draft_rows.items()),
        ]  # fmt: skip
        if ssm_state is not None:
            expected.append(("ssm_state", ssm_state, (layers, slots, *ssm_state.shape[2:])))
            if intermediate_ssm is not None:
                tail = ssm_state.shape[2:]
                shape = (layers, intermediate_ssm.shape[1], self.draft_token_num, *tail)
                expected.append(("intermediate_ssm", intermediate_ssm, shape))
        for name, tensor, shape in expected:
            _check_tensor(name, tensor, shape, self.device)
        for name, storage in states.items():
            if name in conv_streams:
                raise ArgumentError("StatePool", "states", repr(name), "a name that no conv stream has")
            storage.check(f"states[{name!r}]", layers, slots, self.device)
        if layers != len(self.layer_ids):
            raise ShapeError("StatePool", "layers", f"{len(self.layer_ids)} layer ids", f"{layers}, as the tensors")
        self.conv_streams, self.draft_rows = conv_streams, draft_rows
        self.ssm_state, self.intermediate_ssm = ssm_state, intermediate_ssm
        self.states = states
        self.num_slots, self.rows = slots, rows
        for name in conv_streams:
            self.conv_state(name, self.layer_ids[0])  # rows against layout and width
            break

    _groups: dict[str, Tensor]
    _draft_groups: dict[str, Tensor]

    @property
    def device(self) -> torch.device:
        """Device of every tensor of the pool."""
        return self.mamba_index_mapping.device

    @property
    def request_rows(self) -> int:
        """R, rows of the engine's request pool."""
        return self.mamba_index_mapping.shape[0]

    @property
    def num_layers(self) -> int:
        """L, layers that hold state."""
        return len(self.layer_ids)

    @property
    def needs_positions(self) -> bool:
        """Whether steps and snapshots of this pool need to know computed lengths."""
        conv = self.layout == "ring" and bool(self.conv_streams)
        return conv or any(storage.positions for storage in self.states.values())

    @property
    def one_chain(self) -> bool:
        """Whether a state of this pool follows one chain of drafts only, so that trees are refused."""
        return bool(self.conv_streams) or any(storage.one_chain for storage in self.states.values())

    def layer_index(self, layer_id: int) -> int:
        """Where a layer stands in the pool's first axis.

        Raises:
            ArgumentError: no such layer.
        """
        index = self._layer_index.get(layer_id)
        if index is None:
            raise ArgumentError("StatePool", "layer_id", layer_id, f"one of {list(self.layer_ids)}")
        return index

    def state(self, name: str, layer_id: int) -> Any:
        """The state of a name in one layer, as its family's hooks take it; the same object every time.

        Raises:
            ArgumentError: no such state or layer.
        """
        found = self._family_states.get((name, layer_id))
        if found is None:
            if name not in self.states:
                raise ArgumentError("StatePool.state", "name", repr(name), f"one of {', '.join(self.states)}")
            found = self._family_states[name, layer_id] = self.states[name].layer(self.layer_index(layer_id))
        return found

    def slot_tensors(self) -> list[Tensor]:
        """Everything that belongs to slots, each [L, slots, ...]: what a clear zeroes and a copy moves."""
        ssm = [] if self.ssm_state is None else [self.ssm_state]
        return [*self.storages(), *ssm, *(t for storage in self.states.values() for t in storage.slot_tensors())]

    def conv_state(self, stream: str | tuple[str, ...], layer_id: int) -> ConvState:
        """The state of one stream in one layer, or of neighbouring streams as one; the same object every time.

        Raises:
            ArgumentError: no such stream or layer, or the streams are not neighbours in one storage.
        """
        found = self._states.get((stream, layer_id))
        if found is None:
            found = self._states[stream, layer_id] = self._make_state(stream, layer_id)
        return found

    def _make_state(self, stream: str | tuple[str, ...], layer_id: int) -> ConvState:
        index = self.layer_index(layer_id)
        names = (stream,) if isinstance(stream, str) else stream
        if not names:
            raise ArgumentError("StatePool.conv_state", "stream", "no stream", "at least one")
        for name in names:
            if name not in self.conv_streams:
                known = ", ".join(self.conv_streams)
                raise ArgumentError("StatePool.conv_state", "stream", repr(name), f"one of {known}")
        conv = merge([self.conv_streams[name][index] for name in names])
        has_drafts = names[0] in self.draft_rows
        drafts = merge([self.draft_rows[name][index] for name in names]) if has_drafts else None
        return ConvState(conv, self.layout, self.width, drafts)

    def storages(self) -> list[Tensor]:
        """Conv state as few tensors [L, slots, rows, D]: one per dtype where the pool allocated it itself."""
        return list(self._groups.values()) or list(self.conv_streams.values())

    def draft_storages(self) -> list[Tensor]:
        """Draft rows in the same grouping as `storages`; empty where the layout keeps none."""
        return list(self._draft_groups.values()) or list(self.draft_rows.values())

    def addresses(self) -> dict[str, int]:
        """Address of every tensor that a graph may hold."""
        tensors = {f"conv[{n}]": t for n, t in self.conv_streams.items()}
        tensors |= {f"draft_rows[{n}]": t for n, t in self.draft_rows.items()}
        named = {
            "ssm_state": self.ssm_state,
            "intermediate_ssm": self.intermediate_ssm,
            "mamba_index_mapping": self.mamba_index_mapping,
            "mamba_v2p_table": self.mamba_v2p_table,
        }
        tensors |= {name: t for name, t in named.items() if t is not None}
        for name, storage in self.states.items():
            tensors |= {f"states[{name}].{part}": t for part, t in storage.tensors().items()}
        return {name: t.data_ptr() for name, t in tensors.items()}


WRAPPED = tuple(name for name in inspect.signature(StatePool.wrap).parameters if name != "layers")
"""Everything that a pool is made from, its layers' ids (`layer_ids`) apart: arguments of `wrap` and, by the same names,
attributes of a pool."""


class PoolParts:
    """The pools of a model's parts, by part name. Parts share slots and the map; clear and copy reach all of them."""

    def __init__(self, parts: Mapping[str, StatePool]) -> None:
        pools = list(parts.values())
        if not pools:
            raise ArgumentError("PoolParts", "parts", "none", "at least one pool")
        first = pools[0]
        for name, pool in parts.items():
            if pool.mamba_index_mapping is not first.mamba_index_mapping or pool.num_slots != first.num_slots:
                raise ArgumentError(
                    "PoolParts", name, "a pool with its own map or slots", "one mamba_index_mapping and num_slots"
                )
        self.parts = dict(parts)

    def __iter__(self) -> Iterator[StatePool]:
        return iter(self.parts.values())

    def __getitem__(self, name: str) -> StatePool:
        return self.parts[name]


def _allocate_states(streams: Sequence[StateStream], extents: Extents) -> dict[str, StateStorage]:
    names = [stream.name for stream in streams]
    if len(set(names)) != len(names):
        raise ArgumentError("StatePool", "states", names, "each name once")
    return {stream.name: stream.allocate(extents) for stream in streams}


def _lead(conv_streams: Mapping[str, Tensor], states: Mapping[str, StateStorage]) -> tuple[int, int]:
    """L and slots, as the first conv stream or else the first state has them."""
    for tensor in conv_streams.values():
        if tensor.dim() != 4:
            break
        return tensor.shape[0], tensor.shape[1]
    for storage in states.values() if not conv_streams else ():
        first = storage.slot_tensors()[0]
        return first.shape[0], first.shape[1]
    raise ShapeError("StatePool", "conv_streams", "no 4-d tensor", "name -> [L, slots, rows, D]")


def _check_sizes(layout: Layout, width: int, num_slots: int, draft_token_num: int, track_interval: int) -> None:
    if layout not in LAYOUTS:
        raise UnsupportedError("StatePool", "layout", repr(layout), f"one of {', '.join(LAYOUTS)}")
    if width < 2:
        raise WidthError("StatePool", "width", width, "at least 2")
    if num_slots < 2:
        raise SlotError("StatePool", "num_slots", num_slots, "at least 2: slot 0 is reserved")
    if draft_token_num < 0:
        raise ArgumentError("StatePool", "draft_token_num", draft_token_num, "at least 0")
    if track_interval < 1:
        raise ArgumentError("StatePool", "track_interval", track_interval, "at least 1")


def _ring_rows(ring_rows: int | None, layout: Layout, width: int, draft_token_num: int) -> int:
    least = layout_rows(layout, width, draft_token_num)
    if ring_rows is None:
        return least
    if layout != "ring":
        raise ArgumentError("StatePool", "ring_rows", ring_rows, f"None on layout {layout}")
    if ring_rows < least:
        raise ShapeError("StatePool", "ring_rows", ring_rows, f"at least {least} = S + max(1, draft_token_num)")
    return ring_rows


def _layer_ids(layers: int | Sequence[int]) -> tuple[int, ...]:
    ids = tuple(range(layers)) if isinstance(layers, int) else tuple(layers)
    if not ids or len(set(ids)) != len(ids):
        raise ArgumentError("StatePool", "layers", list(ids), "at least one layer id, each once")
    return ids


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if tuple(tensor.shape) != shape:
        raise ShapeError("StatePool", name, tuple(tensor.shape), str(shape))
    if tensor.dtype not in STATE_DTYPES:
        raise DtypeError("StatePool", name, tensor.dtype, "float16, bfloat16, float32 or float64")
    if tensor.device != device:
        raise DeviceError("StatePool", name, tensor.device, f"{device}, as mamba_index_mapping")
