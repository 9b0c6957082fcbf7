"""Fused epilogue: conv, addition to the residual stream, RMSNorm; state is that of the plain conv. Optional hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hwbackends.conformance import oracle
from hwbackends.conformance.cases import Call, Req, Rig, Weights, judge_state, rig_for
from hwbackends.conformance.conv.test_errors import judge
from hwbackends.conformance.conv.test_tolerance import random_histories, random_numbers, random_weights, silu_weights
from hwbackends.conformance.kit import Kit
from hwbackends.conformance.marks import cases, clauses, over, product
from hwbackends.errors import DtypeError, HwBackendsError, ShapeError, StrideError

DIM, EPS = 37, 0.75  # large enough that leaving it out, or adding it elsewhere, shows in 16 bits
FUSED = {"decode": "fused_decode_add_rmsnorm", "target_verify": "fused_target_verify_add_rmsnorm"}
REQUESTS = [Req(3, length=7), Req(-1), Req(1, length=2), Req(0), Req(9, length=12)]
NORMS = ("", "float32")


def _run(
    kit: Kit,
    rig: Rig,
    batch: oracle.Batch,
    weights: Weights,
    x: oracle.Array,
    stream: oracle.Array,
    norm: oracle.Array,
    norm_dtype: str = "",
) -> tuple[Call, Tensor]:
    """The fused hook; returns the call and the residual stream after it, guard rows included."""
    wide = rig.far("stream", kit.tensor(np.pad(stream, ((1, 1), (0, 0)), constant_values=np.nan), rig.shape.dtype))

    def hook(*args: Any, **options: Any) -> Tensor:
        taps = kit.tensor(norm, norm_dtype or rig.shape.dtype)
        found: Tensor = getattr(kit.hooks, FUSED[batch.mode])(*args, wide[1:-1], taps, EPS, **options)
        return found

    call = rig.run(batch, weights, x, hook=hook)
    return call, kit.host(wide)


def _bounds(call: Call, rig: Rig, stream: oracle.Array, norm: oracle.Array) -> tuple[Any, Any, Any, Any]:
    """(h, its bound, out, its bound): errors of y and of float32 arithmetic, carried through the norm."""
    dtype, unit = rig.shape.dtype, oracle.WIDE(2.0) ** (-53 if rig.shape.dtype == "float64" else -24)
    h, out = oracle.add_rmsnorm(oracle.round_to(call.want.y, dtype), stream, norm, EPS)
    error = call.want.bound + oracle.ulp(call.want.y, dtype) / 2 + unit * np.abs(h)
    square = np.mean(h * h, axis=-1, keepdims=True)
    spread = np.mean(2 * np.abs(h) * error + error**2, axis=-1, keepdims=True) + (h.shape[1] + 3) * unit * square
    relative = spread / (2 * (square + EPS)) + 8 * unit
    scale = np.abs(norm) / np.sqrt(square + EPS)
    carried = scale * error + relative * np.abs(out)
    return h, error + oracle.ulp(h, dtype) / 2, out, carried + oracle.ulp(np.abs(out) + carried, dtype) / 2


@cases("mode, norm_dtype", [(m, n) for n in NORMS for m in FUSED], quick=4)
@over("layout", "dtype", "width", quick=3)
@clauses("CS-FUSED-01", "CS-FUSED-02")
def test_fused(kit: Kit, mode: str, norm_dtype: str) -> None:
    """The residual stream, the normed output, padded rows of both, and the state of the plain conv."""
    kit.need(hooks=(FUSED[mode],), dtype=norm_dtype or None)
    rig = rig_for(kit, mode, dims=(DIM,))
    judge_fused(kit, rig, mode, REQUESTS, EPS, "" if rig.shape.dtype == "float64" else norm_dtype)


@cases("mode", list(FUSED), quick=2)
@over("dtype", quick=2, dtype=("float16", "bfloat16"))
@clauses("CS-FUSED-01", "CS-FUSED-02")
def test_the_norm_weight_keeps_its_bits(kit: Kit, mode: str) -> None:
    """float32 norm weights over 16-bit rows, where a loud stream leaves the conv's rounding nothing to hide."""
    kit.need(hooks=(FUSED[mode],), dtype="float32")
    rig = rig_for(kit, mode, dims=(DIM,))
    judge_fused(kit, rig, mode, REQUESTS, EPS, "float32", loud=256.0)


