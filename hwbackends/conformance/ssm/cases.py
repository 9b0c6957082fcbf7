"""Builders for tests of SSM hooks: a pool of SSM states in poisoned, guarded memory (`Rig`), requests with tokens of
whole or of random numbers (`Request`), one step through preparation and hook (`Step`), and what is judged of it.

With whole numbers every product, sum and gate is exact: gates are 0 or 1, betas 0 or 1, keys name one column. States
and outputs are then compared with `==`, in any order of summation, on any hardware, and what the ring implies at a
position can be computed from its rows without a rounding."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hwbackends.conformance import oracle as plain
from hwbackends.conformance.cases import GUARD, PREPARE, REQUEST_ROWS, STALE
from hwbackends.conformance.kit import Kit, bits
from hwbackends.conformance.marks import over
from hwbackends.conformance.ssm import oracle
from hwbackends.conformance.ssm.oracle import Array, Rules, Trail
from hwbackends.contract.claims import Claims
from hwbackends.remote.client import HookError
from hwbackends.ssm.layouts import LENS_ROWS, lens_tiles
from hwbackends.ssm.state import SSMState, SSMStorage
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.metadata import MetadataBuffers, MetadataLimits, StepMetadata
from hwbackends.step.pool import StatePool

Test = TypeVar("Test", bound=Callable[..., None])
HOOK = {
    "decode": "ssm_decode", "idle": "ssm_decode", "extend": "ssm_extend", "target_verify": "ssm_target_verify",
    "draft_extend": "ssm_draft_extend",
}  # fmt: skip
MODES = ("decode", "extend", "target_verify", "draft_extend")
DTYPES = ("float16", "bfloat16", "float32")
FAR_LENGTH = 1 << 20
"""What `state_lens` holds where nobody has written: a length that would hide every token."""
INTERVAL = 3
"""Tokens between snapshots."""
KEEP, FORGET = -200.0, 200.0
"""Gate inputs behind which a decay is exactly 1 and exactly 0 in float32."""


def states(claims: Claims, seed: int, layouts: Sequence[str] = ("ring", "intermediate")) -> list[tuple[str, str]]:
    """Every claimed kind on every claimed layout, both changing from one to the next; one of each where nothing is
    claimed, so that a test can say so."""
    held, kinds = [layout for layout in layouts if layout in claims.ssm_layouts], claims.ssm_kinds
    if not held or not kinds:
        return [("gdn", layouts[0])]
    turns = [(i, turn) for turn in range(len(held)) for i in range(len(kinds))]
    return [(kinds[i], held[(i + turn) % len(held)]) for i, turn in turns]


def on_ring(claims: Claims, seed: int) -> list[tuple[str, str]]:
    """Every claimed kind on a ring."""
    return states(claims, seed, ("ring",))


def on_intermediate(claims: Claims, seed: int) -> list[tuple[str, str]]:
    """Every claimed kind with intermediate states."""
    return states(claims, seed, ("intermediate",))


def over_ssm(*dimensions: str, quick: int = 1) -> Callable[[Test], Test]:
    """`over`, with the activation dtypes that SSM hooks take."""
    return over(*dimensions, quick=quick, dtype=DTYPES)


@dataclass(frozen=True)
class Numbers:
    """Where weights and tokens come from: whole numbers or random ones that the dtypes hold. Drawn once per run."""

    kind: str
    dtype: str
    state_dtype: str
    heads: tuple[int, int, int, int]
    whole: bool
    options: tuple[tuple[str, Any], ...]

    def rules(self, seed: int) -> Rules:
        """Weights and options."""
        _, many, width, _ = self.heads
        rng, wide = np.random.default_rng((seed, 1)), (many, width) if self.kind == "kda" else (many,)
        if self.whole:
            even = self.kind != "mamba2"
            rates = np.zeros(many) if even else np.where(np.arange(many) % 4 == 2, 3.0, KEEP)
            bias = None if even else 32.0 * (np.arange(many) % 2)
            skip = None if even else 1.0 + np.arange(many) % 3
            rules = Rules(self.kind, rates, bias, skip, scale=1.0 if even else None)
        else:
            rates, bias = plain.round_to(rng.random(many), "float32"), plain.round_to(rng.random(wide), "float32")
            skip = plain.round_to(rng.standard_normal(many), "float32") if self.kind == "mamba2" else None
            rules = Rules(self.kind, rates, bias, skip, l2norm=self.kind != "mamba2")
        return replace(rules, **dict(self.options))

    def tokens(self, rng: np.random.Generator, count: int, l2norm: bool) -> dict[str, Array]:
        """Tokens of one request, as float64 that the activation dtype holds."""
        few, many, width, rows = self.heads
        wide = (many, width) if self.kind == "kda" else (many,)
        made = _whole(self.kind, rng, count, *self.heads) if self.whole else {
            "q": rng.standard_normal((count, few, width)), "k": rng.standard_normal((count, few, width)),
            "v": rng.standard_normal((count, many, rows)), "a": 2 * rng.standard_normal((count, *wide)),
            "b": rng.standard_normal((count, many)),
        }  # fmt: skip
        if not self.whole and not l2norm and self.kind != "mamba2":
            made["k"] /= width**0.5  # a state that its own keys do not blow up
        if self.kind == "mamba2":
            del made["b"]
        return {name: plain.round_to(value, self.dtype) for name, value in made.items()}

    def start(self, rng: np.random.Generator) -> Array:
        """A state that the state's dtype holds."""
        _, many, width, rows = self.heads
        if not self.whole:
            return plain.round_to(rng.standard_normal((many, rows, width)), self.state_dtype)
        step = 32 if self.kind == "mamba2" else 1
        return step * rng.integers(0, 4, (many, rows, width)).astype(np.float64)


