"""Builders for tests: a state pool in poisoned, guarded memory (`Rig`), requests in plain numbers (`Req`), weights, and
one call of a hook with everything that is needed to judge it (`Call`). Sizes are odd and pairwise different."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hwbackends.conformance import oracle
from hwbackends.conformance.kit import Kit, bits, places
from hwbackends.conv.layouts import Layout, layout_rows
from hwbackends.remote.client import HookError
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.metadata import MetadataBuffers, MetadataLimits, StepMetadata
from hwbackends.step.pool import StatePool

GUARD = 1
"""Sentinel slots, request rows and rows of x around every tensor; a hook must not touch them."""
STALE = 77
"""What prepared index tensors hold before a preparation."""
REQUEST_ROWS = (5, 3, 12, 1, 7, 10, 2, 9, 4, 6, 8, 11)
"""Request rows in the order they are given out: none equals the slot that a test pairs it with by habit."""
DIGITS = (1.0, 10.0, 100.0, 1000.0, 10000.0)
BITS = (1.0, 2.0, 4.0, 8.0, 16.0)


@dataclass(frozen=True)
class Req:
    """One request of a step, by physical slot.

    Attributes:
        slot: where its state lies; 0: its request row maps to slot 0 (padded); -1: its request row is negative.
        tokens: rows of x, in an extend step.
        length: tokens consumed before the step.
        initial: `has_initial_state` where it is given.
        source: slot that holds the history, where it is another one.
        track: track slot; with `track_seqlen` in an extend step.
        accept: accepted tokens of a draft extend step; negative: padded.
        accepted: tokens that the previous step kept (lazy).
    """

    slot: int
    tokens: int = 1
    length: int = 0
    initial: bool | None = None
    source: int = -1
    track: int = -1
    track_seqlen: int = -1
    accept: int = 0
    accepted: int = 1


@dataclass(frozen=True)
class Weights:
    """Taps [D, W], bias [D] or None, activation, residual."""

    taps: oracle.Array
    bias: oracle.Array | None = None
    activation: str | None = None
    residual: bool = False


@dataclass(frozen=True)
class Far:
    """Which tensor of a step lies how far apart: its name, dimension, the entry that is looked at, and elements between
    the first entry and that one. Dimensions of pool tensors count the layers."""

    name: str
    dim: int
    entry: int
    beyond: int


@dataclass(frozen=True)
class Shape:
    """Sizes of a pool. `transposed`: D is not the contiguous dimension, as in pools of [L, slots, D, rows]. `far`: what
    of it is spread over more memory than there is."""

    layout: Layout = "window"
    dtype: str = "float32"
    state_dtype: str = ""
    width: int = 4
    dims: tuple[int, ...] = (5,)
    slots: int = 11
    layers: int = 1
    drafts: int = 0
    request_rows: int = 13
    index_dtype: str = "int64"
    track_interval: int = 3
    virtual: bool = False
    ssm: bool = False
    transposed: bool = False
    extra_rows: int = 0
    step_drafts: int = 0
    map_dtype: str = "int32"
    ssm_dtype: str = "float32"
    ssm_shape: tuple[int, ...] = (3, 2)
    weight_dtype: str = ""
    far: Far | None = None

    @property
    def state(self) -> str:
        """Dtype of the state."""
        return self.state_dtype or self.dtype


@dataclass
class Call:
    """One conv call: inputs, what came out, and what had to come out.

    Attributes:
        y: [T, D] host tensor of the returned output.
        guards: rows around the output, host.
        before, after: [slots + 2, rows, D] host tensors of the stream's state, guards included.
        drafts_before, drafts_after: [R + 2, S + N, D], or None.
        elsewhere: names of other layers and streams that changed.
        want: the oracle's result.
        rows: the prepared requests.
    """

    mode: str
    y: Tensor
    guards: Tensor
    before: Tensor
    after: Tensor
    drafts_before: Tensor | None
    drafts_after: Tensor | None
    elsewhere: list[str]
    want: oracle.StepResult
    rows: list[oracle.Row]
    text: str
    dtype: str = "float32"


class Rig:
    """A pool on the kit's device, poisoned with NaN and framed by sentinel slots, and the means to run hooks on it."""

    def __init__(self, kit: Kit, shape: Shape) -> None:
        self.kit, self.shape = kit, shape
        self.names = tuple("kvam"[: len(shape.dims)])
        rows = layout_rows(shape.layout, shape.width, shape.drafts) + shape.extra_rows
        sizes = dict(zip(self.names, shape.dims, strict=True))
        self.bases = {n: self.far("state", self._poison(shape.slots, rows, dim)) for n, dim in sizes.items()}
        self.draft_bases: dict[str, Tensor] = {}
        if shape.layout == "window" and shape.drafts:
            saved = shape.width - 1 + shape.drafts
            poison = {name: self._poison(shape.request_rows, saved, dim) for name, dim in sizes.items()}
            self.draft_bases = {name: self.far("drafts", base) for name, base in poison.items()}
        self.mapping = [0] * shape.request_rows
        self.table = [0, *np.random.default_rng(5).permutation(shape.slots - 1) + 1] if shape.virtual else None
        self.pool = self._wrap(rows)
        kit.client.adopt(self.pool)
        self.facts = oracle.PoolFacts(
            shape.layout, shape.width, rows, self.mapping, self.table, shape.track_interval
        )  # fmt: skip
        self.states: Callable[[Any], Any] | None = None

    @property
    def weight_dtype(self) -> str:
        """Dtype of weights and bias."""
        return self.shape.weight_dtype or self.shape.dtype

    def _poison(self, count: int, rows: int, dim: int) -> Tensor:
        """[L, count + 2, rows, dim] of NaN on the device."""
        shape = (self.shape.layers, count + 2 * GUARD, dim, rows)
        dtype = getattr(torch, self.shape.state)
        if self.shape.transposed:
            return torch.full(shape, torch.nan, dtype=dtype).to(self.kit.device).transpose(-1, -2)
        return torch.full((*shape[:2], rows, dim), torch.nan, dtype=dtype).to(self.kit.device)

    def far(self, name: str, tensor: Tensor) -> Tensor:
        """`tensor` spread over more memory than there is, where the shape says so of this name."""
        far = self.shape.far
        return self.kit.far(tensor, far.dim, far.entry, far.beyond) if far and far.name == name else tensor

    def _wrap(self, rows: int) -> StatePool:
        shape, kit = self.shape, self.kit
        ssm = intermediate = None
        if shape.ssm:
            self.ssm_base = self.far("ssm", self._numbers(shape.layers, shape.slots + 2 * GUARD, *shape.ssm_shape))
            ssm = self.ssm_base[:, GUARD:-GUARD]
            if shape.drafts:
                steps = self._numbers(shape.layers, shape.request_rows, shape.drafts, *shape.ssm_shape)
                intermediate = self.far("intermediate", steps)
        table = kit.tensor(self.table, "int64") if self.table else None
        return StatePool.wrap(
            {name: base[:, GUARD:-GUARD] for name, base in self.bases.items()},
            width=shape.width,
            mamba_index_mapping=kit.tensor(self.mapping, shape.map_dtype),
            layout=shape.layout,
            draft_token_num=shape.drafts,
            draft_rows={name: base[:, GUARD:-GUARD] for name, base in self.draft_bases.items()} or None,
            ssm_state=ssm,
            intermediate_ssm=intermediate,
            mamba_v2p_table=table,
            track_interval=shape.track_interval,
        )

    def _numbers(self, *extents: int) -> Tensor:
        """Numbers that use every bit of the SSM state's dtype."""
        return self.kit.tensor(
            oracle.round_to(self.kit.rng.standard_normal(extents), self.shape.ssm_dtype), self.shape.ssm_dtype
        )

    # --- state ---

    def virtual(self, slot: int) -> int:
        """The value that the map or a track list holds for a physical slot."""
        return slot if self.table is None or slot <= 0 else self.table.index(slot)

    def history(self, slot: int, length: int = 0, offset: int = 0, values: Any = None, index: int = 0) -> oracle.Array:
        """Give a slot a history of small whole numbers in every stream of layer `index`; returns the first stream's.

        The rest of the slot becomes NaN. Positions below 0 keep NaN on the ring: they count as zeros.
        """
        first: oracle.Array | None = None
        for base in self.bases.values():
            rows, dim = base.shape[2:]
            low, high = (0, 2) if self.small else (1, 10)
            given = self.kit.rng.integers(low, high, (self.shape.width - 1, dim)) if values is None else values
            rows_of = oracle.window_rows(self.shape.layout, rows, self.shape.width, length, offset)
            content = np.full((rows, dim), np.nan)
            content[rows_of] = given
            if self.shape.layout == "ring":
                positions = range(length - (self.shape.width - 1), length)
                content[[row for row, p in zip(rows_of, positions, strict=True) if p < 0]] = np.nan
            base[index, GUARD + slot].copy_(self.kit.tensor(content, self.shape.state))
            if first is None:
                first = np.broadcast_to(np.asarray(given, np.float64), (self.shape.width - 1, dim))
        assert first is not None
        return first

    def histories(self, requests: Sequence[Req]) -> None:
        """A history for each live request, in every layer: at its source where it has one."""
        for layer in range(self.shape.layers):
            for req in requests:
                slot = req.source if req.source > 0 else req.slot
                if slot > 0:
                    self.history(slot, req.length, self.offset(req), None, layer)

    def offset(self, req: Req) -> int:
        """Row at which a request's history starts."""
        return req.accepted - 1 if self.shape.layout == "lazy" else 0

    def tensor(self, name: str | None = None, layer: int = 0) -> Tensor:
        """[slots + 2, rows, D] of one stream, guards included, in host memory."""
        return self.kit.host(self.bases[name or self.names[0]][layer])

    def numbers(self, name: str | None = None, layer: int = 0) -> oracle.Array:
        """[slots, rows, D] of one stream as float64."""
        return self.tensor(name, layer)[GUARD:-GUARD].double().numpy()

    def drafts(self, name: str | None = None, layer: int = 0) -> oracle.Array:
        """[R, S + N, D] of one stream as float64."""
        base = self.kit.host(self.draft_bases[name or self.names[0]][layer])
        return base[GUARD:-GUARD].double().numpy()

    def window_of(self, slot: int, length: int = 0, offset: int = 0) -> oracle.Array:
        """The history that a request of `length` tokens would read from `slot`, first stream and layer."""
        return oracle.read_history(self.numbers()[slot], self.shape.layout, self.shape.width, length, offset)

    def copy_state(self, other: Rig) -> None:
        """The bits of another rig's pool, whatever the strides."""
        for mine, theirs in ((self.bases, other.bases), (self.draft_bases, other.draft_bases)):
            for name, base in mine.items():
                base.copy_(theirs[name])

    # --- steps ---

    def batch(
        self, mode: str, requests: Sequence[Req], live: int | None = None, place: bool = True, **extra: Any
    ) -> oracle.Batch:
        """A step over `requests`; the map is set to lead to their slots.

        Args:
            live: `num_reqs`, all by default; rows behind are given as they are, and must be ignored.
            place: set the map; without it `extra` gives `req_pool_indices`.
            extra: fields of `oracle.Batch` that win.
        """
        rows = self._place(requests) if place else []
        most = self.shape.step_drafts or self.shape.drafts
        drafts = most if mode in ("target_verify", "draft_extend") else 1
        per_request = [r.tokens if mode == "extend" else drafts for r in requests]
        fields: dict[str, Any] = {
            "mode": mode, "req_pool_indices": rows, "num_reqs": len(requests) if live is None else live,
            "draft_token_num": drafts, "num_tokens": sum(per_request),
        }  # fmt: skip
        if mode == "extend":
            lengths = [r.tokens for r in requests]
            fields |= {"extend_seq_lens": lengths, "extend_prefix_lens": [max(0, r.length) for r in requests]}
            fields["num_tokens"] = sum(lengths[: fields["num_reqs"]])
            if any(r.source > 0 for r in requests):
                fields["source_indices"] = [self.virtual(r.source) for r in requests]
        else:
            fields["computed_lens"] = [r.length for r in requests]
        if any(r.initial is not None for r in requests):
            fields["has_initial_state"] = [
                r.initial if r.initial is not None else mode != "extend" or r.length > 0 for r in requests
            ]
        if mode == "draft_extend":
            fields["num_accept_tokens"] = [r.accept for r in requests]
        if any(r.track > 0 for r in requests):
            fields |= {
                "mamba_track_mask": [r.track > 0 for r in requests],
                "mamba_track_indices": [self.virtual(r.track) for r in requests],
                "mamba_track_seqlens": [r.track_seqlen for r in requests],
            }
        if self.shape.layout == "lazy":
            fields["num_accepted_tokens"] = [r.accepted for r in requests]
        return oracle.Batch(**{**fields, **extra})

    def _place(self, requests: Sequence[Req]) -> list[int]:
        """A request row for each request, none of which equals a slot by habit, and the map that leads to the slots."""
        order = REQUEST_ROWS
        if len(requests) > len(REQUEST_ROWS) or self.shape.request_rows != 13:
            order = tuple(np.random.default_rng(self.shape.request_rows).permutation(self.shape.request_rows).tolist())
        rows = []
        for number, req in enumerate(requests):
            row = order[number % len(order)] if req.slot >= 0 else -1
            if row >= 0:
                self.mapping[row] = self.virtual(req.slot) if req.slot > 0 else 0
            rows.append(row)
        self.pool.mamba_index_mapping.copy_(self.kit.tensor(self.mapping, self.shape.map_dtype))
        return rows

    def step_batch(self, batch: oracle.Batch, mix: Sequence[str] = (), step: int = 1) -> StepBatch:
        """`batch` as tensors.

        Args:
            mix: index dtypes that the batch's tensors take in turn; the shape's own by default.
            step: elements from one entry of an index tensor to the next.
        """
        dtypes = itertools.cycle(mix or (self.shape.index_dtype,))

        def strided(values: Any, dtype: str) -> Tensor:
            wide = np.full((len(values), step), STALE, values.dtype)
            wide[:, 0] = values
            return self.kit.tensor(wide.reshape(-1), dtype)[::step]

        def index(values: Sequence[int] | None) -> Tensor | None:
            return None if values is None else strided(np.asarray(values, np.int64), next(dtypes))

        def flags(values: Sequence[bool] | None) -> Tensor | None:
            return None if values is None else strided(np.asarray(values, bool), "bool")

        rows = index(batch.req_pool_indices)
        assert rows is not None
        live = batch.num_reqs_device
        return StepBatch(
            forward_mode=ForwardMode(batch.mode),
            req_pool_indices=rows,
            num_reqs=batch.num_reqs,
            num_tokens=batch.num_tokens,
            seq_lens=index(batch.seq_lens),
            computed_lens=index(batch.computed_lens),
            extend_seq_lens=index(batch.extend_seq_lens),
            extend_prefix_lens=index(batch.extend_prefix_lens),
            draft_token_num=batch.draft_token_num,
            num_accept_tokens=index(batch.num_accept_tokens),
            has_initial_state=flags(batch.has_initial_state),
            mamba_track_mask=flags(batch.mamba_track_mask),
            mamba_track_indices=index(batch.mamba_track_indices),
            mamba_track_seqlens=index(batch.mamba_track_seqlens),
            source_indices=index(batch.source_indices),
            num_accepted_tokens=index(batch.num_accepted_tokens),
            cache_indices=index(batch.cache_indices),
            num_reqs_device=None if live is None else self.kit.tensor([live], "int32"),
        )

    def metadata(self, batch: oracle.Batch) -> StepMetadata:
        """Unprepared metadata for `batch`, every tensor filled with stale values."""
        limits = MetadataLimits(len(batch.req_pool_indices) + 2, batch.num_tokens + 3, batch.draft_token_num)
        buffers = MetadataBuffers(limits, self.kit.device, getattr(torch, self.shape.index_dtype))
        tracks = batch.mamba_track_mask is not None
        view = buffers.view(
            ForwardMode(batch.mode), len(batch.req_pool_indices), batch.num_tokens, batch.draft_token_num, tracks
        )
        for tensor in view.tensors().values():  # what lies behind the step's extents too
            value = STALE if tensor.dtype != torch.bool else True
            torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).fill_(value)
        return view

    def prepare(
        self, batch: oracle.Batch, step_batch: StepBatch | None = None, out: StepMetadata | None = None
    ) -> StepMetadata:
        """Run the backend's preparation."""
        view = self.metadata(batch) if out is None else out
        hook = getattr(self.kit.hooks, PREPARE[batch.mode])
        hook(self.step_batch(batch) if step_batch is None else step_batch, self.pool, view)
        return view

    def run(
        self,
        batch: oracle.Batch,
        weights: Weights,
        x: oracle.Array | None = None,
        metadata: StepMetadata | None = None,
        name: str | None = None,
        layer: int = 0,
        tail: int = 0,
        inputs: Inputs | None = None,
        hook: Callable[..., Tensor] | None = None,
    ) -> Call:
        """Prepare (unless `metadata` is given) and run the conv hook of the batch's phase, over poisoned output.

        Args:
            x: [T, D] as float64, random small numbers by default; `tail` rows of NaN follow the step's tokens.
            inputs: how x, weight and out lie in memory.
            hook: called instead of the phase's conv hook.
        """
        name = name or self.names[0]
        dim = self.shape.dims[self.names.index(name)]
        if x is None:
            x = self.whole_numbers(batch.num_tokens, dim)
        x = np.concatenate([x, np.full((tail, dim), np.nan)])
        metadata = self.prepare(batch) if metadata is None else metadata
        lay = inputs or Inputs()
        base = lay.out_base(self, x.shape)
        out = lay.out(base, x.shape)
        state = self.pool.conv_state(name, layer)
        if self.states is not None:
            state = self.states(state)
        before = self.snapshot()
        hook = hook or getattr(self.kit.hooks, CONV[batch.mode])
        taps = lay.weight(self, weights.taps)
        bias = None if weights.bias is None else lay.bias(self, weights.bias)
        rows_of_x = lay.x(self, x)
        y = hook(
            rows_of_x, taps, bias, state, metadata, activation=weights.activation, residual=weights.residual,
            out=None if lay.no_out else out,
        )  # fmt: skip
        self._judge_result(y, rows_of_x, None if lay.no_out else out)
        after = self.snapshot()
        rows = oracle.prepare(batch, self.facts)
        key = ("state", name, layer)
        clean = np.where(np.isnan(x), 0.0, x)
        want = oracle.step(
            batch.mode, rows, clean, weights.taps, before[key][GUARD:-GUARD].double().numpy(), self.shape.layout,
            weights.bias, weights.activation, weights.residual, self.shape.dtype, bool(self.draft_bases),
        )  # fmt: skip
        draft_key = ("drafts", name, layer)
        others = [k for k in before if k not in (key, draft_key)]
        return Call(
            batch.mode, self.kit.host(y), lay.guards(self, base, x.shape), before[key], after[key],
            before.get(draft_key), after.get(draft_key),
            [f"{k}" for k in others if not torch.equal(bits(before[k]), bits(after[k]))],
            want, rows, f"{batch.mode} on {self.shape.layout}, {self.shape.dtype}, W={self.shape.width}",
            self.shape.dtype,
        )  # fmt: skip

    def _judge_result(self, y: Any, x: Tensor, out: Tensor | None) -> None:
        """The result is `out`, filled, or a new tensor of x's shape and dtype."""
        kit = self.kit
        good = isinstance(y, Tensor) and y.shape == x.shape and y.dtype == x.dtype
        got = f"{y.dtype} {list(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        if not good:
            kit.book("CS-CONV-01", False, f"the result is {got}, wanted {x.dtype} {list(x.shape)}")
            raise HookError(f"the result is {got}, wanted {x.dtype} {list(x.shape)}")
        if out is not None:
            kit.book(
                "CS-CONV-05",
                bool(torch.equal(bits(kit.host(y)), bits(kit.host(out)))),
                "the result is not what out holds",
            )

    def snapshot(self) -> dict[tuple[str, str, int], Tensor]:
        """A host copy of every tensor of the pool that a hook may write, guards included."""
        layers = range(self.shape.layers)
        found = {("state", n, i): self.kit.host(base[i]) for n, base in self.bases.items() for i in layers}
        found |= {("drafts", n, i): self.kit.host(base[i]) for n, base in self.draft_bases.items() for i in layers}
        if self.shape.ssm:
            found |= {("ssm", "", i): self.kit.host(self.ssm_base[i]) for i in layers}
        return found

    # --- numbers ---

    def whole_numbers(self, tokens: int, dim: int) -> oracle.Array:
        """[tokens, dim] of 0 and 1 in 16 bits, of 1 to 9 otherwise: exact sums with the taps of `taps`."""
        low, high = (0, 2) if self.small else (1, 10)
        return self.kit.rng.integers(low, high, (tokens, dim)).astype(np.float64)

    @property
    def small(self) -> bool:
        """Whether exact sums need bit taps."""
        return "16" in self.shape.dtype or "16" in self.shape.state

    def taps(self, dim: int | None = None) -> oracle.Array:
        """[D, W] digit taps (bit taps in 16 bits), rotated from channel to channel so that no two neighbours agree."""
        taps = np.asarray((BITS if self.small else DIGITS)[: self.shape.width])
        count = self.shape.dims[0] if dim is None else dim
        return np.stack([np.roll(taps, channel % self.shape.width) for channel in range(count)])


