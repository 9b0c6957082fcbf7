"""Which aten ops the torch tier runs on a device, and in which dtypes: the ones that torch_npu has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hwbackends.testing import emulated_npu
from hwbackends.testing.emulated_npu import EmulatedNpuTensor, forbid_host_syncs
from tests.ascend.conftest import NPU, TORCH
from tests.backend.lab import Lab

pytestmark = pytest.mark.skipif(NPU, reason="there is an NPU: it says itself what it cannot run")

REGISTERED = {
    "_to_copy", "add.Tensor", "bitwise_and.Tensor", "bitwise_not",
    "bitwise_or.Tensor", "clamp", "clone", "constant_pad_nd", "copy_", "cumsum", "div.Tensor_mode",
    "empty_like", "fill_.Scalar", "floor_divide", "ge.Scalar",
    "gt.Scalar", "index.Tensor", "index_put_", "index_select", "le.Tensor", "lt.Scalar", "lt.Tensor", "mean.dim",
    "mul.Tensor", "ne.Tensor", "ones_like", "pow.Tensor_Scalar", "remainder.Scalar",
    "rsqrt", "searchsorted.Tensor", "silu", "sub.Tensor", "view",
    "where.self", "zero_",
}  # fmt: skip
"""Of the ops that torch_npu 2.13.0 registers for its device (`npu_native_functions*.yaml` in its wheel), those that the
tier needs."""
COMPOSED = {
    "_unsafe_view", "alias", "argmax", "expand", "full_like", "permute", "select.int",
    "slice.Tensor", "unsqueeze", "zeros_like",
}  # fmt: skip
"""Views, and ops that torch itself composes of registered ones."""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[torch.dtype]]:
    """Ops that ran on the device, with the dtypes of their tensors."""
    found: dict[str, set[torch.dtype]] = {}
    run = emulated_npu._run

    def note(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = str(func).removeprefix("aten.").removesuffix(".default")
        leaves = emulated_npu.tree_leaves((args, kwargs))
        found.setdefault(name, set()).update(leaf.dtype for leaf in leaves if isinstance(leaf, EmulatedNpuTensor))
        return run(func, args, kwargs)

    monkeypatch.setattr(emulated_npu, "_run", note)
    return found


@pytest.fixture(scope="session")
def target() -> tuple[str, str]:
    """The lane of this file."""
    return TORCH


def every_hook(it: Lab) -> None:
    """Each hook of the contract once, with tracking, SSM state and an activation."""
    mask = torch.ones(2, dtype=torch.bool, device=it.device)
    track = {"mamba_track_mask": mask, "mamba_track_indices": it.ints([7, 8])}
    conv = {"activation": "silu", "residual": True}
    bias = torch.ones(5, dtype=it.dtype, device=it.device)
    x = torch.ones(6, 5)
    it.extend([5, 3], [4, 2], x, conv={**conv, "bias": bias}, mamba_track_seqlens=it.ints([4, 2]), **track)
    it.decode([5, 3], x[:2], conv={**conv, "bias": bias}, **track)
    it.verify([5, 3], x, conv={**conv})
    steps, lens = it.ints([0, 1]), it.ints([5, 3])
    it.commit([5, 3], [1, 2], mamba_track_indices=it.ints([7, 8]), mamba_steps_to_track=steps, computed_lens=lens)
    it.draft_extend([5, 3], [1, 2], x, conv={**conv}, **track)
    batch = it.decode_batch([5, 3])
    stream, norm = (torch.ones(shape, dtype=it.dtype, device=it.device) for shape in [(2, 5), (5,)])
    it.hooks.fused_decode_add_rmsnorm(
        it.tokens(x[:2]), it.weight, None, it.state, it.prepare(batch), stream, norm, 1e-6
    )
    it.hooks.clear_slots(it.pool, it.ints([1]))
    it.hooks.copy_slots(it.pool, it.ints([2]), it.ints([3]))


def lab_of(lab: Callable[..., Lab]) -> Lab:
    return lab(rows={5: 1, 3: 2}, dim=5, dtype=torch.bfloat16, ssm_shape=(3,), v2p=range(12), taps=(1, 2, 4, 8))


def test_every_op_is_one_that_torch_npu_registers(lab: Callable[..., Lab], ran: dict[str, set[torch.dtype]]) -> None:
    every_hook(lab_of(lab))
    assert {name for name in ran if name not in REGISTERED | COMPOSED} == set()


def test_no_op_computes_in_float64(lab: Callable[..., Lab], ran: dict[str, set[torch.dtype]]) -> None:
    every_hook(lab_of(lab))
    assert [name for name, dtypes in ran.items() if torch.float64 in dtypes] == []


def test_no_hook_waits_for_the_device(lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch) -> None:
    it = lab_of(lab)
    inputs = Lab.ints, Lab.tokens
    monkeypatch.setattr(Lab, "ints", lambda self, *a, **k: _unforbidden(inputs[0], self, *a, **k))
    monkeypatch.setattr(Lab, "tokens", lambda self, *a, **k: _unforbidden(inputs[1], self, *a, **k))
    with forbid_host_syncs():
        every_hook(it)


def _unforbidden(make: Any, *args: Any, **kwargs: Any) -> Any:
    """The test's own inputs come from the host."""
    monitor = emulated_npu._syncs
    before, monitor.forbidden = monitor.forbidden, False
    try:
        return make(*args, **kwargs)
    finally:
        monitor.forbidden = before