@functools.lru_cache(maxsize=512)
def _trail(numbers: Numbers, base_seed: int, number: int, seed: int, zeros: bool, count: int) -> Any:
    """A request's tokens and what they do to its state."""
    rng, rules = np.random.default_rng((base_seed, seed, number)), numbers.rules(base_seed)
    tokens, start = numbers.tokens(rng, count, rules.l2norm), numbers.start(rng)
    trail = oracle.run(rules, np.zeros_like(start) if zeros else start, tokens, numbers.state_dtype, not numbers.whole)
    return tokens, trail


@dataclass(frozen=True)
class Shape:
    """Sizes of a pool of SSM states. `heads`: H, HV, K, V. `slack`: elements that lie between slots and between request
    rows. `stale`: what memory holds that nobody has written, "nan" or "numbers"."""

    kind: str
    layout: str
    dtype: str = "float32"
    state_dtype: str = "float32"
    heads: tuple[int, int, int, int] = (2, 4, 12, 11)
    drafts: int = 3
    ring_rows: int = 8
    ring_dtype: str = "float32"
    slots: int = 9
    request_rows: int = 13
    layers: int = 1
    names: tuple[str, ...] = ("s",)
    index_dtype: str = "int64"
    virtual: bool = False
    slack: int = 0
    stale: str = "nan"
    whole: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    far: tuple[str, int, int] | None = None

    @property
    def numbers(self) -> Numbers:
        """What decides over numbers."""
        named = tuple(sorted(self.options.items()))
        dtypes = ("float32", "float32") if self.whole else (self.dtype, self.state_dtype)
        return Numbers(self.kind, *dtypes, self.heads, self.whole, named)


class Request:
    """One request: row, slot, position, tokens to come in each layer, and what they do to its state in each.

    Attributes:
        base: the position at which its trail begins.
        trails: per (state name, layer), the oracle's states from `base` on.
    """

    def __init__(self, rig: Rig, row: int, slot: int, base: int, seed: int, zeros: bool, count: int = 24) -> None:
        self.row, self.slot, self.position, self.base = row, slot, base, base
        self.inputs: dict[tuple[str, int], dict[str, Array]] = {}
        self.trails: dict[tuple[str, int], Trail] = {}
        for number, key in enumerate(rig.keys):
            made = _trail(rig.shape.numbers, rig.kit.base_seed, number, seed, zeros or not base, count)
            self.inputs[key], self.trails[key] = made

    def state(self, key: tuple[str, int], position: int) -> Array:
        """S(position) in [HV, V, K]."""
        return self.trails[key].states[position - self.base]

    def tokens(self, key: tuple[str, int], start: int, count: int) -> dict[str, Array]:
        """Its tokens at positions `start` and on."""
        at = slice(start - self.base, start - self.base + count)
        return {name: value[at] for name, value in self.inputs[key].items()}


