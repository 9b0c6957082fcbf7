"""Packed continuous batching of a stock model of Transformers: requests join and leave at any step, prompts go in
chunks beside decoding requests, drafts are verified for the whole batch and committed through the sidecar, and prompts
that share a chunk-aligned prefix start from its snapshot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from hwbackends.engines.transformers.convs import SidecarConvs
from hwbackends.engines.transformers.drafters import Drafter, DrafterHost
from hwbackends.engines.transformers.graphs import MetadataGraphs, Record, StepRow
from hwbackends.engines.transformers.models import describe
from hwbackends.engines.transformers.packed import KeyValueStore, PackedCache, PackedStep, Segment, pack
from hwbackends.engines.transformers.patches import patch_model
from hwbackends.engines.transformers.prefixes import PrefixCache
from hwbackends.engines.transformers.requests import Request, RequestState
from hwbackends.errors import ArgumentError, UnsupportedError
from hwbackends.metadata import PADDED, ForwardMode, StepBatch
from hwbackends.sidecar import ConvStateSidecar
from hwbackends.state import LAYOUTS, Layout, SlotAllocator, StatePool

Guard = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """Limits and choices of a runner.

    Args:
        layout: state layout, `window`, `ring` or `lazy`.
        max_batch: requests that run at once.
        max_len: tokens of prompt and answer of one request, at most.
        chunk_size: tokens of a prompt per step, at most; also the track interval of the prefix cache.
        draft_tokens: N, drafts per verify step; 0: no speculation.
        prefix_slots: track slots for shared prefixes; 0: none are kept.
        keep_logits: whether requests keep the logits of each generated token.
    """

    layout: Layout = "window"
    max_batch: int = 8
    max_len: int = 512
    chunk_size: int = 32
    draft_tokens: int = 0
    prefix_slots: int = 4
    keep_logits: bool = False

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise UnsupportedError("RunnerSettings", "layout", repr(self.layout), f"one of {', '.join(LAYOUTS)}")
        for name, least in (
            ("max_batch", 1),
            ("max_len", 2),
            ("chunk_size", 1),
            ("draft_tokens", 0),
            ("prefix_slots", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ArgumentError("RunnerSettings", name, value, f"a whole number, at least {least}")

    @property
    def draft_token_num(self) -> int:
        """Tokens per request in a verify step: the newest token and its drafts; 0 without speculation."""
        return self.draft_tokens + 1 if self.draft_tokens else 0

    @property
    def max_tokens(self) -> int:
        """Tokens of one step, at most: one of each decoding request, and a chunk."""
        return max(self.max_batch + self.chunk_size, self.max_batch * max(1, self.draft_token_num))


@dataclass(slots=True)
class StepReport:
    """What one step did."""

    index: int
    forward_mode: ForwardMode
    requests: int
    tokens: int
    finished: list[Request] = field(default_factory=list)


@dataclass(slots=True)
class RunnerCounters:
    """Counts over a runner's life: steps (idle ones too), metadata resolutions, and steps by forward mode."""

    steps: int = 0
    resolutions: int = 0
    by_mode: dict[str, int] = field(default_factory=dict)


