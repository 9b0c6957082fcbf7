"""Errors lane: bad arguments of the SSM hooks get a named error of the contract's class, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hwbackends.conformance.cases import GUARD
from hwbackends.conformance.kit import Kit, bits
from hwbackends.conformance.marks import cases, clauses, product
from hwbackends.conformance.ssm.cases import (
    HOOK,
    MODES,
    Live,
    Rig,
    judge_outputs,
    on_ring,
    over_ssm,
    rig_for,
    states,
)
from hwbackends.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    HwBackendsError,
    MissingArgumentError,
    OverlapError,
    ShapeError,
    StrideError,
    TreeDraftsError,
    UnsupportedError,
)
from hwbackends.step.batch import ForwardMode

Arguments = dict[str, Any]
Bad = tuple[str, type[HwBackendsError], Callable[[Arguments], Arguments]]


def _other(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype != torch.float32 else torch.bfloat16


def _phase(metadata: Any) -> Any:
    mode = ForwardMode.EXTEND if metadata.forward_mode is not ForwardMode.EXTEND else ForwardMode.TARGET_VERIFY
    return replace(metadata, forward_mode=mode)


BAD: dict[str, Bad] = {
    "q-heads": ("gdn", ShapeError, lambda a: {"q": torch.cat([a["q"], a["q"]], 1)}),
    "q-dims": ("kda", ShapeError, lambda a: {"q": a["q"][..., :-1]}),
    "k-dtype": ("gdn", DtypeError, lambda a: {"k": a["k"].to(_other(a["k"].dtype))}),
    "k-integers": ("mamba2", DtypeError, lambda a: {"k": a["k"].int()}),
    "v-heads": ("gdn", ShapeError, lambda a: {"v": a["v"][:, :-1], "out": None}),
    "v-dims": ("mamba2", ShapeError, lambda a: {"v": a["v"][..., :-1], "out": None}),
    "v-too-few-rows": ("kda", ShapeError, lambda a: {n: a[n][:-1] for n in ("q", "k", "v", "a", "b")} | {"out": None}),
    "v-float64": ("gdn", DtypeError, lambda a: {n: a[n].double() for n in ("q", "k", "v")} | {"out": None}),
    "v-elsewhere": ("gdn", DeviceError, lambda a: {"v": a["v"].to("meta"), "out": None}),
    "a-one-per-head": ("kda", ShapeError, lambda a: {"a": a["a"][..., 0]}),
    "a-one-per-channel": ("gdn", ShapeError, lambda a: {"a": a["a"][..., None].expand(-1, -1, 12)}),
    "a-rows": ("mamba2", ShapeError, lambda a: {"a": a["a"][:-1]}),
    "b-missing": ("gdn", MissingArgumentError, lambda a: {"b": None}),
    "b-of-mamba2": ("mamba2", UnsupportedError, lambda a: {"b": a["a"].clone()}),
    "A_log-heads": ("gdn", ShapeError, lambda a: {"A_log": a["A_log"][:-1]}),
    "dt_bias-shape": ("kda", ShapeError, lambda a: {"dt_bias": torch.ones(4)}),
    "D-of-gdn": ("gdn", UnsupportedError, lambda a: {"D": torch.ones(4)}),
    "D-heads": ("mamba2", ShapeError, lambda a: {"D": torch.ones(3)}),
    "lower_bound-of-gdn": ("gdn", UnsupportedError, lambda a: {"lower_bound": -1.0}),
    "lower_bound-positive": ("kda", ArgumentError, lambda a: {"lower_bound": 0.5}),
    "dt_limit-of-kda": ("kda", UnsupportedError, lambda a: {"dt_limit": (0.1, 1.0)}),
    "dt_limit-falls": ("mamba2", ArgumentError, lambda a: {"dt_limit": (1.0, 0.1)}),
    "l2norm-of-mamba2": ("mamba2", UnsupportedError, lambda a: {"use_qk_l2norm_in_kernel": True}),
    "scale-text": ("gdn", ArgumentError, lambda a: {"scale": "1"}),
    "state-none": ("gdn", ArgumentError, lambda a: {"state": None}),
    "metadata-none": ("kda", ArgumentError, lambda a: {"metadata": None}),
    "metadata-of-another-phase": ("gdn", ArgumentError, lambda a: {"metadata": _phase(a["metadata"])}),
    "out-shape": ("gdn", ShapeError, lambda a: {"out": a["out"][..., :-1]}),
    "out-dtype": ("kda", DtypeError, lambda a: {"out": a["out"].to(_other(a["out"].dtype))}),
    "out-strides": ("gdn", StrideError, lambda a: {"out": torch.cat([a["out"], a["out"]], 2)[..., ::2]}),
    "out-is-v": ("gdn", OverlapError, lambda a: {"out": a["v"]}),
}


def arguments(kit: Kit, kind: str, mode: str, layout: str = "") -> tuple[Rig, Arguments]:
    """A rig and everything that a hook takes, right."""
    layouts = [where for name, where in states(kit.claims, 0) if name == kind] or ["ring"]
    rig = rig_for(kit, kind, layout or layouts[len(mode) % len(layouts)], mode)
    rows = [Live(rig.request(3, 7, 2), 2, accept=1), Live(rig.request(6, 9), 3, accept=3)]
    metadata = rig.prepare(mode, rows)
    given = rig.tokens(mode, rows, rig.keys[0])
    out = torch.full_like(given["v"], torch.nan)
    return rig, rig.arguments(mode, given, rig.keys[0], metadata, out=out)


@cases("bad, mode", list(product(bad=list(BAD), mode=MODES))[::3], quick=8)
@over_ssm()
@clauses("CS-SSM-14")
def test_bad_arguments(kit: Kit, bad: str, mode: str) -> None:
    """Kinds, shapes, dtypes, devices, strides, phases, arguments of another kind, memory that is read and written."""
    kind, wanted, change = BAD[bad]
    rig, given = arguments(kit, kind, mode)
    given |= change(given)
    refused(kit, "CS-SSM-14", rig, wanted, f"{HOOK[mode]} with {bad}", lambda: getattr(kit.hooks, HOOK[mode])(**given))


def refused(kit: Kit, clause: str, rig: Rig, wanted: type[HwBackendsError], what: str, call: Callable[[], Any]) -> None:
    """Refused with that class, and nothing of the state changed."""
    before = rig.snapshot()
    kit.refuses(clause, wanted, call, what)
    changed = [".".join(name) for name, t in rig.snapshot().items() if not torch.equal(bits(t), bits(before[name]))]
    kit.check(clause, not changed, f"{what}: refused after it had written to {', '.join(changed)}")


@cases("mode", MODES, quick=1)
@over_ssm()
@clauses("CS-SSM-14")
def test_a_right_call_after_a_refused_one(kit: Kit, mode: str) -> None:
    """A refusal leaves nothing behind: the next call over the same objects is right."""
    kind, layout = states(kit.claims, 0)[len(mode) % len(states(kit.claims, 0))]
    rig = rig_for(kit, kind, layout, mode)
    rows = [Live(rig.request(3, 7, 2), 2, accept=1)]
    metadata = rig.prepare(mode, rows)
    given = rig.arguments(mode, rig.tokens(mode, rows, rig.keys[0]), rig.keys[0], metadata)
    bad = {**given, "A_log": given["A_log"][:-1]}
    refused(kit, "CS-SSM-14", rig, ShapeError, HOOK[mode], lambda: getattr(kit.hooks, HOOK[mode])(**bad))
    judge_outputs(kit, rig, rig.run(mode, rows, metadata=metadata), "CS-SSM-14")


@cases("what", ["more-drafts", "no-intermediate"], quick=2)
@over_ssm()
@clauses("CS-SSM-VER-03")
def test_a_verify_without_room(kit: Kit, what: str) -> None:
    """More drafts than the state has rows for, and no intermediate states at all."""
    layouts = kit.claims.ssm_layouts if what == "more-drafts" else ("intermediate",)
    kinds = kit.claims.ssm_kinds or ("gdn",)
    for layout in layouts or ("ring",):
        rig, given = arguments(kit, kinds[0], "target_verify", layout)
        drafts = 2 if what == "more-drafts" else 0
        held: dict[str, Any] = {name: base[0, GUARD:-GUARD] for name, base in rig.bases["s"].items()}
        if layout == "intermediate":
            held["intermediate"] = held["intermediate"][:, :drafts].clone() if drafts else None
        few = replace(rig.state(rig.keys[0]), draft_token_num=max(1, drafts), **held)
        wanted = ShapeError if drafts else MissingArgumentError
        call = lambda given=given, few=few: kit.hooks.ssm_target_verify(**{**given, "state": few})  # noqa: E731
        refused(kit, "CS-SSM-VER-03", rig, wanted, f"{what} on {layout}", call)


@cases("kind, layout", on_ring, quick=1)
@over_ssm()
@clauses("CS-SSM-VER-06")
def test_a_tree_on_a_ring(kit: Kit, kind: str, layout: str) -> None:
    """Refused by name: two drafts of one position would share a row."""
    rig, given = arguments(kit, kind, "target_verify", layout)
    tree: Tensor = kit.tensor([[-1, 0, 0], [-1, 0, 1]], "int64")
    call = lambda: kit.hooks.ssm_target_verify(**{**given, "retrieve_parent_token": tree})  # noqa: E731
    refused(kit, "CS-SSM-VER-06", rig, TreeDraftsError, "a tree on a ring", call)


@cases("kind, layout", lambda claims, seed: states(claims, seed)[:1], quick=1)
@over_ssm()
@clauses("CS-SSM-13")
def test_dtypes_that_are_none(kit: Kit, kind: str, layout: str) -> None:
    """float64 is served by no SSM hook."""
    rig, given = arguments(kit, kind, "decode", layout)
    wide = {name: None if given[name] is None else given[name].double() for name in ("q", "k", "v", "a", "b")}
    call = lambda: kit.hooks.ssm_decode(**{**given, **wide, "out": None})  # noqa: E731
    refused(kit, "CS-SSM-13", rig, DtypeError, "float64 inputs", call)