def judge_fused(
    kit: Kit, rig: Rig, mode: str, requests: list[Req], eps: float, norm_dtype: str = "", loud: float = 1.0
) -> None:
    """A step of random numbers through the fused hook, judged whole; `loud` scales the residual stream."""
    dtype, width, dim = rig.shape.dtype, rig.shape.width, rig.shape.dims[0]
    random_histories(kit, rig, requests, mode)
    batch = rig.batch(mode, requests)
    x, stream = (random_numbers(kit, (batch.num_tokens, dim), dtype) for _ in range(2))
    stream *= loud
    norm = random_numbers(kit, (dim,), norm_dtype or dtype)
    weights = random_weights(kit, dim, width, dtype, kit.silu, residual=mode == "decode")
    call, after = _run(kit, rig, batch, weights, x, stream, norm, norm_dtype)
    live = np.concatenate([np.arange(r.start, r.start + r.tokens) for r in call.rows if not r.padded])
    padded = np.setdiff1d(np.arange(batch.num_tokens), live)
    h, h_bound, out, out_bound = _bounds(call, rig, stream, norm)
    mine, y = after[1:-1].double().numpy(), call.y.double().numpy()
    kit.within("CS-FUSED-01", mine[live], h[live], h_bound[live], dtype, f"{mode}: residual stream")
    kit.within("CS-FUSED-01", y[live], out[live], out_bound[live], dtype, f"{mode}: normed output")
    kit.equal("CS-FUSED-02", y[padded], np.zeros((len(padded), dim)), "padded outputs")
    kit.equal("CS-FUSED-02", mine[padded], stream[padded], "residual stream of padded rows")
    guards = bool(call.guards.isnan().all() and after[[0, -1]].isnan().all())
    kit.check("CS-FUSED-02", guards, "memory around the output or the residual stream was written")
    judge_state(kit, call, rig, own="CS-FUSED-02", others="CS-FUSED-02", drafts="CS-FUSED-02", padded="CS-FUSED-02")


@over("layout", "dtype", "width", quick=1)
@clauses("CS-FUSED-03")
def test_the_verify_form_gives_the_rows_of_the_decode_form(kit: Kit) -> None:
    """N drafts at once against N fused decode steps, bit by bit."""
    kit.need(hooks=tuple(FUSED.values()))
    dtype = kit.point.dtype
    requests = [Req(3, length=7), Req(1, length=2), Req(9, length=12)]
    one, many = (rig_for(kit, "target_verify", dims=(DIM,), drafts=3) for _ in range(2))
    random_histories(kit, one, requests, "target_verify")
    many.copy_state(one)
    weights, norm = silu_weights(kit, DIM), random_numbers(kit, (DIM,), dtype)
    x, stream = (random_numbers(kit, (3, 3, DIM), dtype) for _ in range(2))
    flat = x.reshape(9, DIM), stream.reshape(9, DIM)
    call, after = _run(kit, one, one.batch("target_verify", requests), weights, *flat, norm)
    judge_state(kit, call, one, own="CS-FUSED-03", drafts="CS-FUSED-03")
    for t in range(3):
        now = [Req(r.slot, length=r.length + t) for r in requests]
        single, left = _run(kit, many, many.batch("decode", now), weights, x[:, t], stream[:, t], norm)
        kit.same_bits("CS-FUSED-03", call.y[t::3], single.y, f"normed outputs of token {t}")
        kit.same_bits("CS-FUSED-03", after[1:-1][t::3], left[1:-1], f"residual stream of token {t}")


@over("layout", "dtype", quick=1)
@clauses("CS-FUSED-02")
def test_fused_with_no_live_row(kit: Kit) -> None:
    """All rows padded: outputs 0, nothing else."""
    kit.need(hooks=(FUSED["decode"],))
    rig = rig_for(kit, "decode")
    rig.history(6, 9)
    batch = rig.batch("decode", [Req(0), Req(-1), Req(0)])
    stream = kit.rng.integers(1, 9, (3, 5)).astype(float)
    call, after = _run(kit, rig, batch, Weights(rig.taps()), rig.whole_numbers(3, 5), stream, np.ones(5))
    kit.equal("CS-FUSED-02", call.y, np.zeros((3, 5)), "outputs")
    kit.equal("CS-FUSED-02", after[1:-1], stream, "residual stream")
    kit.check("CS-FUSED-02", torch.equal(call.after.isnan(), call.before.isnan()), "state changed")
    judge_state(kit, call, rig, others="CS-FUSED-02", padded="CS-FUSED-02")


BAD: dict[str, tuple[type[HwBackendsError], Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]] = {
    "stream-dtype": (DtypeError, lambda s, n: (s.to(torch.float32 if s.dtype != torch.float32 else torch.bfloat16), n)),
    "stream-shape": (ShapeError, lambda s, n: (s[:, :-1], n)),
    "norm-shape": (ShapeError, lambda s, n: (s, n[:-1])),
    "stream-strides": (StrideError, lambda s, n: (torch.cat([s, s], 1)[:, ::2], n)),
}


@cases("mode, bad", list(product(mode=list(FUSED), bad=list(BAD))), quick=2 * len(BAD))
@over("layout", "dtype", quick=1)
@clauses("CS-CONV-11")
def test_bad_arguments_of_the_epilogue(kit: Kit, mode: str, bad: str) -> None:
    """A residual stream of another dtype, shape or stride, a norm weight of another extent."""
    kit.need(hooks=(FUSED[mode],))
    rig = rig_for(kit, mode, dims=(DIM,))
    batch, dtype = rig.batch(mode, REQUESTS), rig.shape.dtype
    rig.histories([r for r in REQUESTS if r.slot > 0])
    x = kit.tensor(rig.whole_numbers(batch.num_tokens, DIM), dtype)
    wanted, spoil = BAD[bad]
    stream, norm = spoil(torch.ones_like(x), torch.ones(DIM).to(x.dtype))
    metadata, state = rig.prepare(batch), rig.pool.conv_state("k", 0)
    taps = kit.tensor(rig.taps(), dtype)

    def call() -> None:
        getattr(kit.hooks, FUSED[mode])(x, taps, None, state, metadata, stream, norm, EPS)

    judge(kit, "CS-CONV-11", f"{FUSED[mode]} with {bad}", wanted, rig, call)
