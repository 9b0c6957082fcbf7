"""Programmatic dependent launch gives the bits of plain launches, over thousands of chained steps in every order."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from hwbackends.cuda.ahead import FetchAhead
from hwbackends.cuda.dependent import Chain
from hwbackends.registry.loading import load
from hwbackends.step.batch import ForwardMode
from hwbackends.step.metadata import MetadataBuffers, MetadataLimits
from tests.backend.lab import same_bits
from tests.cuda.steps import DRAFTS, PHASE, Case, Setting
from tests.gpu import GPU

ORDERS = list(itertools.permutations(["decode", "verify", "fused", "draft_extend"]))


def test_a_conv_depends_only_behind_a_plain_launch_over_other_state() -> None:
    chain = Chain()
    assert not chain.may_depend(0, 8)  # nothing known yet: plain
    assert chain.may_depend(8, 16)
    assert not chain.may_depend(12, 20)  # written by the launch before: plain, which starts over
    assert chain.may_depend(8, 12)
    chain.changed = True
    assert not chain.may_depend(100, 108)


class Walk:
    """Steps of mixed phases over several layers, outputs fed into the next step; run plain or in graphs. `foreign`: a
    kernel that is not ours stands between the layers."""

    def __init__(self, layout: str, monkeypatch: pytest.MonkeyPatch, dependent: bool, foreign: bool) -> None:
        self.foreign = foreign
        monkeypatch.setenv("HWBACKENDS_CUDA_PDL", "1" if dependent else "0")
        self.hooks: Any = load(GPU, "cuda")
        setting = Setting(layout=layout, dim=1024, dtype=torch.bfloat16, track=False)
        self.layers = [Case(Setting(**{**vars(setting), "seed": seed}), "cuda") for seed in range(5)]
        self.views, self.batches = {}, {}
        for mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND):
            batch = self.layers[0].batch(mode)
            buffers = MetadataBuffers(MetadataLimits(64, 512, DRAFTS), "cuda", torch.int32)
            self.batches[mode] = batch
            self.views[mode] = buffers.view(mode, batch.padded_reqs, batch.num_tokens, batch.tokens_per_req)
        self.x = self.layers[0].inputs(self.batches[ForwardMode.TARGET_VERIFY]).clone()
        self.stream = torch.zeros_like(self.x)
        self.gain = torch.ones(setting.dim, dtype=torch.bfloat16, device="cuda")

    def step(self, kind: str) -> None:
        mode = {"verify": ForwardMode.TARGET_VERIFY, "draft_extend": ForwardMode.DRAFT_EXTEND}
        found = mode.get(kind, ForwardMode.DECODE)
        view = self.views[found]
        getattr(self.hooks, f"prepare_{PHASE[found]}_metadata")(self.batches[found], self.layers[0].pool, view)
        x = self.x[: self.batches[found].num_tokens]
        for case in self.layers:
            if kind == "fused":
                stream = self.stream[: len(x)]
                x = self.hooks.fused_decode_add_rmsnorm(
                    x, case.weight, None, case.state, view, stream, self.gain, 1e-6, None, True
                )
            else:
                hook = getattr(self.hooks, f"conv_{PHASE[found]}")
                x = hook(x, case.weight, None, case.state, view, "silu", True)
            if self.foreign:
                x.mul_(1)
        self.x[: len(x)].copy_(x / x.float().abs().amax().clamp(min=1).to(x.dtype))

    def memory(self) -> list[torch.Tensor]:
        return [self.x, self.stream, *(case.state.tensor for case in self.layers)]


def count_fetches(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many launches of decode and of the epilogue fetched ahead from now on."""
    counts = {"decode": 0, "fused": 0}
    launch = FetchAhead.__call__

    def counted(self: FetchAhead, tensors: Any) -> bool:
        done = launch(self, tensors)
        counts["fused" if self.chained else "decode"] += done
        return done

    monkeypatch.setattr(FetchAhead, "__call__", counted)
    return counts


@pytest.mark.cuda
@pytest.mark.parametrize("foreign", [False, True], ids=["back to back", "foreign kernels between"])
@pytest.mark.parametrize("layout", ["ring", "window", "lazy"])
def test_thousands_of_chained_steps_in_every_order_equal_plain_launches(
    layout: str, foreign: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if GPU == "rocm" or torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("dependent launch needs NVIDIA's compute capability 9.0")
    plain, chained = (Walk(layout, monkeypatch, dependent, foreign) for dependent in (False, True))
    ahead = count_fetches(monkeypatch)
    kinds = sorted({kind for order in ORDERS for kind in order})
    for walk in (plain, chained):
        for kind in kinds:
            walk.step(kind)
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for order in ORDERS:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for kind in order:
                chained.step(kind)
        graphs[",".join(order)] = graph
    assert ahead["fused"] > 0
    assert (ahead["decode"] > 0) is foreign
    start = Walk(layout, monkeypatch, False, foreign)
    for walk in (plain, chained):
        for mine, fresh in zip(walk.memory(), start.memory(), strict=True):
            mine.copy_(fresh)
    monkeypatch.setenv("HWBACKENDS_CUDA_PDL", "0")
    choose = random.Random(7)
    for _ in range(20):
        orders = [choose.choice(ORDERS) for _ in range(20)]
        for order in orders:
            graphs[",".join(order)].replay()
        for order in orders:
            for kind in order:
                plain.step(kind)
        for mine, theirs in zip(chained.memory(), plain.memory(), strict=True):
            assert same_bits(mine, theirs)
