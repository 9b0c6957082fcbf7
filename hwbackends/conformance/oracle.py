"""What every hook has to produce, in NumPy and in higher precision than any backend: window reads and writes per
layout, the convolution with an error bound per element, metadata preparation, tracking, commit. Written from the
contract alone: nothing of a backend, of `state` or of `metadata` is used here, and no torch.

Numbers of a step are plain Python ints and lists; rows are float64 arrays. A result says three things about the state:
rows that must hold a value (`writes`), rows that may hold anything (`free`), and, by being neither, rows that must not
change by a single bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
RowKey = tuple[int, int]
"""(slot or request row, row inside it)."""

_FORMATS = {"float16": (11, -14, 65504.0), "bfloat16": (8, -126, 3.3895313892515355e38),
            "float32": (24, -126, 3.4028234663852886e38), "float64": (53, -1022, 1.7976931348623157e308)}  # fmt: skip
"""dtype to (bits of precision, exponent of the smallest normal number, largest number)."""

WIDE = np.longdouble
"""Working precision; on x86 it has 64 bits of precision, so that float64 results can be judged too."""


def ulp(values: Array, dtype: str) -> Array:
    """Unit in the last place of `values` in `dtype`: the gap between neighbours at that size; zero has the smallest."""
    precision, smallest, _ = _FORMATS[dtype]
    _, exponent = np.frexp(np.abs(values).astype(WIDE))
    exponent = np.where(values == 0, smallest, exponent - 1)
    gap: Array = np.ldexp(WIDE(1), np.maximum(exponent, smallest) - (precision - 1))
    return gap


def round_to(values: Array, dtype: str) -> Array:
    """`values` rounded once to `dtype`, half to even, as float64; subnormal numbers are kept, overflow is infinite."""
    wide = np.asarray(values, WIDE)
    gap = ulp(wide, dtype)
    finite = np.isfinite(wide)
    rounded = np.where(finite, np.rint(np.where(finite, wide, 0) / gap) * gap, wide)
    largest = _FORMATS[dtype][2]
    overflow = finite & (np.abs(rounded) > largest)
    return np.where(overflow, np.copysign(np.inf, wide), rounded).astype(np.float64)


def v_rows(history: Array | None, x: Array, width: int) -> Array:
    """v = history ++ x: [S + T, D]. `history` None means zeros."""
    past = np.zeros((width - 1, x.shape[1])) if history is None else history
    assert past.shape == (width - 1, x.shape[1])
    return np.concatenate([past, x]).astype(np.float64)


def window(v: Array, k: int, width: int) -> Array:
    """win(k) = v[k : k + S]: the window after k tokens, 0 <= k <= T."""
    assert 0 <= k <= v.shape[0] - (width - 1), (k, v.shape, width)
    return v[k : k + width - 1]


def conv(
    v: Array, weight: Array, bias: Array | None = None, activation: str | None = None, residual: bool = False
) -> Array:
    """y[t] = act(bias + sum over i < W of weight[:, i] * v[t + i]) + (x[t] if residual): [T, D] in `WIDE`, unrounded.

    Args:
        v: [S + T, D], history and inputs.
        weight: [D, W]; weight[:, W - 1] multiplies the newest row.
        bias: [D] or None.
        activation: None or "silu".
    """
    total = _sum(v, weight, bias)
    y: Array = total / (1 + np.exp(-total)) if activation == "silu" else total
    if residual:
        y = y + _inputs(v, weight)
    return y


def error_bound(
    v: Array, weight: Array, bias: Array | None, activation: str | None, residual: bool, dtype: str
) -> Array:
    """Largest |result - conv(...)| per element for float32 (float64 for float64) sums in any order, rounded once.

    The sum of n rounded products is off by at most n * u * sum |products| (Higham, Accuracy and Stability of Numerical
    Algorithms, section 3.1); silu has slope at most 1.1, and its exponential loses |z| * u in range reduction.
    """
    unit = WIDE(2.0) ** (-53 if dtype == "float64" else -24)
    magnitude: Array = _sum(np.abs(v), np.abs(weight), None if bias is None else np.abs(bias))
    error: Array = (weight.shape[1] + 1) * unit * magnitude
    total = _sum(v, weight, bias)
    if activation == "silu":
        error = 1.1 * error + (6 + 2 * np.abs(total)) * unit * np.abs(conv(v, weight, bias, activation))
    y = conv(v, weight, bias, activation, residual)
    if residual:
        error = error + unit * np.abs(y)
    rounded: Array = error + 0.5 * ulp(np.abs(y) + error, dtype)
    return rounded


def _sum(v: Array, weight: Array, bias: Array | None) -> Array:
    width = weight.shape[1]
    tokens = v.shape[0] - (width - 1)
    wide, taps = v.astype(WIDE), weight.astype(WIDE)
    total = np.zeros((tokens, v.shape[1]), WIDE)
    for i in range(width):
        total += taps[:, i] * wide[i : i + tokens]
    return total if bias is None else total + bias.astype(WIDE)


def _inputs(v: Array, weight: Array) -> Array:
    return v[weight.shape[1] - 1 :].astype(WIDE)


def add_rmsnorm(y: Array, residual_stream: Array, norm_weight: Array, eps: float) -> tuple[Array, Array]:
    """(h, out) with h = residual_stream + y and out = h * rsqrt(mean(h * h) + eps) * norm_weight, unrounded.

    Args:
        y: [T, D], conv output already rounded to the dtype of x.
        residual_stream: [T, D].
        norm_weight: [D].
    """
    h = residual_stream.astype(WIDE) + y.astype(WIDE)
    scale = 1 / np.sqrt(np.mean(h * h, axis=-1, keepdims=True) + WIDE(eps))
    return h, h * scale * norm_weight.astype(WIDE)


# --- layouts -----------------------------------------------------------------------------------------------------


def window_rows(layout: str, rows: int, width: int, length: int, offset: int = 0) -> list[int]:
    """Row numbers, oldest first, of the window that ends before absolute position `length`.

    Args:
        layout: window, ring or lazy.
        rows: rows per slot.
        length: tokens consumed; only `ring` asks.
        offset: row at which the history starts; only `lazy` asks.
    """
    history = width - 1
    if layout == "ring":
        return [position % rows for position in range(length - history, length)]
    return list(range(offset, offset + history)) if layout == "lazy" else list(range(history))


def read_history(slot_rows: Array, layout: str, width: int, length: int, offset: int = 0) -> Array:
    """The history [S, D] that `slot_rows` [rows, D] holds for a request of computed length `length`.

    On `ring`, positions below 0 are zeros whatever the slot holds.
    """
    taken = slot_rows[window_rows(layout, slot_rows.shape[0], width, length, offset)].astype(np.float64)
    if layout == "ring":
        below = np.arange(length - (width - 1), length) < 0
        taken[below] = 0.0
    return taken


# --- preparation -------------------------------------------------------------------------------------------------


@dataclass
class PoolFacts:
    """What preparation and commit need to know of a pool, in plain numbers (fields as in the contract)."""

    layout: str
    width: int
    rows: int
    mamba_index_mapping: Sequence[int]
    mamba_v2p_table: Sequence[int] | None = None
    track_interval: int = 64

    def physical(self, slot: int) -> int:
        """Physical slot of a value of the map; what is not positive is padding."""
        if slot <= 0:
            return -1
        found = slot if self.mamba_v2p_table is None else self.mamba_v2p_table[slot]
        return found if found > 0 else -1


@dataclass
class Batch:
    """One step in plain numbers; fields as `StepBatch` in the contract."""

    mode: str
    req_pool_indices: Sequence[int]
    num_reqs: int
    num_tokens: int
    seq_lens: Sequence[int] | None = None
    computed_lens: Sequence[int] | None = None
    extend_seq_lens: Sequence[int] | None = None
    extend_prefix_lens: Sequence[int] | None = None
    draft_token_num: int = 1
    num_accept_tokens: Sequence[int] | None = None
    has_initial_state: Sequence[bool] | None = None
    mamba_track_mask: Sequence[bool] | None = None
    mamba_track_indices: Sequence[int] | None = None
    mamba_track_seqlens: Sequence[int] | None = None
    source_indices: Sequence[int] | None = None
    num_accepted_tokens: Sequence[int] | None = None
    cache_indices: Sequence[int] | None = None
    num_reqs_device: int | None = None

    @property
    def tokens_per_req(self) -> int:
        """Tokens per request of a uniform phase."""
        return self.draft_token_num if self.mode in ("target_verify", "draft_extend") else 1


@dataclass(frozen=True)
class Row:
    """One request of a prepared step; `slot` -1 marks a padded row."""

    slot: int
    source: int
    start: int
    tokens: int
    has_initial_state: bool = False
    computed_len: int = 0
    history_offset: int = 0
    request_row: int = -1
    num_accept: int = -1
    track_slot: int = -1
    track_tokens: int = -1

    @property
    def padded(self) -> bool:
        """Nothing is written for this row and its output is 0."""
        return self.slot <= 0


def prepare(batch: Batch, pool: PoolFacts) -> list[Row]:
    """The rows of a step, padded ones too, by the clauses CS-PREP-*."""
    rows: list[Row] = []
    start, live = 0, _live_count(batch)
    for b in range(len(batch.req_pool_indices)):
        slot = _slot(batch, pool, b)
        tokens = batch.tokens_per_req
        if batch.mode == "extend":
            tokens = max(0, batch.extend_seq_lens[b]) if b < live else 0  # type: ignore[index]
        rows.append(_padded(start, tokens) if slot <= 0 else _live(batch, pool, b, slot, start, tokens))
        start += tokens
    return rows


def _live_count(batch: Batch) -> int:
    """The smaller of both counts."""
    return batch.num_reqs if batch.num_reqs_device is None else min(batch.num_reqs, batch.num_reqs_device)


def _slot(batch: Batch, pool: PoolFacts, b: int) -> int:
    request = batch.req_pool_indices[b]
    accept = batch.num_accept_tokens
    rejected = batch.mode == "draft_extend" and accept is not None and b < len(accept) and accept[b] < 0
    if batch.mode == "idle" or b >= _live_count(batch) or request < 0 or rejected:
        return -1
    if batch.cache_indices is not None:
        return batch.cache_indices[b] if batch.cache_indices[b] > 0 else -1
    return pool.physical(pool.mamba_index_mapping[request])


def _padded(start: int, tokens: int) -> Row:
    return Row(slot=-1, source=-1, start=start, tokens=tokens)


def _live(batch: Batch, pool: PoolFacts, b: int, slot: int, start: int, tokens: int) -> Row:
    computed = _computed_len(batch, b, tokens)
    initial = computed > 0 if batch.mode == "extend" else True
    if batch.has_initial_state is not None and batch.mode in ("extend", "draft_extend"):
        initial = bool(batch.has_initial_state[b])
    source = slot
    if batch.source_indices is not None and batch.mode == "extend":
        found = _translated(batch, pool, batch.source_indices[b])
        source = found if found > 0 else slot
    offset = 0
    if pool.layout == "lazy" and batch.num_accepted_tokens is not None:
        offset = max(0, batch.num_accepted_tokens[b] - 1)
    accept = min(batch.num_accept_tokens[b], tokens) if batch.mode == "draft_extend" and batch.num_accept_tokens else -1
    track_tokens = _track_tokens(batch, pool, b, tokens, computed, accept)
    track_slot = -1
    if track_tokens >= 0 and batch.mamba_track_indices is not None:
        track_slot = _translated(batch, pool, batch.mamba_track_indices[b])
    return Row(
        slot=slot, source=source, start=start, tokens=tokens, has_initial_state=initial, computed_len=computed,
        history_offset=offset, request_row=batch.req_pool_indices[b], num_accept=accept, track_slot=track_slot,
        track_tokens=track_tokens if track_slot > 0 else -1,
    )  # fmt: skip


def _translated(batch: Batch, pool: PoolFacts, slot: int) -> int:
    """Physical slot of a track or source index; an engine that translates slots itself translates these too."""
    if batch.cache_indices is not None:
        return slot if slot > 0 else -1
    return pool.physical(slot)


def _computed_len(batch: Batch, b: int, tokens: int) -> int:
    if batch.computed_lens is not None:
        return batch.computed_lens[b]
    if batch.mode == "extend":
        return batch.extend_prefix_lens[b]  # type: ignore[index]
    return 0 if batch.seq_lens is None else batch.seq_lens[b] - tokens


def _track_tokens(batch: Batch, pool: PoolFacts, b: int, tokens: int, computed: int, accept: int) -> int:
    if batch.mamba_track_mask is None or not batch.mamba_track_mask[b]:
        return -1
    interval = pool.track_interval
    if batch.mode == "decode":
        return 1
    if batch.mode == "extend":
        length = -1 if batch.mamba_track_seqlens is None else batch.mamba_track_seqlens[b]
        k = (length - computed) // interval * interval
        return k if length >= 0 and 0 <= k <= tokens else -1
    if batch.mode == "draft_extend":
        post = computed + accept
        return post // interval * interval - computed if computed // interval != post // interval else -1
    return -1


def metadata(batch: Batch, rows: Sequence[Row]) -> dict[str, list[int] | list[bool]]:
    """The tensors of `StepMetadata` that the phase of `batch` must have written, as lists."""
    starts = [row.start for row in rows]
    end = rows[-1].start + rows[-1].tokens if rows else 0
    fields: dict[str, list[int] | list[bool]] = {
        "cache_indices": [row.slot for row in rows],
        "source_indices": [row.source for row in rows],
        "query_start_loc": [*starts, end],
        "has_initial_state": [row.has_initial_state for row in rows],
        "computed_lens": [row.computed_len for row in rows],
        "history_offset": [row.history_offset for row in rows],
        "mamba_track_indices": [row.track_slot for row in rows],
        "mamba_track_tokens": [row.track_tokens for row in rows],
    }
    if batch.mode == "extend":
        owners = [b for b, row in enumerate(rows) for _ in range(row.tokens)]
        fields["seq_idx"] = owners + [-1] * (batch.num_tokens - len(owners))
    if batch.mode in ("target_verify", "draft_extend"):
        fields["draft_indices"] = [row.request_row for row in rows]
    if batch.mode == "draft_extend":
        fields["num_accept_tokens"] = [row.num_accept for row in rows]
    return fields


# --- steps -------------------------------------------------------------------------------------------------------


@dataclass
class Effect:
    """What a hook must have done to one tensor [slots or requests, rows, D].

    Attributes:
        writes: rows that must hold these values, rounded once to the tensor's dtype.
        free: rows that may hold anything. Every row that is in neither must be bit-unchanged.
    """

    writes: dict[RowKey, Array] = field(default_factory=dict)
    free: set[RowKey] = field(default_factory=set)

    def put(self, slot: int, numbers: Sequence[int], values: Array) -> None:
        """Row `numbers[i]` of `slot` must hold `values[i]`."""
        for number, value in zip(numbers, values, strict=True):
            self.writes[slot, number] = value
            self.free.discard((slot, number))

    def release(self, slot: int, rows: int) -> None:
        """Every row of `slot` that has no value yet may hold anything."""
        self.free.update((slot, row) for row in range(rows) if (slot, row) not in self.writes)

    def apply(self, tensor: Array, dtype: str) -> Array:
        """`tensor` [slots, rows, D] after the hook; free rows become NaN, so that nothing may depend on them."""
        after = tensor.copy()
        for key in self.free:
            after[key] = np.nan
        for key, value in self.writes.items():
            after[key] = round_to(value, dtype)
        return after


@dataclass
class StepResult:
    """Outputs and effects of one conv hook.

    Attributes:
        y: [T, D] exact outputs, zeros for padded rows and behind the last token.
        bound: [T, D] largest allowed |output - y|; 0 where the output must be exactly 0.
        state: effect on the conv state; drafts: effect on the draft rows (window layout, by request row).
    """

    y: Array
    bound: Array
    state: Effect = field(default_factory=Effect)
    drafts: Effect = field(default_factory=Effect)


def step(
    mode: str,
    rows: Sequence[Row],
    x: Array,
    weight: Array,
    tensor: Array,
    layout: str,
    bias: Array | None = None,
    activation: str | None = None,
    residual: bool = False,
    dtype: str = "float32",
    has_drafts: bool = True,
) -> StepResult:
    """One conv hook over a prepared step. Every request reads the state before the step.

    Args:
        mode: decode, idle, extend, target_verify or draft_extend.
        rows: the prepared requests, see `prepare`.
        x: [T, D] inputs as float64.
        weight: [D, W]; bias: [D] or None.
        tensor: [slots, rows, D] state before the step.
        dtype: of x and of the output; decides the bound.
        has_drafts: whether the state has draft rows (window).
    """
    width = weight.shape[1]
    result = StepResult(np.zeros(x.shape, WIDE), np.zeros(x.shape, WIDE))
    for row in rows:
        if row.padded:
            continue
        span = slice(row.start, row.start + row.tokens)
        history = None
        if row.has_initial_state:
            history = read_history(tensor[row.source], layout, width, row.computed_len, row.history_offset)
        v = v_rows(history, x[span], width)
        if row.tokens == 0:  # the slot is untouched, but a snapshot of what it holds may be asked for
            _put_track(row, v, width, tensor.shape[1], layout, result)
            continue
        result.y[span] = conv(v, weight, bias, activation, residual)
        result.bound[span] = error_bound(v, weight, bias, activation, residual, dtype)
        _write(mode, row, v, width, tensor.shape[1], layout, result, has_drafts)
    return result


def _write(
    mode: str, row: Row, v: Array, width: int, rows: int, layout: str, result: StepResult, has_drafts: bool
) -> None:
    if mode == "target_verify":
        _write_verify(row, v, width, rows, layout, result, has_drafts)
        return
    kept = row.num_accept if mode == "draft_extend" else row.tokens
    fresh = not row.has_initial_state or row.source != row.slot
    _put_window(result.state, row.slot, v, kept, width, rows, layout, row.computed_len, fresh)
    result.state.release(row.slot, rows)
    if mode == "draft_extend" and layout == "window" and has_drafts:
        result.drafts.release(row.request_row, width - 1 + row.tokens)
    _put_track(row, v, width, rows, layout, result)


def _put_track(row: Row, v: Array, width: int, rows: int, layout: str, result: StepResult) -> None:
    """win(track_tokens) in the track slot, whole."""
    if row.track_slot > 0 and row.track_tokens >= 0:
        _put_window(result.state, row.track_slot, v, row.track_tokens, width, rows, layout, row.computed_len, True)
        result.state.release(row.track_slot, rows)


def _put_window(
    effect: Effect, slot: int, v: Array, k: int, width: int, rows: int, layout: str, computed: int, fresh: bool
) -> None:
    """win(k) in the layout's rows; on `ring`, positions below 0 are written only with a whole window (`fresh`)."""
    numbers = window_rows(layout, rows, width, computed + k)
    values = window(v, k, width)
    if layout == "ring":
        values = values.copy()
        positions = range(computed + k - (width - 1), computed + k)
        keep = [i for i, position in enumerate(positions) if fresh or position >= 0]
        numbers, values = [numbers[i] for i in keep], values[keep]
    effect.put(slot, numbers, values)


