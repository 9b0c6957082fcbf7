"""Discipline lane: no hook waits for the device, none allocates what outlives its call (its output apart), and many
steps leave no more memory in use than few."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hwbackends.conformance.cases import CONV, MODES, PREPARE, Req, Rig, prepare_rig, rig_for, shape_of
from hwbackends.conformance.kit import HookCall, Kit
from hwbackends.conformance.marks import cases, clauses, over
from hwbackends.contract.reader import installed

COMMIT = "update_mamba_state_after_mtp_verify"
REQUESTS = [
    Req(3, tokens=5, length=7, accept=2, track=8, track_seqlen=11),
    Req(0, tokens=2),
    Req(1, tokens=1, length=2),
]
Calls = Sequence[HookCall]


def disciplined(kit: Kit, clause: str, hook: str, *args: Any, **options: Any) -> None:
    """After a warm-up: no synchronisation, no allocation that stays but the output."""
    kit.call(hook, *args, **options)
    kit.check(clause, True, "")
    if not kit.claims.asynchronous:
        return
    for watch, verb in (("sync", "synchronises"), ("alloc", "allocates")):
        found = kit.call(hook, *args, watch=watch, **options).notes.get(watch, "")
        kit.check(clause, not found, f"{hook} {verb}: {found}")


@cases("mode", MODES, quick=4)
@over("layout", "index", quick=1)
@clauses("CS-PREP-09")
def test_preparation(kit: Kit, mode: str) -> None:
    """Every phase and layout, with tracking."""
    rig = prepare_rig(kit, mode, virtual=True)
    batch = rig.batch(mode, REQUESTS)
    disciplined(kit, "CS-PREP-09", PREPARE[mode], rig.step_batch(batch), rig.pool, rig.metadata(batch))


@cases("mode", MODES, quick=4)
@over("layout", "dtype", quick=1)
@clauses("CS-CONV-12")
def test_conv(kit: Kit, mode: str) -> None:
    """With an output that is given, and with one that is made."""
    rig = rig_for(kit, mode, virtual=True)
    rig.histories(REQUESTS)
    batch, dtype = rig.batch(mode, REQUESTS), rig.shape.dtype
    metadata, state = rig.prepare(batch), rig.pool.conv_state("k", 0)
    x, taps = kit.tensor(rig.whole_numbers(batch.num_tokens, 5), dtype), kit.tensor(rig.taps(), dtype)
    bias, out = kit.tensor(np.ones(5), dtype), torch.empty_like(x)
    disciplined(
        kit, "CS-CONV-12", CONV[mode], x, taps, bias, state, metadata, activation=kit.silu, residual=True, out=out
    )
    disciplined(kit, "CS-CONV-12", CONV[mode], x, taps, None, state, metadata, out=None)


@cases("hook", [name for name, hook in installed().hooks.items() if name.startswith("fused_")], quick=2)
@over("layout", "dtype", quick=1)
@clauses("CS-CONV-12")
def test_fused(kit: Kit, hook: str) -> None:
    """The fused epilogue is recordable too."""
    kit.need(hooks=(hook,))
    mode = "decode" if "decode" in hook else "target_verify"
    rig = rig_for(kit, mode, virtual=True)
    rig.histories(REQUESTS)
    batch, dtype = rig.batch(mode, REQUESTS), rig.shape.dtype
    metadata, state = rig.prepare(batch), rig.pool.conv_state("k", 0)
    x, taps = kit.tensor(rig.whole_numbers(batch.num_tokens, 5), dtype), kit.tensor(rig.taps(), dtype)
    stream, norm, out = torch.ones_like(x), kit.tensor(np.ones(5), dtype), torch.empty_like(x)
    disciplined(kit, "CS-CONV-12", hook, x, taps, None, state, metadata, stream, norm, 0.5, out=out)


@over("layout", "dtype", "index", quick=3)
@clauses("CS-COMMIT-10")
def test_commit(kit: Kit) -> None:
    """With SSM state and tracking."""
    kit.need(hooks=(COMMIT,))
    rig = Rig(kit, shape_of(kit, dims=(5, 3), layers=2, drafts=3, ssm=True))
    rows = rig.batch("target_verify", REQUESTS).req_pool_indices
    values = (rows, [1, 2, 0], [10, -1, 6], [0, 1, -1], [7, 0, 2])
    held = [kit.tensor(np.asarray(value, np.int64), kit.point.index) for value in values]
    disciplined(kit, "CS-COMMIT-10", COMMIT, rig.pool, *held)


@over("index", quick=2, layout=("ring", "lazy"))
@clauses("CS-COMMIT-06")
def test_an_empty_commit_launches_nothing(kit: Kit) -> None:
    """No torch op at all, and on CUDA no kernel."""
    kit.need(hooks=(COMMIT,))
    rig = Rig(kit, shape_of(kit, drafts=3))
    rows = kit.tensor(np.asarray(rig.batch("target_verify", REQUESTS).req_pool_indices, np.int64), kit.point.index)
    found = kit.call(COMMIT, rig.pool, rows, torch.zeros_like(rows), watch="ops").notes.get("ops", "")
    kit.check("CS-COMMIT-06", not found, f"ops of an empty commit: {found}")


@cases("hook", ["clear_slots", "copy_slots"], quick=2)
@over("layout", "index", quick=1)
@clauses("CS-CLEAR-02")
def test_clear_and_copy(kit: Kit, hook: str) -> None:
    """Every layer and stream, and SSM state."""
    kit.need(hooks=(hook,))
    rig = Rig(kit, shape_of(kit, dims=(5, 3), layers=2, ssm=True))
    lists = ([1, 0, 7], [4, 3, 0])[: 1 + (hook == "copy_slots")]
    disciplined(
        kit, "CS-CLEAR-02", hook, rig.pool, *(kit.tensor(np.asarray(v, np.int64), kit.point.index) for v in lists)
    )


def steady(kit: Kit, clause: str, what: str, calls: Calls) -> None:
    """Many rounds over new metadata leave nothing in use: neither Python's objects nor the allocators' bytes."""
    growth = kit.repeat(calls, 32)
    most = 8 if kit.emulated else 1.5  # an emulation keeps a record of its own
    fine = growth["blocks"] < most and growth["bytes"] < 256 and growth.get("device", 0) < 64
    kit.check(clause, fine, f"{what}: what stays in use grows with every step: {growth}")


@cases("mode", MODES, quick=4)
@over("layout", quick=1)
@clauses("CS-CONV-12", "CS-PREP-09")
def test_memory_does_not_grow_with_steps(kit: Kit, mode: str) -> None:
    """Thirty-two steps, each prepared in metadata of its own and then convolved."""
    rig = rig_for(kit, mode)
    rig.histories(REQUESTS)
    batch, dtype = rig.batch(mode, REQUESTS), rig.shape.dtype
    step, metadata, state = rig.step_batch(batch), rig.metadata(batch), rig.pool.conv_state("k", 0)
    x, taps = kit.tensor(rig.whole_numbers(batch.num_tokens, 5), dtype), kit.tensor(rig.taps(), dtype)
    out = torch.empty_like(x)
    prepare: HookCall = (PREPARE[mode], (step, rig.pool, metadata), {})
    conv: HookCall = (CONV[mode], (x, taps, None, state, metadata), {"out": out})
    steady(kit, "CS-PREP-09", PREPARE[mode], [prepare])
    steady(kit, "CS-CONV-12", CONV[mode], [prepare, conv])


@over("layout", quick=1)
@clauses("CS-COMMIT-10", "CS-CLEAR-02")
def test_memory_does_not_grow_with_commits(kit: Kit) -> None:
    """Thirty-two commits, clears and copies."""
    kit.need(hooks=(COMMIT, "clear_slots", "copy_slots"))
    rig = Rig(kit, shape_of(kit, dims=(5, 3), layers=2, drafts=3, ssm=True))
    rows = rig.batch("target_verify", REQUESTS).req_pool_indices
    one, two, three = (kit.tensor(np.asarray(v, np.int64), kit.point.index) for v in (rows, [1, 2, 0], [4, 5, 7]))
    steady(kit, "CS-COMMIT-10", COMMIT, [(COMMIT, (rig.pool, one, two), {})])
    steady(kit, "CS-CLEAR-02", "clear_slots", [("clear_slots", (rig.pool, three), {})])
    steady(kit, "CS-CLEAR-02", "copy_slots", [("copy_slots", (rig.pool, two, three), {})])
