"""SGLang's own Inkling short-conv modules and conv-state backend, on its kernels, against the cuda backend: one
process, one state to start from, every phase. Outputs to bfloat16 rounding, states bit for bit, step times in turn.

    python benchmarks/sglang_inkling.py --sglang UNPACKED_WHEEL [--out FOLDER]
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from hwbackends.bench import timing
from hwbackends.bench.peers.sglang import Mode, Pool, Sglang
from hwbackends.registry.loading import load
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.metadata import MetadataBuffers, MetadataLimits, StepMetadata
from hwbackends.step.pool import StatePool

LAYERS, WIDTH, DRAFTS, INTERVAL = 5, 4, 4, 64
STREAMS = {"K_FULL": 1024, "V_FULL": 1024, "ATTN": 4096, "MLP": 4096}
PHASES = {
    "decode": ForwardMode.DECODE,
    "extend": ForwardMode.EXTEND,
    "verify": ForwardMode.TARGET_VERIFY,
    "draft_extend": ForwardMode.DRAFT_EXTEND,
}


class Side:
    """One of the two: conv tensors of its own [L, slots, W - 1, D], windows or draft rows, and how a step runs."""

    def __init__(self, batch: int, start: dict[str, Tensor]) -> None:
        self.batch = batch
        self.conv = {name: tensor.clone() for name, tensor in start.items()}
        self.rows = torch.arange(1, batch + 1, device="cuda")
        self.mapping = torch.zeros(batch + 1, dtype=torch.int32, device="cuda")
        self.mapping[1:] = torch.arange(batch, 0, -1, device="cuda")


class Theirs(Side):
    """SGLang's modules over its backend."""

    def __init__(self, peer: Sglang, batch: int, start: dict[str, Tensor], weights: dict[str, list[Tensor]]) -> None:
        super().__init__(batch, start)
        self.peer = peer
        kinds = {kind.name: kind for kind in peer.modules.SconvType}
        shape = (LAYERS, batch, DRAFTS, WIDTH - 1)
        empty = torch.empty(LAYERS, batch + 1, WIDTH - 1, 0, dtype=torch.bfloat16, device="cuda")
        windows = {n: torch.zeros(*shape, d, dtype=torch.bfloat16, device="cuda") for n, d in STREAMS.items()}
        pool = Pool(
            [self.conv.get(kind, empty) for kind in kinds],
            [windows.get(kind, torch.empty(*shape, 0, dtype=torch.bfloat16, device="cuda")) for kind in kinds],
            self.mapping,
            size=batch,
        )
        peer.runtime.draft_token_num = DRAFTS
        runner = types.SimpleNamespace(req_to_token_pool=pool, device=torch.device("cuda"))
        self.backend = peer.backend.InklingShortConvAttnBackend(runner)
        self.modules = {
            name: [self._module(name, kinds[name], i, w[i]) for i in range(LAYERS)] for name, w in weights.items()
        }

    def _module(self, name: str, kind: Any, layer: int, weight: Tensor) -> Any:
        module = self.peer.modules.ShortConvolution(STREAMS[name], WIDTH, kind, layer_id=layer, tp_rank=0)
        module.weight.data = weight[:, None, :].contiguous()
        return module

    def batch_of(self, phase: str, step: StepBatch) -> Any:
        """Their forward batch of a step."""
        spec = types.SimpleNamespace(
            draft_token_num=DRAFTS, num_accept_tokens=step.num_accept_tokens, num_front_tokens=0
        )
        lengths = step.extend_seq_lens
        if phase == "draft_extend":
            lengths = torch.full_like(self.rows, DRAFTS)
        return types.SimpleNamespace(
            forward_mode=Mode(phase), batch_size=self.batch, req_pool_indices=self.rows, seq_lens=step.seq_lens,
            extend_seq_lens=lengths, extend_prefix_lens=step.extend_prefix_lens, extend_num_tokens=step.num_tokens,
            spec_info=spec, mamba_track_mask=step.mamba_track_mask, mamba_track_indices=step.mamba_track_indices,
            mamba_track_seqlens=step.mamba_track_seqlens,
        )  # fmt: skip

    def prepare(self, phase: str, forward: Any, recorded: bool) -> None:
        self.peer.runtime.attn_backend = self.backend
        if recorded:
            self.backend.init_forward_metadata_in_graph(forward)
        else:
            self.backend.init_forward_metadata(forward)

    def convs(self, forward: Any, x: dict[str, Tensor]) -> list[Tensor]:
        return [
            self.modules[name][layer].forward(x[name], None, forward) for layer in range(LAYERS) for name in STREAMS
        ]

    def commit(self, steps: Tensor) -> None:
        self.backend.commit_conv_state_after_mtp_verify(
            req_pool_indices=self.rows,
            last_correct_step_indices=steps,
            mamba_track_indices=None,
            mamba_steps_to_track=None,
        )