@dataclass
class Live:
    """One row of a step: a request (None: padded), how many tokens, accepted, where it is read and tracked."""

    request: Request | None
    tokens: int = 1
    accept: int = 0
    initial: bool | None = None
    source: int = -1
    track: int = -1
    taken: int = -1
    slot0: bool = False
    start: int = 0

    @property
    def runs(self) -> bool:
        """Whether the hook has anything to do for it."""
        return self.request is not None and self.accept >= 0


@dataclass
class Step:
    """One hook call in one layer: rows, outputs by host, the memory around them, state before and after."""

    mode: str
    rows: list[Live]
    key: tuple[str, int]
    y: Tensor
    guards: Tensor
    before: dict[tuple[str, ...], Tensor]
    after: dict[tuple[str, ...], Tensor]
    text: str


def _taken(mode: str, row: Live) -> int:
    """The tokens of its step behind which a row's snapshot is taken; negative: none."""
    if row.request is None or row.track <= 0:
        return -1
    before = row.request.position
    if mode == "decode":
        return 1
    if mode == "extend":
        return row.tokens // INTERVAL * INTERVAL
    after = before + row.accept
    return after // INTERVAL * INTERVAL - before if before // INTERVAL != after // INTERVAL else -1


class Rig:
    """A pool of SSM states on the kit's device, poisoned and framed by sentinel slots and request rows."""

    def __init__(self, kit: Kit, shape: Shape) -> None:
        self.kit, self.shape = kit, shape
        _, many, width, rows = shape.heads
        self.extents = (many, rows, width)
        self.keys = [(name, layer) for name in shape.names for layer in range(shape.layers)]
        self.rules = shape.numbers.rules(kit.base_seed)
        self.mapping = [0] * shape.request_rows
        self.table = [0, *np.random.default_rng(5).permutation(shape.slots - 1) + 1] if shape.virtual else None
        self.bases: dict[str, dict[str, Tensor]] = {name: self._allocate() for name in shape.names}
        self.pool = self._wrap()
        kit.client.adopt(self.pool)
        self.weights = self._weights()

    # --- memory ---

    def _allocate(self) -> dict[str, Tensor]:
        """Every tensor of one state with its guards, [L, slots or rows, ...]."""
        shape = self.shape
        (few, many, width, rows), slots = shape.heads, shape.slots + 2 * GUARD
        held = shape.request_rows + 2 * GUARD
        found = {"tensor": self._poison("tensor", slots, many, rows, width, dtype=shape.state_dtype)}
        if shape.layout == "ring":
            decay = (many, width) if shape.kind == "kda" else (many,)
            count = shape.ring_rows
            found["ring_k"] = self._poison("ring_k", held, count, few, width, dtype=shape.ring_dtype)
            found["ring_u"] = self._poison("ring_u", held, count, many, rows)
            found["ring_d"] = self._poison("ring_d", held, count, *decay)
            found["state_lens"] = self._poison("state_lens", slots, many, lens_tiles(rows), dtype="int32")
        elif shape.drafts:
            extents = (held, shape.drafts, many, rows, width)
            found["intermediate"] = self._poison("intermediate", *extents, dtype=shape.state_dtype)
        return found

    def _poison(self, name: str, count: int, *extents: int, dtype: str = "float32") -> Tensor:
        """[L, count, *extents] of NaN, or of what `stale` says."""
        shape, slack = self.shape, self.shape.slack
        made = np.full((shape.layers, count, int(np.prod(extents)) + slack), np.nan)
        if shape.stale == "numbers":
            made[...] = self.kit.rng.integers(-9, 10, made.shape)
        if dtype == "int32":
            made[...] = FAR_LENGTH
        wide = self.kit.tensor(made, dtype)
        found: Tensor = wide[..., : wide.shape[-1] - slack].unflatten(-1, extents)  # type: ignore[no-untyped-call]
        if shape.far and shape.far[0] == name:
            return self.kit.far(found, 1, GUARD + shape.far[1], shape.far[2])
        return found

    def _wrap(self) -> StatePool:
        shape, kit = self.shape, self.kit
        states = {}
        for name, bases in self.bases.items():
            held = {part: base[:, GUARD:-GUARD] for part, base in bases.items()}
            tensor = held.pop("tensor")
            kind: Any = shape.kind
            layout: Any = shape.layout
            states[name] = SSMStorage(tensor, kind, layout, shape.heads[0], shape.drafts, **held)
        mapped = "int32" if "int32" in kit.claims.index_dtypes else "int64"
        return StatePool.wrap(
            {},
            states=states,
            mamba_index_mapping=kit.tensor(self.mapping, mapped),
            draft_token_num=shape.drafts,
            mamba_v2p_table=kit.tensor(self.table, "int64") if self.table else None,
            track_interval=INTERVAL,
        )

    def _weights(self) -> dict[str, Tensor | None]:
        rules, kit = self.rules, self.kit
        given = {"A_log": rules.A_log, "dt_bias": rules.dt_bias, "D": rules.D}
        return {name: None if v is None else kit.tensor(v, "float32") for name, v in given.items()}

    def snapshot(self) -> dict[tuple[str, ...], Tensor]:
        """A host copy of every tensor of every state and layer, guards included, by (state, layer, tensor)."""
        return {
            (name, str(layer), part): self.kit.host(base[layer])
            for name, bases in self.bases.items()
            for part, base in bases.items()
            for layer in range(self.shape.layers)
        }

    def copy_from(self, other: Rig) -> None:
        """The bits, the map and the requests' slots of another rig, whatever the strides and the ring's size are."""
        for name, bases in self.bases.items():
            for part, base in bases.items():
                base.copy_(other.bases[name][part])
        self.mapping[:] = other.mapping
        self.pool.mamba_index_mapping.copy_(other.pool.mamba_index_mapping)

    # --- requests ---

    def virtual(self, slot: int) -> int:
        """The value that the map or a track list holds for a physical slot."""
        return slot if self.table is None or slot <= 0 else self.table.index(slot)

    def request(self, slot: int, length: int = 0, pending: int = 0, seed: int = 0, row: int | None = None,
                fresh: bool = False) -> Request:  # fmt: skip
        """A request whose slot holds S(length), on a ring with `pending` of its last tokens in ring rows. A fresh one,
        and on a ring one of length 0, has nothing anywhere. Its row is one that no slot number stands for by habit."""
        row = REQUEST_ROWS[(slot - 1) % len(REQUEST_ROWS)] if row is None else row
        self.mapping[row] = self.virtual(slot)
        self.pool.mamba_index_mapping[row] = self.mapping[row]
        pending = pending if self.shape.layout == "ring" and not fresh else 0
        made = Request(self, row, slot, max(0, length - pending), seed or 100 + slot, fresh)
        made.position = length
        if not fresh and (length or self.shape.layout != "ring"):
            self.store(made, made.base, pending)
        return made

    def store(self, request: Request, checkpoint: int, pending: int, slot: int | None = None) -> None:
        """Lay S(checkpoint) into the slot and the next tokens' factors into the ring, in every state and layer."""
        place = GUARD + (request.slot if slot is None else slot)
        for name, layer in self.keys:
            bases = self.bases[name]
            state = request.state((name, layer), checkpoint)
            bases["tensor"][layer, place] = self.kit.tensor(state, self.shape.state_dtype)
            if self.shape.layout != "ring":
                continue
            bases["state_lens"][layer, place] = checkpoint
            for position in range(checkpoint, checkpoint + pending):
                d, k, u = request.trails[name, layer].factors[position - request.base]
                at = (layer, GUARD + request.row, position % self.shape.ring_rows)
                bases["ring_k"][at] = self.kit.tensor(k, self.shape.ring_dtype)
                bases["ring_u"][at] = self.kit.tensor(u, "float32")
                bases["ring_d"][at] = self.kit.tensor(d if self.shape.kind == "kda" else d[:, 0], "float32")

    # --- steps ---

    def batch(self, mode: str, rows: Sequence[Live], **extra: Any) -> StepBatch:
        """A step as tensors; slot 0 is reached through a request row that maps to it."""
        kit, index, drafts = self.kit, self.shape.index_dtype, self.per_request(mode)
        spare = next(row for row in range(self.shape.request_rows) if not self.mapping[row])
        requests = [row.request.row if row.request else (spare if row.slot0 else -1) for row in rows]
        lengths = [row.tokens if mode == "extend" else drafts for row in rows]
        at = 0
        for row, length in zip(rows, lengths, strict=True):
            row.start, at = at, at + length
        positions = [row.request.position if row.request else 0 for row in rows]

        def ints(values: Sequence[int]) -> Tensor:
            return kit.tensor(np.asarray(values, np.int64), index)

        given: dict[str, Any] = {"draft_token_num": drafts if mode in ("target_verify", "draft_extend") else 1}
        if mode == "extend":
            given |= {"extend_seq_lens": ints(lengths), "extend_prefix_lens": ints(positions)}
        else:
            given["computed_lens"] = ints(positions)
        if any(row.initial is not None for row in rows):
            flags = [row.initial if row.initial is not None else mode != "extend" or p > 0
                     for row, p in zip(rows, positions, strict=True)]  # fmt: skip
            given["has_initial_state"] = kit.tensor(flags, "bool")
        if any(row.source > 0 for row in rows):
            given["source_indices"] = ints([self.virtual(row.source) for row in rows])
        if mode == "draft_extend":
            given["num_accept_tokens"] = ints([row.accept if row.request else -1 for row in rows])
        if any(row.track > 0 for row in rows):
            for row in rows:
                row.taken = _taken(mode, row)
            given["mamba_track_mask"] = kit.tensor([row.track > 0 for row in rows], "bool")
            given["mamba_track_indices"] = ints([self.virtual(row.track) for row in rows])
            seen = [p + row.tokens if row.track > 0 else -1 for row, p in zip(rows, positions, strict=True)]
            given["mamba_track_seqlens"] = ints(seen)
        return StepBatch(ForwardMode(mode), ints(requests), len(rows), sum(lengths), **{**given, **extra})

    def per_request(self, mode: str) -> int:
        """Tokens of each request in a step of a phase that is no extend."""
        return self.shape.drafts if mode in ("target_verify", "draft_extend") else 1

    def prepare(self, mode: str, rows: Sequence[Live], **extra: Any) -> StepMetadata:
        """Stale metadata, prepared by the backend."""
        batch = self.batch(mode, rows, **extra)
        out = self.stale(batch, any(row.track > 0 for row in rows))
        getattr(self.kit.hooks, PREPARE[mode])(batch, self.pool, out)
        return out

    def stale(self, batch: StepBatch, tracks: bool = False) -> StepMetadata:
        """Metadata of a step's extents over stale buffers."""
        count, tokens = len(batch.req_pool_indices), batch.num_tokens
        limits = MetadataLimits(count + 2, tokens + 3, batch.draft_token_num)
        buffers = MetadataBuffers(limits, "cpu", getattr(torch, self.shape.index_dtype))
        out = buffers.view(batch.forward_mode, count, tokens, batch.draft_token_num, tracks)
        for tensor in out.tensors().values():
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            whole.fill_(STALE if tensor.dtype != torch.bool else True)
        return out

    def tokens(self, mode: str, rows: Sequence[Live], key: tuple[str, int], tail: int = 0) -> dict[str, Tensor]:
        """q, k, v, a, b of a step: NaN for padded rows and behind the last one."""
        per_request = self.per_request(mode)
        few, many, width, dim = self.shape.heads
        wide = (many, width) if self.shape.kind == "kda" else (many,)
        extents = {"q": (few, width), "k": (few, width), "v": (many, dim), "a": wide, "b": (many,)}
        if self.shape.kind == "mamba2":
            del extents["b"]
        found = {}
        for name, extent in extents.items():
            parts = []
            for row in rows:
                count = row.tokens if mode == "extend" else per_request
                held = row.request.tokens(key, row.request.position, count)[name] if row.request else np.zeros((0,))
                parts.append(held if row.request else np.full((count, *extent), np.nan))
            parts.append(np.full((tail, *extent), np.nan))
            found[name] = self.kit.tensor(np.concatenate(parts).reshape(-1, *extent), self.shape.dtype)
        return {"b": None, **found}  # type: ignore[dict-item]

    def state(self, key: tuple[str, int]) -> SSMState:
        """The state of a name and layer, as hooks take it."""
        found: SSMState = self.pool.state(*key)
        return found

    def arguments(self, mode: str, given: Mapping[str, Any], key: tuple[str, int], metadata: StepMetadata,
                  **more: Any) -> dict[str, Any]:  # fmt: skip
        """Everything that a hook takes."""
        held = {"state": self.state(key), "metadata": metadata}
        return {**given, **self.weights, **held, **self.rules.options, **more}

    def run(
        self,
        mode: str,
        rows: Sequence[Live],
        key: tuple[str, int] | None = None,
        metadata: StepMetadata | None = None,
        tail: int = 0,
        no_out: bool = False,
        lay: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
        **options: Any,
    ) -> Step:
        """Prepare (unless `metadata` is given) and run the hook of a phase, over poisoned output; `lay` lays the inputs
        into memory otherwise."""
        key = key or self.keys[0]
        metadata = self.prepare(mode, rows) if metadata is None else metadata
        given = self.tokens(mode, rows, key, tail)
        given = lay(given) if lay else given
        v = given["v"]
        base = torch.full((v.shape[0] + 2 * GUARD, *v.shape[1:]), torch.nan, dtype=v.dtype)
        out = None if no_out else base[GUARD:-GUARD]
        before = self.snapshot()
        hook = getattr(self.kit.hooks, HOOK[mode])
        y = hook(**self.arguments(mode, given, key, metadata, out=out, **options))
        if not isinstance(y, Tensor) or y.shape != v.shape or y.dtype != v.dtype:
            raise HookError(f"the result is no tensor {v.dtype} {list(v.shape)}")
        if out is not None and not torch.equal(bits(self.kit.host(y)), bits(self.kit.host(out))):
            raise HookError("the result is not what out holds")
        guards = self.kit.host(base)
        guards[GUARD:-GUARD] = torch.nan
        shape = self.shape
        text = f"{HOOK[mode]}, {shape.kind} on {shape.layout}, {shape.dtype} over {shape.state_dtype}"
        return Step(mode, list(rows), key, self.kit.host(y), guards, before, self.snapshot(), text)

    def advance(self, rows: Sequence[Live], counts: Sequence[int]) -> None:
        """The engine's lengths behind a step."""
        for row, count in zip(rows, counts, strict=True):
            if row.request is not None:
                row.request.position += count

    # --- what a state is worth ---

    def implied(self, held: Mapping[tuple[str, ...], Tensor], key: tuple[str, int], request: Request, position: int,
                slot: int | None = None) -> Array:  # fmt: skip
        """S(position) of a request, from the checkpoint and the ring as they are: exact for whole numbers."""
        name, layer = key[0], str(key[1])
        place = GUARD + (request.slot if slot is None else slot)
        found = held[name, layer, "tensor"][place].double().numpy().copy()
        if self.shape.layout != "ring":
            return found
        held_of = request.row + GUARD
        parts = [held[name, layer, part][held_of].double().numpy() for part in ("ring_d", "ring_k", "ring_u")]
        share = len(found) // self.shape.heads[0]
        lens = np.repeat(held[name, layer, "state_lens"][place].numpy(), LENS_ROWS, 1)[:, : found.shape[1]]
        for p in range(max(int(lens.min()), position - self.shape.ring_rows), position):
            d, k, u = (part[p % self.shape.ring_rows] for part in parts)
            wide = np.repeat(k, share, 0)[:, None, :]
            with np.errstate(invalid="ignore"):
                behind = d.reshape(len(found), 1, -1) * found + u[:, :, None] * wide
            found = np.where((lens <= p)[:, :, None], behind, found)
        return found


