"""Packed continuous batching of a stock model of Transformers: requests join and leave at any step, prompts go in
chunks beside decoding requests, drafts are verified for the whole batch and committed through the sidecar, and prompts
that share a chunk-aligned prefix start from its snapshot. Decode and verify steps are replays of recorded forwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from hwbackends.engines.transformers.convs import SidecarConvs
from hwbackends.engines.transformers.models import describe
from hwbackends.engines.transformers.patches import patch_model
from hwbackends.errors import ArgumentError, DeviceError, UnsupportedError
from hwbackends.runner.drafters import Drafter, DrafterHost, NGramDrafter
from hwbackends.runner.graphs import CudaRecorder, ForwardOutput, Record, StepGraphs, StepRow
from hwbackends.runner.packed import KeyValueStore, PackedCache, PackedStep, Segment, pack
from hwbackends.runner.requests import Request, RequestState, token_ids
from hwbackends.runner.scheduler import Plan, Scheduler
from hwbackends.runner.settings import RunnerSettings
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.metadata import PADDED
from hwbackends.step.pool import StatePool
from hwbackends.step.sidecar import ConvStateSidecar

ATTENTION_KINDS = ("sdpa", "eager")
Guard = Callable[[], contextlib.AbstractContextManager[Any]]


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
    """Counts over a runner's life: steps (idle ones too), steps with a forward by forward mode, and calls of the model
    from Python, which are the steps that no graph replayed."""

    steps: int = 0
    by_mode: dict[str, int] = field(default_factory=dict)
    model_calls: int = 0


@dataclass(frozen=True, slots=True)
class _Greedy:
    """The greedy token of each row of a forward's logits, and the logits [rows, vocabulary] where they are kept."""

    tokens: list[int]
    logits: Tensor | None

    def give(self, request: Request, first: int, count: int) -> int:
        """Append `count` tokens from row `first` on to a request; returns how many it took before it was done."""
        rows = slice(first, first + count)
        return request.extend(self.tokens[rows], None if self.logits is None else list(self.logits[rows]))


