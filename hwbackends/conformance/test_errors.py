"""Errors lane: the same bad input gets the same class of error as on the reference, before anything is written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch

from hwbackends.conformance.cases import CONV, MODES, PREPARE, Req, Rig, Shape, rig_for
from hwbackends.conformance.kit import Kit, bits
from hwbackends.conformance.marks import cases, clauses
from hwbackends.errors import HwBackendsError, TreeDraftsError
from hwbackends.step.batch import ForwardMode

REQUESTS = [Req(3, tokens=2, length=7, accept=1), Req(1, tokens=1, length=2, accept=2), Req(9, tokens=4, length=5)]
Arguments = dict[str, Any]


@functools.cache
def reference() -> Kit:
    """The reference on the CPU, which says what class of error a bad input is."""
    return Kit("hwbackends.reference.plugin", "cpu")


def _elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor on a device where it must not be."""
    return tensor.to("meta" if tensor.device.type == "cpu" else "cpu")


def _int(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=torch.int32).to(tensor.device)


BAD_CONV: dict[str, Callable[[Arguments], Arguments]] = {
    "x-channels": lambda a: {"x": a["x"][:, :4]},
    "x-rank": lambda a: {"x": a["x"][0]},
    "x-too-few-rows": lambda a: {"x": a["x"][:-1], "out": None},
    "x-integers": lambda a: {"x": _int(a["x"]), "out": None},
    "x-elsewhere": lambda a: {"x": _elsewhere(a["x"]), "out": None},
    "weight-width": lambda a: {"weight": torch.cat([a["weight"], a["weight"][:, :1]], 1)},
    "weight-swapped": lambda a: {"weight": a["weight"].t()},
    "weight-integers": lambda a: {"weight": _int(a["weight"])},
    "weight-elsewhere": lambda a: {"weight": _elsewhere(a["weight"])},
    "bias-shape": lambda a: {"bias": a["bias"][:4]},
    "bias-elsewhere": lambda a: {"bias": _elsewhere(a["bias"])},
    "activation": lambda a: {"activation": "gelu"},
    "out-shape": lambda a: {"out": a["out"][:, :4]},
    "out-dtype": lambda a: {"out": a["out"].to(torch.bfloat16)},
    "out-strides": lambda a: {"out": torch.cat([a["out"], a["out"]], 1)[:, ::2]},
    "metadata-of-another-phase": lambda a: {"metadata": replace(a["metadata"], forward_mode=_other(a["metadata"]))},
    "x-float64-over-float32": lambda a: {"x": a["x"].double(), "out": None},
}  # fmt: skip


def _other(metadata: Any) -> ForwardMode:
    return ForwardMode.EXTEND if metadata.forward_mode is not ForwardMode.EXTEND else ForwardMode.TARGET_VERIFY


def _conv_call(kit: Kit, mode: str, spoil: Callable[[Arguments], Arguments]) -> tuple[Rig, Callable[[], Any]]:
    rig = rig_for(kit, mode, Shape())
    rig.histories(REQUESTS)
    batch = rig.batch(mode, REQUESTS)
    x = kit.tensor(np.ones((batch.num_tokens, 5)), "float32")
    arguments: Arguments = {
        "x": x, "weight": kit.tensor(rig.taps(), "float32"), "bias": kit.tensor(np.ones(5), "float32"),
        "state": rig.pool.conv_state("k", 0), "metadata": rig.prepare(batch), "activation": None, "residual": False,
        "out": torch.full_like(x, torch.nan),
    }  # fmt: skip
    arguments |= spoil(arguments)
    return rig, lambda: getattr(kit.hooks, CONV[mode])(**arguments)


def _class_on_reference(call: Callable[[], Any]) -> type[HwBackendsError]:
    """What the reference raises; it must refuse, or the case says nothing."""
    try:
        call()
    except HwBackendsError as error:
        return type(error)
    raise AssertionError("the reference accepts this input")


def _judge(kit: Kit, clause: str, what: str, make: Callable[[Kit], tuple[Rig, Callable[[], Any]]]) -> None:
    """Refused with the reference's class, and no tensor of the pool changed."""
    wanted = _class_on_reference(make(reference())[1])
    rig, call = make(kit)
    before = rig.snapshot()
    kit.refuses(clause, wanted, call, what)
    changed = [str(key) for key, value in rig.snapshot().items() if not torch.equal(bits(value), bits(before[key]))]
    kit.check(clause, not changed, f"{what}: refused after it had written to {', '.join(changed)}")


