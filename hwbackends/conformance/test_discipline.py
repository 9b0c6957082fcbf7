"""Discipline lane: no hook waits for the device, and none allocates what outlives its call, its output apart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hwbackends.conformance.cases import CONV, LAYOUTS, MODES, PREPARE, Req, Rig, Shape, rig_for
from hwbackends.conformance.kit import Kit
from hwbackends.conformance.marks import cases, clauses
from hwbackends.errors import GraphError
from hwbackends.testing.guards import Allocations, no_alloc, no_sync

REQUESTS = [
    Req(3, tokens=5, length=7, accept=2, track=8, track_seqlen=11),
    Req(0, tokens=2),
    Req(1, tokens=1, length=2),
]


@contextlib.contextmanager
def _quiet(kit: Kit) -> Iterator[None]:
    """No host synchronisation, on the emulated device too."""
    with contextlib.ExitStack() as stack:
        if kit.emulated:
            from hwbackends.testing.emulated_npu import forbid_host_syncs

            stack.enter_context(forbid_host_syncs())
        stack.enter_context(no_sync())
        yield


def _disciplined(kit: Kit, clause: str, what: str, work: Callable[[], Tensor | None]) -> None:
    """After a warm-up: no synchronisation, no allocation that stays but the output."""
    work()
    kit.need(asynchronous=True)
    for guard in ("synchronises", "allocates"):
        try:
            if guard == "synchronises":
                with _quiet(kit):
                    work()
            else:
                allocations: Allocations
                with no_alloc() as allocations:
                    made = work()
                    if made is not None:
                        allocations.allow(made)
                    del made
            kit.check(clause, True, "")
        except (GraphError, RuntimeError) as error:
            kit.check(clause, False, f"{what} {guard}: {type(error).__name__}: {error}")


@cases("mode, layout", [(mode, layout) for layout in LAYOUTS for mode in MODES], quick=4)
@clauses("CS-PREP-09")
def test_preparation(kit: Kit, mode: str, layout: Any) -> None:
    """Every phase and layout, with tracking."""
    rig = rig_for(kit, mode, Shape(layout, virtual=True))
    batch = rig.batch(mode, REQUESTS)
    step, out = rig.step_batch(batch), rig.metadata(batch)
    hook = getattr(kit.hooks, PREPARE[mode])
    _disciplined(kit, "CS-PREP-09", PREPARE[mode], lambda: hook(step, rig.pool, out))


@cases("mode, layout", [(mode, layout) for layout in LAYOUTS for mode in MODES], quick=4)
@clauses("CS-CONV-12")
def test_conv(kit: Kit, mode: str, layout: Any) -> None:
    """With an output that is given, and with one that is made."""
    rig = rig_for(kit, mode, Shape(layout, virtual=True), activation="silu")
    rig.histories(REQUESTS)
    batch = rig.batch(mode, REQUESTS)
    metadata, state = rig.prepare(batch), rig.pool.conv_state("k", 0)
    x, taps = kit.tensor(rig.whole_numbers(batch.num_tokens, 5), "float32"), kit.tensor(rig.taps(), "float32")
    bias, out = kit.tensor(np.ones(5), "float32"), torch.empty_like(x)
    hook = getattr(kit.hooks, CONV[mode])
    _disciplined(
        kit, "CS-CONV-12", f"{CONV[mode]} with out",
        lambda: hook(x, taps, bias, state, metadata, activation="silu", residual=True, out=out),
    )  # fmt: skip
    _disciplined(kit, "CS-CONV-12", f"{CONV[mode]} without out", lambda: hook(x, taps, None, state, metadata))


@cases("layout", LAYOUTS, quick=3)
@clauses("CS-COMMIT-10")
def test_commit(kit: Kit, layout: Any) -> None:
    """With SSM state and tracking."""
    kit.need(hooks=("update_mamba_state_after_mtp_verify",), layout=layout)
    rig = Rig(kit, Shape(layout, dims=(5, 3), layers=2, drafts=3, ssm=True))
    rows = rig.batch("target_verify", REQUESTS).req_pool_indices
    values = (rows, [1, 2, 0], [10, -1, 6], [0, 1, -1], [7, 0, 2])
    held = [kit.tensor(np.asarray(value, np.int64), "int64") for value in values]
    hook = kit.hooks.update_mamba_state_after_mtp_verify
    _disciplined(kit, "CS-COMMIT-10", "commit", lambda: hook(rig.pool, *held))


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class is untyped
    """Counts torch ops."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@cases("layout", ["ring", "lazy"], quick=2)
@clauses("CS-COMMIT-06")
def test_an_empty_commit_launches_nothing(kit: Kit, layout: Any) -> None:
    """No torch op at all, and on CUDA no kernel."""
    kit.need(hooks=("update_mamba_state_after_mtp_verify",), layout=layout)
    rig = Rig(kit, Shape(layout, drafts=3))
    rows = kit.tensor(np.asarray(rig.batch("target_verify", REQUESTS).req_pool_indices, np.int64), "int64")
    steps = torch.zeros_like(rows)
    with _Ops() as ops:
        kit.hooks.update_mamba_state_after_mtp_verify(rig.pool, rows, steps)
    kit.check("CS-COMMIT-06", not ops.names, f"ops of an empty commit: {ops.names}")


@cases("hook", ["clear_slots", "copy_slots"], quick=2)
@clauses("CS-CLEAR-02")
def test_clear_and_copy(kit: Kit, hook: str) -> None:
    """Every layer and stream, and SSM state."""
    kit.need(hooks=(hook,))
    rig = Rig(kit, Shape(dims=(5, 3), layers=2, ssm=True))
    held = [kit.tensor(np.asarray(v, np.int64), "int64") for v in ([1, 0, 7], [4, 3, 0])][: 1 + (hook == "copy_slots")]
    _disciplined(kit, "CS-CLEAR-02", hook, lambda: getattr(kit.hooks, hook)(rig.pool, *held))
