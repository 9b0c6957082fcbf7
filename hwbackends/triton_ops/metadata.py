"""The prepare hooks over Triton kernels: one launch per phase. What the batch brings decides the compile-time
arguments; a plan serves every later batch that brings tensors of the same dtypes and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor

from hwbackends.conv.layouts import history_rows
from hwbackends.step import checks
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.metadata import StepMetadata
from hwbackends.step.pool import StatePool
from hwbackends.triton_ops.conv import check_device
from hwbackends.triton_ops.kernels_metadata import prepare_extend_kernel, prepare_uniform_kernel
from hwbackends.triton_ops.launch import Launch, cdiv, ordered
from hwbackends.triton_ops.plans import changed
from hwbackends.triton_ops.traits import Traits, TraitsOf

_FIELDS = (
    "req_pool_indices", "seq_lens", "computed_lens", "extend_seq_lens", "extend_prefix_lens", "num_accept_tokens",
    "has_initial_state", "mamba_track_mask", "mamba_track_indices", "mamba_track_seqlens", "source_indices",
    "num_accepted_tokens", "cache_indices", "num_reqs_device",
)  # fmt: skip
_fields = attrgetter(*_FIELDS)
_PHASES = {
    ForwardMode.DECODE: 0,
    ForwardMode.IDLE: 0,
    ForwardMode.TARGET_VERIFY: 1,
    ForwardMode.DRAFT_EXTEND: 2,
}


class PreparePlan:
    """A prepare call made ready: which of the batch's tensors the kernel reads, of which form, and the launch.

    Args:
        batch: the planned batch.
        pool: the pool whose map and table are read; the map stands in for None.
        launch: kernel, grid, constants and outputs.
        inputs: the kernel's leading pointers: a field of the batch by name, a tensor of the pool, or None for one
            that it does not read.
    """

    __slots__ = (
        "_absent", "_dense", "_filled", "_inputs", "_launch", "_map", "_mode", "_present", "_rows", "_template",
        "_tokens",
    )  # fmt: skip

    def __init__(
        self, batch: StepBatch, pool: StatePool, launch: Launch, inputs: Sequence[str | Tensor | None]
    ) -> None:
        self._launch, self._mode, self._rows = launch, batch.forward_mode, batch.padded_reqs
        self._tokens, self._map = batch.num_tokens, _map_of(pool)
        values = _fields(batch)
        self._absent = [i for i, tensor in enumerate(values) if tensor is None]
        self._present = [(i, t.shape, t.dtype, t.get_device()) for i, t in enumerate(values) if t is not None]
        self._inputs = [pool.mamba_index_mapping if value is None else value for value in inputs]
        self._template = [0 if isinstance(value, str) else value.data_ptr() for value in self._inputs]
        self._dense = all(isinstance(value, str) or value.is_contiguous() for value in self._inputs)
        self._filled = [(at, _FIELDS.index(v)) for at, v in enumerate(self._inputs) if isinstance(v, str)]

    def serves(self, batch: StepBatch, values: tuple[Tensor | None, ...], pool: StatePool) -> bool:
        """Whether a batch is of the planned phase and brings the same tensors, in dtype, shape and device, over the
        same map and table."""
        if batch.forward_mode is not self._mode or batch.topk != 1 or batch.num_tokens != self._tokens:
            return False
        if not 0 <= batch.num_reqs <= self._rows or _map_of(pool) != self._map:
            return False
        for i in self._absent:
            if values[i] is not None:
                return False
        for i, shape, dtype, device in self._present:
            tensor = values[i]
            if tensor is None or tensor.shape != shape or tensor.dtype is not dtype or tensor.get_device() != device:
                return False
        return True

    def __call__(self, batch: StepBatch, values: tuple[Tensor | None, ...]) -> None:
        """Launch for a batch of the planned kind."""
        count = 0 if self._mode is ForwardMode.IDLE else batch.num_reqs
        pointers, dense = self._template.copy(), self._dense
        for at, i in self._filled:
            tensor: Any = values[i]
            pointers[at] = tensor.data_ptr()
            dense = dense and tensor.is_contiguous()
        if not dense or not self._launch.at(pointers, first=(count,)):
            given: list[Any] = [getattr(batch, v) if isinstance(v, str) else v for v in self._inputs]
            self._launch([tensor.contiguous() for tensor in given], first=(count,))
        changed(self._launch)


def prepare(hook: str, traits_of: TraitsOf, batch: StepBatch, pool: StatePool, out: StepMetadata) -> None:
    """A prepare hook by its name. See `hookspecs`."""
    try:
        key = (pool, batch.draft_token_num)
        plan, values = out.cache.get(key), _fields(batch)
        ready = type(plan) is PreparePlan and plan.serves(batch, values, pool)
    except (AttributeError, TypeError):
        checks.prepare(hook, batch, pool, out)
        raise
    if not ready:
        plan = out.cache[key] = _plan(hook, traits_of, batch, pool, out)
    plan(batch, values)  # type: ignore[operator]


def _plan(hook: str, traits_of: TraitsOf, batch: StepBatch, pool: StatePool, out: StepMetadata) -> PreparePlan:
    checks.prepare(hook, batch, pool, out)
    traits = traits_of(pool.device)
    check_device(hook, "pool", pool.device, traits)
    extend = batch.forward_mode is ForwardMode.EXTEND
    return (_extend_plan if extend else _uniform_plan)(traits, batch, pool, out)


def _options(batch: StepBatch, pool: StatePool) -> dict[str, Any]:
    return {
        "INTERVAL": pool.track_interval,
        "V2P": pool.mamba_v2p_table is not None,
        "GIVEN": batch.cache_indices is not None,
        "LAZY": pool.layout == "lazy" and batch.num_accepted_tokens is not None,
        "TRACK": batch.mamba_track_mask is not None and batch.mamba_track_indices is not None,
        "COUNTED": batch.num_reqs_device is not None,
        "LAST": pool.rows - history_rows(pool.width),
    }


def _extents(pool: StatePool) -> tuple[int, int, int]:
    """Rows of the map, entries of the table, slots: what an index must stay below."""
    table = pool.mamba_v2p_table
    return pool.request_rows, 0 if table is None else table.shape[0], pool.num_slots


def _map_of(pool: StatePool) -> tuple[object, ...]:
    """What tells one map and table from another, whatever was swapped underneath."""
    mapping, table = pool.mamba_index_mapping, pool.mamba_v2p_table
    held = (mapping.data_ptr(), mapping.dtype, mapping.shape, mapping.stride())
    return held if table is None else (*held, table.data_ptr(), table.shape, table.stride())


def _name(batch: StepBatch, name: str) -> str | None:
    """The field's name where the batch brings it."""
    return None if getattr(batch, name) is None else name


