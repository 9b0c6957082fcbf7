"""Triton kernels that move state between slots: the commit after a verify, copy and clear. Device code only."""
# Tuples of tensors grow by +, and branches stay nested: triton's compiler knows no unpacking, and no short circuit.
# ruff: noqa: RUF005, SIM102

from __future__ import annotations

import triton
import triton.language as tl

from hwbackends.triton_ops.kernels_conv import LAST_POSITION, RING, WINDOW, _at, _channels, _every, _live, _state_row


@triton.jit
def _translated(v2p, slot, virtual_slots, V2P: tl.constexpr):
    """Physical slot; 0 where the table has no such entry."""
    if V2P:
        slot = tl.load(v2p + slot, mask=_live(slot, virtual_slots), other=0)
    return slot


@triton.jit
def _slot_of(req_pool_indices, mamba_index_mapping, v2p, b, request_rows, virtual_slots, V2P: tl.constexpr):
    """Request row and physical slot of one row of the batch; slot 0 where it is padded or its row is not there."""
    request = tl.load(req_pool_indices + b)
    slot = tl.load(mamba_index_mapping + request, mask=(request >= 0) & (request < request_rows), other=0)
    return request, _translated(v2p, slot, virtual_slots, V2P)


@triton.jit
def _step(steps, b, N: tl.constexpr):
    """The step of one row, -1 where a verify has no such step."""
    step = tl.load(steps + b)
    return tl.where((step >= 0) & (step < N), step, -1).to(tl.int32)


@triton.jit
def _copy_rows(
    source, at, target, to, ok, d, inside,
    S: tl.constexpr, STEP: tl.constexpr, SD: tl.constexpr, TR: tl.constexpr, TD: tl.constexpr,
):  # fmt: skip
    """S rows of one channel block, all read before any is written."""
    mask = _every(ok, d) & inside
    rows = ()
    for i in tl.static_range(S):
        rows = rows + (tl.load(source + at + i * STEP + _at(d, SD), mask=mask, other=0.0),)
    for i in tl.static_range(S):
        tl.store(target + to + i * TR + _at(d, TD), rows[i], mask=mask)


@triton.jit
def _track_in_slot(
    state, base, slot, track, position, step, ok, d, inside,
    S: tl.constexpr, LAYOUT: tl.constexpr, C: tl.constexpr, SS: tl.constexpr, SR: tl.constexpr, SD: tl.constexpr,
):  # fmt: skip
    """A snapshot where verify left the drafts in the slot: ring, the S rows up to the step at the same row numbers;
    lazy, the rows from the step on to the front."""
    mask = _every(ok, d) & inside
    first = position + step + 1 - S if LAYOUT == RING else step
    begin = first if LAYOUT == RING else first * 0
    rows = ()
    for i in tl.static_range(S):
        seen = mask & _every((first + i >= 0) | (ok == 0), d)
        at = base + _state_row(slot, first, i, LAYOUT, C, SS, SR) + _at(d, SD)
        rows = rows + (tl.load(state + at, mask=seen, other=0.0),)
    for i in tl.static_range(S):
        at = base + _state_row(track, begin, i, LAYOUT, C, SS, SR) + _at(d, SD)
        tl.store(state + at, rows[i], mask=mask)