def _whole(kind: str, rng: np.random.Generator, count: int, few: int, many: int, width: int, rows: int) -> Any:
    """Tokens whose gates are 0 or 1, whose keys name one column and whose values are small whole numbers."""
    keys = np.eye(width)[rng.integers(0, width, (count, few))]
    wide = (count, many, width) if kind == "kda" else (count, many)
    gates = np.where(rng.random(wide) < 0.85, KEEP, FORGET)
    if kind == "mamba2":
        gates = 32.0 * rng.integers(1, 3, wide)
    return {
        "q": rng.integers(0, 2, (count, few, width)).astype(np.float64), "k": keys,
        "v": rng.integers(0, 2 if kind == "mamba2" else 4, (count, many, rows)).astype(np.float64), "a": gates,
        "b": np.where(rng.random((count, many)) < 0.8, FORGET, KEEP),
    }  # fmt: skip


def rig_for(kit: Kit, kind: str, layout: str, mode: str = "", needs: dict[str, Any] | None = None, **sizes: Any) -> Rig:
    """A rig at the test's point of the claims, if the backend claims what it takes; the state's dtype turns from test
    to test."""
    hooks = [HOOK[mode], PREPARE[mode]] if mode else ["materialize_slots"]
    dtype = kit.point.dtype
    turn = zlib.crc32(f"{kit.test_id}{kind}".encode()) % len(DTYPES)
    held = [name for name in DTYPES if kit.claims.mixed_dtypes and name in kit.claims.dtypes] or [dtype]
    given = {"dtype": dtype, "state_dtype": held[turn % len(held)], "index_dtype": kit.point.index, **sizes}
    kit.need(hooks=tuple(hooks), ssm_kind=kind, ssm_layout=layout, dtype=given["dtype"],
             state_dtype=given["state_dtype"], index_dtype=given["index_dtype"], **(needs or {}))  # fmt: skip
    return Rig(kit, Shape(kind, layout, **given))


