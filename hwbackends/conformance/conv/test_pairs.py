"""Sampling lane: every pair of values of any two parameters of a step occurs in some row, drawn by the run's seed. It
is for what no other lane thought of: sizes beyond a block, strides, dtypes, epilogues and padding in company."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from hwbackends.conformance.cases import Inputs, Req, Rig, judge_outputs, judge_state, rig_for
from hwbackends.conformance.conv.test_tolerance import random_histories, random_numbers, random_weights
from hwbackends.conformance.kit import Kit
from hwbackends.conformance.marks import Point, cases, clauses
from hwbackends.conformance.sampling import Row, pairwise
from hwbackends.contract.claims import Claims

OWN = {
    "decode": "CS-DECODE-01",
    "extend": "CS-EXTEND-01",
    "target_verify": "CS-VERIFY-02",
    "draft_extend": "CS-DRAFT-01",
}
TRACK = {
    "decode": "CS-DECODE-02",
    "extend": "CS-EXTEND-04",
    "draft_extend": "CS-DRAFT-04",
    "target_verify": "CS-VERIFY-02",
}


@functools.lru_cache(maxsize=4)
def rows(claims: Claims, seed: int) -> list[Row]:
    """The rows of a run."""
    space = {
        "mode": ("decode", "extend", "target_verify", "draft_extend"),
        "layout": claims.layouts, "dtype": claims.dtypes, "width": claims.widths, "index": claims.index_dtypes,
        "mixed": (False, True) if claims.mixed_dtypes else (False,),
        "wide_weights": (False, True) if "float32" in claims.dtypes else (False,),
        "dim": (5, 1, 64, 129, 300, 1025),
        "requests": (3, 1, 17, 70, 130),
        "tokens": (3, 1, 40, 300),
        "drafts": (3, 1, 2, 5, 9),
        "spare_drafts": (0, 2),
        "extra_rows": (0, 1, 3),
        "x": ("rows", "columns", "odd columns"),
        "weight": ("rows", "transposed", "gaps"),
        "out": ("given", "columns", "made"),
        "transposed": (False, True),
        "tail": (0, 2),
        "track": (False, True),
        "epilogue": tuple((a, b, r) for a in (None, *claims.activations) for b in (False, True) for r in (False, True)),
        "padding": ("none", "first", "middle", "last", "behind"),
        "device_count": (False, True),
        "virtual": (False, True),
        "mix_index": (False, True),
        "initial": ("by length", "given"),
        "source": (False, True),
    }  # fmt: skip
    return pairwise(space, seed)


def _numbers(claims: Claims, seed: int) -> range:
    return range(len(rows(claims, seed)))


def _requests(kit: Kit, row: Row, count: int) -> list[Req]:
    """Requests of a row: slots drawn, padding where it says."""
    rng, drafts = kit.rng, row["drafts"]
    slots = (rng.permutation(3 * count) + 1).tolist()
    found = []
    for b in range(count):
        length = int(rng.integers(0, 40))
        tokens = int(rng.integers(0, max(2, row["tokens"] // max(1, count // 4)))) if b else row["tokens"]
        tracked = row["track"] and b % 2 == 0 and row["mode"] != "target_verify"
        given = row["initial"] == "given" and row["mode"] in ("extend", "draft_extend")
        found.append(
            Req(
                slots[b], tokens=tokens, length=length, accept=int(rng.integers(0, drafts + 1)),
                accepted=int(rng.integers(1, drafts + 1)), track=slots[count + b] if tracked else -1,
                track_seqlen=length + int(rng.integers(0, tokens + 2)),
                initial=bool(rng.integers(2)) if given else None,
                source=slots[2 * count + b] if row["source"] and row["mode"] == "extend" and b % 3 == 0 else -1,
            )
        )  # fmt: skip
    place = {"first": 0, "middle": count // 2, "last": count}.get(row["padding"])
    if place is not None:
        found[place:place] = [Req(0, tokens=2, accept=1), Req(-1, tokens=1, accept=1)]
    return found


def _inputs(row: Row) -> Inputs:
    dim = row["dim"]
    return Inputs(
        x_columns={"rows": (0, 0), "columns": (dim, dim), "odd columns": (1, 2)}[row["x"]],
        out_columns=(3, 8) if row["out"] == "columns" else (0, 0),
        no_out=row["out"] == "made",
        weight_transposed=row["weight"] == "transposed",
        weight_step=2 if row["weight"] == "gaps" else 1,
        bias_step=3 if row["weight"] == "gaps" else 1,
    )


def _rig(kit: Kit, row: Row, count: int) -> Rig:
    small = ("float16", "bfloat16", "float32")
    dtype = row["dtype"]
    states = [d for d in kit.claims.dtypes if d in small and d != dtype]
    mixed = row["mixed"] and dtype in small and states
    kit.point = Point(row["layout"], dtype, row["width"], row["index"])
    return rig_for(
        kit, row["mode"], {"activation": row["epilogue"][0]}, dims=(row["dim"],),
        state_dtype=states[0] if mixed else dtype,
        slots=3 * count + 8, request_rows=2 * count + 7, drafts=row["drafts"] + row["spare_drafts"],
        step_drafts=row["drafts"], extra_rows=row["extra_rows"] if row["layout"] != "window" else 0,
        transposed=row["transposed"], virtual=row["virtual"], track_interval=3,
        weight_dtype="float32" if row["wide_weights"] and dtype in small else dtype,
    )  # fmt: skip


@cases("number", _numbers, quick=14)
@clauses(
    "CS-CONV-01", "CS-CONV-02", "CS-CONV-05", "CS-CONV-07", "CS-DECODE-01", "CS-EXTEND-01", "CS-VERIFY-02",
    "CS-DRAFT-01", "CS-DECODE-02", "CS-EXTEND-04", "CS-DRAFT-04", "CS-VERIFY-03", "CS-EXTEND-03",
)  # fmt: skip
def test_pairs(kit: Kit, number: int) -> None:
    """One row of the sample: the whole step, judged whole."""
    row = rows(kit.claims, kit.base_seed)[number]
    count = max(1, kit.rows(row["requests"]) - 4)
    if row["dim"] >= 300:
        count = min(count, 17)
    rig, mode = _rig(kit, row, count), row["mode"]
    requests = _requests(kit, row, count)
    random_histories(kit, rig, requests, mode)
    behind = 2 if row["padding"] == "behind" and len(requests) > 2 else 0
    live = len(requests) - behind
    extra: dict[str, Any] = {"num_reqs_device": live} if row["device_count"] else {}
    batch = rig.batch(mode, requests, live=None if row["device_count"] else live, **extra)
    mix = list(kit.claims.index_dtypes) if row["mix_index"] else []
    metadata = rig.prepare(batch, rig.step_batch(batch, mix))
    x = random_numbers(kit, (batch.num_tokens, row["dim"]), rig.shape.dtype)
    weights = random_weights(kit, row["dim"], row["width"], rig.weight_dtype, *row["epilogue"])
    call = rig.run(batch, weights, x, metadata=metadata, tail=row["tail"], inputs=_inputs(row))
    judge_outputs(kit, call, "CS-CONV-01", "CS-CONV-05", exact=False)
    judge_outputs(kit, call, "CS-CONV-02", exact=False)
    own = OWN[mode] if mode != "target_verify" or row["layout"] == "window" else "CS-VERIFY-03"
    drafts = "CS-VERIFY-03" if mode == "target_verify" else ""
    judge_state(kit, call, rig, own=own, track=TRACK[mode], others="CS-CONV-07", padded="CS-CONV-05", drafts=drafts)
    kit.check("CS-CONV-07", not np.isnan(call.y.double().numpy()).any(), "an output is not a number")
