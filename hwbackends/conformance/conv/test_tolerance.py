"""Tolerance lane: random numbers against the oracle, with a bound for each element in units in the last place of the
output: one rounding at the store plus what float32 (float64 for float64) sums may lose. The worst is reported."""

from __future__ import annotations

from hwbackends.conformance import oracle
from hwbackends.conformance.cases import MODES, Req, Rig, Weights, judge_outputs, judge_state, rig_for
from hwbackends.conformance.kit import Kit
from hwbackends.conformance.marks import cases, clauses, over

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


def silu_weights(kit: Kit, dim: int) -> Weights:
    """Random weights at the running point, with bias, residual and, where it is claimed, silu."""
    return random_weights(kit, dim, kit.point.width, kit.point.dtype, kit.silu)


def random_histories(kit: Kit, rig: Rig, requests: list[Req], mode: str) -> None:
    """A random history for each live request that `mode` lets read one; other slots keep their NaN."""
    for req in requests:
        fresh = req.initial is False and mode in ("extend", "draft_extend")
        reads = req.length > 0 or req.initial is True or mode != "extend"
        slot = req.source if req.source > 0 and mode == "extend" else req.slot
        if req.slot > 0 and reads and not fresh:
            values = random_numbers(kit, (rig.shape.width - 1, rig.shape.dims[0]), rig.shape.state)
            rig.history(slot, req.length, rig.offset(req), values)


EPILOGUES = (("silu", True, True), (None, False, True), (None, True, False), ("silu", False, False))
FORMS = [(mode, *epilogue) for epilogue in EPILOGUES for mode in MODES]


@cases("mode, activation, bias, residual", FORMS, quick=8)
@over("layout", "dtype", "width", "index", quick=1)
@clauses("CS-CONV-01", "CS-CONV-02", "CS-CONV-04")
def test_outputs(kit: Kit, mode: str, activation: str | None, bias: bool, residual: bool) -> None:
    """Every phase, layout, dtype, width and epilogue, D not a multiple of anything, and the state that they leave."""
    rig = rig_for(kit, mode, {"activation": activation}, dims=(DIM,))
    random_histories(kit, rig, REQUESTS, mode)
    batch = rig.batch(mode, REQUESTS)
    dtype = rig.shape.dtype
    x = random_numbers(kit, (batch.num_tokens, DIM), dtype)
    call = rig.run(batch, random_weights(kit, DIM, rig.shape.width, dtype, activation, bias, residual), x)
    judge_outputs(kit, call, "CS-CONV-01", exact=False)
    judge_outputs(kit, call, "CS-CONV-02", exact=False)
    judge_state(kit, call, rig, own="CS-CONV-04")


@cases("mode", MODES, quick=4)
@over("dtype", "width", quick=4)
@clauses("CS-CONV-02")
def test_cancellation(kit: Kit, mode: str) -> None:
    """Products that cancel: rounding them to the input's dtype loses what is left."""
    rig = rig_for(kit, mode, dims=(DIM,))
    dtype, width = rig.shape.dtype, rig.shape.width
    taps = random_numbers(kit, (DIM, width), dtype)
    taps[:, 1] = -taps[:, 0]
    requests = [Req(4, tokens=41, length=9, accept=1)]
    near = oracle.round_to(1 + random_numbers(kit, (width - 1, DIM), dtype) / 256, dtype)
    rig.history(4, 9, rig.offset(requests[0]), near)
    batch = rig.batch(mode, requests)
    x = oracle.round_to(1 + random_numbers(kit, (batch.num_tokens, DIM), dtype) / 256, dtype)
    call = rig.run(batch, Weights(taps), x)
    judge_outputs(kit, call, "CS-CONV-02", exact=False)