def _write_verify(row: Row, v: Array, width: int, rows: int, layout: str, result: StepResult, has_drafts: bool) -> None:
    history = width - 1
    if layout == "window":
        if has_drafts:
            result.drafts.put(row.request_row, range(v.shape[0]), v)
        return
    if layout == "lazy":
        result.state.put(row.slot, range(v.shape[0] - 1), v[1:])
        result.state.release(row.slot, rows)
        return
    positions = range(row.computed_len, row.computed_len + row.tokens)
    result.state.put(row.slot, [position % rows for position in positions], v[history:])
    kept = {(row.slot, p % rows) for p in range(max(0, row.computed_len - history), row.computed_len)}
    result.state.release(row.slot, rows)
    result.state.free -= kept  # the committed history stays, bit by bit


# --- commit ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CommitRow:
    """One request of a commit: request row, last correct step, and what is tracked; -1 is padding everywhere."""

    request_row: int
    step: int
    track_slot: int = -1
    track_step: int = -1
    computed_len: int = 0
    draft_row: int | None = None

    @property
    def drafts(self) -> int:
        """Row of the draft buffers."""
        return self.request_row if self.draft_row is None else self.draft_row


def commit_conv(rows: Sequence[CommitRow], pool: PoolFacts, tensor: Array, draft_rows: Array | None) -> Effect:
    """Effect of `update_mamba_state_after_mtp_verify` on one conv stream of one layer.

    Args:
        tensor: [slots, rows, D] before the commit.
        draft_rows: [R, S + N, D], what verify saved; None on ring and lazy.
    """
    effect = Effect()
    for row in rows:
        slot = _commit_slot(row, pool)
        if slot <= 0:
            continue
        if pool.layout == "window" and draft_rows is not None:
            v = draft_rows[row.drafts]
            if row.step >= 0:
                effect.put(slot, range(pool.width - 1), window(v, row.step + 1, pool.width))
            if row.track_step >= 0 and pool.physical(row.track_slot) > 0:
                track = pool.physical(row.track_slot)
                effect.put(track, range(pool.width - 1), window(v, row.track_step + 1, pool.width))
        elif row.track_step >= 0 and pool.physical(row.track_slot) > 0:
            _track_rows(effect, row, slot, pool.physical(row.track_slot), pool, tensor)
    return effect