# --- judging ---------------------------------------------------------------------------------------------------------


def judge_outputs(kit: Kit, rig: Rig, step: Step, live: str = "", padded: str = "") -> None:
    """Outputs of live rows against the oracle (clause `live`), exact for whole numbers; of padded rows, of rows behind
    the last one, and what lies around (`padded`)."""
    got = step.y.double().numpy()
    mask = np.zeros(len(got), bool)
    for row in step.rows:
        count = row.tokens if step.mode == "extend" else rig.per_request(step.mode)
        if not row.runs or not count:
            continue
        assert row.request is not None
        mask[row.start : row.start + count] = True
        if not live:
            continue
        trail, at = row.request.trails[step.key], row.request.position - row.request.base
        want = np.stack(trail.outputs[at : at + count])
        mine = got[row.start : row.start + count]
        if rig.shape.whole:
            kit.equal(live, mine, plain.round_to(want, rig.shape.dtype), f"{step.text}: outputs")
        else:
            error = np.stack(trail.output_errors[at : at + count])
            error = error + 0.5 * np.asarray(plain.ulp(np.abs(want) + error, rig.shape.dtype), np.float64)
            kit.within(live, mine, want, error, rig.shape.dtype, f"{step.text}: outputs")
    if padded:
        if not mask.all():
            kit.equal(padded, got[~mask], np.zeros_like(got[~mask]), f"{step.text}: padded outputs")
        kit.check(padded, bool(step.guards.isnan().all()), f"{step.text}: memory around the output was written")


