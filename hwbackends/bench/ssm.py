"""The SSM benchmark: launch shapes of verify and decode held to the same bits, then timed against SGLang's kernels and
the floor. On a GPU in graphs, inputs past the L2; on a CPU, in triton's interpreter, it only shows that it runs."""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from hwbackends.bench import ssm_sizes, timing
from hwbackends.bench.floor import Floor
from hwbackends.bench.ssm_sizes import ACCEPTED, DRAFTS, Inputs, Size, Weights, label, layers_for, steady, storage
from hwbackends.cuda.traits import CUDA
from hwbackends.ssm.state import SSMState
from hwbackends.step.batch import ForwardMode
from hwbackends.step.metadata import MetadataBuffers, MetadataLimits, StepMetadata
from hwbackends.triton_ops import ssm
from hwbackends.triton_ops.traits import SsmShape, Traits

POSITION = 1000
"""Tokens that a measured request has seen."""


class Chosen:
    """Launch sizes as a backend's tuning gives them, but for SSMs the one that is measured."""

    def __init__(self, shape: SsmShape, defers: bool) -> None:
        self._shape, self._defers = shape, defers

    def ssm(self, state: SSMState, requests: int, tokens: int, through: bool) -> SsmShape:
        """The shape, whatever is asked."""
        return self._shape

    def ssm_defers(self, state: SSMState, requests: int) -> bool:
        """As chosen."""
        return self._defers

    def __getattr__(self, name: str) -> Any:
        return getattr(gpu().tuning, name)


def gpu() -> Traits:
    """Those of the GPUs that torch is built for."""
    if torch.version.hip is None:
        return CUDA
    from hwbackends.rocm.traits import traits_of

    return traits_of(torch.device("cuda"))


def traits(shape: SsmShape, defers: bool = False) -> Traits:
    """The device's, with one launch shape for SSMs; most registers of a thread are NVIDIA's to choose alone."""
    device = gpu()
    shape = shape if device.speaks_ptx else replace(shape, registers=0)
    return replace(device, tuning=Chosen(shape, defers))


def metadata(mode: ForwardMode, slots: Tensor, rows: Tensor, positions: Tensor, drafts: int) -> StepMetadata:
    """Of a decode or verify step of these slots, request rows and computed lengths, all [B] int32."""
    batch, device = len(slots), slots.device
    tokens = drafts if mode is ForwardMode.TARGET_VERIFY else 1
    buffers = MetadataBuffers(MetadataLimits(batch, batch * tokens, tokens), device, torch.int32)
    found = buffers.view(mode, batch, batch * tokens, tokens)
    found.cache_indices.copy_(slots)
    found.source_indices.copy_(slots)
    found.draft_indices.copy_(rows)
    found.computed_lens.copy_(positions)
    found.has_initial_state.copy_(slots > 0)
    found.query_start_loc.copy_(torch.arange(batch + 1, device=device) * tokens)
    return found


