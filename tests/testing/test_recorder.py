"""The recorder behaves as a captured graph does; the same tests run on CUDA graphs where there is a GPU."""

from __future__ import annotations

import copy
import ctypes
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hwbackends.errors import GraphError, SyncError
from hwbackends.testing.recorder import CpuGraph, CudaGraph, graph_for

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])


def test_each_device_gets_its_own_kind_of_graph() -> None:
    assert isinstance(graph_for("cpu"), CpuGraph)


@pytest.mark.cuda
def test_cuda_gets_cudas_graph() -> None:
    assert isinstance(graph_for("cuda:0"), CudaGraph)


@devices
def test_a_replay_reads_inputs_changed_in_place(device: str) -> None:
    x, total = torch.arange(5.0, device=device), torch.zeros(3, device=device)
    graph = graph_for(device)
    with graph.capture():
        doubled = x * 2
        total.add_(doubled[2:])
    graph.replay()
    assert total.tolist() == [4, 6, 8]
    x.fill_(1)
    graph.replay()
    assert doubled.tolist() == [2] * 5
    assert total.tolist() == [6, 8, 10]


@devices
def test_a_capture_runs_nothing_that_can_be_seen_outside(device: str) -> None:
    state = torch.arange(6.0, device=device)
    graph = graph_for(device)
    with graph.capture():
        state[1:3] = 7
        state.mul_(2)
    assert state.tolist() == [0, 1, 2, 3, 4, 5]
    graph.replay()
    assert state.tolist() == [0, 14, 14, 6, 8, 10]


def test_results_of_a_capture_are_poison_until_the_first_replay() -> None:
    graph = CpuGraph()
    with graph.capture():
        floats, indices = torch.ones(3) + 1, torch.arange(3)
    assert floats.isnan().all()
    assert indices.tolist() == [-1, -1, -1]
    graph.replay()
    assert floats.tolist() == [2, 2, 2]
    assert indices.tolist() == [0, 1, 2]


@devices
def test_a_moved_address_gives_a_wrong_replay(device: str) -> None:
    slots = {"map": torch.tensor([4, 5], device=device)}
    read = torch.zeros(2, dtype=torch.int64, device=device)
    graph = graph_for(device)
    with graph.capture():
        read.copy_(slots["map"] + 1)
    old = slots["map"]
    slots["map"] = torch.tensor([8, 9], device=device)  # "grown": the graph still holds the old address
    graph.replay()
    assert read.tolist() == [5, 6], "wrong: the engine's map says 8 and 9"
    old.copy_(slots["map"])
    graph.replay()
    assert read.tolist() == [9, 10]


def test_giving_a_tensor_other_memory_does_not_reach_the_graph() -> None:
    x, read = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)
    graph = CpuGraph()
    with graph.capture():
        read.copy_(x)
    x.data = torch.tensor([7.0, 8.0, 9.0])
    graph.replay()
    assert read.tolist() == [1, 2, 3]


@devices
def test_host_numbers_are_baked_in(device: str) -> None:
    settings = {"eps": 0.5}
    out = torch.zeros(2, device=device)
    graph = graph_for(device)
    with graph.capture():
        out.fill_(settings["eps"])
    settings["eps"] = 2.0
    graph.replay()
    assert out.tolist() == [0.5, 0.5]


def test_intermediate_results_keep_their_storage_between_replays() -> None:
    x = torch.arange(7.0)
    graph = CpuGraph()
    with graph.capture():
        kept = (x + 1).reshape(7, 1)
        y = kept.expand(7, 2).sum(dim=1)
    address = kept.data_ptr()
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert kept.data_ptr() == address
        assert y.tolist() == [2 * (value + 1)] * 7


def test_several_results_and_out_arguments_are_recorded() -> None:
    x, total = torch.tensor([3.0, 1.0, 2.0]), torch.zeros(())
    graph = CpuGraph()
    with graph.capture():
        values, order = x.sort()
        torch.sum(values, dim=0, out=total)
    x.copy_(torch.tensor([9.0, 8.0, 7.0]))
    graph.replay()
    assert values.tolist() == [7, 8, 9]
    assert order.tolist() == [2, 1, 0]
    assert total.item() == 24


def test_a_module_with_parameters_is_recorded_as_its_ops() -> None:
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(5, 3), nn.SiLU()), torch.randn(7, 5)
    graph = CpuGraph()
    with graph.capture():
        y = layer(x)
    x.copy_(torch.randn(7, 5))
    with torch.no_grad():
        layer[0].weight.mul_(2)
    graph.replay()
    assert torch.equal(y, layer(x))