@cases("mode, bad", list(product(MODES, BAD_CONV)), quick=len(BAD_CONV))
@clauses("CS-CONV-11")
def test_bad_arguments_of_a_conv(kit: Kit, mode: str, bad: str) -> None:
    """Shapes, dtypes, devices, strides, widths, activations and phases."""
    _judge(kit, "CS-CONV-11", f"{CONV[mode]} with {bad}", functools.partial(_conv_call, mode=mode, spoil=BAD_CONV[bad]))


@clauses("CS-CONV-08")
def test_undeclared_dtypes_are_refused(kit: Kit) -> None:
    """Every pair of x and state that the manifest or the contract leaves out."""
    kit.need(hooks=("conv_decode", "prepare_decode_metadata"))
    names = ("float16", "bfloat16", "float32", "float64")
    for dtype, state in product(names, names):
        within = (dtype == "float64") == (state == "float64")
        if within and not kit.claims.missing(dtype=dtype, state_dtype=state):
            continue
        rig = Rig(kit, Shape("window", dtype, state))
        batch = rig.batch("decode", [Req(3, length=7)])
        x, weight = kit.tensor(np.ones((1, 5)), dtype), kit.tensor(rig.taps(), dtype)
        metadata = rig.prepare(batch)
        call = functools.partial(kit.hooks.conv_decode, x, weight, None, rig.pool.conv_state("k", 0), metadata)
        kit.refuses("CS-CONV-08", HwBackendsError, call, f"{dtype} x over {state} state")


BAD_BATCH: dict[str, Callable[[Rig, Any, Any], Any]] = {
    "rows-of-floats": lambda rig, b, out: setattr(b, "req_pool_indices", b.req_pool_indices.float()),
    "rows-elsewhere": lambda rig, b, out: setattr(b, "req_pool_indices", _elsewhere(b.req_pool_indices)),
    "rows-of-another-count": lambda rig, b, out: setattr(b, "req_pool_indices", b.req_pool_indices[:-1]),
    "more-live-rows-than-rows": lambda rig, b, out: setattr(b, "num_reqs", 4),
    "negative-live-rows": lambda rig, b, out: setattr(b, "num_reqs", -1),
    "flags-of-integers": lambda rig, b, out: setattr(b, "has_initial_state", b.req_pool_indices),
    "track-mask-without-slots": lambda rig, b, out: setattr(b, "mamba_track_mask", b.req_pool_indices > 0),
    "count-of-int64": lambda rig, b, out: setattr(b, "num_reqs_device", torch.ones_like(b.req_pool_indices[:1])),
    "another-phase": lambda rig, b, out: setattr(b, "forward_mode", _other(b)),
}
ONLY = {"track-mask-without-slots": ("decode", "extend", "draft_extend")}
MISSING = {
    "extend": ("extend_seq_lens", "extend_prefix_lens"), "draft_extend": ("num_accept_tokens",), "decode": (),
    "target_verify": (),
}  # fmt: skip


def _prepare_call(
    kit: Kit, mode: str, spoil: Callable[[Rig, Any, Any], Any], layout: Any = "window"
) -> tuple[Rig, Any]:
    kit.need(hooks=(PREPARE[mode],), layout=layout)
    drafts = 3 if mode in ("target_verify", "draft_extend") else 0
    rig = Rig(kit, Shape(layout, drafts=drafts))
    batch = rig.batch(mode, REQUESTS)
    out, step = rig.metadata(batch), rig.step_batch(batch)
    spoil(rig, step, out)
    return rig, lambda: getattr(kit.hooks, PREPARE[mode])(step, rig.pool, out)


@cases("mode, bad", [(m, b) for m in MODES for b in BAD_BATCH if m in ONLY.get(b, MODES)], quick=len(BAD_BATCH))
@clauses("CS-PREP-10")
def test_bad_batches(kit: Kit, mode: str, bad: str) -> None:
    """Index dtypes, devices, extents, counts and phases of a step."""
    _judge(
        kit,
        "CS-PREP-10",
        f"{PREPARE[mode]} with {bad}",
        functools.partial(_prepare_call, mode=mode, spoil=BAD_BATCH[bad]),
    )


@cases("mode", MODES, quick=4)
@clauses("CS-PREP-10")
def test_missing_tensors(kit: Kit, mode: str) -> None:
    """What the phase reads and does not get; on the ring layout, lengths."""
    for name in MISSING[mode]:
        call = functools.partial(_prepare_call, mode=mode, spoil=_without(name))
        _judge(kit, "CS-PREP-10", f"{PREPARE[mode]} without {name}", call)
    if mode != "extend":
        call = functools.partial(_prepare_call, mode=mode, spoil=_without("computed_lens"), layout="ring")
        _judge(kit, "CS-PREP-10", f"{PREPARE[mode]} on ring without lengths", call)