@triton.jit
def _commit_ssm(
    ssm, intermediate, layer, slot, row, step, ok, block,
    E: tl.constexpr, ML: tl.constexpr, MS: tl.constexpr, IL: tl.constexpr, IR: tl.constexpr, IN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    e, inside = _channels(block, E, BLOCK)
    mask = _every(ok & (row >= 0) & (step >= 0), e) & inside
    at = layer.to(tl.int64) * IL + tl.maximum(row, 0).to(tl.int64) * IR + tl.maximum(step, 0).to(tl.int64) * IN
    value = tl.load(intermediate + at + e, mask=mask, other=0.0)
    tl.store(ssm + layer.to(tl.int64) * ML + slot.to(tl.int64) * MS + e, value, mask=mask)


@triton.jit(do_not_specialize=["request_rows", "virtual_slots", "num_slots", "num_draft_rows", "num_ssm_rows"])
def commit_kernel(
    state, drafts, ssm, intermediate, req_pool_indices, mamba_index_mapping, v2p, steps, draft_indices,
    track_indices, track_steps, computed_lens, request_rows, virtual_slots, num_slots, num_draft_rows, num_ssm_rows,
    D: tl.constexpr, S: tl.constexpr, N: tl.constexpr, LAYOUT: tl.constexpr, C: tl.constexpr,
    SL: tl.constexpr, SS: tl.constexpr, SR: tl.constexpr, SD: tl.constexpr,
    RL: tl.constexpr, RS: tl.constexpr, RR: tl.constexpr, RD: tl.constexpr,
    E: tl.constexpr, ML: tl.constexpr, MS: tl.constexpr, IL: tl.constexpr, IR: tl.constexpr, IN: tl.constexpr,
    LAYERS: tl.constexpr, V2P: tl.constexpr, ROWS: tl.constexpr, TRACK: tl.constexpr, CONV: tl.constexpr,
    SSM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Everything that a commit writes, in one launch: the window into the slot (CONV, window layout), the snapshot
    (TRACK), the SSM state of both (SSM). One program per (block, layer, request), conv blocks before SSM blocks."""
    CONV_BLOCKS: tl.constexpr = (D + BLOCK - 1) // BLOCK if CONV else 0
    SSM_BLOCKS: tl.constexpr = (E + BLOCK - 1) // BLOCK if SSM else 0
    BLOCKS: tl.constexpr = CONV_BLOCKS + SSM_BLOCKS
    block = tl.program_id(0) % BLOCKS
    layer = (tl.program_id(0) // BLOCKS) % LAYERS
    b = tl.program_id(0) // (BLOCKS * LAYERS)
    request, slot = _slot_of(req_pool_indices, mamba_index_mapping, v2p, b, request_rows, virtual_slots, V2P)
    step = _step(steps, b, N)
    row = tl.load(draft_indices + b) if ROWS else request
    live = _live(slot, num_slots)
    if TRACK:
        track = _translated(v2p, tl.load(track_indices + b), virtual_slots, V2P)
        track_step = _step(track_steps, b, N)
        snap = live & _live(track, num_slots) & (track_step >= 0)
    if block < CONV_BLOCKS:
        d, inside = _channels(block, D, BLOCK)
        base = layer.to(tl.int64) * SL
        if LAYOUT == WINDOW:
            known = live & (row >= 0) & (row < num_draft_rows)
            saved = layer.to(tl.int64) * RL + tl.maximum(row, 0).to(tl.int64) * RS
            at = saved + (tl.maximum(step, 0) + 1).to(tl.int64) * RR
            ok = known & (step >= 0)
            _copy_rows(drafts, at, state, base + slot.to(tl.int64) * SS, ok, d, inside, S, RR, RD, SR, SD)
            if TRACK:
                at = saved + (tl.maximum(track_step, 0) + 1).to(tl.int64) * RR
                to = base + track.to(tl.int64) * SS
                _copy_rows(drafts, at, state, to, known & snap, d, inside, S, RR, RD, SR, SD)
        elif TRACK:
            position = step
            if LAYOUT == RING:
                position = tl.minimum(tl.maximum(tl.load(computed_lens + b), 0), LAST_POSITION).to(tl.int32)
            _track_in_slot(state, base, slot, track, position, track_step, snap, d, inside, S, LAYOUT, C, SS, SR, SD)
    if SSM:
        if block >= CONV_BLOCKS:
            at = block - CONV_BLOCKS
            row = tl.where(row < num_ssm_rows, row, -1)
            _commit_ssm(ssm, intermediate, layer, slot, row, step, live, at, E, ML, MS, IL, IR, IN, BLOCK)
            if TRACK:
                _commit_ssm(ssm, intermediate, layer, track, row, track_step, snap, at, E, ML, MS, IL, IR, IN, BLOCK)


@triton.jit(do_not_specialize=["num_slots"])
def copy_slots_kernel(
    state, source_indices, destination_indices, num_slots,
    ENTRY: tl.constexpr, INNER: tl.constexpr, SL: tl.constexpr, SS: tl.constexpr, SR: tl.constexpr, SD: tl.constexpr,
    LAYERS: tl.constexpr, CLEAR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy (or with CLEAR zero) whole slots, ENTRY elements each as rows of INNER; pairs with a padded side are
    left out."""
    BLOCKS: tl.constexpr = (ENTRY + BLOCK - 1) // BLOCK
    e, inside = _channels(tl.program_id(0) % BLOCKS, ENTRY, BLOCK)
    layer = (tl.program_id(0) // BLOCKS) % LAYERS
    m = tl.program_id(0) // (BLOCKS * LAYERS)
    destination = tl.load(destination_indices + m)
    source = tl.load(source_indices + m)
    mask = _every(_live(destination, num_slots) & _live(source, num_slots), e) & inside
    at = state + layer.to(tl.int64) * SL + (e // INNER).to(tl.int64) * SR + (e % INNER).to(tl.int64) * SD
    if CLEAR:
        value = tl.zeros([BLOCK], state.dtype.element_ty)
    else:
        value = tl.load(at + source.to(tl.int64) * SS, mask=mask, other=0.0)
    tl.store(at + destination.to(tl.int64) * SS, value, mask=mask)
