"""Launching for AMD GPUs without one: what is compiled, with what a kernel is called, and by which record of traits."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton ships for Linux only")

from hwbackends.cuda.traits import CUDA
from hwbackends.errors import UnsupportedError
from hwbackends.rocm import traits as module
from hwbackends.rocm.architectures import known
from hwbackends.rocm.traits import traits_for, traits_of
from hwbackends.triton_ops import conv, launch
from hwbackends.triton_ops.launch import Launch, Unsized

CDNA = traits_for("gfx942")


class Kernel:
    """Writes down what it is compiled with."""

    __name__ = "kernel"

    def __init__(self) -> None:
        self.compiled: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.compile

    def warmup(self, *arguments: Any, grid: Any, **options: Any) -> Any:
        return self.compile(*arguments, **options)

    def compile(self, *arguments: Any, **options: Any) -> Any:
        self.compiled.append((arguments, options))
        return SimpleNamespace(run=lambda *given: None, function="f", packed_metadata="m")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    monkeypatch.setattr(launch, "_current_device", lambda: -1)
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    # ROCm reports 9.4 for gfx942: not a compute capability that knows dependent launch
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *given: (9, 4))
    return Kernel()


def test_one_form_is_compiled_and_it_waits_for_the_launches_before(kernel: Kernel) -> None:
    Launch(CDNA, kernel, 5, [3], {"D": 8, "PDL": False}, 2)([torch.zeros(64)])
    ((_, options),) = kernel.compiled
    assert options["PDL"] is False
    assert "launch_pdl" not in options


def test_in_a_capture_a_conv_is_launched_plainly(kernel: Kernel) -> None:
    made = Launch(CDNA, kernel, 5, [3], {"D": 8, "PDL": False}, 2)
    conv.launch_conv(made, [torch.zeros(64)], (0, 8), 3)
    assert len(kernel.compiled) == 1


@pytest.mark.parametrize(("traits", "told"), [(CDNA, False), (CUDA, True)], ids=["rocm", "cuda"])
def test_no_size_of_a_tensor_is_compiled_in(kernel: Kernel, traits: Any, told: bool) -> None:
    Launch(traits, kernel, 5, [3], {"D": 8}, 2, [torch.zeros(8)])([torch.zeros(64)])
    (arguments, _) = kernel.compiled[0]
    assert [isinstance(one, torch.Tensor) for one in arguments[:2]] == [told, told]


def test_triton_s_amd_backend_takes_an_unsized_tensor_for_one_of_any_size() -> None:
    compiler = pytest.importorskip("triton.backends.amd.compiler")
    small = torch.zeros(64)
    assert "S" in compiler.HIPBackend.get_tensor_specialization(small, align=True)
    assert compiler.HIPBackend.get_tensor_specialization(Unsized(small), align=True) == "D"


def test_more_threads_than_a_launch_can_have_are_refused_by_name(kernel: Kernel) -> None:
    most = (1 << 32) // 128
    Launch(CDNA, kernel, most - 1, [3], {"D": 8}, 2)
    with pytest.raises(UnsupportedError, match=r"kernel.*grid.*33554432 programs of 128 threads"):
        Launch(CDNA, kernel, most, [3], {"D": 8}, 2)


@pytest.mark.parametrize(
    ("reported", "lanes"), [("gfx942:sramecc+:xnack-", 64), ("gfx90a:sramecc+", 64), ("gfx1100", 32), ("gfx1201", 32)]
)
def test_the_device_s_architecture_decides(monkeypatch: pytest.MonkeyPatch, reported: str, lanes: int) -> None:
    module._architecture.cache_clear()
    properties = SimpleNamespace(gcnArchName=reported)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    found = traits_of(torch.device("cuda:3"))
    module._architecture.cache_clear()
    assert (found.lanes, found.dependents, found.fetch_ahead) == (lanes, None, None)


@pytest.mark.parametrize("architecture", known())
def test_no_program_has_more_threads_than_a_device_gives_one(architecture: str) -> None:
    traits = traits_for(architecture)
    tuning = traits.tuning
    for dim in (1, 37, 512, 4096, 5000, 16384):
        for rows in (1, 32, 128, 4096, 100_000):
            warps = [tuning.decode(rows, dim)[1], tuning.draft(rows, dim)[1], tuning.extend(rows, dim)[2]]
            warps += [tuning.epilogue(rows, dim, True), tuning.commit(dim)[1], tuning.prepare(rows)[1]]
            warps += [tuning.prepare_extend(rows, 16 * rows)[3]]
            assert all(1 <= count * traits.lanes <= 1024 for count in warps)
            assert all(count & (count - 1) == 0 for count in warps)
