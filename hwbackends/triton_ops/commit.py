"""What happens between steps, over Triton kernels: the speculative commit, and clearing and copying slots."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from hwbackends.conv.layouts import LAYOUT_CODES
from hwbackends.errors import StrideError
from hwbackends.ssm.state import SSMStorage
from hwbackends.step import checks
from hwbackends.step.pool import StatePool
from hwbackends.step.strides import packed
from hwbackends.triton_ops.kernels_commit import commit_kernel, copy_slots_kernel
from hwbackends.triton_ops.launch import Launch, cdiv, ordered
from hwbackends.triton_ops.plans import Launches, Plans, changed, held, planned
from hwbackends.triton_ops.ssm_moves import move, moving
from hwbackends.triton_ops.traits import Traits, TraitsOf

COMMIT = "update_mamba_state_after_mtp_verify"
FAMILIES = ("ssm",)
"""Families whose states are committed, cleared and copied here, beside convs."""


def commit(
    traits_of: TraitsOf,
    pool: StatePool,
    req_pool_indices: Tensor,
    last_correct_step_indices: Tensor,
    mamba_track_indices: Tensor | None,
    mamba_steps_to_track: Tensor | None,
    computed_lens: Tensor | None,
    draft_indices: Tensor | None,
) -> None:
    """The slot becomes win_b(j + 1). See `hookspecs.update_mamba_state_after_mtp_verify`.

    window: one launch per storage, streams and layers together. ring and lazy: nothing without snapshots and SSM
    state, else one launch for both. States of other families: one launch for each, on a ring only with snapshots.
    """
    given = (
        req_pool_indices, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track, computed_lens,
        draft_indices,
    )  # fmt: skip
    try:
        key = (COMMIT, *(None if t is None else (t.dtype, t.shape, t.get_device(), t.is_contiguous()) for t in given))
        plans, holds = planned(pool, key), held(pool)
    except (AttributeError, TypeError):
        checks.commit(pool, *given, families=FAMILIES)
        raise
    if plans.held != holds:
        checks.commit(pool, *given, families=FAMILIES)
        traits = traits_of(pool.device)
        tracks = mamba_track_indices is not None
        moves = _moves(traits, pool, req_pool_indices.shape[0]) if tracks else []
        launches = _commit_plans(traits, pool, *given)
        launches += _state_plans(traits, pool, req_pool_indices.shape[0], tracks, draft_indices is not None)
        plans = pool.cache[key] = Plans(holds, launches, moves)
    if plans.moves and computed_lens is not None:
        move(plans.moves, pool, req_pool_indices, computed_lens, mamba_track_indices, mamba_steps_to_track)
    if not plans.launches:
        return
    requests, steps, track, track_steps, lengths, drafts = (
        req_pool_indices if t is None else t.contiguous() for t in given
    )
    table = req_pool_indices if pool.mamba_v2p_table is None else pool.mamba_v2p_table.contiguous()
    tensors = (requests, pool.mamba_index_mapping.contiguous(), table, steps, drafts, track, track_steps, lengths)
    for launch, storages in plans.launches:
        launch([*storages, *tensors])
        changed(launch)


def _commit_plans(
    traits: Traits,
    pool: StatePool,
    requests: Tensor,
    steps: Tensor,
    track: Tensor | None,
    track_steps: Tensor | None,
    lengths: Tensor | None,
    drafts: Tensor | None,
) -> Launches:
    tracks = track is not None and track_steps is not None
    window = pool.layout == "window"
    conv = window or tracks
    ssm = pool.ssm_state is not None
    storages = pool.storages() if conv else pool.storages()[:1]
    saved = pool.draft_storages() if window else storages
    plans: Launches = []
    extents = (pool.request_rows, 0 if pool.mamba_v2p_table is None else pool.mamba_v2p_table.shape[0], pool.num_slots)
    for index, (state, rows) in enumerate(zip(storages, saved, strict=True)):
        with_ssm = ssm and index == 0
        if not conv and not with_ssm:
            continue
        options = _commit_options(pool, state, rows, with_ssm)
        options |= {"CONV": conv, "TRACK": tracks, "ROWS": drafts is not None}
        block, warps = traits.tuning.commit(options["D"])
        options["BLOCK"] = block
        blocks = (cdiv(options["D"], block) if conv else 0) + (cdiv(options["E"], block) if with_ssm else 0)
        constants = ordered(commit_kernel, options)
        middle_rows = 0 if pool.intermediate_ssm is None else pool.intermediate_ssm.shape[1]
        scalars = [*extents, rows.shape[1] if window else 0, middle_rows]
        grid = blocks * pool.num_layers * requests.shape[0]
        launch = Launch(traits, commit_kernel, grid, scalars, constants, warps)
        main = pool.ssm_state if with_ssm and pool.ssm_state is not None else state
        middle = pool.intermediate_ssm if with_ssm and pool.intermediate_ssm is not None else state
        plans.append((launch, (state, rows, main, middle)))
    return plans


def _moves(traits: Traits, pool: StatePool, count: int) -> Launches:
    """Snapshots of SSM states on rings."""
    rings = [one for one in pool.states.values() if isinstance(one, SSMStorage) and one.layout == "ring"]
    return [moving(traits, pool, one, count, own=False, steps=True) for one in rings]


def _state_plans(traits: Traits, pool: StatePool, count: int, tracks: bool, rows: bool) -> Launches:
    """The commit of SSM states whose verify kept the state behind each draft."""
    plans: Launches = []
    for one in pool.states.values():
        if not isinstance(one, SSMStorage) or one.intermediate is None:
            continue
        _entry_contiguous(one.tensor, 2, "pool.states")
        _entry_contiguous(one.intermediate, 3, "pool.states")
        elements = prod(one.tensor.shape[2:])
        block, warps = traits.tuning.commit(elements)
        middle = one.intermediate.stride()
        options = dict.fromkeys(commit_kernel.arg_names, 0) | {
            "D": 1, "S": 1, "N": max(1, pool.draft_token_num), "C": 1, "LAYERS": pool.num_layers, "E": elements,
            "ML": one.tensor.stride(0), "MS": one.tensor.stride(1), "IL": middle[0], "IR": middle[1], "IN": middle[2],
            "V2P": pool.mamba_v2p_table is not None, "ROWS": rows, "TRACK": tracks, "CONV": False, "SSM": True,
            "BLOCK": block,
        }  # fmt: skip
        constants = {name: options[name] for name in commit_kernel.arg_names if name.isupper()}
        table = 0 if pool.mamba_v2p_table is None else pool.mamba_v2p_table.shape[0]
        scalars = [pool.request_rows, table, pool.num_slots, 0, one.intermediate.shape[1]]
        grid = cdiv(elements, block) * pool.num_layers * count
        launch = Launch(traits, commit_kernel, grid, scalars, constants, warps)
        plans.append((launch, (one.tensor, one.tensor, one.tensor, one.intermediate)))
    return plans


def _commit_options(pool: StatePool, state: Tensor, rows: Tensor, with_ssm: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "D": state.shape[3],
        "S": pool.width - 1,
        "N": max(1, pool.draft_token_num),
        "LAYOUT": LAYOUT_CODES[pool.layout],
        "C": pool.rows,
        "LAYERS": pool.num_layers,
        "V2P": pool.mamba_v2p_table is not None,
        "SSM": with_ssm,
    }
    options |= dict(zip(("SL", "SS", "SR", "SD"), _strides(state), strict=True))
    options |= dict(zip(("RL", "RS", "RR", "RD"), _strides(rows), strict=True))
    options |= {"E": 0, "ML": 0, "MS": 0, "IL": 0, "IR": 0, "IN": 0}
    if with_ssm and pool.ssm_state is not None and pool.intermediate_ssm is not None:
        _entry_contiguous(pool.ssm_state, 2, "pool.ssm_state")
        _entry_contiguous(pool.intermediate_ssm, 3, "pool.intermediate_ssm")
        ssm, middle = pool.ssm_state.stride(), pool.intermediate_ssm.stride()
        options |= {"E": prod(pool.ssm_state.shape[2:]), "ML": ssm[0], "MS": ssm[1]}
        options |= {"IL": middle[0], "IR": middle[1], "IN": middle[2]}
    return options


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides of [L, slots, rows, D], 1 for a single channel."""
    return (*tensor.stride()[:3], tensor.stride(3) if tensor.shape[3] > 1 else 1)