class PackedRunner:
    """Serves generation requests (greedy) with one stock model.

    Args:
        model: `InklingForCausalLM` or `Lfm2ForCausalLM`; its short convs are patched in place.
        backend: a bound backend, as `hwbackends.load` returns it.
        settings: limits and choices.
        drafter: who proposes drafts; needed when `settings.draft_tokens` > 0.
        record: how decode and verify metadata is recorded; None: prepared anew each step.
        guard: context around each forward of the model, such as one that forbids host synchronisations.

    Raises:
        UnsupportedError: model, version or setting that is not supported.
    """

    def __init__(
        self,
        model: nn.Module,
        backend: Any,
        settings: RunnerSettings | None = None,
        drafter: Drafter | None = None,
        record: Record | None = None,
        guard: Guard = contextlib.nullcontext,
    ) -> None:
        self._guard = guard
        self.settings = settings = settings or RunnerSettings()
        if settings.draft_tokens and drafter is None:
            raise ArgumentError("PackedRunner", "drafter", None, "a drafter", "draft_tokens > 0 needs one")
        self.spec = describe(model)
        patch_model(model)
        self.model = cast(Any, model)
        self.drafter = drafter if settings.draft_tokens else None
        self.device = next(model.parameters()).device
        self._check_model_length()
        self.pool = self._make_pool()
        self.allocator = SlotAllocator(self.pool.num_slots)
        self.prefixes = PrefixCache(self.allocator, settings.prefix_slots)
        self.counters = RunnerCounters()
        self.sidecar = make_sidecar(self.pool, backend, settings)
        dtype = self.model.get_input_embeddings().weight.dtype
        # a verify step may write drafts behind the last position of a request
        self._row_len = settings.max_len + settings.draft_tokens
        self.store = KeyValueStore(self.spec, settings.max_batch, self._row_len, dtype, self.device)
        self._convs = SidecarConvs(self.sidecar, self.spec)
        self.cache = PackedCache(self.store, self._convs)
        self.graphs = self._make_graphs(record)
        self.requests: list[Request] = []
        self.running: list[Request] = []
        self._waiting: list[Request] = []
        self._free_rows = list(range(settings.max_batch))
        self._hidden: Tensor | None = None
        if self.drafter is not None:
            self._attach(self.drafter, backend)

    def _check_model_length(self) -> None:
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if limit is not None and self.settings.max_len > limit:
            raise UnsupportedError("PackedRunner", "max_len", self.settings.max_len, f"at most {limit}, as the model")

    def _make_pool(self) -> StatePool:
        settings = self.settings
        return StatePool(
            self.spec.streams,
            num_slots=1 + settings.max_batch + settings.prefix_slots,
            width=self.spec.width,
            layers=self.spec.conv_layers,
            layout=settings.layout,
            draft_token_num=settings.draft_token_num,
            request_rows=settings.max_batch,
            device=self.device,
            track_interval=settings.chunk_size,
        )

    def _make_graphs(self, record: Record | None) -> MetadataGraphs:
        settings = self.settings
        tracks = settings.prefix_slots > 0
        graphs = MetadataGraphs(self.sidecar, settings.max_batch, settings.draft_token_num, self.device, record, tracks)
        self.sidecar.init_graph_state(settings.max_batch, settings.max_tokens, max(1, settings.draft_token_num))
        graphs.capture()
        return graphs

    def _attach(self, drafter: Drafter, backend: Any) -> None:
        limits = self.settings
        sizes = (limits.max_batch, limits.max_len, limits.chunk_size, limits.draft_tokens)
        drafter.attach(DrafterHost(self.model, backend, self.pool, *sizes))
        if drafter.needs_hidden:
            self.model.get_decoder().register_forward_hook(self._keep_hidden)

    def _keep_hidden(self, module: nn.Module, args: object, output: Any) -> None:
        self._hidden = output.last_hidden_state[0]

    # requests

    def add(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        eos_token_ids: Sequence[int] = (),
        arrival: int = 0,
    ) -> Request:
        """Queue a request; it joins as soon as a row is free.

        Args:
            prompt: token ids, at least one.
            max_new_tokens: tokens to generate, at least one.
            eos_token_ids: tokens that end the answer.
            arrival: first step that may admit it.

        Raises:
            ArgumentError: empty prompt, tokens outside the vocabulary, or more tokens than `max_len`.
        """
        vocab = self.model.config.vocab_size
        if not prompt or not all(0 <= token < vocab for token in prompt):
            raise ArgumentError("PackedRunner.add", "prompt", list(prompt)[:8], f"token ids from 0 to {vocab - 1}")
        if max_new_tokens < 1:
            raise ArgumentError("PackedRunner.add", "max_new_tokens", max_new_tokens, "at least 1")
        total = len(prompt) + max_new_tokens
        if total > self.settings.max_len:
            hint = "make max_len larger"
            wanted = f"at most {self.settings.max_len} (max_len)"
            raise ArgumentError("PackedRunner.add", "prompt + max_new_tokens", total, wanted, hint)
        request = Request(len(self.requests), tuple(prompt), max_new_tokens, frozenset(eos_token_ids), arrival)
        self.requests.append(request)
        self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Take a request out at once, wherever it stands; what it generated so far stays with it."""
        if request in self._waiting:
            self._waiting.remove(request)
            request.state = RequestState.CANCELLED
        elif request.state is RequestState.RUNNING:
            self._leave(request, RequestState.CANCELLED)

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits."""
        return not self.running and not self._waiting

    def run(self, progress: Callable[[StepReport], None] | None = None) -> list[Request]:
        """Step until every request is done; `progress` sees each step."""
        while not self.idle:
            report = self.step()
            if progress is not None:
                progress(report)
        return self.requests

    def close(self) -> None:
        """Cancel what runs and forget every prefix: afterwards every slot is free."""
        for request in [*self.running, *self._waiting]:
            self.cancel(request)
        self.prefixes.clear()

    def _admit(self) -> None:
        for request in list(self._waiting):
            if not self._free_rows:
                return
            if request.arrival <= self.counters.steps:
                self._waiting.remove(request)
                self._join(request)

    def _join(self, request: Request) -> None:
        if not self.allocator.available:
            self.prefixes.evict()
        [request.slot] = self.allocator.alloc()
        request.row = self._free_rows.pop()
        request.state = RequestState.RUNNING
        self.pool.mamba_index_mapping[request.row] = request.slot
        fresh = self.drafter is not None and self.drafter.needs_hidden
        entry = None if fresh else self.prefixes.find(request.prompt)
        if entry is not None:
            entry.readers += 1
            request.source = entry
            request.computed = request.reused = len(entry.tokens)
            self.store.restore(request.row, entry.saved)
        self.running.append(request)

    def _leave(self, request: Request, state: RequestState) -> None:
        self._release_source(request)
        self.running.remove(request)
        self.allocator.free([request.slot])
        self.pool.mamba_index_mapping[request.row] = 0
        self._free_rows.append(request.row)
        request.row = request.slot = -1
        request.state = state
        if self.drafter is not None:
            self.drafter.finish(request)

    @staticmethod
    def _release_source(request: Request) -> None:
        if request.source is not None:
            request.source.readers -= 1
            request.source = None

    # steps

    @torch.no_grad()
    def step(self) -> StepReport:
        """Admit what may join, run one forward, take its tokens."""
        self._admit()
        index = self.counters.steps
        self.counters.steps += 1
        if not self.running:
            return StepReport(index, ForwardMode.IDLE, 0, 0)
        if any(request.prefilling for request in self.running):
            report = self._extend_step(index)
        elif self.drafter is not None:
            report = self._verify_step(index, self.drafter)
        else:
            report = self._decode_step(index)
        mode = report.forward_mode.value
        self.counters.by_mode[mode] = self.counters.by_mode.get(mode, 0) + 1
        for request in [request for request in self.running if request.done]:
            self._leave(request, RequestState.FINISHED)
            report.finished.append(request)
        return report

    def _forward(self, step: PackedStep, keep: Tensor | int) -> Tensor:
        """Logits [kept tokens, vocabulary] in float32 on the host."""
        self.cache.step = step
        with self._guard():
            out = self.model(
                input_ids=step.input_ids,
                attention_mask=step.masks,
                position_ids=step.position_ids,
                use_cache=True,
                logits_to_keep=keep,
                **{self.spec.cache_argument: self.cache},
            )
        logits: Tensor = out.logits[0]
        return logits.float().cpu()

    def _take(self, request: Request, logits: Tensor) -> int:
        """Append the greedy tokens of logits [tokens, vocabulary]; returns how many."""
        keep = list(logits) if self.settings.keep_logits else None
        return request.extend(logits.argmax(dim=-1).tolist(), keep)

    def _extend_step(self, index: int) -> StepReport:
        """A chunk of each prompt that is not done, as far as the step's tokens reach, and a token of every other."""
        plan = self._plan_extend()
        segments = [
            Segment(request.row, request.computed, request.span(request.computed, request.computed + count))
            for request, count in plan
        ]
        total = sum(count for _, count in plan)
        # a decoding request may stand anywhere: only whole chunks of prompts are snapshot here
        tracks = [self._reserve_track(request, count) if request.prefilling else PADDED for request, count in plan]
        self.sidecar.init_forward_metadata(self._extend_batch(plan, tracks, total))
        self.counters.resolutions += 1
        step = pack(segments, self.spec, self._row_len, total, self.device)
        ends = [request.computed + count == request.length for request, count in plan]
        last = torch.tensor([count for _, count in plan]).cumsum(0) - 1
        logits = self._forward(step, last.to(self.device))
        counts = [count for _, count in plan]
        self._observe([request for request, _ in plan], counts, counts)
        for row, (request, count) in enumerate(plan):
            request.computed += count
            request.steps += 1
            request.kept_tokens = 1
            self._release_source(request)
            self._publish(request, tracks[row])
            if ends[row]:
                self._take(request, logits[row : row + 1])
        return StepReport(index, ForwardMode.EXTEND, len(plan), total)

    def _plan_extend(self) -> list[tuple[Request, int]]:
        """Tokens of each request in a mixed step; a chunk that does not end its prompt ends on a chunk boundary."""
        size = self.settings.chunk_size
        budget = self.settings.max_tokens - sum(not request.prefilling for request in self.running)
        plan: list[tuple[Request, int]] = []
        for request in self.running:
            if not request.prefilling:
                plan.append((request, 1))
                continue
            need = len(request.prompt) - request.computed
            count = min(need, size - request.computed % size, budget)
            if not count or (count < need and (request.computed + count) % size):
                continue
            budget -= count
            plan.append((request, count))
        return plan

    def _extend_batch(self, plan: Sequence[tuple[Request, int]], tracks: Sequence[int], total: int) -> StepBatch:
        columns = [
            [request.row for request, _ in plan],
            [count for _, count in plan],
            [request.computed for request, _ in plan],
            [request.source.slot if request.source else PADDED for request, _ in plan],
            tracks,
            [request.computed + count if t > 0 else PADDED for (request, count), t in zip(plan, tracks, strict=True)],
            [request.kept_tokens for request, _ in plan],
        ]
        rows, counts, prefix, source, track, track_len, kept = torch.tensor(columns).to(self.device)
        tracking = any(slot > 0 for slot in tracks)
        return StepBatch(
            forward_mode=ForwardMode.EXTEND,
            req_pool_indices=rows,
            num_reqs=len(plan),
            num_tokens=total,
            extend_seq_lens=counts,
            extend_prefix_lens=prefix,
            source_indices=source,
            num_accepted_tokens=kept,
            mamba_track_mask=track > 0 if tracking else None,
            mamba_track_indices=track if tracking else None,
            mamba_track_seqlens=track_len if tracking else None,
        )

    def _uniform(self, mode: ForwardMode, tokens: Sequence[Sequence[int]], tracks: Sequence[int]) -> Tensor:
        """Run a decode or verify step with the same number of tokens for each running request; all its logits."""
        rows = [
            StepRow(request.row, request.computed, request.kept_tokens, track)
            for request, track in zip(self.running, tracks, strict=True)
        ]
        batch = self.graphs.prepare(mode, rows)
        self.counters.resolutions += 1
        segments = [Segment(r.row, r.computed, t) for r, t in zip(self.running, tokens, strict=True)]
        return self._forward(pack(segments, self.spec, self._row_len, batch.num_tokens, self.device), 0)

    def _decode_step(self, index: int) -> StepReport:
        running = list(self.running)
        tracks = [self._reserve_track(request, 1) for request in running]
        logits = self._uniform(ForwardMode.DECODE, [r.span(r.computed, r.computed + 1) for r in running], tracks)
        for row, request in enumerate(running):
            request.computed += 1
            request.steps += 1
            request.kept_tokens = 1
            self._publish(request, tracks[row])
            self._take(request, logits[row : row + 1])
        return StepReport(index, ForwardMode.DECODE, len(running), len(running))

    def _verify_step(self, index: int, drafter: Drafter) -> StepReport:
        """The newest token of each request and its drafts; accepted ones are committed, the others never happened."""
        running, width = list(self.running), self.settings.draft_token_num
        drafts = drafter.propose(running, self.settings.draft_tokens)
        tokens = [
            [*request.span(request.computed, request.computed + 1), *proposed][:width]
            for request, proposed in zip(running, drafts, strict=True)
        ]
        tokens = [[*row, *[0] * (width - len(row))] for row in tokens]
        logits = self._uniform(ForwardMode.TARGET_VERIFY, tokens, [PADDED] * len(running))
        kept = []
        starts = [request.computed for request in running]
        for row, request in enumerate(running):
            own = logits[row * width : (row + 1) * width]
            right = own.argmax(dim=-1).tolist()
            accepted = next((i for i in range(width - 1) if tokens[row][i + 1] != right[i]), width - 1)
            kept.append(self._take(request, own[: accepted + 1]))
            request.accepted[kept[-1] - 1] += 1
            request.steps += 1
            request.computed += kept[-1]
            request.kept_tokens = kept[-1]
        self._commit(running, starts, kept)
        self._observe(running, [width] * len(running), kept)
        return StepReport(index, ForwardMode.TARGET_VERIFY, len(running), len(running) * width)

    def _commit(self, running: Sequence[Request], starts: Sequence[int], kept: Sequence[int]) -> None:
        """Tell the sidecar which step of each request was the last right one, and snapshot what crossed a boundary."""
        size = self.settings.chunk_size
        steps, tracks = [], []
        for request, start, count in zip(running, starts, kept, strict=True):
            boundary = (start + count) // size * size
            slot = self._reserve_boundary(request, boundary) if boundary > start else PADDED
            tracks.append(slot)
            steps.append(boundary - start - 1 if slot > 0 else PADDED)
        columns = [[r.row for r in running], [count - 1 for count in kept], tracks, steps, starts]
        rows, last, track, track_steps, computed = torch.tensor(columns).to(self.device)
        tracking = any(slot > 0 for slot in tracks)
        self.sidecar.update_mamba_state_after_mtp_verify(
            req_pool_indices=rows,
            last_correct_step_indices=last,
            mamba_track_indices=track if tracking else None,
            mamba_steps_to_track=track_steps if tracking else None,
            computed_lens=computed,
        )
        for request, slot in zip(running, tracks, strict=True):
            self._publish(request, slot)

    # drafters and prefixes

    def _observe(self, requests: Sequence[Request], counts: Sequence[int], kept: Sequence[int]) -> None:
        """Show the drafter the hidden states of the tokens that each request keeps."""
        if self.drafter is None or not self.drafter.needs_hidden or self._hidden is None:
            return
        parts, offset = [], 0
        for count, keep in zip(counts, kept, strict=True):
            parts.append(self._hidden[offset : offset + keep])
            offset += count
        self.drafter.observe(requests, parts)

    def _reserve_track(self, request: Request, count: int) -> int:
        """A track slot if this step ends exactly on a chunk boundary, else the padding value."""
        end = request.computed + count
        return self._reserve_boundary(request, end) if end % self.settings.chunk_size == 0 else PADDED

    def _reserve_boundary(self, request: Request, boundary: int) -> int:
        if not self.settings.prefix_slots or request.span(0, boundary) in self.prefixes:
            return PADDED
        slot = self.prefixes.reserve()
        return PADDED if slot is None else slot

    def _publish(self, request: Request, slot: int) -> None:
        """Offer a snapshot that the step just wrote; it stands at the last chunk boundary of the computed tokens."""
        if slot > 0:
            boundary = request.computed // self.settings.chunk_size * self.settings.chunk_size
            self.prefixes.publish(slot, request.span(0, boundary), self.store.save(request.row, boundary))

    # checks

    @property
    def conv_calls(self) -> int:
        """Conv modules that asked for metadata so far."""
        return self._convs.calls

    def addresses(self) -> dict[str, int]:
        """Address of every tensor that a recorded graph may hold."""
        static = {f"graph.{name}": address for name, address in self.graphs.addresses().items()}
        store = {f"{n}[{i}]": t.data_ptr() for n in ("keys", "values") for i, t in getattr(self.store, n).items()}
        return {**self.sidecar.addresses(), **store, **static}


def make_sidecar(pool: StatePool, backend: Any, settings: RunnerSettings) -> ConvStateSidecar:
    """The sidecar of a runner's pool, with buffers for its largest step."""
    return ConvStateSidecar(
        backend,
        pool,
        max_batch=settings.max_batch,
        max_tokens=settings.max_tokens,
        draft_tokens=max(1, settings.draft_token_num),
    )
