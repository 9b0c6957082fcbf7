"""Each guard fails at what it forbids, and lets the rest be."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hwbackends.errors import AllocationError, GraphError, SyncError
from hwbackends.testing.guards import frozen_addresses, no_alloc, no_sync

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])

SYNCHRONISING: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x[1]),
    "branch": lambda x: "yes" if (x > 3).any() else "no",
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "to-cpu": lambda x: x.to("cpu"),
    "to-cpu-keyword": lambda x: x.to(device=torch.device("cpu")),
    "nonzero": lambda x: x.nonzero(),
    "where-one-argument": lambda x: torch.where(x > 1),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "masked-select": lambda x: x.masked_select(x > 1),
    "mask-read": lambda x: x[x > 1],
    "mask-write": lambda x: x.__setitem__(x > 1, torch.zeros_like(x[:3])),
    "mask-index-put": lambda x: x.index_put_((x > 1,), x[0]),
    "list-index": lambda x: x[[0, 2]],
    "list-index-in-a-tuple": lambda x: x.view(1, 5)[:, [0, 2]],
    "host-values": lambda x: torch.tensor([1.0, 2.0]),
    "new-tensor": lambda x: x.new_tensor([1.0, 2.0]),
    "repeat-interleave": lambda x: x.repeat_interleave(x.long()),
    "bincount": lambda x: x.long().bincount(),
}

DEVICE_ONLY: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda x: (x * 2 + 1).sum(),
    "index-tensor": lambda x: x[x.argsort()],
    "masked-fill": lambda x: x.masked_fill(x > 1, 0.0),
    "where": lambda x: torch.where(x > 1, x, 0.0),
    "host-number": lambda x: x + torch.tensor(3.0),
    "fill-slice": lambda x: x[:3].fill_(4),
    # a slice is filled; a single element would be copied from a host scalar, which waits on CUDA
    "set-number": lambda x: x.__setitem__(slice(2, 4), 4.0),
    "cast": lambda x: x.to(torch.float64),
    "repeat-interleave-with-size": lambda x: x.repeat_interleave(x.long(), output_size=10),
    "repeat-interleave-number": lambda x: x.repeat_interleave(2),
    "searchsorted": lambda x: torch.searchsorted(x, x),
    "factory": lambda x: torch.arange(7, device=x.device),
}


grad_modes = pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode], ids=["grad", "inference"])


@grad_modes
@pytest.mark.parametrize("name", SYNCHRONISING)
def test_no_sync_fails_at_a_host_synchronisation(name: str, mode: type[contextlib.ContextDecorator]) -> None:
    with mode():
        _fails(name, torch.arange(5.0))


def _fails(name: str, x: Tensor) -> None:
    with pytest.raises(SyncError, match=r"inside no_sync\(\)"), no_sync():
        SYNCHRONISING[name](x)
    SYNCHRONISING[name](x)  # outside of the guard it is legal


@devices
@grad_modes
@pytest.mark.parametrize("name", DEVICE_ONLY)
def test_no_sync_lets_device_work_be(name: str, mode: type[contextlib.ContextDecorator], device: str) -> None:
    x = torch.arange(5.0, device=device)
    with mode(), no_sync():
        DEVICE_ONLY[name](x)


@pytest.mark.cuda
@pytest.mark.parametrize("name", [name for name in SYNCHRONISING if name != "numpy"])
def test_no_sync_fails_on_a_gpu_too(name: str) -> None:
    x = torch.arange(5.0, device="cuda")
    with pytest.raises((SyncError, RuntimeError)), no_sync():
        SYNCHRONISING[name](x)


@pytest.mark.cuda
def test_no_sync_gives_torchs_own_check_back() -> None:
    torch.zeros(1, device="cuda")
    with no_sync():
        assert torch.cuda.get_sync_debug_mode() == 2
    assert torch.cuda.get_sync_debug_mode() == 0


@devices
def test_no_alloc_fails_when_a_result_outlives_the_block(device: str) -> None:
    x, kept = torch.arange(5.0, device=device), []
    with pytest.raises(AllocationError, match=r"1 allocation\(s\) outlive .* aten::add"), no_alloc():
        kept.append(x + 1)


@devices
def test_no_alloc_exempts_temporaries_that_are_dead_at_the_end(device: str) -> None:
    x, out = torch.arange(5.0, device=device), torch.zeros(5, device=device)
    with no_alloc():
        out.copy_((x * 2).where(x > 1, x.flip(0)))
    assert out.tolist() == [4, 3, 4, 6, 8]


def test_no_alloc_does_not_mistake_a_dead_cycle_for_a_survivor() -> None:
    x = torch.arange(5.0)
    with no_alloc():
        loop: list[object] = [x + 1]
        loop.append(loop)
        del loop


@devices
def test_no_alloc_without_temporaries_fails_at_the_first_new_storage(device: str) -> None:
    x, out = torch.arange(5.0, device=device), torch.zeros(5, device=device)
    with no_alloc(temporaries=False):
        torch.add(x, 1, out=out)
        out.view(1, 5).t().mul_(2)
    with pytest.raises(AllocationError, match="aten::mul allocated 20 bytes"), no_alloc(temporaries=False):
        x.mul(2)


def test_no_alloc_allows_the_output_that_the_contract_allows() -> None:
    x = torch.arange(5.0)
    with no_alloc() as allocations:
        y = x + 1
        allocations.allow(y)
    assert y.tolist() == [1, 2, 3, 4, 5]
    kept: list[Tensor] = []
    with pytest.raises(AllocationError, match="aten::mul"):
        _allow_one_of_two(x, kept)


def _allow_one_of_two(x: Tensor, kept: list[Tensor]) -> None:
    with no_alloc() as allocations:
        kept += [x + 1, x * 2]
        allocations.allow(kept[0])


def test_an_error_inside_a_guard_is_the_one_that_is_seen() -> None:
    kept: list[Tensor] = []

    def keep_and_fail() -> None:
        kept.append(torch.ones(3) + 1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), no_alloc(), no_sync(), frozen_addresses(dict):
        keep_and_fail()


class Buffers:
    def __init__(self) -> None:
        self.tensors = {"map": torch.zeros(3), "lens": torch.zeros(7)}

    def addresses(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self.tensors.items()}


def test_frozen_addresses_names_every_buffer_that_moved_vanished_or_appeared() -> None:
    buffers, still = Buffers(), Buffers()
    with frozen_addresses(buffers, still.addresses):
        buffers.tensors["map"].add_(1)
    other = {"map": buffers.tensors["map"].clone(), "new": torch.zeros(1)}
    with pytest.raises(GraphError, match="address moved: map, lens, new;"), frozen_addresses(still, buffers):
        buffers.tensors = other


@pytest.mark.parametrize(
    "copy", [lambda x: x.to("meta"), lambda x: torch.empty(5, device="meta").copy_(x)], ids=["to", "copy_"]
)
def test_no_sync_fails_at_a_copy_from_the_host_to_a_device(copy: Callable[[Tensor], object]) -> None:
    with pytest.raises(SyncError, match="between host and device"), no_sync():
        copy(torch.arange(5.0))


def test_guards_and_recorder_leave_torchs_compiler_out() -> None:
    """Its import takes seconds of every process that watches a hook."""
    code = (
        "import sys, torch\n"
        "from hwbackends.testing.guards import no_alloc, no_sync\n"
        "from hwbackends.testing.recorder import CpuGraph\n"
        "x, graph = torch.ones(4), CpuGraph()\n"
        "with no_sync(), no_alloc(): x.add_(1)\n"
        "with graph.capture(): x.mul_(2)\n"
        "graph.replay()\n"
        "assert x.tolist() == [4.0] * 4\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