def _entry_contiguous(tensor: Tensor, lead: int, name: str) -> None:
    if not packed(tensor, lead):
        raise StrideError(COMMIT, name, f"strides {tensor.stride()}", "each request's state contiguous")


def clear(traits_of: TraitsOf, pool: StatePool, cache_indices: Tensor) -> None:
    """Zero slots in every layer and stream. See `hookspecs.clear_slots`."""
    checks.slots("clear_slots", pool, FAMILIES, cache_indices=cache_indices)
    _move(traits_of, pool, cache_indices, cache_indices, clear=True)


def copy(traits_of: TraitsOf, pool: StatePool, source_indices: Tensor, destination_indices: Tensor) -> None:
    """Copy slots onto others in every layer and stream. See `hookspecs.copy_slots`."""
    checks.slots("copy_slots", pool, FAMILIES, source_indices=source_indices, destination_indices=destination_indices)
    _move(traits_of, pool, source_indices, destination_indices, clear=False)


def _move(traits_of: TraitsOf, pool: StatePool, source: Tensor, destination: Tensor, clear: bool) -> None:
    key = ("move", clear, source.shape, source.dtype, destination.dtype)
    plans, holds = planned(pool, key), held(pool)
    if plans.held != holds:
        traits, count = traits_of(pool.device), source.shape[0]
        plans = Plans(holds, [_move_plan(traits, state, count, clear) for state in _slot_tensors(pool)])
        pool.cache[key] = plans
    for launch, (state,) in plans.launches:
        launch([state, source.contiguous(), destination.contiguous()])
        changed(launch)


def _slot_tensors(pool: StatePool) -> list[Tensor]:
    """Everything that belongs to slots, as [L, slots, rows, inner]."""
    convs = pool.storages()
    tensors = list(convs)
    for state in pool.slot_tensors()[len(convs) :]:
        _entry_contiguous(state, 2, "a state of the pool")
        tensors.append(state.flatten(2).unsqueeze(2))
    return tensors


def _move_plan(traits: Traits, state: Tensor, count: int, clear: bool) -> tuple[Launch, tuple[Tensor]]:
    layers, slots, rows, inner = state.shape
    strides = dict(zip(("SL", "SS", "SR", "SD"), _strides(state), strict=True))
    block, warps = traits.tuning.commit(rows * inner)
    options = {"ENTRY": rows * inner, "INNER": inner, **strides, "LAYERS": layers, "CLEAR": clear, "BLOCK": block}
    grid = cdiv(rows * inner, block) * layers * count
    return Launch(traits, copy_slots_kernel, grid, [slots], options, warps), (state,)