def _without(name: str) -> Callable[[Rig, Any, Any], Any]:
    return lambda rig, batch, out: setattr(batch, name, None)


@cases("mode", ["target_verify", "draft_extend"], quick=2)
@clauses("CS-PREP-VER-02")
def test_trees_of_drafts_are_refused(kit: Kit, mode: str) -> None:
    """topk other than 1."""
    for topk in (2, 4, 0):
        _, call = _prepare_call(kit, mode, _tree(topk))
        kit.refuses("CS-PREP-VER-02", TreeDraftsError, call, f"{PREPARE[mode]} with topk={topk}")


def _tree(topk: int) -> Callable[[Rig, Any, Any], Any]:
    return lambda rig, batch, out: setattr(batch, "topk", topk)


COMMIT = "update_mamba_state_after_mtp_verify"
BAD_COMMIT: dict[str, Callable[[Arguments], Arguments]] = {
    "rows-of-floats": lambda a: {"req_pool_indices": a["req_pool_indices"].float()},
    "rows-elsewhere": lambda a: {"req_pool_indices": _elsewhere(a["req_pool_indices"])},
    "rows-of-rank-two": lambda a: {"req_pool_indices": a["req_pool_indices"][None]},
    "fewer-steps": lambda a: {"last_correct_step_indices": a["last_correct_step_indices"][:-1]},
    "steps-of-floats": lambda a: {"last_correct_step_indices": a["last_correct_step_indices"].float()},
    "track-slots-without-steps": lambda a: {"mamba_track_indices": a["req_pool_indices"]},
    "track-steps-without-slots": lambda a: {"mamba_steps_to_track": a["last_correct_step_indices"]},
    "lengths-of-another-count": lambda a: {"computed_lens": a["req_pool_indices"][:-1]},
}


def _commit_call(kit: Kit, spoil: Callable[[Arguments], Arguments], layout: Any = "window") -> tuple[Rig, Any]:
    kit.need(hooks=(COMMIT,), layout=layout)
    rig = Rig(kit, Shape(layout, drafts=3))
    batch = rig.batch("target_verify", REQUESTS)
    index = kit.tensor(np.asarray(batch.req_pool_indices, np.int64), "int64")
    arguments: Arguments = {"req_pool_indices": index, "last_correct_step_indices": torch.zeros_like(index)}
    arguments |= spoil(arguments)
    return rig, lambda: getattr(kit.hooks, COMMIT)(rig.pool, **arguments)


@cases("bad", list(BAD_COMMIT), quick=len(BAD_COMMIT))
@clauses("CS-COMMIT-11")
def test_bad_arguments_of_a_commit(kit: Kit, bad: str) -> None:
    """Dtypes, devices, extents, one track tensor without the other."""
    _judge(kit, "CS-COMMIT-11", f"{COMMIT} with {bad}", functools.partial(_commit_call, spoil=BAD_COMMIT[bad]))


@clauses("CS-COMMIT-11")
def test_a_ring_snapshot_needs_lengths(kit: Kit) -> None:
    """Rows of a ring are numbered by position, so tracking needs the computed lengths."""
    _judge(
        kit,
        "CS-COMMIT-11",
        f"{COMMIT} on ring without lengths",
        functools.partial(_commit_call, spoil=_tracks, layout="ring"),
    )


def _tracks(arguments: Arguments) -> Arguments:
    rows = arguments["req_pool_indices"]
    return {"mamba_track_indices": rows, "mamba_steps_to_track": rows * 0}


def _slots_call(kit: Kit, hook: str, values: tuple[Any, ...]) -> tuple[Rig, Any]:
    kit.need(hooks=(hook,))
    rig = Rig(kit, Shape())
    tensors = [kit.tensor(np.asarray(value), str(np.asarray(value).dtype)) for value in values]
    return rig, lambda: getattr(kit.hooks, hook)(rig.pool, *tensors)


@cases("hook", ["clear_slots", "copy_slots"], quick=2)
@clauses("CS-CLEAR-02")
def test_bad_slot_lists(kit: Kit, hook: str) -> None:
    """Floats, rank two, sources and destinations of different length."""
    good = [np.array([1, 2])] * (hook == "copy_slots")
    bad = {"floats": np.array([1.0, 2.0]), "rank two": np.array([[1, 2]])}
    if hook == "copy_slots":
        bad["another length"] = np.array([3])
    for name, value in bad.items():
        _judge(
            kit, "CS-CLEAR-02", f"{hook} with {name}", functools.partial(_slots_call, hook=hook, values=(*good, value))
        )