def call(
    hook: str, chosen: Traits, inputs: Inputs, weights: Weights, state: SSMState, step: StepMetadata,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """An SSM hook over the launcher, with a launch shape of ours."""
    norm = state.kind != "mamba2"
    given = (inputs.q, inputs.k, inputs.v, inputs.a, inputs.b, weights.A_log, weights.dt_bias)
    return ssm.run(hook, lambda _: chosen, *given, state, step, weights.D, None, None, None, norm, None, out)


# ---------------------------------------------------------------------------------------------------------- numbers


@dataclass(frozen=True, slots=True)
class Run:
    """What a sequence of steps gave: outputs of every token and the state behind the last one."""

    outputs: Tensor
    state: Tensor

    @property
    def digest(self) -> str:
        """Of all bits."""
        parts = [t.contiguous().view(torch.uint8).cpu().numpy().tobytes() for t in (self.outputs, self.state)]
        return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


SLOTS, ROWS = [2, 4, -1, 1], [1, 3, -1, 0]
"""Of the checked batch: slots and request rows, one of them padded."""


class Check:
    """One size's steps in a launch shape: token by token, and by verify with every accepted count."""

    def __init__(
        self, size: Size, dtype: torch.dtype, ring_rows: int, device: str, drafts: int = DRAFTS, steps: int = 3
    ) -> None:
        self.size, self.device, self.drafts, self.total = size, device, drafts, steps * drafts
        torch.manual_seed(3)
        self.held = storage(size, 1, 6, 5, dtype, device, ring_rows, drafts)
        self.held.tensor.mul_(3)
        assert self.held.state_lens is not None
        self.held.state_lens.fill_(7)
        self.start = self.held.tensor.clone()
        self.weights = Weights(size, device)
        self.tokens = Inputs(size, len(SLOTS) * (self.total + drafts), device)
        self.slots, self.rows = (torch.tensor(x, dtype=torch.int32, device=device) for x in (SLOTS, ROWS))

    def _of(self, positions: Sequence[int], count: int) -> Inputs:
        """Tokens positions[b] .. positions[b] + count - 1 of each request."""
        each = self.total + self.drafts
        index = [b * each + p + t for b, p in enumerate(positions) for t in range(count)]
        return self.tokens.rows(torch.tensor(index, device=self.device))

    def _reset(self) -> SSMState:
        """The state as it began; the ring full of NaN, which nothing may read."""
        held = self.held
        held.tensor.copy_(self.start)
        for ring in (held.ring_k, held.ring_u, held.ring_d):
            assert ring is not None
            ring.fill_(float("nan"))
        assert held.state_lens is not None
        held.state_lens.fill_(7)
        return held.layer(0)

    def decodes(self, chosen: Traits) -> Run:
        """Every token by a decode of its own."""
        state, outputs = self._reset(), []
        for t in range(self.total):
            at = torch.full_like(self.slots, 7 + t)
            step = metadata(ForwardMode.DECODE, self.slots, self.rows, at, 1)
            outputs.append(call("ssm_decode", chosen, self._of([t] * len(SLOTS), 1), self.weights, state, step))
        self._settle(state, [self.total] * len(SLOTS), chosen)
        return Run(torch.stack(outputs, 1), state.tensor.clone())

    def verifies(self, chosen: Traits) -> Run:
        """By verify steps, each run twice, with accepted counts that differ by request and step."""
        state, done = self._reset(), [0] * len(SLOTS)
        heads = self.tokens.v.shape[1:]
        outputs = torch.zeros(len(SLOTS), self.total + self.drafts, *heads, dtype=torch.bfloat16, device=self.device)
        turn = 0
        while min(done) < self.total:
            at = torch.tensor([7 + n for n in done], dtype=torch.int32, device=self.device)
            step = metadata(ForwardMode.TARGET_VERIFY, self.slots, self.rows, at, self.drafts)
            inputs = self._of(done, self.drafts)
            for _ in range(2):
                y = call("ssm_target_verify", chosen, inputs, self.weights, state, step)
            y = y.view(len(SLOTS), self.drafts, *heads)
            for b, n in enumerate(done):
                outputs[b, n : n + self.drafts] = y[b]
                done[b] = min(self.total, n + (turn + b) % (self.drafts + 1))
            turn += 1
        self._settle(state, done, chosen)
        return Run(outputs[:, : self.total], state.tensor.clone())

    def _settle(self, state: SSMState, done: Sequence[int], chosen: Traits) -> None:
        """Bring every checkpoint up to its request's position, as `materialize_slots` does."""
        from hwbackends.step.pool import StatePool
        from hwbackends.triton_ops import ssm_moves

        mapping = torch.zeros(5, dtype=torch.int32, device=self.device)
        for row, slot in zip(ROWS, SLOTS, strict=True):
            if row >= 0:
                mapping[row] = slot
        pool = StatePool.wrap({}, mamba_index_mapping=mapping, states={"ssm": self.held}, draft_token_num=self.drafts)
        at = torch.tensor([7 + n for n in done], dtype=torch.int32, device=self.device)
        ssm_moves.materialize(lambda _: chosen, pool, self.rows, at, None)


def digests(size: Size, dtype: torch.dtype, rings: Sequence[int], device: str, small: bool) -> Iterator[dict[str, Any]]:
    """Decode and verify in every launch shape and ring: one line each, with the digest of all bits."""
    for ring in rings:
        check = Check(size, dtype, ring, device, *((2, 2) if small else (DRAFTS, 3)))
        base = {"size": size.name, "dtype": str(dtype)[6:], "ring": ring}
        for shape in shapes(ssm_sizes.DECODE_SHAPES, size, dtype, small):
            for defers in (False, True):
                run = check.decodes(traits(shape, defers))
                kind = "decode, deferred" if defers else "decode, through"
                yield base | {"work": kind, "shape": label(shape), "digest": run.digest}
        for shape in shapes(ssm_sizes.VERIFY_SHAPES, size, dtype, small):
            run = check.verifies(traits(shape))
            yield base | {"work": "verify", "shape": label(shape), "digest": run.digest}


def shapes(found: Sequence[SsmShape], size: Size, dtype: torch.dtype, small: bool) -> list[SsmShape]:
    """The launch shapes that a size can take: no wider than V, four lanes at most to a row; tiles of 16-bit states hold
    8 columns a lane."""
    fits = [s for s in found if s.rows <= size.head_v_dim and (dtype is torch.float32 or s.rows >= 16 * s.warps)]
    fits = [s for s in fits if 4 * s.rows >= gpu().lanes * s.warps]
    return fits[:: len(fits) - 1] if small and len(fits) > 2 else fits


# ------------------------------------------------------------------------------------------------------------ speed


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to measure."""

    work: str
    size: Size
    batch: int
    dtype: torch.dtype
    ring: int
    shape: SsmShape


class Work:
    """One size, batch and ring: the steps of every layer, to be captured in one graph."""

    def __init__(self, task: Task, layers: int, device: str, drafts: int = DRAFTS) -> None:
        self.task, self.layers, self.device, self.drafts = task, layers, device, drafts
        size, batch = task.size, task.batch
        self.held = storage(size, layers, batch + 1, batch, task.dtype, device, task.ring, drafts)
        self.weights = Weights(size, device)
        tokens = batch * (drafts if task.work == "verify" else 1)
        self.inputs = [Inputs(size, tokens, device, seed) for seed in range(layers)]
        self.outs = [torch.empty_like(x.v, memory_format=torch.contiguous_format) for x in self.inputs]
        self.slots = (torch.randperm(batch, device=device) + 1).int()
        self.rows = torch.arange(batch, dtype=torch.int32, device=device)
        mode = ForwardMode.TARGET_VERIFY if task.work == "verify" else ForwardMode.DECODE
        at = torch.full((batch,), POSITION, dtype=torch.int32, device=device)
        self.step = metadata(mode, self.slots, self.rows, at, drafts)
        self.states = [self.held.layer(index) for index in range(layers)]
        pending = self.pending()
        assert self.held.state_lens is not None
        lens = torch.zeros_like(self.held.state_lens)
        for layer in range(layers):
            for b in range(batch):
                lens[layer, int(self.slots[b])] = POSITION - pending[(layer + b) % len(pending)]
        self.lens = lens

    def pending(self) -> list[int]:
        """Tokens behind the checkpoint in the steady state."""
        if self.task.work == "verify":
            return steady(self.task.ring, self.drafts, min(ACCEPTED, self.drafts))
        return steady(self.task.ring, self.drafts, 1) if self.task.work == "deferred" else [0]

    def reset(self) -> None:
        """The lengths as before the step."""
        assert self.held.state_lens is not None
        self.held.state_lens.copy_(self.lens)

    def __call__(self, layer: int) -> None:
        """The step of one layer."""
        hook = "ssm_target_verify" if self.task.work == "verify" else "ssm_decode"
        chosen = traits(self.task.shape, self.task.work == "deferred")
        call(hook, chosen, self.inputs[layer], self.weights, self.states[layer], self.step, self.outs[layer])

    def bytes(self) -> float:
        """Bytes that a layer's step must move: states, and what it reads and writes of the ring."""
        task, size = self.task, self.task.size
        state, row, pending = size.state_bytes(task.dtype), size.ring_row_bytes(), self.pending()
        tokens = self.drafts if task.work == "verify" else 1
        if task.work == "through":
            return task.batch * (2 * state + size.token_bytes())
        written = sum(p + 2 * self.drafts > task.ring for p in pending) / len(pending)
        replayed = sum(pending) / len(pending)
        return task.batch * (state * (1 + written) + row * (replayed + tokens) + tokens * size.token_bytes())


def per_layer(work: Callable[[int], object], layers: int, before: Callable[[], None], overhead: float) -> float:
    """Median microseconds of one layer: a graph of `before` and every layer, less what `before` takes."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for layer in range(layers):
            work(layer)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before()
        for layer in range(layers):
            work(layer)
    return (statistics.median(timing.replayed(graph, 15)) - overhead) / layers


def alone(before: Callable[[], None]) -> float:
    """Microseconds of one `before` among many."""
    graph = torch.cuda.CUDAGraph()
    before()
    with torch.cuda.graph(graph):
        for _ in range(4):
            before()
    return statistics.median(timing.replayed(graph, 15)) / 4


def measure(task: Task, floor: Floor) -> dict[str, Any]:
    """One task on a GPU."""
    work = Work(task, layers_for(task.size, task.batch, task.dtype), "cuda")
    us = per_layer(work, work.layers, work.reset, alone(work.reset))
    return row(task) | {"us": us, "floor_us": floor.of(int(work.bytes())), "pending": work.pending()}


def row(task: Task) -> dict[str, Any]:
    """What names a task in the results."""
    named = {"size": task.size.name, "batch": task.batch, "dtype": str(task.dtype)[6:], "ring": task.ring}
    return {"work": task.work} | named | {"shape": label(task.shape)}


def smoke(task: Task) -> dict[str, Any]:
    """One task's step on a CPU."""
    work = Work(task, 1, "cpu", 2)
    work.reset()
    work(0)
    finite = bool(torch.isfinite(work.outs[0].float()).all())
    return row(task) | {"us": None, "floor_us": None, "finite": finite, "pending": work.pending()}


def warm(task: Task) -> None:
    """In a process of its own: compile what a task launches, into triton's cache."""
    work = Work(task, 1, "cuda")
    work.reset()
    work(0)
    torch.cuda.synchronize()


def compile_all(tasks: Sequence[Task], workers: int) -> None:
    """Every kernel of the tasks, in processes beside this one; one small batch of each."""
    wanted = {(t.work, t.size, t.dtype, t.ring, t.shape): replace(t, batch=2) for t in tasks}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for _ in pool.map(warm, wanted.values()):
            pass


def tasks(sizes: Sequence[Size], batches: Sequence[int], small: bool) -> list[Task]:
    """What is measured: verify in three rings, decode written through and deferred; 16-bit states of gdn."""
    found = []
    for size in sizes:
        dtypes = [torch.float32, torch.bfloat16] if size.name in ("gdn", "mamba2") else [torch.float32]
        for dtype in dtypes:
            for batch in batches:
                rings = (4, 8) if small else (8, 12, 16)
                for shape in shapes(ssm_sizes.VERIFY_SHAPES, size, dtype, small):
                    found += [Task("verify", size, batch, dtype, ring, shape) for ring in rings]
                for shape in shapes(ssm_sizes.DECODE_SHAPES, size, dtype, small):
                    found += [Task("through", size, batch, dtype, 8 if small else 16, shape)]
                    found += [Task("deferred", size, batch, dtype, ring, shape) for ring in rings[1:]]
    return found


def memory(size: Size) -> dict[str, float]:
    """MiB that a running request holds in one layer beside its state: ours on rings, SGLang's intermediate states."""
    lens = 4 * size.num_v_heads * -(-size.head_v_dim // 8)
    rings = {f"ring C={c}": (c * size.ring_row_bytes() + lens) / (1 << 20) for c in (8, 12, 16)}
    return {"size": size.name, "state": size.state_bytes(torch.float32) / (1 << 20)} | rings | {  # type: ignore[return-value]
        "intermediates of SGLang": DRAFTS * size.state_bytes(torch.float32) / (1 << 20)
    }  # fmt: skip


def workers() -> int:
    """Processes that compile."""
    return max(1, min(14, (os.cpu_count() or 2) - 1))


class Deadline:
    """When to stop: what is left is counted, never hidden."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    def passed(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self._end


# ------------------------------------------------------------------------------------------------------------- runs


class Session:
    """One run of the benchmark; results are kept as they come, so that a run that is cut short shows what it found.

    Args:
        peer: SGLang's kernels, or None.
        device: `cuda`, or `cpu` with TRITON_INTERPRET=1.
        small: tiny sizes, few shapes.
        only: sizes whose name holds one of these words; empty: all of one rank.
        minutes: when to stop measuring.
        save: called with the results after each part.
    """

    def __init__(
        self, peer: Any, device: str, small: bool, only: Sequence[str], minutes: float,
        save: Callable[[dict[str, Any]], None],
    ) -> None:  # fmt: skip
        found = ssm_sizes.TINY if small else ssm_sizes.SIZES
        wanted = only or ("",)
        sizes = [s for s in found if any(word in s.name for word in wanted)]
        self.sizes = sizes if only else [s for s in sizes if "_tp" not in s.name]
        self.batches = (2,) if small else ssm_sizes.BATCHES
        self.peer, self.device, self.small, self.save = peer, device, small, save
        self.deadline = Deadline(minutes)
        self.results: dict[str, Any] = {"digests": [], "ours": [], "peers": [], "failures": [], "left": 0}
        self.results["memory"] = [memory(size) for size in self.sizes]

    def run(self) -> dict[str, Any]:
        """Everything."""
        todo = tasks(self.sizes, self.batches, self.small)
        if self.device == "cuda":
            began = time.monotonic()
            self._try("compiling", lambda: compile_all(todo, workers()))
            self.results["compiled_s"] = time.monotonic() - began
        for size in self.sizes:
            wide = size.kind == "gdn" and not self.small
            for dtype in (torch.float32, torch.bfloat16) if wide else (torch.float32,):
                rings = (4,) if self.small else (8, 16)
                self._try(f"digests of {size.name}", partial(self._digests, size, dtype, rings))
        self.save(self.results)
        if self.device == "cuda":
            self._timed(todo)
        else:
            self.results["ours"] = [smoke(task) for task in todo[:: max(1, len(todo) // 3)]]
        self.save(self.results)
        return self.results

    def _digests(self, size: Size, dtype: torch.dtype, rings: Sequence[int]) -> None:
        for line in digests(size, dtype, rings, self.device, self.small):
            self.results["digests"].append(line)

    def _timed(self, todo: Sequence[Task]) -> None:
        from hwbackends.bench import floor

        found = floor.measure()
        self.results["floor"] = {"copy_bytes_per_s": found.copy_bytes_per_s, "empty_us": found.empty_us}
        self._peers(todo)
        # the batches that the figures are held to come first, the sizes in turns
        for task in sorted(todo, key=lambda t: (t.dtype is not torch.float32, t.batch not in (8, 32), t.batch)):
            if self.deadline.passed():
                self.results["left"] += 1
                continue
            self._try(str(row(task)), partial(self._measured, task, found))
        self.save(self.results)

    def _measured(self, task: Task, floor: Floor) -> None:
        self.results["ours"].append(measure(task, floor))

    def _peers(self, todo: Sequence[Task]) -> None:
        if self.peer is None:
            return
        for size, batch, dtype in dict.fromkeys((t.size, t.batch, t.dtype) for t in todo):
            name = f"SGLang {size.name} {batch} {dtype}"
            self._try(name, partial(self._peer, size, batch, dtype))
        self.save(self.results)

    def _peer(self, size: Size, batch: int, dtype: torch.dtype) -> None:
        layers = layers_for(size, batch, dtype)
        held = storage(size, layers, batch + 1, 1, dtype, self.device, 2, 1).tensor
        weights = Weights(size, self.device)
        slots = (torch.randperm(batch, device=self.device) + 1).int()
        named = {"size": size.name, "batch": batch, "dtype": str(dtype)[6:]}
        for work, kinds in {"verify": ("default", "replay"), "decode": ("default",)}.items():
            tokens = batch * (DRAFTS if work == "verify" else 1)
            inputs = [Inputs(size, tokens, self.device, seed) for seed in range(layers)]
            for kind in kinds:
                make = getattr(self.peer, "replay" if kind == "replay" else work)
                step = make(size, held, inputs, weights, slots)
                if step is None:
                    continue
                self._try(f"SGLang {kind} {named}", partial(self._step, step, named, work, kind, layers))

    def _step(self, step: Any, named: dict[str, Any], work: str, kind: str, layers: int) -> None:
        us = per_layer(step.layer, layers, lambda: None, 0.0)
        commit = 0.0
        if step.commit is not None:
            before = step.before or (lambda: None)
            overhead = alone(step.before) if step.before else 0.0
            commit = per_layer(lambda _: step.commit(), 1, before, overhead) / layers
        self.results["peers"].append(named | {"work": work, "peer": kind, "us": us + commit, "commit_us": commit})

    def _try(self, what: str, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # one failure must not cost the run
            self.results["failures"].append(f"{what}: {type(error).__name__}: {str(error)[:300]}")
