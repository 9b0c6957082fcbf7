"""Triton kernels of the commit on Ascend: windows and snapshots of conv state, and SSM states. Imports triton alone.

A work item is a request, a layer and a channel block, with scalar slots; see `kernels_conv` for the rules. Slots come
from the request rows through the map, inside the kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hwbackends.ascend.kernels_conv import RING, WINDOW, _ring_row
from hwbackends.ascend.kernels_metadata import LAST_POSITION, _slot, _there, _translated


@triton.jit
def _resolved(b, req_pool_indices, mamba_index_mapping, v2p_table, draft_indices, request_rows,
              virtual_slots, num_slots, V2P: tl.constexpr, DRAFTS: tl.constexpr):  # fmt: skip
    """Physical slot (0 where padded) and draft row of request b."""
    request = tl.load(req_pool_indices + b).to(tl.int64)
    slot = _slot(request, request >= 0, req_pool_indices, mamba_index_mapping, v2p_table, request_rows, virtual_slots,
                 num_slots, False, V2P)  # fmt: skip
    draft = request
    if DRAFTS:
        draft = tl.load(draft_indices + b).to(tl.int64)
    return slot, draft


@triton.jit
def _drafted(step, drafts):
    """Whether a verify has such a step."""
    return (step >= 0) & (step < drafts)


@triton.jit
def _copy_rows(source, target, row, rows_in, rows_out, d, d_in, d_out, limit, S: tl.constexpr,
               S_TILE: tl.constexpr):  # fmt: skip
    """Rows row .. row + S - 1 of `source` to rows 0 .. S - 1 of `target`."""
    r = tl.arange(0, S_TILE)
    mask = (r < S)[:, None] & (d < limit)[None, :]
    tile = tl.load(source + row * rows_in + r[:, None] * rows_in + d[None, :] * d_in, mask=mask, other=0.0)
    tl.store(target + r[:, None] * rows_out + d[None, :] * d_out, tile, mask=mask)


@triton.jit(do_not_specialize=[
    "items", "blocks", "reqs", "dim", "rows", "drafts", "s_layer", "s_slot", "s_row", "s_d", "q_layer", "q_req",
    "q_row", "q_d", "request_rows", "virtual_slots", "num_slots", "draft_count",
])  # fmt: skip
def commit_conv_kernel(
    state, draft_rows, req_pool_indices, mamba_index_mapping, v2p_table, draft_indices, last_steps, track_indices,
    track_steps, computed_lens,
    items, blocks, reqs, dim, rows, drafts, s_layer, s_slot, s_row, s_d, q_layer, q_req, q_row, q_d,
    request_rows, virtual_slots, num_slots, draft_count,
    LAYOUT: tl.constexpr, S: tl.constexpr, V2P: tl.constexpr, DRAFTS: tl.constexpr, TRACK: tl.constexpr,
    S_UNIT: tl.constexpr, S_TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Windows of one conv storage. window: rows j + 1 .. j + S of the saved v_b into the slot, and into the track slot
    for the tracked step. ring and lazy: the track slot alone, from the request's own slot."""
    sd = 1 if S_UNIT else s_d
    qd = 1 if S_UNIT else q_d
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        d = (item % blocks) * BLOCK + tl.arange(0, BLOCK)
        b = (item // blocks) % reqs
        layer = (item // blocks // reqs).to(tl.int64)
        slot, draft = _resolved(b, req_pool_indices, mamba_index_mapping, v2p_table, draft_indices, request_rows,
                                virtual_slots, num_slots, V2P, DRAFTS)  # fmt: skip
        limit = tl.where(slot > 0, dim, 0)
        base = state + layer * s_layer
        own = base + tl.maximum(slot, 0) * s_slot
        if LAYOUT == WINDOW:
            limit = tl.where((draft >= 0) & (draft < draft_count), limit, 0)
            saved = draft_rows + layer * q_layer + tl.maximum(draft, 0) * q_req
        if TRACK:
            step = tl.load(track_steps + b).to(tl.int64)
            goal = _translated(tl.load(track_indices + b).to(tl.int64), v2p_table, virtual_slots, V2P)
            wanted = tl.where(_drafted(step, drafts) & _there(goal, num_slots), limit, 0)
            taken = tl.minimum(tl.maximum(step, 0), drafts - 1) + 1
            track = base + tl.maximum(goal, 0) * s_slot
            if LAYOUT == WINDOW:
                _copy_rows(saved, track, taken, q_row, s_row, d, qd, sd, wanted, S, S_TILE)
            elif LAYOUT == RING:
                end = tl.minimum(tl.maximum(tl.load(computed_lens + b).to(tl.int64), 0), LAST_POSITION) + taken
                for i in tl.static_range(S):
                    at = _ring_row(end - S + i, rows) * s_row + d * sd
                    row = tl.load(own + at, mask=d < tl.where(end - S + i >= 0, wanted, 0), other=0.0)
                    tl.store(track + at, row, mask=d < wanted)
            else:
                _copy_rows(own, track, taken - 1, s_row, s_row, d, sd, sd, wanted, S, S_TILE)
        if LAYOUT == WINDOW:
            step = tl.load(last_steps + b).to(tl.int64)
            taken = tl.minimum(tl.maximum(step, 0), drafts - 1) + 1
            _copy_rows(saved, own, taken, q_row, s_row, d, qd, sd, tl.where(_drafted(step, drafts), limit, 0), S,
                       S_TILE)  # fmt: skip


@triton.jit(do_not_specialize=[
    "items", "blocks", "reqs", "size", "drafts", "s_layer", "s_slot", "q_layer", "q_req", "q_step", "request_rows",
    "virtual_slots", "num_slots", "draft_count",
])  # fmt: skip
def commit_ssm_kernel(
    ssm_state, intermediate_ssm, req_pool_indices, mamba_index_mapping, v2p_table, draft_indices, last_steps,
    track_indices, track_steps,
    items, blocks, reqs, size, drafts, s_layer, s_slot, q_layer, q_req, q_step,
    request_rows, virtual_slots, num_slots, draft_count,
    V2P: tl.constexpr, DRAFTS: tl.constexpr, TRACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The SSM state of step j into the slot, and of the tracked step into the track slot."""
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        d = (item % blocks) * BLOCK + tl.arange(0, BLOCK)
        b = (item // blocks) % reqs
        layer = (item // blocks // reqs).to(tl.int64)
        slot, draft = _resolved(b, req_pool_indices, mamba_index_mapping, v2p_table, draft_indices, request_rows,
                                virtual_slots, num_slots, V2P, DRAFTS)  # fmt: skip
        limit = tl.where((slot > 0) & (draft >= 0) & (draft < draft_count), size, 0)
        saved = intermediate_ssm + layer * q_layer + tl.maximum(draft, 0) * q_req
        if TRACK:
            step = tl.load(track_steps + b).to(tl.int64)
            goal = _translated(tl.load(track_indices + b).to(tl.int64), v2p_table, virtual_slots, V2P)
            wanted = d < tl.where(_drafted(step, drafts) & _there(goal, num_slots), limit, 0)
            at = tl.minimum(tl.maximum(step, 0), drafts - 1) * q_step
            row = tl.load(saved + at + d, mask=wanted, other=0.0)
            tl.store(ssm_state + layer * s_layer + tl.maximum(goal, 0) * s_slot + d, row, mask=wanted)
        step = tl.load(last_steps + b).to(tl.int64)
        wanted = d < tl.where(_drafted(step, drafts), limit, 0)
        at = tl.minimum(tl.maximum(step, 0), drafts - 1) * q_step
        row = tl.load(saved + at + d, mask=wanted, other=0.0)
        tl.store(ssm_state + layer * s_layer + tl.maximum(slot, 0) * s_slot + d, row, mask=wanted)
