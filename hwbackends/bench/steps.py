"""Whole steps of a decoder: 24 layers of three matrix products, four convs, two add and RMSNorm, with metadata, and
for verify with the commit. Ours and SGLang's kernels around the same products."""
# mypy: allow-untyped-calls

from __future__ import annotations

import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hwbackends.bench import timing
from hwbackends.bench.ours import Bench, random, taps
from hwbackends.bench.sizes import DIM, DRAFTS, HISTORY, KV_DIM, LAYERS, STREAMS
from hwbackends.bench.works import EPS, Peer, gather_slots, metadata_out

Products = list[tuple[Tensor, Tensor, Tensor]]


def products() -> Products:
    """Three square weights for each layer."""
    return [tuple(random(DIM, DIM) / DIM**0.5 for _ in range(3)) for _ in range(LAYERS)]


class Decoder:
    """The products and inputs of a step; `layer` gets what stands around them."""

    def __init__(self, weights: Products, tokens: int) -> None:
        self.weights, self.tokens = weights, tokens
        self.start, self.stream, self.gain = random(tokens, DIM), random(tokens, DIM), random(DIM)

    def run(
        self,
        project: Callable[[int, Tensor], object],
        attention: Callable[[int, Tensor], Tensor],
        mlp: Callable[[int, Tensor], Tensor],
    ) -> Tensor:
        """One step: k and v from the first product, then the two branches."""
        h = self.start
        for layer, (first, second, third) in enumerate(self.weights):
            qkv = h @ first
            project(layer, qkv)
            h = attention(layer, qkv @ second)
            h = mlp(layer, h @ third)
        return h


class OurStep:
    """A decode or verify step on our hooks."""

    def __init__(self, hooks: Any, peer: Peer, decoder: Decoder, batch: int, verify: bool, fused: bool) -> None:
        self.hooks, self.peer, self.decoder, self.fused = hooks, peer, decoder, fused
        self.bench = Bench(hooks, "ring", batch, STREAMS, LAYERS, slots=batch + 1)
        self.batch = self.bench.verify_batch() if verify else self.bench.decode_batch()
        self.view = self.bench.prepare(self.batch)
        self.conv = hooks.conv_target_verify if verify else hooks.conv_decode
        self.epilogue = hooks.fused_target_verify_add_rmsnorm if verify else hooks.fused_decode_add_rmsnorm
        self.taps = {"kv": taps(LAYERS, 2 * KV_DIM), "attn": taps(LAYERS, DIM), "mlp": taps(LAYERS, DIM)}
        self.verify = verify
        self.commit = self.bench.commit_arguments()

    def __call__(self, prepared: int = 1) -> Tensor:
        """Run the step, metadata prepared `prepared` times."""
        for _ in range(prepared):
            self.bench.prepare(self.batch, self.view)
        attention, mlp = (lambda layer, x, s=s: self._branch(s, layer, x) for s in ("attn", "mlp"))
        result = self.decoder.run(self._project, attention, mlp)
        if self.verify:
            self.hooks.update_mamba_state_after_mtp_verify(*self.commit)
        return result

    def _project(self, layer: int, qkv: Tensor) -> None:
        state = self.bench.pool.conv_state(("k", "v"), layer)
        self.conv(qkv[:, : 2 * KV_DIM], self.taps["kv"][layer], None, state, self.view, None, True)

    def _branch(self, stream: str, layer: int, x: Tensor) -> Tensor:
        state, weight = self.bench.pool.conv_state(stream, layer), self.taps[stream][layer]
        decoder = self.decoder
        if self.fused:
            result: Tensor = self.epilogue(
                x, weight, None, state, self.view, decoder.stream, decoder.gain, EPS, None, True
            )
            return result
        y: Tensor = self.conv(x, weight, None, state, self.view, None, True)
        self.peer.norm.fused_add_rmsnorm(y, decoder.stream, decoder.gain, EPS)
        return y