def judge_state(kit: Kit, rig: Rig, step: Step, own: str = "", others: str = "", track: str = "", lens: str = "",
                padded: str = "", source: str = "") -> None:  # fmt: skip
    """State behind a step of whole numbers, by whose it is: the requests' own (`own`) with what of the ring and of the
    checkpoint may change (`lens`), track slots, sources, reserved and guard slots (`padded`), everything else
    (`others`)."""
    slots, rows = _named(rig, step)
    for row in step.rows:
        if row.runs and row.request is not None:
            _judge_own(kit, rig, step, row, own, lens)
            if row.taken >= 0 and track:
                _judge_track(kit, rig, step, row, track)
    tracked = {row.track for row in step.rows if row.runs and row.taken >= 0}
    sources = {row.source for row in step.rows if row.source > 0} - slots
    reserved = {-1, 0, rig.shape.slots - 1, rig.shape.slots} - slots - tracked - sources
    for key, before in step.before.items():
        changed = _changed(before, step.after[key])
        mine = key[:2] == (step.key[0], str(step.key[1]))
        by_slot = key[2] in ("tensor", "state_lens")
        named = (slots | tracked if by_slot else rows) if mine else set()
        for where, clause in ((sources, source), (reserved, padded)) if by_slot and mine else ():
            hit = sorted(slot for slot in where if changed[slot + GUARD])
            if clause:
                kit.check(clause, not hit, f"{step.text}: {key[2]} of slots {hit} changed")
        if others:
            apart = named | (reserved | sources if by_slot and mine else set())
            hit = [place - GUARD for place in np.flatnonzero(changed).tolist() if place - GUARD not in apart]
            what = "slots" if by_slot else "request rows"
            kit.check(others, not hit, f"{step.text}: {'.'.join(key)} of {what} {hit} changed")


