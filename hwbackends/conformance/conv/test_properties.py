"""Properties: what must give the same bits. A prompt in chunks, a batch in another order, added padding, other strides,
a verify step against decode steps, a cold call against a warm one, every repeat against the first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hwbackends.conformance import oracle
from hwbackends.conformance.cases import CONV, MODES, Inputs, Req, Rig, judge_outputs, judge_state, rig_for
from hwbackends.conformance.conv.test_tolerance import random_histories, random_numbers, random_weights, silu_weights
from hwbackends.conformance.kit import Kit
from hwbackends.conformance.marks import cases, clauses, fresh_process, over
from hwbackends.errors import HwBackendsError

DIM = 37
REQUESTS = [Req(3, tokens=9, length=7, accept=2), Req(1, tokens=1, length=2, accept=3), Req(9, tokens=23, length=12)]


def _twins(kit: Kit, mode: str, requests: list[Req], count: int = 2, **sizes: Any) -> list[Rig]:
    """Rigs with the same state."""
    rigs = [rig_for(kit, mode, **{"dims": (DIM,), **sizes}) for _ in range(count)]
    random_histories(kit, rigs[0], requests, mode)
    for rig in rigs[1:]:
        rig.copy_state(rigs[0])
    return rigs


CHUNKED = 11
CHUNKS = ((1,) * CHUNKED, (3, 3, 3, 2), (10, 1), (1, 2, 8), (4, 7))


@over("layout", "dtype", "width", quick=3)
@clauses("CS-EXTEND-05")
def test_a_prompt_in_chunks(kit: Kit) -> None:
    """Any split of a prompt gives the outputs and the window of the whole; each split is a request of its own."""
    weights = silu_weights(kit, DIM)
    x = random_numbers(kit, (CHUNKED, DIM), kit.point.dtype)
    whole, rig = _twins(kit, "extend", [], 2)
    want = whole.run(whole.batch("extend", [Req(4, tokens=CHUNKED)]), weights, x)
    window = whole.window_of(4, CHUNKED)
    outputs: list[list[Any]] = [[] for _ in CHUNKS]
    for turn in range(max(map(len, CHUNKS))):
        now = [b for b, chunks in enumerate(CHUNKS) if turn < len(chunks)]
        spans = [(sum(CHUNKS[b][:turn]), CHUNKS[b][turn]) for b in now]
        requests = [Req(1 + b, tokens=tokens, length=start) for b, (start, tokens) in zip(now, spans, strict=True)]
        inputs = np.concatenate([x[start : start + tokens] for start, tokens in spans])
        call = rig.run(rig.batch("extend", requests), weights, inputs)
        for b, row in zip(now, call.rows, strict=True):
            outputs[b].append(call.y[row.start : row.start + row.tokens])
    for b, chunks in enumerate(CHUNKS):
        kit.same_bits("CS-EXTEND-05", torch.cat(outputs[b]), want.y, f"outputs of chunks {chunks}")
        kit.equal("CS-EXTEND-05", rig.window_of(1 + b, CHUNKED), window, f"window after chunks {chunks}")


@cases("mode", MODES, quick=4)
@over("layout", "dtype", "width", quick=1)
@clauses("CS-CONV-07")
def test_a_batch_in_another_order(kit: Kit, mode: str) -> None:
    """Permuting requests permutes outputs and leaves the same state."""
    first, second = _twins(kit, mode, REQUESTS)
    weights, order = silu_weights(kit, DIM), [2, 0, 1]
    batch = first.batch(mode, REQUESTS)
    x = random_numbers(kit, (batch.num_tokens, DIM), kit.point.dtype)
    straight = first.run(batch, weights, x)
    spans = [slice(row.start, row.start + row.tokens) for row in straight.rows]
    moved = [REQUESTS[i] for i in order]
    rows = [batch.req_pool_indices[i] for i in order]
    second.batch(mode, REQUESTS)  # the map of the first order
    other = second.batch(mode, moved, place=False, req_pool_indices=rows)
    turned = second.run(other, weights, np.concatenate([x[spans[i]] for i in order]))
    kit.same_bits("CS-CONV-07", turned.y, torch.cat([straight.y[spans[i]] for i in order]), "outputs, permuted")
    kit.same_bits("CS-CONV-07", turned.after, straight.after, "state after the permuted batch")


@cases("mode", MODES, quick=4)
@over("layout", "dtype", "width", quick=1)
@clauses("CS-CONV-05")
def test_added_padding(kit: Kit, mode: str) -> None:
    """Padded rows between, behind, and rows of x behind the tokens change no bit of the live ones."""
    plain, padded = _twins(kit, mode, REQUESTS)
    weights = silu_weights(kit, DIM)
    batch = plain.batch(mode, REQUESTS)
    x = random_numbers(kit, (batch.num_tokens, DIM), kit.point.dtype)
    want = plain.run(batch, weights, x)
    more = [REQUESTS[0], Req(0), REQUESTS[1], Req(-1), Req(0), REQUESTS[2], Req(-1)]
    wider = padded.batch(mode, more)
    rows = oracle.prepare(wider, padded.facts)
    spread = random_numbers(kit, (wider.num_tokens, DIM), kit.point.dtype)
    live = np.concatenate([np.arange(r.start, r.start + r.tokens) for r in rows if not r.padded])
    spread[live] = x
    got = padded.run(wider, weights, spread, tail=3)
    kit.same_bits("CS-CONV-05", got.y[live], want.y, "live outputs beside padding")
    kit.same_bits("CS-CONV-05", got.after, want.after, "state beside padding")


@over("layout", "dtype", "width", quick=3)
@clauses("CS-VERIFY-01")
def test_verify_equals_decode(kit: Kit) -> None:
    """N drafts in one step give the outputs of N decode steps."""
    kit.need(hooks=("conv_decode", "prepare_decode_metadata"))
    requests = [Req(3, length=7), Req(1, length=2), Req(9, length=12)]
    one, many = _twins(kit, "target_verify", requests, drafts=3)
    weights = silu_weights(kit, DIM)
    x = random_numbers(kit, (3, 3, DIM), kit.point.dtype)
    verified = one.run(one.batch("target_verify", requests), weights, x.reshape(9, DIM))
    for t in range(3):
        now = [replace(req, length=req.length + t) for req in requests]
        call = many.run(many.batch("decode", now), weights, x[:, t])
        kit.same_bits("CS-VERIFY-01", verified.y[t::3], call.y, f"outputs of token {t}")


@cases("mode", MODES, quick=4)
@over("layout", "dtype", "width", quick=1)
@clauses("CS-CONV-06")
def test_strides_of_inputs(kit: Kit, mode: str) -> None:
    """x and out as columns of wider tensors, weights as the transpose of [W, D] or with gaps: no bit changes."""
    lays = [
        Inputs(), Inputs(x_columns=(DIM, DIM)), Inputs(out_columns=(3, 8)), Inputs(weight_transposed=True),
        Inputs(weight_step=2, bias_step=3), Inputs(x_columns=(1, 2), out_columns=(1, 0), weight_transposed=True),
        Inputs(x_columns=(8, 0), no_out=True, bias_step=2),
    ]  # fmt: skip
    rigs = _twins(kit, mode, REQUESTS, len(lays))
    weights = silu_weights(kit, DIM)
    batch = rigs[0].batch(mode, REQUESTS)
    x = random_numbers(kit, (batch.num_tokens, DIM), kit.point.dtype)
    calls = []
    for rig, lay in zip(rigs, lays, strict=True):
        call = rig.run(rig.batch(mode, REQUESTS), weights, x, inputs=lay)
        calls.append(call)
        kit.same_bits("CS-CONV-06", call.y, calls[0].y, f"outputs with {lay}")
        kit.same_bits("CS-CONV-06", call.after, calls[0].after, f"state with {lay}")
        kit.check("CS-CONV-06", bool(call.guards.isnan().all()), f"memory around the output was written, {lay}")


@cases("mode", MODES, quick=4)
@over("layout", "dtype", "width", quick=1)
@clauses("CS-CONV-06")
def test_strides_of_state(kit: Kit, mode: str) -> None:
    """A pool of [L, slots, D, rows], as two engines lay it out, gives the bits of a pool of rows."""
    plain, turned = (rig_for(kit, mode, dims=(DIM,), transposed=t) for t in (False, True))
    random_histories(kit, plain, REQUESTS, mode)
    turned.copy_state(plain)
    weights = silu_weights(kit, DIM)
    batch = plain.batch(mode, REQUESTS)
    turned.batch(mode, REQUESTS)
    x = random_numbers(kit, (batch.num_tokens, DIM), kit.point.dtype)
    want, got = plain.run(batch, weights, x), turned.run(batch, weights, x)
    kit.same_bits("CS-CONV-06", got.y, want.y, "outputs")
    kit.same_bits("CS-CONV-06", got.after, want.after, "state")


@cases("mode", MODES, quick=4)
@over("layout", "dtype", "width", quick=1)
@clauses("CS-CONV-06")
def test_x_with_channels_apart(kit: Kit, mode: str) -> None:
    """x whose last dimension is not contiguous: the right numbers, or a named error, never wrong numbers."""
    rig = rig_for(kit, mode, dims=(DIM,))
    rig.histories(REQUESTS)
    batch = rig.batch(mode, REQUESTS)
    try:
        call = rig.run(
            batch, random_weights(kit, DIM, rig.shape.width, rig.shape.dtype, None, residual=False), inputs=_Apart()
        )
    except HwBackendsError:
        kit.check("CS-CONV-06", True, "")
        return
    judge_outputs(kit, call, "CS-CONV-06", exact=False)
    judge_state(kit, call, rig, own="CS-CONV-06")


class _Apart(Inputs):
    """x as every second column."""

    def x(self, rig: Rig, values: oracle.Array) -> torch.Tensor:
        wide = np.full((values.shape[0], 2 * values.shape[1]), np.nan)
        wide[:, ::2] = values
        return rig.kit.tensor(wide, rig.shape.dtype)[:, ::2]


@cases("mode", MODES, quick=4)
@over("layout", "dtype", quick=1)
@clauses("CS-CONV-10")
def test_every_repeat_gives_the_same_bits(kit: Kit, mode: str) -> None:
    """A hundred runs from the same state."""
    rig, spare = _twins(kit, mode, REQUESTS, dims=(129,))
    weights = silu_weights(kit, 129)
    batch = rig.batch(mode, REQUESTS)
    x = random_numbers(kit, (batch.num_tokens, 129), kit.point.dtype)
    metadata = rig.prepare(batch)
    first = rig.run(batch, weights, x, metadata=metadata)
    for _ in range(99 if "cuda" in kit.target else 9):
        rig.copy_state(spare)
        again = rig.run(batch, weights, x, metadata=metadata)
        kit.same_bits("CS-CONV-10", again.y, first.y, "outputs of a repeat")
        kit.same_bits("CS-CONV-10", again.after, first.after, "state of a repeat")


@fresh_process
@over("layout", "dtype", quick=1)
@clauses("CS-CONV-10")
def test_a_cold_call_equals_a_warm_one(kit: Kit) -> None:
    """The first call of a process, when kernels are built and tuned, against a later one."""
    kit.need(hooks=tuple(CONV.values()))
    for mode in MODES:
        cold, warm = _twins(kit, mode, REQUESTS)
        weights = silu_weights(kit, DIM)
        batch = cold.batch(mode, REQUESTS)
        x = random_numbers(kit, (batch.num_tokens, DIM), kit.point.dtype)
        first = cold.run(batch, weights, x)
        warm.batch(mode, REQUESTS)
        later = warm.run(batch, weights, x)
        kit.same_bits("CS-CONV-10", later.y, first.y, f"{mode}: outputs, cold and warm")
        kit.same_bits("CS-CONV-10", later.after, first.after, f"{mode}: state, cold and warm")