def _commit_slot(row: CommitRow, pool: PoolFacts) -> int:
    return pool.physical(pool.mamba_index_mapping[row.request_row]) if row.request_row >= 0 else -1


def _track_rows(effect: Effect, row: CommitRow, slot: int, track: int, pool: PoolFacts, tensor: Array) -> None:
    history, rows = pool.width - 1, tensor.shape[1]
    if pool.layout == "lazy":
        effect.put(track, range(history), tensor[slot, row.track_step : row.track_step + history])
    else:
        end = row.computed_len + row.track_step + 1
        numbers = [p % rows for p in range(max(0, end - history), end)]
        effect.put(track, numbers, tensor[slot, numbers])
    effect.release(track, rows)


def commit_ssm(rows: Sequence[CommitRow], pool: PoolFacts, intermediate: Array) -> dict[int, Array]:
    """Slots whose SSM state must become a value, for one layer. intermediate: [R, N, ...] of that layer."""
    writes: dict[int, Array] = {}
    for row in rows:
        slot = _commit_slot(row, pool)
        if slot <= 0:
            continue
        if row.step >= 0:
            writes[slot] = intermediate[row.drafts, row.step]
        if row.track_step >= 0 and pool.physical(row.track_slot) > 0:
            writes[pool.physical(row.track_slot)] = intermediate[row.drafts, row.track_step]
    return writes


def copied(pairs: Mapping[int, int], tensor: Array) -> Effect:
    """Effect of `copy_slots` on one stream of one layer: source slot to destination slot, same row numbers."""
    effect = Effect()
    for source, destination in pairs.items():
        if source > 0 and destination > 0:
            effect.put(destination, range(tensor.shape[1]), tensor[source])
    return effect


def cleared(slots: Sequence[int], tensor: Array) -> Effect:
    """Effect of `clear_slots` on one stream of one layer."""
    effect = Effect()
    for slot in slots:
        if slot > 0:
            effect.put(slot, range(tensor.shape[1]), np.zeros_like(tensor[slot]))
    return effect