def _named(rig: Rig, step: Step) -> tuple[set[int], set[int]]:
    """Slots and request rows that a step may write."""
    live = [row.request for row in step.rows if row.runs and row.request is not None]
    return {request.slot for request in live}, {request.row for request in live}


def _changed(before: Tensor, after: Tensor) -> Array:
    """[slots or rows] whether any byte differs."""
    return (bits(before) != bits(after)).flatten(1).any(1).numpy()


def _judge_own(kit: Kit, rig: Rig, step: Step, row: Live, own: str, lens: str) -> None:
    assert row.request is not None
    request, key, shape, at = row.request, step.key, rig.shape, row.request.position
    count = row.tokens if step.mode == "extend" else rig.per_request(step.mode)
    reached = {"target_verify": range(count + 1), "draft_extend": [row.accept]}.get(step.mode, [count])
    if shape.layout != "ring" and step.mode == "target_verify":
        _judge_intermediate(kit, rig, step, row, own)
        reached = [0]
    if own and (step.mode != "extend" or count):
        for k in reached:
            got = rig.implied(step.after, key, request, at + k)
            want = plain.round_to(request.state(key, at + k), shape.state_dtype)
            if not k and not at:
                continue  # no token was accepted and none was there: the next step starts from zeros by its length
            kit.equal(own, got, want, f"{step.text}: state of slot {request.slot} behind {k} of its tokens")
    if shape.layout == "ring" and lens:
        _judge_ring(kit, rig, step, row, count, lens)
    elif lens and (step.mode == "target_verify" or not count):
        same = not _changed(*(held[(*_key(step), "tensor")] for held in (step.before, step.after)))[
            GUARD + request.slot
        ]
        kit.check(lens, same, f"{step.text}: slot {request.slot} changed")