class Ours(Side):
    """The cuda backend over the same tensors, wrapped."""

    def __init__(self, batch: int, start: dict[str, Tensor], weights: dict[str, list[Tensor]]) -> None:
        super().__init__(batch, start)
        self.hooks: Any = load("cuda", "cuda")
        self.pool = StatePool.wrap(
            self.conv, width=WIDTH, mamba_index_mapping=self.mapping, draft_token_num=DRAFTS, track_interval=INTERVAL
        )
        # channels next to each other, as a serving layer would keep them
        self.weights = {n: [w.t().contiguous().t() for w in each] for n, each in weights.items()}
        self.views: dict[str, StepMetadata] = {}

    def prepare(self, phase: str, step: StepBatch) -> StepMetadata:
        view = self.views.get(phase)
        if view is None or view.num_tokens != step.num_tokens:
            buffers = MetadataBuffers(MetadataLimits(self.batch, step.num_tokens, DRAFTS), "cuda", torch.int32)
            tracks = step.mamba_track_mask is not None
            view = buffers.view(PHASES[phase], self.batch, step.num_tokens, step.tokens_per_req, tracks)
            self.views[phase] = view
        name = "target_verify" if phase == "verify" else phase
        getattr(self.hooks, f"prepare_{name}_metadata")(step, self.pool, view)
        return view

    def convs(self, phase: str, view: StepMetadata, x: dict[str, Tensor]) -> list[Tensor]:
        conv = getattr(self.hooks, f"conv_{'target_verify' if phase == 'verify' else phase}")
        return [
            conv(x[name], self.weights[name][i], None, self.pool.conv_state(name, i), view, None, True)
            for i in range(LAYERS)
            for name in STREAMS
        ]


def steps_of(batch: int) -> list[tuple[str, StepBatch]]:
    """A prefill, a chunk that continues it with snapshots, decode, verify, draft extend."""
    rows = torch.arange(1, batch + 1, device="cuda")
    tracks = torch.arange(batch + 1, 2 * batch + 1, device="cuda")
    mask = torch.ones(batch, dtype=torch.bool, device="cuda")
    first = 70 + torch.arange(batch, device="cuda") % 5
    second = 80 + torch.arange(batch, device="cuda") % 7
    found = []
    for lengths, prefix in ((first, torch.zeros_like(first)), (second, first)):
        found.append((
            "extend",
            StepBatch(
                ForwardMode.EXTEND, rows, batch, int(lengths.sum()), seq_lens=prefix + lengths,
                extend_seq_lens=lengths, extend_prefix_lens=prefix, mamba_track_mask=mask, mamba_track_indices=tracks,
                mamba_track_seqlens=prefix + lengths,
            ),
        ))  # fmt: skip
    length = first + second
    found.append(("decode", StepBatch(ForwardMode.DECODE, rows, batch, batch, seq_lens=length + 1)))
    drafts = {"num_tokens": batch * DRAFTS, "draft_token_num": DRAFTS}
    found.append(("verify", StepBatch(ForwardMode.TARGET_VERIFY, rows, batch, seq_lens=length + 1 + DRAFTS, **drafts)))
    accepted = torch.arange(batch, device="cuda") % DRAFTS + 1
    found.append((
        "draft_extend",
        StepBatch(
            ForwardMode.DRAFT_EXTEND, rows, batch, seq_lens=length + 1 + 2 * DRAFTS, num_accept_tokens=accepted,
            **drafts,
        ),
    ))  # fmt: skip
    return found


def bfloat16_steps(one: Tensor, two: Tensor) -> int:
    """Largest distance of two bfloat16 tensors in representable numbers, where `two` is not the small rest of a
    cancellation: there the distance of two float32 sums, which both are right, has many bfloat16 steps."""

    def order(tensor: Tensor) -> Tensor:
        bits = tensor.view(torch.int16).int()
        return torch.where(bits < 0, -32768 - bits, bits)

    apart = (order(one) - order(two)).abs()
    return int(torch.where(two.abs() > 2.0**-8, apart, 0).max())


