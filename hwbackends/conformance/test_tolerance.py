"""Tolerance lane: random numbers against the oracle, with a bound for each element in units in the last place of the
output: one rounding at the store plus what float32 (float64 for float64) sums may lose. The worst is reported."""

from __future__ import annotations

from typing import Any

import numpy as np

from hwbackends.conformance import oracle
from hwbackends.conformance.cases import MODES, Req, Rig, Shape, Weights, judge_outputs, judge_state, rig_for
from hwbackends.conformance.kit import Kit
from hwbackends.conformance.marks import cases, clauses

DTYPES = ("bfloat16", "float32", "float16", "float64")
REQUESTS = [
    Req(3, tokens=9, length=7, accept=2), Req(-1, tokens=2), Req(1, tokens=1, length=2, accept=3),
    Req(9, tokens=23, length=12, accept=1), Req(6, tokens=2, initial=False),
]  # fmt: skip
DIM = 37


def random_numbers(kit: Kit, shape: tuple[int, ...], dtype: str) -> oracle.Array:
    """Normal numbers over six orders of two, as `dtype` holds them."""
    scale = 2.0 ** kit.rng.integers(-3, 4, shape)
    return oracle.round_to(kit.rng.standard_normal(shape) * scale, dtype)


def random_weights(
    kit: Kit,
    dim: int,
    width: int,
    dtype: str,
    activation: str | None = "silu",
    bias: bool = True,
    residual: bool = True,
) -> Weights:
    """Random taps and bias as `dtype` holds them."""
    taps = random_numbers(kit, (dim, width), dtype)
    return Weights(taps, random_numbers(kit, (dim,), dtype) if bias else None, activation, residual)


def random_histories(kit: Kit, rig: Rig, requests: list[Req], mode: str) -> None:
    """A random history for each live request that `mode` lets read one; other slots keep their NaN."""
    for req in requests:
        fresh = req.initial is False and mode in ("extend", "draft_extend")
        if req.slot > 0 and not fresh and (req.length > 0 or mode != "extend"):
            values = random_numbers(kit, (rig.shape.width - 1, rig.shape.dims[0]), rig.shape.state)
            rig.history(req.slot, req.length, rig.offset(req), values)


EPILOGUES = (("silu", True, True), (None, False, True), (None, True, False), ("silu", False, False))
FORMS = [
    (mode, dtype, activation, bias, residual)
    for activation, bias, residual in EPILOGUES
    for dtype in DTYPES
    for mode in MODES
]  # fmt: skip


@cases("mode, dtype, activation, bias, residual", FORMS, quick=8)
@clauses("CS-CONV-01", "CS-CONV-02")
def test_outputs(kit: Kit, mode: str, dtype: str, activation: str | None, bias: bool, residual: bool) -> None:
    """Every phase, dtype and epilogue, D not a multiple of anything."""
    rig = rig_for(kit, mode, Shape("window", dtype, dims=(DIM,)), activation=activation)
    random_histories(kit, rig, REQUESTS, mode)
    batch = rig.batch(mode, REQUESTS)
    x = random_numbers(kit, (batch.num_tokens, DIM), dtype)
    call = rig.run(batch, random_weights(kit, DIM, 4, dtype, activation, bias, residual), x)
    judge_outputs(kit, call, "CS-CONV-01", exact=False, dtype=dtype)
    judge_outputs(kit, call, "CS-CONV-02", exact=False, dtype=dtype)


@cases(
    "layout, width, dtype",
    [(layout, w, d) for w in (2, 3, 5) for layout in ("ring", "lazy", "window") for d in DTYPES[:2]],
)
@clauses("CS-CONV-01", "CS-CONV-04")
def test_widths_and_layouts(kit: Kit, layout: Any, width: int, dtype: str) -> None:
    """Random numbers through each layout and width, and the random state that they leave."""
    for mode in ("decode", "extend"):
        rig = rig_for(kit, mode, Shape(layout, dtype, width=width, dims=(DIM,)), activation="silu")
        random_histories(kit, rig, REQUESTS, mode)
        batch = rig.batch(mode, REQUESTS)
        x = random_numbers(kit, (batch.num_tokens, DIM), dtype)
        call = rig.run(batch, random_weights(kit, DIM, width, dtype), x)
        judge_outputs(kit, call, "CS-CONV-01", exact=False, dtype=dtype)
        judge_state(kit, call, rig, own="CS-CONV-04")


@cases("dtype", DTYPES, quick=1)
@clauses("CS-CONV-02")
def test_cancellation(kit: Kit, dtype: str) -> None:
    """Products that cancel: rounding them to the input's dtype loses what is left."""
    rig = rig_for(kit, "extend", Shape("window", dtype, dims=(DIM,)))
    taps = random_numbers(kit, (DIM, 4), dtype)
    taps[:, 1] = -taps[:, 0]
    x = oracle.round_to(1 + random_numbers(kit, (41, DIM), dtype) / 256, dtype)
    call = rig.run(rig.batch("extend", [Req(4, tokens=41)]), Weights(taps), x)
    judge_outputs(kit, call, "CS-CONV-02", exact=False, dtype=dtype)


@cases("example", range(40), quick=4)
@clauses("CS-CONV-01", "CS-CONV-04", "CS-CONV-05", "CS-CONV-07")
def test_random_steps(kit: Kit, example: int) -> None:
    """A light fuzz over phases, layouts, dtypes, widths, sizes and batches; the seed is the test's own."""
    rng = kit.rng
    mode, layout = MODES[rng.integers(4)], ("window", "ring", "lazy")[rng.integers(3)]
    dtype, width = DTYPES[rng.integers(3)], int(rng.integers(2, 6))
    dim, drafts = int(rng.choice([1, 3, 17, 64, 129])), int(rng.integers(1, 5))
    shape = Shape(layout, dtype, width=width, dims=(dim,), slots=23, drafts=drafts, virtual=bool(rng.integers(2)))  # type: ignore[arg-type]
    rig = rig_for(kit, mode, shape, activation="silu")
    requests = _random_requests(rng, drafts)
    random_histories(kit, rig, requests, mode)
    batch = rig.batch(mode, requests)
    x = random_numbers(kit, (batch.num_tokens, dim), dtype)
    call = rig.run(batch, random_weights(kit, dim, width, dtype), x, tail=int(rng.integers(3)))
    judge_outputs(kit, call, "CS-CONV-01", "CS-CONV-05", exact=False, dtype=dtype)
    judge_state(kit, call, rig, own="CS-CONV-04", track="CS-CONV-04", others="CS-CONV-07", padded="CS-CONV-05")


def _random_requests(rng: np.random.Generator, drafts: int) -> list[Req]:
    slots = rng.permutation(np.arange(1, 22))
    found = []
    for i in range(int(rng.integers(1, 10))):
        slot = int(slots[i]) if rng.random() < 0.8 else int(rng.integers(-1, 1))
        length = int(rng.integers(0, 30))
        track = int(slots[12 + i]) if slot > 0 and rng.random() < 0.3 else -1
        found.append(
            Req(
                slot,
                tokens=int(rng.integers(0, 12)),
                length=length,
                track=track,
                track_seqlen=length + int(rng.integers(0, 12)),
                accept=int(rng.integers(0, drafts + 1)),
                accepted=int(rng.integers(1, drafts + 1)),
            )
        )
    return found