def _key(step: Step) -> tuple[str, str]:
    return step.key[0], str(step.key[1])


def _judge_intermediate(kit: Kit, rig: Rig, step: Step, row: Live, clause: str) -> None:
    assert row.request is not None
    saved = step.after[(*_key(step), "intermediate")][GUARD + row.request.row].double().numpy()
    for t in range(rig.shape.drafts if clause else 0):
        want = plain.round_to(row.request.state(step.key, row.request.position + t + 1), rig.shape.state_dtype)
        kit.equal(clause, saved[t], want, f"{step.text}: saved state of request row {row.request.row}, draft {t}")


def _judge_ring(kit: Kit, rig: Rig, step: Step, row: Live, count: int, clause: str) -> None:
    """Lengths and checkpoint change together, to S(n_b) or what the phase may write besides, and in time; of the ring
    no other row changes than those of the step's tokens."""
    assert row.request is not None
    request, shape, at = row.request, rig.shape, row.request.position
    before, after = (
        held[(*_key(step), "state_lens")][GUARD + request.slot].numpy() for held in (step.before, step.after)
    )
    fresh = row.initial is False or not at
    if step.mode == "extend":
        right = after == (at + count if count else before)
    else:
        right = ((after == before) & (not fresh)) | (after == at) | ((after == at + 1) & (step.mode == "decode"))
    kit.check(clause, bool(right.all()), f"{step.text}: state_lens of slot {request.slot}: {after.tolist()} behind "
              f"{before.tolist()}, at position {at}")  # fmt: skip
    if step.mode != "extend":
        late = (after < at) & (at - before + 2 * max(1, shape.drafts) > shape.ring_rows)
        kit.check(clause, not late.any(), f"{step.text}: slot {request.slot} at {at} keeps {before.tolist()}: the ring "
                  f"of {shape.ring_rows} rows runs out")  # fmt: skip
    written = {(at + t) % shape.ring_rows for t in range(count)} if step.mode != "extend" else set()
    for part in ("ring_d", "ring_k", "ring_u"):
        old, new = (held[(*_key(step), part)][GUARD + request.row] for held in (step.before, step.after))
        hit = [place for place in np.flatnonzero(_changed(old, new)).tolist() if place not in written]
        kit.check(clause, not hit, f"{step.text}: {part} rows {hit} of request row {request.row} changed")


def _judge_track(kit: Kit, rig: Rig, step: Step, row: Live, clause: str) -> None:
    assert row.request is not None
    at, place = row.request.position + row.taken, GUARD + row.track
    got = step.after[(*_key(step), "tensor")][place].double().numpy()
    want = plain.round_to(row.request.state(step.key, at), rig.shape.state_dtype)
    kit.equal(clause, got, want, f"{step.text}: track slot {row.track}, behind {row.taken} tokens")
    if rig.shape.layout == "ring":
        lens = step.after[(*_key(step), "state_lens")][place].numpy()
        kit.equal(clause, lens, np.full_like(lens, at), f"{step.text}: length of track slot {row.track}")