def _uniform_plan(traits: Traits, batch: StepBatch, pool: StatePool, out: StepMetadata) -> PreparePlan:
    phase = _PHASES[batch.forward_mode]
    draft_extend = batch.forward_mode is ForwardMode.DRAFT_EXTEND
    options = _options(batch, pool) | {
        "PHASE": phase,
        "TOKENS": batch.tokens_per_req,
        "COMPUTED": batch.computed_lens is not None,
        "LENGTHS": batch.seq_lens is not None,
        "INITIAL": draft_extend and batch.has_initial_state is not None,
    }
    options["TRACK"] = options["TRACK"] and batch.forward_mode is not ForwardMode.TARGET_VERIFY
    rows, mapping = batch.padded_reqs, pool.mamba_index_mapping
    block, warps = traits.tuning.prepare(rows)
    constants = ordered(prepare_uniform_kernel, options | {"BLOCK": block})
    outputs = [
        out.cache_indices, out.source_indices, out.query_start_loc, out.has_initial_state, out.computed_lens,
        out.draft_indices, out.num_accept_tokens, out.history_offset, out.mamba_track_indices, out.mamba_track_tokens,
    ]  # fmt: skip
    launch = Launch(
        traits, prepare_uniform_kernel, max(1, cdiv(rows, block)), (rows, *_extents(pool)), constants, warps, outputs,
        aligned=False,
    )  # fmt: skip
    wanted = (
        "cache_indices", "computed_lens", "seq_lens", "has_initial_state", "num_accept_tokens",
        "num_accepted_tokens", "mamba_track_mask", "mamba_track_indices", "num_reqs_device",
    )  # fmt: skip
    inputs = ["req_pool_indices", mapping, pool.mamba_v2p_table, *(_name(batch, n) for n in wanted)]
    return PreparePlan(batch, pool, launch, inputs)


def _extend_plan(traits: Traits, batch: StepBatch, pool: StatePool, out: StepMetadata) -> PreparePlan:
    rows, tokens, mapping = batch.padded_reqs, out.num_tokens, pool.mamba_index_mapping
    tile, requests, owners, warps = traits.tuning.prepare_extend(rows, tokens)
    options = _options(batch, pool) | {
        "INITIAL": batch.has_initial_state is not None,
        "SOURCE": batch.source_indices is not None,
        "BLOCK_B": tile,
        "BLOCK_R": requests,
        "BLOCK_T": owners,
        "SINGLE": rows <= tile,
    }
    options["TRACK"] = options["TRACK"] and batch.mamba_track_seqlens is not None
    programs = max(1, cdiv(rows, requests))
    constants = ordered(prepare_extend_kernel, options)
    grid, scalars = programs + cdiv(tokens, owners), (rows, tokens, programs, *_extents(pool))
    outputs = [
        out.cache_indices, out.source_indices, out.query_start_loc, out.has_initial_state, out.computed_lens,
        out.draft_indices, out.history_offset, out.mamba_track_indices, out.mamba_track_tokens, out.seq_idx,
    ]  # fmt: skip
    launch = Launch(traits, prepare_extend_kernel, grid, scalars, constants, warps, outputs, aligned=False)
    lengths = "extend_prefix_lens" if batch.computed_lens is None else "computed_lens"
    wanted = (
        "cache_indices", "extend_seq_lens", lengths, "has_initial_state", "source_indices", "num_accepted_tokens",
        "mamba_track_mask", "mamba_track_indices", "mamba_track_seqlens", "num_reqs_device",
    )  # fmt: skip
    inputs = ["req_pool_indices", mapping, pool.mamba_v2p_table, *(_name(batch, n) for n in wanted)]
    return PreparePlan(batch, pool, launch, inputs)