@devices
def test_a_capture_in_inference_mode_is_replayed_outside_of_it(device: str) -> None:
    torch.manual_seed(0)
    layer, x, out = nn.Linear(5, 3).to(device), torch.randn(7, 5, device=device), torch.zeros(3, 7, device=device)
    layer(x)
    graph = graph_for(device)
    with torch.inference_mode(), graph.capture():
        out.copy_(layer(x).transpose(0, 1).reshape(3, 7))
    x.copy_(torch.randn(7, 5))
    graph.replay()
    assert torch.allclose(out, layer(x).t(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.item(),
        lambda x: bool(x > 0),
        lambda x: x[x > 0],
        lambda x: torch.tensor([1.0]) + x,
        lambda x: x * x.tolist()[0],
        lambda x: x * float(x.numpy()[0]),
        lambda x: x * float(np.asarray(x)[0]),
        lambda x: np.from_dlpack(x),
        lambda x: x.cpu(),
        lambda x: x.tensor_split(x.long()),
        lambda x: x.to_sparse(),
        lambda x: torch.linalg.inv(x[None]),
    ],
    ids=[
        "item",
        "bool",
        "mask",
        "host-values",
        "tolist",
        "numpy",
        "array",
        "dlpack",
        "cpu",
        "tensor-split",
        "sparse",
        "inverse",
    ],
)
def test_a_host_synchronisation_fails_the_capture_and_leaves_memory_as_it_was(
    read: Callable[[Tensor], object],
) -> None:
    x, graph = torch.ones(1), CpuGraph()
    with pytest.raises(SyncError, match="a graph cannot record it"), graph.capture():
        read(x.add_(1))
    assert x.item() == 1
    with pytest.raises(GraphError, match="nothing was captured"):
        graph.replay()


def test_memory_that_no_recorded_op_filled_is_refused() -> None:
    """What NumPy or a kernel of its own wrote would be replayed as it was once, or not at all."""
    x = torch.ones(3)

    def filled_unseen() -> Tensor:
        made = torch.empty(3)
        ctypes.memmove(made.data_ptr(), x.data_ptr(), 12)
        return made + x

    with pytest.raises(GraphError, match=r"aten::add reads memory of empty\(\) that"), CpuGraph().capture():
        filled_unseen()
    with pytest.raises(GraphError, match="aten::clamp_min reads memory of empty"), CpuGraph().capture():
        # torch fills the lengths behind the dispatcher
        torch.nn.functional.ctc_loss(x.expand(5, 1, 3), torch.ones(1, 2, dtype=torch.long), (5,), (2,))
    with CpuGraph().capture():
        part = torch.empty(3)
        part[:2] = x[:2]
        part + x


@pytest.mark.parametrize("copy", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_that_are_no_op_are_refused_and_leave_memory_as_it_was(copy: Callable[[Tensor], Tensor]) -> None:
    x = torch.arange(5.0)
    with pytest.raises(GraphError, match="gives a tensor the memory of a storage"), CpuGraph().capture():
        copy(x).add_(1)
    assert x.tolist() == [0, 1, 2, 3, 4]


def test_a_kernel_of_tritons_interpreter_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    code = textwrap.dedent(
        """
        import torch, triton, triton.language as tl
        from hwbackends.errors import GraphError
        from hwbackends.testing.recorder import CpuGraph

        @triton.jit
        def one(x):
            tl.store(x, 1.0)

        x = torch.zeros(3)
        try:
            with CpuGraph().capture():
                one[(1,)](x)
        except GraphError as error:
            print(error, x.tolist())
        """
    )
    (tmp_path / "script.py").write_text(code)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    found = subprocess.run([sys.executable, tmp_path / "script.py"], env=environment, capture_output=True, text=True)
    assert "Triton's interpreter" in found.stdout, found.stderr
    assert "[0.0, 0.0, 0.0]" in found.stdout


def test_memory_from_outside_may_not_grow() -> None:
    x, out = torch.arange(3.0), torch.ones(1)
    refused = pytest.raises(GraphError, match="resizes memory from outside")
    with pytest.warns(UserWarning, match="was resized"), refused, CpuGraph().capture():
        torch.add(x, 1, out=out)
    assert out[0] == 1


@devices
def test_each_replay_draws_new_random_numbers_and_a_capture_draws_none(device: str) -> None:
    out, graph = torch.zeros(7, device=device), graph_for(device)
    state = torch.get_rng_state()
    with graph.capture():
        out.uniform_()
    assert torch.equal(torch.get_rng_state(), state)
    drawn = []
    for _ in range(2):
        graph.replay()
        drawn.append(out.clone())
    assert not torch.equal(*drawn)


def test_a_generator_of_its_own_is_refused() -> None:
    with pytest.raises(GraphError, match="aten::rand draws from a generator of its own"), CpuGraph().capture():
        torch.rand(3, generator=torch.Generator())


def test_a_capture_inside_a_capture_is_refused() -> None:
    x = torch.zeros(3)
    inner = CpuGraph().capture()
    with pytest.raises(GraphError, match="inside another capture"), CpuGraph().capture(), inner:
        x.add_(1)
    assert not x.any()


def test_a_mapped_function_is_recorded() -> None:
    x, graph = torch.arange(5.0), CpuGraph()
    with graph.capture():
        y = torch.vmap(lambda row: row * 2)(x)
    x.fill_(7)
    graph.replay()
    assert y.tolist() == [14] * 5


def test_a_graph_is_captured_once() -> None:
    graph = CpuGraph()
    with graph.capture():
        pass
    with pytest.raises(GraphError, match="holds a capture already"), graph.capture():
        pass
    graph.replay()
    assert graph.num_ops == 0


def test_views_and_uninitialised_memory_cost_no_recorded_op() -> None:
    x, graph = torch.arange(6.0), CpuGraph()
    with graph.capture():
        out = torch.empty(3, 2)
        x.view(3, 2).t().t()
        out.copy_(x.view(3, 2))
    assert graph.num_ops == 1