class PackedRunner:
    """Serves generation requests (greedy) with one stock model.

    Args:
        model: `InklingForCausalLM` or `Lfm2ForCausalLM`; its short convs are patched in place.
        backend: a bound backend, as `hwbackends.load` returns it.
        settings: limits and choices.
        drafter: who proposes drafts where `settings.draft_tokens` > 0; default: an `NGramDrafter`.
        record: how decode and verify forwards are recorded (a `graphs.CudaRecorder` on a GPU); None: they run eagerly.
        guard: context around each forward of the model, such as one that forbids host synchronisations.

    Raises:
        UnsupportedError: model, version or setting that is not supported.
        ArgumentError: an argument of another kind.
        DeviceError: CUDA graphs of a model that is not on a GPU.
    """

    # tensors made in inference mode could be written in no other
    @torch.inference_mode(False)
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
        self.spec = describe(model)
        _check_arguments(model, backend, settings, drafter, record)
        patch_model(model)
        self.model = cast(Any, model)
        self.drafter = (drafter or NGramDrafter()) if settings.draft_tokens else None
        self.device = next(model.parameters()).device
        self._check_model()
        self.pool = self._make_pool()
        self.counters = RunnerCounters()
        self.sidecar = make_sidecar(self.pool, backend, settings)
        dtype = self.model.get_input_embeddings().weight.dtype
        self.store = KeyValueStore(self.spec, settings.max_batch, settings.row_len, dtype, self.device)
        self.scheduler = self._make_scheduler()
        self._convs = SidecarConvs(self.sidecar, self.spec)
        self.cache = PackedCache(self.store, self._convs)
        self._hidden: Tensor | None = None
        self._watch: Any = None
        if self.drafter is not None:
            self._attach(self.drafter, backend)
        self.graphs = self._make_graphs(record)
        self._captured = self.sidecar.resolutions
        self._convs.calls = self.counters.model_calls = 0

    def _make_scheduler(self) -> Scheduler:
        drafter = self.drafter
        share = drafter is None or not drafter.needs_hidden
        finish = drafter.finish if drafter is not None else lambda request: None
        return Scheduler(self.settings, self.pool, self.store, self.model.config.vocab_size, share, finish)

    def _check_model(self) -> None:
        kind = self.spec.attention_kind
        if kind not in ATTENTION_KINDS:
            hint = "load the model with attn_implementation='sdpa'"
            wanted = f"one of {', '.join(ATTENTION_KINDS)}: packed steps need a mask"
            raise UnsupportedError("PackedRunner", "attn_implementation", repr(kind), wanted, hint)
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

    def _make_graphs(self, record: Record | None) -> StepGraphs:
        settings = self.settings
        if record is not None and self.spec.expert_loop:
            hint = "load the model with experts_implementation='batched_mm'"
            wanted = "experts without a loop on the host: a graph cannot record one"
            raise UnsupportedError("PackedRunner", "experts_implementation", "'eager'", wanted, hint)
        graphs = StepGraphs(self.sidecar, self.spec, settings, lambda step: self._call_model(step, 0), record)
        self.sidecar.init_graph_state(settings.max_batch, settings.max_tokens, max(1, settings.draft_token_num))
        graphs.capture()
        return graphs

    def _attach(self, drafter: Drafter, backend: Any) -> None:
        limits = self.settings
        sizes = (limits.max_batch, limits.max_len, limits.chunk_size, limits.draft_tokens)
        drafter.attach(DrafterHost(self.model, backend, self.pool, *sizes))
        if drafter.needs_hidden:
            self._watch = self.model.get_decoder().register_forward_hook(self._keep_hidden)

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
            ArgumentError: empty prompt, tokens outside the vocabulary, more tokens than `max_len`, an argument of
                another kind, or the runner is closed.
        """
        return self.scheduler.add(prompt, max_new_tokens, eos_token_ids, arrival)

    def cancel(self, request: Request) -> None:
        """Take a request out at once, wherever it stands; what it generated so far stays with it.

        Raises:
            ArgumentError: another runner's request, or none.
        """
        self.scheduler.cancel(request)

    @property
    def requests(self) -> list[Request]:
        """Every request that was added, in that order."""
        return self.scheduler.requests

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits."""
        return self.scheduler.idle

    def run(self, progress: Callable[[StepReport], None] | None = None) -> list[Request]:
        """Step until every request is done; `progress` sees each step."""
        while not self.idle:
            report = self.step()
            if progress is not None:
                progress(report)
        return self.requests

    def close(self) -> None:
        """Cancel what runs or waits and forget every prefix: every slot is free, and the runner serves no more."""
        self.scheduler.close()
        if self._watch is not None:
            self._watch.remove()

    # steps

    @torch.no_grad()
    def step(self) -> StepReport:
        """Admit what may join, run one forward, take its tokens."""
        index = self.counters.steps
        self.scheduler.admit(index)
        self.counters.steps += 1
        if not self.scheduler.running:
            return StepReport(index, ForwardMode.IDLE, 0, 0)
        try:
            report = self._forward_step(index)
        except BaseException:
            self.scheduler.prefixes.abandon()
            raise
        mode = report.forward_mode.value
        self.counters.by_mode[mode] = self.counters.by_mode.get(mode, 0) + 1
        for request in [request for request in self.scheduler.running if request.done]:
            self.scheduler.leave(request, RequestState.FINISHED)
            report.finished.append(request)
        return report

    def _forward_step(self, index: int) -> StepReport:
        if any(request.prefilling for request in self.scheduler.running):
            return self._extend_step(index)
        return self._decode_step(index) if self.drafter is None else self._verify_step(index, self.drafter)

    def _call_model(self, step: PackedStep, keep: Tensor | int) -> ForwardOutput:
        """Run the model; nothing waits for the device. `keep`: the tokens whose logits are wanted, 0 for all."""
        self.cache.step = step
        self.counters.model_calls += 1
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
            return ForwardOutput(logits, logits.argmax(dim=-1), self._hidden)

    def _greedy(self, output: ForwardOutput, rows: int) -> _Greedy:
        """The first `rows` rows; the host waits for the tokens, and for the logits only where requests keep them."""
        # a copy: the next replay fills the same tensor
        kept = output.logits[:rows].to("cpu", torch.float32, copy=True) if self.settings.keep_logits else None
        return _Greedy(output.tokens[:rows].tolist(), kept)

    def _extend_step(self, index: int) -> StepReport:
        """A chunk of each prompt that is not done, as far as the step's tokens reach, and a token of every other."""
        plan = self.scheduler.plan_extend()
        segments = [
            Segment(request.row, request.computed, request.span(request.computed, request.computed + count))
            for request, count in plan
        ]
        total = sum(count for _, count in plan)
        # a decoding request may stand anywhere: only whole chunks of prompts are snapshot here
        tracks = [
            self.scheduler.reserve_track(request, count) if request.prefilling else PADDED for request, count in plan
        ]
        self.sidecar.init_forward_metadata(self._extend_batch(plan, tracks, total))
        step = pack(segments, self.spec, self.settings.row_len, total, self.device)
        ends = [request.computed + count == request.length for request, count in plan]
        last = torch.tensor([count for _, count in plan]).cumsum(0) - 1
        output = self._call_model(step, last.to(self.device))
        found = self._greedy(output, len(plan))
        counts = [count for _, count in plan]
        self._observe([request for request, _ in plan], counts, counts, output.hidden)
        for row, (request, count) in enumerate(plan):
            request.computed += count
            request.steps += 1
            request.kept_tokens = 1
            self.scheduler.release_source(request)
            self.scheduler.publish(request, tracks[row])
            if ends[row]:
                found.give(request, row, 1)
        return StepReport(index, ForwardMode.EXTEND, len(plan), total)

    def _extend_batch(self, plan: Plan, tracks: Sequence[int], total: int) -> StepBatch:
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

    def _uniform(
        self,
        mode: ForwardMode,
        running: Sequence[Request],
        tokens: Sequence[Sequence[int]],
        tracks: Sequence[int],
    ) -> ForwardOutput:
        """Run a decode or verify step with the same number of tokens for each running request."""
        rows = [
            StepRow(request.row, request.computed, request.kept_tokens, given, track)
            for request, given, track in zip(running, tokens, tracks, strict=True)
        ]
        return self.graphs.run(mode, rows)

    def _decode_step(self, index: int) -> StepReport:
        running = list(self.scheduler.running)
        tracks = [self.scheduler.reserve_track(request, 1) for request in running]
        newest = [request.span(request.computed, request.computed + 1) for request in running]
        output = self._uniform(ForwardMode.DECODE, running, newest, tracks)
        found = self._greedy(output, len(running))
        self._observe(running, [1] * len(running), [1] * len(running), output.hidden)
        for row, request in enumerate(running):
            request.computed += 1
            request.steps += 1
            request.kept_tokens = 1
            self.scheduler.publish(request, tracks[row])
            found.give(request, row, 1)
        return StepReport(index, ForwardMode.DECODE, len(running), len(running))

    def _verify_step(self, index: int, drafter: Drafter) -> StepReport:
        """The newest token of each request and its drafts; accepted ones are committed, the others never happened.

        Where nobody has a draft the step decodes.
        """
        width = self.settings.draft_token_num
        drafts = self._drafts(drafter)
        if not any(drafts.values()):
            return self._decode_step(index)
        running = list(drafts)
        tokens = [
            [*request.span(request.computed, request.computed + 1), *proposed][:width]
            for request, proposed in drafts.items()
        ]
        tokens = [[*row, *[0] * (width - len(row))] for row in tokens]
        output = self._uniform(ForwardMode.TARGET_VERIFY, running, tokens, [PADDED] * len(running))
        found = self._greedy(output, len(running) * width)
        kept = []
        starts = [request.computed for request in running]
        for row, request in enumerate(running):
            right = found.tokens[row * width : (row + 1) * width]
            accepted = next((i for i in range(width - 1) if tokens[row][i + 1] != right[i]), width - 1)
            kept.append(found.give(request, row * width, accepted + 1))
            request.accepted[kept[-1] - 1] += 1
            request.steps += 1
            request.computed += kept[-1]
            request.kept_tokens = kept[-1]
        self._commit(running, starts, kept)
        self._observe(running, [width] * len(running), kept, output.hidden)
        return StepReport(index, ForwardMode.TARGET_VERIFY, len(running), len(running) * width)

    def _commit(self, running: Sequence[Request], starts: Sequence[int], kept: Sequence[int]) -> None:
        """Tell the sidecar which step of each request was the last right one, and snapshot what crossed a boundary."""
        size = self.settings.chunk_size
        steps, tracks = [], []
        for request, start, count in zip(running, starts, kept, strict=True):
            boundary = (start + count) // size * size
            slot = self.scheduler.reserve_boundary(request, boundary) if boundary > start else PADDED
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
            self.scheduler.publish(request, slot)

    # drafters

    def _drafts(self, drafter: Drafter) -> dict[Request, list[int]]:
        """What the drafter proposes for each request that runs after it was asked: it may cancel some."""
        asked, hook = list(self.scheduler.running), f"{type(drafter).__name__}.propose"
        proposed = drafter.propose(asked, self.settings.draft_tokens)
        count = len(proposed) if isinstance(proposed, Sequence) else -1
        if count != len(asked):
            got = f"{count} lists" if count >= 0 else type(proposed).__name__
            raise ArgumentError(hook, "drafts", got, f"a list of tokens for each of {len(asked)} requests")
        vocabulary = self.model.config.vocab_size
        return {
            request: token_ids(hook, f"drafts of request {request.request_id}", tokens, vocabulary)
            for request, tokens in zip(asked, proposed, strict=True)
            if request.state is RequestState.RUNNING
        }

    def _observe(
        self, requests: Sequence[Request], counts: Sequence[int], kept: Sequence[int], hidden: Tensor | None
    ) -> None:
        """Show the drafter the hidden states of the tokens that each request keeps."""
        if self.drafter is None or hidden is None:
            return
        parts, offset = [], 0
        for count, keep in zip(counts, kept, strict=True):
            # a copy: the next replay fills the same tensor
            parts.append(hidden[offset : offset + keep].clone())
            offset += count
        self.drafter.observe(requests, parts)

    # checks

    @property
    def resolutions(self) -> int:
        """Times that metadata was resolved for a step so far, replays counted."""
        return self.sidecar.resolutions - self._captured + self.graphs.counters.replayed.total()

    @property
    def conv_calls(self) -> int:
        """Conv modules that asked for metadata so far, those in replays counted."""
        return self._convs.calls + self.graphs.counters.convs

    def addresses(self) -> dict[str, int]:
        """Address of every tensor that a recorded graph may hold."""
        static = {f"graph.{name}": address for name, address in self.graphs.addresses().items()}
        store = {f"{n}[{i}]": t.data_ptr() for n in ("keys", "values") for i, t in getattr(self.store, n).items()}
        return {**self.sidecar.addresses(), **store, **static}


