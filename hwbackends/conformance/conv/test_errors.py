"""Errors lane: bad input gets a named error of the class that the contract's checks give, before anything is written;
what is not claimed is refused, or computed right, never computed wrongly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hwbackends.conformance.cases import (
    CONV,
    MODES,
    PREPARE,
    Req,
    Rig,
    Weights,
    judge_outputs,
    judge_state,
    prepare_rig,
    rig_for,
    shape_of,
)
from hwbackends.conformance.kit import Kit, bits
from hwbackends.conformance.marks import cases, clauses, over, product
from hwbackends.contract.claims import DTYPES, LAYOUTS
from hwbackends.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    HwBackendsError,
    MissingArgumentError,
    ShapeError,
    StrideError,
    TreeDraftsError,
    UnsupportedError,
    WidthError,
)
from hwbackends.step.batch import ForwardMode

REQUESTS = [Req(3, tokens=2, length=7, accept=1), Req(1, tokens=1, length=2, accept=2), Req(9, tokens=4, length=5)]
Arguments = dict[str, Any]


def _elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor on a device where it must not be."""
    return tensor.to("meta")


def _another(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype != torch.float32 else torch.bfloat16


def _far(dtype: torch.dtype) -> torch.dtype:
    """float64 and the narrower dtypes do not go together."""
    return torch.float64 if dtype != torch.float64 else torch.float32


def _int(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=torch.int32).to(tensor.device)


BAD_CONV: dict[str, tuple[type[HwBackendsError], Callable[[Arguments], Arguments]]] = {
    "x-channels": (ShapeError, lambda a: {"x": a["x"][:, :4]}),
    "x-rank": (ShapeError, lambda a: {"x": a["x"][0]}),
    "x-too-few-rows": (ShapeError, lambda a: {"x": a["x"][:-1], "out": None}),
    "x-integers": (DtypeError, lambda a: {"x": _int(a["x"]), "out": None}),
    "x-elsewhere": (DeviceError, lambda a: {"x": _elsewhere(a["x"]), "out": None}),
    "weight-width": (WidthError, lambda a: {"weight": torch.cat([a["weight"], a["weight"][:, :1]], 1)}),
    "weight-swapped": (ArgumentError, lambda a: {"weight": a["weight"].t()}),
    "weight-integers": (DtypeError, lambda a: {"weight": _int(a["weight"])}),
    "weight-elsewhere": (DeviceError, lambda a: {"weight": _elsewhere(a["weight"])}),
    "bias-shape": (ShapeError, lambda a: {"bias": a["bias"][:4]}),
    "bias-elsewhere": (DeviceError, lambda a: {"bias": _elsewhere(a["bias"])}),
    "activation": (UnsupportedError, lambda a: {"activation": "gelu"}),
    "out-shape": (ShapeError, lambda a: {"out": a["out"][:, :4]}),
    "out-dtype": (DtypeError, lambda a: {"out": a["out"].to(_another(a["out"].dtype))}),
    "out-strides": (StrideError, lambda a: {"out": torch.cat([a["out"], a["out"]], 1)[:, ::2]}),
    "metadata-of-another-phase": (
        ArgumentError, lambda a: {"metadata": replace(a["metadata"], forward_mode=_other(a["metadata"]))},
    ),
    "x-of-another-precision": (DtypeError, lambda a: {"x": a["x"].to(_far(a["x"].dtype)), "out": None}),
}  # fmt: skip


def _other(metadata: Any) -> ForwardMode:
    return ForwardMode.EXTEND if metadata.forward_mode is not ForwardMode.EXTEND else ForwardMode.TARGET_VERIFY


def _conv_call(kit: Kit, mode: str, bad: str) -> tuple[Rig, Callable[[], Any]]:
    rig = rig_for(kit, mode, dims=(6,))  # no width: weights must not be square
    rig.histories(REQUESTS)
    batch = rig.batch(mode, REQUESTS)
    dtype = rig.shape.dtype
    x = kit.tensor(np.ones((batch.num_tokens, 6)), dtype)
    arguments: Arguments = {
        "x": x, "weight": kit.tensor(rig.taps(), dtype), "bias": kit.tensor(np.ones(6), dtype),
        "state": rig.pool.conv_state("k", 0), "metadata": rig.prepare(batch), "activation": None, "residual": False,
        "out": torch.full_like(x, torch.nan),
    }  # fmt: skip
    arguments |= BAD_CONV[bad][1](arguments)
    return rig, lambda: getattr(kit.hooks, CONV[mode])(**arguments)


def judge(kit: Kit, clause: str, what: str, wanted: type[HwBackendsError], rig: Rig, call: Callable[[], Any]) -> None:
    """Refused with that class, and no tensor of the pool changed."""
    before = rig.snapshot()
    kit.refuses(clause, wanted, call, what)
    changed = [str(key) for key, value in rig.snapshot().items() if not torch.equal(bits(value), bits(before[key]))]
    kit.check(clause, not changed, f"{what}: refused after it had written to {', '.join(changed)}")


@cases("mode, bad", list(product(mode=MODES, bad=list(BAD_CONV))), quick=4 * len(BAD_CONV))
@over()
@clauses("CS-CONV-11")
def test_bad_arguments_of_a_conv(kit: Kit, mode: str, bad: str) -> None:
    """Shapes, dtypes, devices, strides, widths, activations and phases."""
    judge(kit, "CS-CONV-11", f"{CONV[mode]} with {bad}", BAD_CONV[bad][0], *_conv_call(kit, mode, bad))


@cases("mode", MODES, quick=4)
@over("layout", "dtype", quick=1)
@clauses("CS-CONV-11")
def test_a_right_call_after_a_refused_one(kit: Kit, mode: str) -> None:
    """A refusal leaves nothing behind: the next call over the same objects is right."""
    rig, call = _conv_call(kit, mode, "x-channels")
    kit.refuses("CS-CONV-11", ShapeError, call, "x of four channels")
    right = rig.run(rig.batch(mode, REQUESTS), Weights(rig.taps()))
    judge_outputs(kit, right, "CS-CONV-11")
    judge_state(kit, right, rig, own="CS-CONV-11")


UNCLAIMED = [
    *(("layout", name) for name in LAYOUTS),
    *(("dtype", name) for name in DTYPES),
    *(("width", width) for width in (2, 3, 4, 5, 8)),
    *(("index_dtype", name) for name in ("int32", "int64")),
]


@cases("what, value", UNCLAIMED, quick=len(UNCLAIMED))
@clauses("CS-CONV-06", "CS-CONV-11")
def test_what_is_not_claimed_is_never_wrong(kit: Kit, what: str, value: Any) -> None:
    """A layout, dtype, width or index dtype outside the claims: a named error, or the right result."""
    there = [mode for mode in MODES if not kit.claims.missing(hooks=(PREPARE[mode], CONV[mode]))]
    if not there:
        kit.need(hooks=tuple(CONV.values()))
    if not kit.claims.missing(**{what: value}):
        kit.check("CS-CONV-11", True, "")  # claimed: judged everywhere else
        return
    for mode in there:
        rig = Rig(kit, shape_of(kit, **{what: value, "drafts": 3 if mode in ("target_verify", "draft_extend") else 0}))
        rig.histories(REQUESTS)
        try:
            call = rig.run(rig.batch(mode, REQUESTS), Weights(rig.taps()))
        except HwBackendsError:
            kit.check("CS-CONV-11", True, "")
            continue
        judge_outputs(kit, call, "CS-CONV-11")
        judge_state(kit, call, rig, own="CS-CONV-11")


@clauses("CS-CONV-08")
def test_undeclared_dtypes_are_refused(kit: Kit) -> None:
    """Every pair of x and state that the manifest or the contract leaves out."""
    kit.need(hooks=("conv_decode", "prepare_decode_metadata"))
    names = ("float16", "bfloat16", "float32", "float64")
    for dtype, state in product(x=names, state=names):
        within = (dtype == "float64") == (state == "float64")
        if within and not kit.claims.missing(dtype=dtype, state_dtype=state):
            continue
        rig = Rig(kit, shape_of(kit, dtype=dtype, state_dtype=state))
        batch = rig.batch("decode", [Req(3, length=7)])
        x, weight = kit.tensor(np.ones((1, 5)), dtype), kit.tensor(rig.taps(), dtype)
        metadata = rig.prepare(batch)
        before, out = rig.tensor(), torch.full_like(x, torch.nan)
        what = f"{dtype} x over {state} state"
        try:
            kit.hooks.conv_decode(x, weight, None, rig.pool.conv_state("k", 0), metadata, out=out)
            kit.check("CS-CONV-08", within, f"{what}: accepted")  # not claimed and right: judged elsewhere
        except HwBackendsError:
            kit.check("CS-CONV-08", torch.equal(bits(rig.tensor()), bits(before)), f"{what}: refused after writing")


BAD_BATCH: dict[str, tuple[type[HwBackendsError], Callable[[Rig, Any, Any], Any]]] = {
    "rows-of-floats": (DtypeError, lambda rig, b, out: setattr(b, "req_pool_indices", b.req_pool_indices.float())),
    "rows-elsewhere": (DeviceError, lambda rig, b, out: setattr(b, "req_pool_indices", _elsewhere(b.req_pool_indices))),
    "rows-of-another-count": (ShapeError, lambda rig, b, out: setattr(b, "req_pool_indices", b.req_pool_indices[:-1])),
    "more-live-rows-than-rows": (ShapeError, lambda rig, b, out: setattr(b, "num_reqs", 4)),
    "negative-live-rows": (ShapeError, lambda rig, b, out: setattr(b, "num_reqs", -1)),
    "flags-of-integers": (DtypeError, lambda rig, b, out: setattr(b, "has_initial_state", b.req_pool_indices)),
    "track-mask-without-slots": (
        MissingArgumentError,
        lambda rig, b, out: setattr(b, "mamba_track_mask", b.req_pool_indices > 0),
    ),
    "count-of-int64": (DtypeError, lambda rig, b, out: setattr(b, "num_reqs_device", torch.ones(1, dtype=torch.int64))),
    "another-phase": (ArgumentError, lambda rig, b, out: setattr(b, "forward_mode", _other(b))),
}
ONLY = {"track-mask-without-slots": ("decode", "extend", "draft_extend")}
MISSING = {
    "extend": ("extend_seq_lens", "extend_prefix_lens"), "draft_extend": ("num_accept_tokens",), "decode": (),
    "target_verify": (),
}  # fmt: skip


def _prepare_call(
    kit: Kit, mode: str, spoil: Callable[[Rig, Any, Any], Any], **sizes: Any
) -> tuple[Rig, Callable[[], Any]]:
    rig = prepare_rig(kit, mode, **sizes)
    batch = rig.batch(mode, REQUESTS)
    out, step = rig.metadata(batch), rig.step_batch(batch)
    spoil(rig, step, out)
    return rig, lambda: getattr(kit.hooks, PREPARE[mode])(step, rig.pool, out)


_BATCHES = [(m, b) for m in MODES for b in BAD_BATCH if m in ONLY.get(b, MODES)]


@cases("mode, bad", _BATCHES, quick=len(_BATCHES))
@clauses("CS-PREP-10")
def test_bad_batches(kit: Kit, mode: str, bad: str) -> None:
    """Index dtypes, devices, extents, counts and phases of a step."""
    wanted, spoil = BAD_BATCH[bad]
    judge(kit, "CS-PREP-10", f"{PREPARE[mode]} with {bad}", wanted, *_prepare_call(kit, mode, spoil))


@cases("mode", MODES, quick=4)
@over("layout", quick=3)
@clauses("CS-PREP-10")
def test_missing_tensors(kit: Kit, mode: str) -> None:
    """What the phase reads and does not get; on the ring layout, lengths."""
    missing = [*MISSING[mode], *(["computed_lens"] if mode != "extend" and kit.point.layout == "ring" else [])]
    for name in missing:
        rig, call = _prepare_call(kit, mode, _without(name))
        judge(kit, "CS-PREP-10", f"{PREPARE[mode]} without {name}", MissingArgumentError, rig, call)
    rig = prepare_rig(kit, mode)
    rig.prepare(rig.batch(mode, REQUESTS))
    kit.check("CS-PREP-10", True, "a whole batch is accepted")


def _without(name: str) -> Callable[[Rig, Any, Any], Any]:
    return lambda rig, batch, out: setattr(batch, name, None)


@cases("mode", ["target_verify", "draft_extend"], quick=2)
@over("layout", quick=1)
@clauses("CS-PREP-VER-02")
def test_trees_of_drafts_are_refused(kit: Kit, mode: str) -> None:
    """topk other than 1."""
    for topk in (2, 4, 0):
        _, call = _prepare_call(kit, mode, _tree(topk))
        kit.refuses("CS-PREP-VER-02", TreeDraftsError, call, f"{PREPARE[mode]} with topk={topk}")


def _tree(topk: int) -> Callable[[Rig, Any, Any], Any]:
    return lambda rig, batch, out: setattr(batch, "topk", topk)


COMMIT = "update_mamba_state_after_mtp_verify"
BAD_COMMIT: dict[str, tuple[type[HwBackendsError], Callable[[Arguments], Arguments]]] = {
    "rows-of-floats": (DtypeError, lambda a: {"req_pool_indices": a["req_pool_indices"].float()}),
    "rows-elsewhere": (DeviceError, lambda a: {"req_pool_indices": _elsewhere(a["req_pool_indices"])}),
    "rows-of-rank-two": (ShapeError, lambda a: {"req_pool_indices": a["req_pool_indices"][None]}),
    "fewer-steps": (ShapeError, lambda a: {"last_correct_step_indices": a["last_correct_step_indices"][:-1]}),
    "steps-of-floats": (DtypeError, lambda a: {"last_correct_step_indices": a["req_pool_indices"].float()}),
    "track-slots-without-steps": (MissingArgumentError, lambda a: {"mamba_track_indices": a["req_pool_indices"]}),
    "track-steps-without-slots": (MissingArgumentError, lambda a: {"mamba_steps_to_track": a["req_pool_indices"]}),
    "lengths-of-another-count": (ShapeError, lambda a: {"computed_lens": a["req_pool_indices"][:-1]}),
}


def _commit_call(kit: Kit, spoil: Callable[[Arguments], Arguments], **sizes: Any) -> tuple[Rig, Callable[[], Any]]:
    kit.need(hooks=(COMMIT,))
    rig = Rig(kit, shape_of(kit, drafts=3, **sizes))
    batch = rig.batch("target_verify", REQUESTS)
    index = kit.tensor(np.asarray(batch.req_pool_indices, np.int64), kit.point.index)
    arguments: Arguments = {"req_pool_indices": index, "last_correct_step_indices": torch.zeros_like(index)}
    arguments |= spoil(arguments)
    return rig, lambda: getattr(kit.hooks, COMMIT)(rig.pool, **arguments)


@cases("bad", list(BAD_COMMIT), quick=len(BAD_COMMIT))
@over("layout", quick=1)
@clauses("CS-COMMIT-11")
def test_bad_arguments_of_a_commit(kit: Kit, bad: str) -> None:
    """Dtypes, devices, extents, one track tensor without the other."""
    wanted, spoil = BAD_COMMIT[bad]
    judge(kit, "CS-COMMIT-11", f"{COMMIT} with {bad}", wanted, *_commit_call(kit, spoil))


@over("index", layout=("ring",))
@clauses("CS-COMMIT-11")
def test_a_ring_snapshot_needs_lengths(kit: Kit) -> None:
    """Rows of a ring are numbered by position, so tracking needs the computed lengths."""
    judge(kit, "CS-COMMIT-11", f"{COMMIT} without lengths", MissingArgumentError, *_commit_call(kit, _tracks))


def _tracks(arguments: Arguments) -> Arguments:
    rows = arguments["req_pool_indices"]
    return {"mamba_track_indices": rows, "mamba_steps_to_track": rows * 0}


@cases("hook", ["clear_slots", "copy_slots"], quick=2)
@over("layout", quick=1)
@clauses("CS-CLEAR-02")
def test_bad_slot_lists(kit: Kit, hook: str) -> None:
    """Floats, rank two, sources and destinations of different length, tensors on another device."""
    kit.need(hooks=(hook,))
    rig = Rig(kit, shape_of(kit))
    good = [kit.tensor(np.array([1, 2]), kit.point.index)] * (hook == "copy_slots")
    bad: dict[str, tuple[type[HwBackendsError], torch.Tensor]] = {
        "floats": (DtypeError, torch.tensor([1.0, 2.0])),
        "rank two": (ShapeError, kit.tensor(np.array([[1, 2]]), kit.point.index)),
        "another device": (DeviceError, _elsewhere(kit.tensor(np.array([1, 2]), kit.point.index))),
    }
    if hook == "copy_slots":
        bad["another length"] = ShapeError, kit.tensor(np.array([3]), kit.point.index)
    for name, (wanted, value) in bad.items():
        call = lambda value=value: getattr(kit.hooks, hook)(rig.pool, *good, value)  # noqa: E731
        judge(kit, "CS-CLEAR-02", f"{hook} with {name}", wanted, rig, call)
