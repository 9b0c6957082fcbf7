"""The emulated npu device catches what a real one would stumble over: CPU tensors mixed in, and waits of the host."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hwbackends.errors import DeviceError, HwBackendsError, SyncError
from hwbackends.testing.emulated_npu import EmulatedNpuTensor, emulate_npu, forbid_host_syncs, record_host_syncs
from tests.ascend.conftest import NPU

pytestmark = pytest.mark.skipif(NPU, reason="there is an NPU: nothing is emulated")

SYNCS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda t: t.sum().item(),
    "bool": lambda t: bool((t > 3).any()),
    "int": lambda t: int(t[0, 0]),
    "tolist": lambda t: t.tolist(),
    "cpu": lambda t: t.cpu(),
    "to cpu": lambda t: t.to("cpu"),
    "copy to cpu": lambda t: torch.empty(3, 5).copy_(t),
    "numpy": lambda t: t.numpy(force=True),
    "boolean mask read": lambda t: t[t > 3],
    "boolean mask write": lambda t: t.__setitem__(t > 3, 0),
    "nonzero": lambda t: t.nonzero(),
    "where with one argument": lambda t: torch.where(t > 3),
    "masked_select": lambda t: t.masked_select(t > 3),
    "unique": lambda t: t.unique(),
    "equal": lambda t: torch.equal(t, t),
    "repeat_interleave": lambda t: t[0].repeat_interleave(t[1].long()),
    "bincount": lambda t: t[0].long().bincount(),
    "synchronize": lambda t: torch.npu.synchronize(),
    "tensor from the host": lambda t: torch.tensor([1, 2, 3], device=t.device),
    "blocking copy to the device": lambda t: torch.ones(7).to(t.device),
}
NO_SYNCS: dict[str, Callable[[torch.Tensor], Any]] = {
    "arithmetic": lambda t: (t * 2 + 1).sum(-1),
    "index tensors": lambda t: t[torch.arange(2, device=t.device), torch.zeros(2, dtype=torch.long, device=t.device)],
    "index_put_": lambda t: t.index_put_((torch.zeros(1, dtype=torch.long, device=t.device),), t[1].clone()),
    "where": lambda t: torch.where(t > 3, t, 0),
    "repeat_interleave with its size": lambda t: t[0].repeat_interleave(t[1].long(), output_size=35),
    "views": lambda t: t.view(5, 3).transpose(0, 1)[1:].as_strided((2, 2), (1, 1)),
    "factories": lambda t: torch.full_like(t, 7) + torch.arange(5, device=t.device) + t.new_zeros(5),
    "fill_": lambda t: t.fill_(3),
    "non-blocking copy to the device": lambda t: torch.ones(7).to(t.device, non_blocking=True),
    "0-d scalars of the host": lambda t: t + torch.tensor(2.0),
}
MIXES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda t: t + torch.ones(3, 5),
    "matmul": lambda t: torch.ones(7, 3) @ t,
    "where": lambda t: torch.where(torch.ones(3, 5, dtype=torch.bool), t, t),
    "index": lambda t: t[torch.tensor([0, 2])],
    "index_put_": lambda t: t.index_put_((torch.tensor([1]),), t[:1]),
    "cat": lambda t: torch.cat([t, torch.ones(3, 5)]),
    "embedding": lambda t: torch.nn.functional.embedding(torch.tensor([1]), t),
}


@pytest.fixture
def t() -> torch.Tensor:
    """[3, 5] float32 on the device, 0..14."""
    return torch.arange(15, dtype=torch.float32, device=emulate_npu()).view(3, 5)


def test_tensors_say_that_they_lie_on_the_npu(t: torch.Tensor) -> None:
    assert str(t.device) == "npu:0"
    assert str((t[0] + 1).device) == "npu:0"
    assert isinstance(t.clone(), EmulatedNpuTensor)
    assert str(torch.empty_like(t, device="cpu").device) == "cpu"
    assert str(torch.as_tensor([1], device="npu").device) == "npu:0"
    with torch.device("npu"):
        assert str(torch.zeros(2).device) == "npu:0"


@pytest.mark.parametrize("call", SYNCS.values(), ids=SYNCS)
def test_a_host_sync_is_recorded_and_can_be_forbidden(t: torch.Tensor, call: Callable[[torch.Tensor], Any]) -> None:
    with record_host_syncs() as names:
        call(t)
    assert names
    with forbid_host_syncs(), pytest.raises(SyncError, match="the host waits for the device"):
        call(t)


@pytest.mark.parametrize("call", NO_SYNCS.values(), ids=NO_SYNCS)
def test_what_needs_no_sync_is_not_accused_of_one(t: torch.Tensor, call: Callable[[torch.Tensor], Any]) -> None:
    with record_host_syncs() as names, forbid_host_syncs():
        call(t)
    assert not names


@pytest.mark.parametrize("call", MIXES.values(), ids=MIXES)
def test_a_cpu_tensor_mixed_in_is_refused_by_name(t: torch.Tensor, call: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(DeviceError, match=r"got a cpu tensor of shape .*, wanted all tensors on npu:0"):
        call(t)


def test_writes_through_a_view_reach_the_storage(t: torch.Tensor) -> None:
    t[1:, 2:].mul_(0)
    t[0] = 9.0
    t[[1, 2], 0] = -1.0
    assert t.tolist() == [[9.0] * 5, [-1, 6, 0, 0, 0], [-1, 11, 0, 0, 0]]
    assert t.data_ptr() == t.view(-1).data_ptr()


def test_a_module_moves_and_copies_with_its_parameters(t: torch.Tensor) -> None:
    torch.manual_seed(3)
    host = torch.nn.Linear(5, 7)
    moved = copy.deepcopy(host).to(t.device)
    again = copy.deepcopy(moved)
    assert {str(p.device) for p in again.parameters()} == {"npu:0"}
    assert [name for name, _ in again.named_parameters()] == ["weight", "bias"]
    assert torch.equal(again(t).cpu(), host(t.cpu()))


def test_an_output_that_would_be_resized_is_refused(t: torch.Tensor) -> None:
    with pytest.raises(HwBackendsError, match="wanted an output of the right shape"):
        torch.add(t, t, out=torch.empty(0, device=t.device))


@pytest.mark.parametrize("make", ["tensor", "as_tensor", "asarray"])
def test_a_default_device_still_reaches_the_constructors_that_emulation_wraps(make: str) -> None:
    with torch.device("meta"):
        assert getattr(torch, make)([1.0]).device.type == "meta"