def _check_arguments(model: nn.Module, backend: Any, settings: Any, drafter: Any, record: Any) -> None:
    """Arguments of another kind would fail much later, or not at all."""
    hook = "PackedRunner"
    if backend is None or isinstance(backend, str):
        hint = "hwbackends.load(name) gives one"
        raise ArgumentError(hook, "backend", repr(backend), "a bound backend", hint)
    if not isinstance(settings, RunnerSettings):
        raise ArgumentError(hook, "settings", type(settings).__name__, "RunnerSettings", "RunnerSettings(max_batch=4)")
    if drafter is not None and not isinstance(drafter, Drafter):
        raise ArgumentError(hook, "drafter", repr(drafter), "an instance of drafters.Drafter, or None")
    if record is not None and (isinstance(record, type) or not callable(record)):
        raise ArgumentError(hook, "record", repr(record), "a function such as CudaRecorder(), or None")
    device = next(model.parameters()).device
    if isinstance(record, CudaRecorder) and device.type != "cuda":
        hint = "a CUDA graph would record nothing; move the model, or leave record out"
        raise DeviceError(hook, "record", f"CudaRecorder() for a model on {device}", "a model on a GPU", hint)


def make_sidecar(pool: StatePool, backend: Any, settings: RunnerSettings) -> ConvStateSidecar:
    """The sidecar of a runner's pool, with buffers for its largest step."""
    return ConvStateSidecar(
        backend,
        pool,
        max_batch=settings.max_batch,
        max_tokens=settings.max_tokens,
        draft_tokens=max(1, settings.draft_token_num),
    )