def inputs(tokens: int) -> dict[str, Tensor]:
    """Noise for every stream."""
    return {name: torch.randn(tokens, dim, device="cuda").to(torch.bfloat16) for name, dim in STREAMS.items()}


def agree(peer: Sglang, batch: int) -> list[dict[str, Any]]:
    """Run both sides through every phase and compare after each."""
    torch.manual_seed(0)
    start = {
        n: torch.randn(LAYERS, 2 * batch + 1, WIDTH - 1, d, device="cuda").to(torch.bfloat16)
        for n, d in STREAMS.items()
    }
    weights = {
        n: [(torch.randn(d, WIDTH, device="cuda") / 2).to(torch.bfloat16) for _ in range(LAYERS)]
        for n, d in STREAMS.items()
    }
    theirs, ours = Theirs(peer, batch, start, weights), Ours(batch, start, weights)
    found = []
    for phase, step in steps_of(batch):
        x = inputs(step.num_tokens)
        forward = theirs.batch_of(phase, step)
        theirs.prepare(phase, forward, recorded=False)
        wanted = theirs.convs(forward, x)
        y = ours.convs(phase, ours.prepare(phase, step), x)
        if phase == "verify":
            kept = torch.arange(batch, device="cuda") % DRAFTS
            theirs.commit(kept)
            ours.hooks.update_mamba_state_after_mtp_verify(ours.pool, ours.rows, kept)
        same = all(torch.equal(ours.conv[name], theirs.conv[name]) for name in STREAMS)
        apart = max(bfloat16_steps(a, b) for a, b in zip(y, wanted, strict=True))
        equal = sum(int((a == b).sum()) for a, b in zip(y, wanted, strict=True))
        share = equal / sum(a.numel() for a in y)
        largest = max(float((a.float() - b.float()).abs().max()) for a, b in zip(y, wanted, strict=True))
        row = {"phase": phase, "batch": batch, "state_equal": same, "bfloat16_steps_apart": apart}
        found.append(row | {"outputs_equal": share, "largest_difference": largest})
    return found


def graphs(peer: Sglang, batch: int) -> dict[str, float]:
    """Microseconds of the convs and metadata of one step of LAYERS layers, in graphs, per phase and side."""
    start = {
        n: torch.randn(LAYERS, 2 * batch + 1, WIDTH - 1, d, device="cuda").to(torch.bfloat16)
        for n, d in STREAMS.items()
    }
    weights = {
        n: [(torch.randn(d, WIDTH, device="cuda") / 2).to(torch.bfloat16) for _ in range(LAYERS)]
        for n, d in STREAMS.items()
    }
    theirs, ours = Theirs(peer, batch, start, weights), Ours(batch, start, weights)
    works: dict[str, Callable[[int], object]] = {}
    for phase, step in steps_of(batch)[2:4]:
        x = inputs(step.num_tokens)
        forward = theirs.batch_of(phase, step)

        def their_step(i: int, phase: str = phase, forward: Any = forward, x: dict[str, Tensor] = x) -> None:
            theirs.prepare(phase, forward, recorded=True)
            theirs.convs(forward, x)

        def our_step(i: int, phase: str = phase, step: StepBatch = step, x: dict[str, Tensor] = x) -> None:
            ours.convs(phase, ours.prepare(phase, step), x)

        works |= {f"{phase}, SGLang": their_step, f"{phase}, ours": our_step}
    return {name: timing.in_graph(work, 4).us for name, work in works.items()}


@click.command()
@click.option("--sglang", "wheel", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-results"), show_default=True)
def main(wheel: Path, out: Path) -> None:
    """Compare and time SGLang's Inkling short-conv modules and ours."""
    peer = Sglang(wheel)
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "layers": LAYERS, "agreement": [], "step_us": {}}
    for label, on in (("cuda", True), ("triton", False)):
        peer.use_cuda_kernels(on)
        for batch in (3, 32):
            results["agreement"] += [row | {"kernels": label} for row in agree(peer, batch)]
    for batch in (1, 32, 128):
        for label, on in (("cuda", True), ("triton", False)):
            peer.use_cuda_kernels(on)
            results["step_us"][f"B = {batch}, {label}"] = graphs(peer, batch)
    out.mkdir(parents=True, exist_ok=True)
    (out / "sglang_inkling.json").write_text(json.dumps(results, indent=1) + "\n")
    for row in results["agreement"]:
        click.echo(row)
    for name, times in results["step_us"].items():
        click.echo(f"{name}: { {n: round(us, 1) for n, us in times.items()} }")


if __name__ == "__main__":
    main()