class TheirStep:
    """The same step on SGLang's kernels."""

    def __init__(self, peer: Peer, decoder: Decoder, bench: Bench, verify: bool) -> None:
        self.peer, self.decoder, self.bench, self.verify = peer, decoder, bench, verify
        batch = bench.batch
        self.slots = torch.zeros(batch, dtype=torch.int32, device="cuda")
        self.out = metadata_out(peer, batch, decoder.tokens)
        self.cache = {name: random(LAYERS, batch + 1, HISTORY, dim) for name, dim in STREAMS}
        shape = (LAYERS, batch, DRAFTS, HISTORY)
        self.windows = {n: torch.zeros(*shape, d, dtype=torch.bfloat16, device="cuda") for n, d in STREAMS}
        self.taps = {name: [w.contiguous() for w in taps(LAYERS, dim)] for name, dim in STREAMS}
        self.steps = torch.arange(batch, device="cuda") % DRAFTS
        self.caches = types.SimpleNamespace(
            conv=list(self.cache.values()),
            intermediate_conv_window=list(self.windows.values()),
            temporal=torch.empty(0, device="cuda"),
            intermediate_ssm=torch.empty(0, device="cuda"),
        )

    def __call__(self, prepared: int = 1) -> Tensor:
        """Run the step, metadata prepared `prepared` times."""
        for _ in range(prepared):
            gather_slots(self.peer, self.bench, self.slots)
            self._metadata()
        attention, mlp = (lambda layer, x, s=s: self._branch(s, layer, x) for s in ("attn", "mlp"))
        result = self.decoder.run(self._project, attention, mlp)
        if self.verify:
            commit = self.peer.scatter.scatter_mamba_states_after_mtp_verify
            commit(self.caches, self.slots, self.steps, None, None)
        return result

    def _metadata(self) -> None:
        batch = self.bench.batch
        if self.verify:
            self.peer.kernels.fused_extend_sconv_metadata(
                B=batch,
                T=self.decoder.tokens,
                cache_indices=self.slots,
                his_mode=3,
                draft_token_num=DRAFTS,
                out=self.out,
            )
        else:
            self.peer.kernels.fused_decode_sconv_metadata(batch, self.slots, out=self.out)

    def _conv(self, stream: str, layer: int, x: Tensor) -> Tensor:
        cache, weight, kernels = self.cache[stream][layer], self.taps[stream][layer], self.peer.kernels
        if not self.verify:
            y: Tensor = kernels.fused_causal_conv1d_update_decode(
                x, weight, cache, self.slots, self.out["cache_mask"], None, True
            )
            return y
        names = ("cache_mask", "safe_idx", "cu", "si")
        y = kernels.causal_conv1d(x, weight, cache, use_residual=True, **{n: self.out[n] for n in names})
        kernels.save_intermediate_conv_windows(
            sconv_cache=cache,
            hidden_states=x,
            cache_indices=self.slots,
            intermediate_out=self.windows[stream][layer],
            batch_size=self.bench.batch,
            draft_token_num=DRAFTS,
        )
        return y

    def _project(self, layer: int, qkv: Tensor) -> None:
        self._conv("k", layer, qkv[:, :KV_DIM])
        self._conv("v", layer, qkv[:, KV_DIM : 2 * KV_DIM])

    def _branch(self, stream: str, layer: int, x: Tensor) -> Tensor:
        y = self._conv(stream, layer, x)
        self.peer.norm.fused_add_rmsnorm(y, self.decoder.stream, self.decoder.gain, EPS)
        return y


def captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A step warmed up and captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def step_times(hooks: Any, peer: Peer, weights: Products, batch: int, verify: bool) -> dict[str, float]:
    """Median microseconds of one step of each kind, replayed in turns."""
    tokens = batch * DRAFTS if verify else batch
    decoder = Decoder(weights, tokens)
    steps: dict[str, Callable[[], object]] = {}
    steps["products alone"] = lambda: decoder.run(lambda *a: None, lambda layer, x: x, lambda layer, x: x)
    ours = OurStep(hooks, peer, decoder, batch, verify, fused=True)
    steps["ours, fused"] = ours
    steps["ours, fused, prepared four times"] = lambda: ours(4)
    graphs = {}
    if peer:
        steps["ours"] = OurStep(hooks, peer, decoder, batch, verify, fused=False)
        theirs = TheirStep(peer, decoder, ours.bench, verify)
        steps["sglang"] = theirs
        peer.use_cuda_kernels(True)
    for name, step in steps.items():
        graphs[name] = captured(step)
    if peer and verify:
        peer.use_cuda_kernels(False)
        graphs["sglang triton"] = captured(theirs)
        peer.use_cuda_kernels(True)
    return dict(zip(graphs, timing.interleaved(list(graphs.values())), strict=True))


def out_of_graph(hooks: Any, peer: Peer, weights: Products, batch: int, rounds: int = 40) -> dict[str, float]:
    """Wall microseconds of a decode step with metadata recorded in the graph, or prepared before each replay; the
    engine synchronises each step, or lets steps queue."""
    decoder = Decoder(weights, batch)
    inside = OurStep(hooks, peer, decoder, batch, verify=False, fused=True)
    outside = OurStep(hooks, peer, decoder, batch, verify=False, fused=True)
    recorded, bare = captured(inside), captured(lambda: outside(0))

    def prepare_and_replay() -> None:
        outside.bench.prepare(outside.batch, outside.view)
        bare.replay()

    kinds: dict[str, Callable[[], object]] = {"in graph": recorded.replay, "out of graph": prepare_and_replay}
    times = {}
    for synchronised in (True, False):
        for name, step in kinds.items():
            for _ in range(5):
                step()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(rounds):
                step()
                if synchronised:
                    torch.cuda.synchronize()
            torch.cuda.synchronize()
            label = "synchronised" if synchronised else "pipelined"
            times[f"{name}, {label}"] = (time.perf_counter() - begin) / rounds * 1e6
    return times