@dataclass
class Inputs:
    """How x, the weights and the output lie in memory. The default is plain rows with sentinel rows around."""

    x_columns: tuple[int, int] = (0, 0)
    out_columns: tuple[int, int] = (0, 0)
    weight_transposed: bool = False
    weight_step: int = 1
    bias_step: int = 1
    no_out: bool = False
    keep: list[Tensor] = field(default_factory=list)

    def x(self, rig: Rig, values: oracle.Array) -> Tensor:
        """[T, D]: columns of a wider tensor of NaN, as a slice of a fused projection."""
        left, right = self.x_columns
        wide = np.full((values.shape[0] + 2 * GUARD, left + values.shape[1] + right), np.nan)
        wide[GUARD:-GUARD, left : left + values.shape[1]] = values
        base = rig.far("x", rig.kit.tensor(wide, rig.shape.dtype))
        return base[GUARD:-GUARD, left : left + values.shape[1]]

    def weight(self, rig: Rig, taps: oracle.Array) -> Tensor:
        """[D, W], rows of W, or the transpose of a contiguous [W, D], or every n-th column of a wider tensor."""
        if self.weight_transposed:
            return rig.kit.tensor(np.ascontiguousarray(taps.T), rig.weight_dtype).t()
        if self.weight_step == 1:
            return rig.far("weight", rig.kit.tensor(taps, rig.weight_dtype))
        wide = np.full((taps.shape[0], taps.shape[1] * self.weight_step), np.nan)
        wide[:, :: self.weight_step] = taps
        return rig.kit.tensor(wide, rig.weight_dtype)[:, :: self.weight_step]

    def bias(self, rig: Rig, values: oracle.Array) -> Tensor:
        """[D], or every n-th element of a longer tensor."""
        if self.bias_step == 1:
            return rig.far("bias", rig.kit.tensor(values, rig.weight_dtype))
        wide = np.full(len(values) * self.bias_step, np.nan)
        wide[:: self.bias_step] = values
        return rig.kit.tensor(wide, rig.weight_dtype)[:: self.bias_step]

    def out_base(self, rig: Rig, shape: tuple[int, ...]) -> Tensor:
        """The memory around the output, NaN."""
        left, right = self.out_columns
        extents = (shape[0] + 2 * GUARD, left + shape[1] + right)
        return rig.far("out", torch.full(extents, torch.nan, dtype=getattr(torch, rig.shape.dtype)))

    def out(self, base: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The output inside its memory."""
        return base[GUARD:-GUARD, self.out_columns[0] : self.out_columns[0] + shape[1]]

    def guards(self, rig: Rig, base: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A host copy of the memory with the output itself blanked: all NaN if nothing else was written."""
        copy = rig.kit.host(base)
        self.out(copy, shape).fill_(torch.nan)
        return copy


PREPARE = {
    "decode": "prepare_decode_metadata", "idle": "prepare_decode_metadata", "extend": "prepare_extend_metadata",
    "target_verify": "prepare_target_verify_metadata", "draft_extend": "prepare_draft_extend_metadata",
}  # fmt: skip
CONV = {
    "decode": "conv_decode", "idle": "conv_decode", "extend": "conv_extend", "target_verify": "conv_target_verify",
    "draft_extend": "conv_draft_extend",
}  # fmt: skip
MODES = ("decode", "extend", "target_verify", "draft_extend")
LAYOUTS: tuple[Layout, ...] = ("window", "ring", "lazy")


def shape_of(kit: Kit, **sizes: Any) -> Shape:
    """A shape at the running test's point of the claims; `sizes` win."""
    point = kit.point
    mapped = "int32" if "int32" in kit.claims.index_dtypes else "int64"
    given = {
        "layout": point.layout, "dtype": point.dtype, "width": point.width, "index_dtype": point.index,
        "map_dtype": mapped, **sizes,
    }  # fmt: skip
    return Shape(**given)


def drafts_of(mode: str) -> int:
    """Tokens per request that a phase has by default."""
    return 3 if mode in ("target_verify", "draft_extend") else 0


def rig_for(kit: Kit, mode: str, needs: dict[str, Any] | None = None, **sizes: Any) -> Rig:
    """A rig for one phase, if the backend claims what it takes."""
    shape = shape_of(kit, **{"drafts": drafts_of(mode), **sizes})
    kit.need(
        hooks=(PREPARE[mode], CONV[mode]), layout=shape.layout, dtype=shape.dtype, state_dtype=shape.state,
        width=shape.width, index_dtype=shape.index_dtype, **(needs or {}),
    )  # fmt: skip
    return Rig(kit, shape)


def prepare_rig(kit: Kit, mode: str, **sizes: Any) -> Rig:
    """A rig for the preparation of one phase."""
    shape = shape_of(kit, **{"drafts": drafts_of(mode), **sizes})
    kit.need(hooks=(PREPARE[mode],), layout=shape.layout, dtype=shape.dtype, index_dtype=shape.index_dtype)
    return Rig(kit, shape)


# --- judging ---------------------------------------------------------------------------------------------------------


def judge_outputs(kit: Kit, call: Call, live: str = "", padded: str = "", exact: bool = True) -> None:
    """Outputs of live rows against the oracle (clause `live`), and of padded rows, with what lies around (`padded`)."""
    mask = np.zeros(call.y.shape[0], bool)
    for row in call.rows:
        if not row.padded:
            mask[row.start : row.start + row.tokens] = True
    got = call.y.double().numpy()
    if live and exact:
        kit.equal(live, got[mask], oracle.round_to(call.want.y[mask], call.dtype), f"{call.text}: outputs")
    elif live:
        kit.within(live, got[mask], call.want.y[mask], call.want.bound[mask], call.dtype, f"{call.text}: outputs")
    if padded:
        if not mask.all():
            kit.equal(padded, got[~mask], np.zeros_like(got[~mask]), f"{call.text}: padded outputs")
        kit.check(padded, bool(call.guards.isnan().all()), f"{call.text}: memory around the output was written")


def judge_state(
    kit: Kit, call: Call, rig: Rig, own: str = "", others: str = "", track: str = "", source: str = "",
    drafts: str = "", padded: str = "",
) -> None:  # fmt: skip
    """State after the call, by whose slot it is: the requests' own, track slots, sources, reserved and guard slots
    (`padded`), everybody else's (`others`), and the draft rows."""
    wrong, want = _differences(call.before, call.after, call.want.state, rig.shape.state)
    got = call.after.double().numpy()
    mine = {row.slot for row in call.rows if not row.padded}
    tracked = {row.track_slot for row in call.rows if row.track_slot > 0}
    sources = {row.source for row in call.rows if row.source > 0} - mine
    reserved = {0, rig.shape.slots - 1, -1, rig.shape.slots} - mine - tracked - sources
    groups = [(mine - tracked, own), (tracked, track), (sources, source), (reserved, padded)]
    named = mine | tracked | sources | (reserved if padded else set())
    groups.append(({slot - GUARD for slot in range(call.before.shape[0])} - named, others))
    for slots, clause in groups:
        if clause and slots:
            where = sorted(slot + GUARD for slot in slots)
            text = _text(wrong, got, want, where) if wrong[where].any() else ""
            kit.check(clause, not wrong[where].any(), f"{call.text}: state (slot, row, channel) {text}")
    if others:
        kit.check(others, not call.elsewhere, f"{call.text}: other tensors changed: {', '.join(call.elsewhere)}")
    if drafts and call.drafts_before is not None and call.drafts_after is not None:
        bad, hope = _differences(call.drafts_before, call.drafts_after, call.want.drafts, rig.shape.state)
        found = places(bad, call.drafts_after.double().numpy(), hope) if bad.any() else ""
        kit.check(drafts, not bad.any(), f"{call.text}: draft rows (guarded request row, row, channel) {found}")


def judge_effect(
    kit: Kit, clause: str, before: Tensor, after: Tensor, effect: oracle.Effect, dtype: str, what: str
) -> bool:
    """A guarded state tensor after a hook that is no conv: all of it booked on one clause."""
    wrong, want = _differences(before, after, effect, dtype)
    text = places(wrong, after.double().numpy(), want) if wrong.any() else ""
    return kit.check(clause, not wrong.any(), f"{what}: (guarded slot, row, channel) {text}")


def _differences(before: Tensor, after: Tensor, effect: oracle.Effect, dtype: str) -> tuple[Any, Any]:
    """[slots + 2, rows, D] where `after` is not as it must be, and what it must be."""
    changed = (bits(before) != bits(after)).numpy()
    got, want = after.double().numpy(), before.double().numpy().copy()
    for slot, row in effect.free:
        changed[slot + GUARD, row] = False
    for (slot, row), value in effect.writes.items():
        want[slot + GUARD, row] = oracle.round_to(value, dtype)
        mine = got[slot + GUARD, row]
        hope = want[slot + GUARD, row]
        changed[slot + GUARD, row] = (mine != hope) & ~(np.isnan(mine) & np.isnan(hope))
    return changed, want


def _text(wrong: Any, got: Any, want: Any, where: Sequence[int]) -> str:
    only = np.zeros_like(wrong)
    only[list(where)] = wrong[list(where)]
    return places(only, got, want, first=-GUARD)
