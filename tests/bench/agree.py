"""The conv of a peer against the reference's, on inputs that every sum holds exactly: small integers. Run as a script,
it checks a peer's own kernels, in triton's interpreter on a machine without a GPU (vLLM's: that of triton 3.6):

    TRITON_INTERPRET=1 python -m tests.bench.agree fla
    TRITON_INTERPRET=1 python -m tests.bench.agree vllm FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hwbackends.bench.peers.common import Peer
from hwbackends.bench.works import prefill_of
from hwbackends.conv.state import ConvStream
from hwbackends.registry.loading import load
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.metadata import MetadataBuffers, MetadataLimits, StepMetadata
from hwbackends.step.pool import StatePool

BATCH, DIM, WIDTH, SLOTS = 3, 5, 4, 11
HISTORIES = (6, 0, 9)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def integers(*shape: int, dtype: torch.dtype) -> Tensor:
    """Integers of -3 to 3."""
    return torch.randint(-3, 4, shape, device=DEVICE).to(dtype)


class Setting:
    """A pool of windows, weights, and the reference's hooks."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(7)
        self.dtype, self.hooks = dtype, load("reference", DEVICE)
        self.pool = StatePool(
            [ConvStream("k", DIM, dtype)], num_slots=SLOTS, width=WIDTH, request_rows=BATCH + 1, device=DEVICE,
            track_interval=1,
        )  # fmt: skip
        self.state: Any = self.pool.conv_state("k", 0)
        self.storage = self.pool.storages()[0].view(SLOTS, WIDTH - 1, DIM)
        self.storage.copy_(integers(SLOTS, WIDTH - 1, DIM, dtype=dtype))
        self.pool.mamba_index_mapping[1:].copy_(torch.tensor([9, 2, 5]))
        self.rows = torch.arange(1, BATCH + 1, device=DEVICE)
        self.weight = integers(DIM, WIDTH, dtype=dtype)

    def prepare(self, batch: StepBatch) -> StepMetadata:
        buffers = MetadataBuffers(MetadataLimits(BATCH, batch.num_tokens, 1), DEVICE, torch.int32)
        tracks = batch.mamba_track_mask is not None
        view = buffers.view(batch.forward_mode, BATCH, batch.num_tokens, 1, tracks)
        phase = "decode" if batch.forward_mode is ForwardMode.DECODE else "extend"
        getattr(self.hooks, f"prepare_{phase}_metadata")(batch, self.pool, view)
        return view


def decode(peer: Peer, dtype: torch.dtype, residual: bool = True) -> None:
    """Three steps of decode: outputs and every slot's rows equal the reference's."""
    case = Setting(dtype)
    cache = peer.cache(case.storage)
    histories = torch.tensor(HISTORIES, device=DEVICE)
    for step in range(3):
        lengths = histories + step
        view = case.prepare(StepBatch(ForwardMode.DECODE, case.rows, BATCH, BATCH, computed_lens=lengths))
        if not step:
            # a request without a history starts from zeros: the reference reads none, a peer reads its slot
            case.storage[view.cache_indices[1].long()] = 0
            cache = peer.cache(case.storage)
        x = integers(BATCH, DIM, dtype=dtype)
        wanted = case.hooks.conv_decode(x, case.weight, None, case.state, view, None, residual)
        y = peer.decode(x.clone(), case.weight, cache, peer.indices(view.cache_indices))
        assert torch.equal(y, wanted)
        assert torch.equal(peer.windows(cache), case.storage)


def extend(
    peer: Peer, dtype: torch.dtype, lengths: tuple[int, ...], residual: bool = True, snapshots: bool = True
) -> None:
    """A prefill with and without histories: outputs, state and snapshots equal the reference's."""
    case = Setting(dtype)
    given, histories = (torch.tensor(each, device=DEVICE) for each in (lengths, HISTORIES))
    tracks = {
        "mamba_track_mask": torch.ones(BATCH, dtype=torch.bool, device=DEVICE),
        "mamba_track_indices": torch.tensor([1, 7, 10], device=DEVICE),
        "mamba_track_seqlens": histories + given,
    }
    batch = StepBatch(
        ForwardMode.EXTEND, case.rows, BATCH, sum(lengths), extend_seq_lens=given, extend_prefix_lens=histories,
        **(tracks if snapshots else {}),
    )  # fmt: skip
    view, cache = case.prepare(batch), peer.cache(case.storage)
    x = integers(sum(lengths), DIM, dtype=dtype)
    wanted = case.hooks.conv_extend(x, case.weight, None, case.state, view, None, residual)
    y = peer.extend(x.clone(), case.weight, cache, peer.plan(prefill_of(view, batch)))
    assert torch.equal(y, wanted)
    assert torch.equal(peer.windows(cache), case.storage)


class Evaluated:
    """A kernel whose grid is worked out before the launch. vLLM's grid replaces arguments, by tensors that triton's
    interpreter would have wrapped before."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **meta: self.kernel[grid(dict(meta))](*args, **meta)


def check(name: str, *folder: str) -> None:
    """Every case of an installed peer."""
    made: Any
    if name == "fla":
        from hwbackends.bench.peers.fla import Fla

        made, lacks = Fla(), {}
        for tuner in made.tuners().values():  # nothing is timed here, so nothing need be tuned
            tuner.configs = tuner.configs[:1]
    else:
        from hwbackends.bench.peers.vllm import Vllm

        made, lacks = Vllm(Path(*folder)), {"residual": False}
        if DEVICE == "cpu":
            made.ops._causal_conv1d_fwd_kernel = Evaluated(made.ops._causal_conv1d_fwd_kernel)
    # triton's interpreter does not multiply two bfloat16, as vLLM's kernels do
    for dtype in (torch.float32, torch.float16 if DEVICE == "cpu" else torch.bfloat16):
        made.ready(BATCH)
        decode(made, dtype, **lacks)
        for lengths in ((7, 2, 1), (70, 3, 129)):
            made.ready(sum(lengths))
            extend(made, dtype, lengths, **lacks, **({"snapshots": False} if lacks else {}))


if __name__ == "__main__":
    check(*sys.argv[1:])
    print("equal")
