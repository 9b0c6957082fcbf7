"""One step of a runner: which tokens of which requests go through the model, and what the host makes of the logits.
Nothing here knows of threads, arrivals or failures; those are the runner's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hwbackends.engines.transformers.models import ModelSpec
from hwbackends.errors import ArgumentError
from hwbackends.runner.drafters import Drafter
from hwbackends.runner.graphs import ForwardOutput, StepGraphs, StepRow
from hwbackends.runner.packed import PackedCache, PackedStep, Segment, pack
from hwbackends.runner.requests import Request, RequestState, token_ids
from hwbackends.runner.scheduler import Plan, Scheduler
from hwbackends.runner.settings import RunnerSettings
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.metadata import PADDED
from hwbackends.step.sidecar import ConvStateSidecar

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
class StepParts:
    """What a step works with.

    Attributes:
        between: called once the forward is launched, before its tokens are waited for; true: what the forward gave is
            void.
        after_drafts: called when the drafter was asked; it may have added and cancelled requests.
        fail: called with a request and what its own sampler raised.
    """

    model: Any
    spec: ModelSpec
    settings: RunnerSettings
    scheduler: Scheduler
    sidecar: ConvStateSidecar
    cache: PackedCache
    drafter: Drafter | None
    device: torch.device
    guard: Guard
    page_size: int
    varlen: bool
    between: Callable[[], bool]
    after_drafts: Callable[[], None]
    fail: Callable[[Request, Exception], None]


class StepVoidError(Exception):
    """The model changed under a step."""


class Steps:
    """Runs steps.

    Attributes:
        graphs: decode and verify forwards; set by the runner.
        model_calls: calls of the model from Python.
        plan: requests that the step under way takes part in.
    """

    graphs: StepGraphs

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self.model_calls = 0
        self.plan: list[Request] = []
        self.hidden: Tensor | None = None

    def run(self, index: int) -> StepReport:
        """A step with a forward, or an idle one where nobody could be given a place.

        Raises:
            StepVoidError: the model changed; nothing of the step counts.
        """
        running = self._parts.scheduler.running
        if any(request.prefilling for request in running):
            return self._extend(index)
        drafter = self._parts.drafter
        return self._decode(index) if drafter is None else self._verify(index, drafter)

    def use(self, spec: ModelSpec) -> ModelSpec:
        """The model changed; from now on it is this one."""
        self._parts.spec = spec
        return spec

    # the model

    def call_model(self, step: PackedStep, keep: Tensor | int) -> ForwardOutput:
        """Run the model; nothing waits for the device. `keep`: the tokens whose logits are wanted, 0 for all."""
        parts = self._parts
        parts.cache.step = step
        self.model_calls += 1
        with parts.guard():
            out = parts.model(
                input_ids=step.input_ids,
                attention_mask=step.masks,
                position_ids=step.position_ids,
                use_cache=True,
                logits_to_keep=keep,
                **{parts.spec.cache_argument: parts.cache},
            )
            logits: Tensor = out.logits[0]
            return ForwardOutput(logits, logits.argmax(dim=-1), self.hidden)

    def keep_hidden(self, module: nn.Module, args: object, output: Any) -> None:
        """A forward hook of the decoder, for drafters that want its hidden states."""
        self.hidden = output.last_hidden_state[0]

    def _settle(self) -> None:
        if self._parts.between():
            raise StepVoidError

    # prompts

    def _extend(self, index: int) -> StepReport:
        """A chunk of each prompt that is not done, as far as the step's tokens reach, and a token of every other."""
        parts, scheduler = self._parts, self._parts.scheduler
        plan = scheduler.plan_extend()
        self.plan = [request for request, _ in plan]
        if not plan:
            return StepReport(index, ForwardMode.IDLE, 0, 0)
        segments = [
            Segment(request.pages, request.computed, request.span(request.computed, request.computed + count))
            for request, count in plan
        ]
        total = sum(count for _, count in plan)
        # a decoding request may stand anywhere: only whole chunks of prompts are snapshot here
        tracks = [scheduler.reserve_track(request, count) if request.prefilling else PADDED for request, count in plan]
        parts.sidecar.init_forward_metadata(self._extend_batch(plan, tracks, total))
        step = pack(segments, parts.spec, parts.page_size, self._parts.device, parts.varlen)
        last = torch.tensor([count for _, count in plan]).cumsum(0) - 1
        output = self.call_model(step, last.to(parts.device))
        self._settle()
        ends = [request.computed + count == request.length for request, count in plan]
        found = self._tokens(output, len(plan))
        counts = [count for _, count in plan]
        self._observe(self.plan, counts, counts, output.hidden)
        for row, (request, count) in enumerate(plan):
            if request.state is RequestState.RUNNING:
                request.computed += count
                request.steps += 1
                request.kept_tokens = 1
                scheduler.release_source(request)
                if ends[row]:
                    found.give(request, row, [])
            scheduler.publish(request, tracks[row])
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
        rows, counts, prefix, source, track, track_len, kept = torch.tensor(columns).to(self._parts.device)
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

    # answers

    def _placed(self, width: int, asked: Sequence[Request]) -> list[Request]:
        """Those of `asked` that have pages for `width` more tokens; some may have lost their place."""
        for request in asked:
            if request.state is RequestState.RUNNING:
                self._parts.scheduler.reach(request, request.computed + width)
        self.plan = [request for request in asked if request.state is RequestState.RUNNING]
        return self.plan

    def _uniform(
        self,
        mode: ForwardMode,
        running: Sequence[Request],
        tokens: Sequence[Sequence[int]],
        tracks: Sequence[int],
    ) -> ForwardOutput:
        """Run a decode or verify step with the same number of tokens for each running request."""
        rows = [
            StepRow(request.row, request.computed, request.kept_tokens, given, request.pages, track)
            for request, given, track in zip(running, tokens, tracks, strict=True)
        ]
        # a replay writes without asking the cache
        self._parts.cache.touched |= self.graphs.recorded
        output = self.graphs.run(mode, rows)
        self._settle()
        return output

    def _decode(self, index: int) -> StepReport:
        scheduler = self._parts.scheduler
        running = self._placed(1, list(scheduler.running))
        if not running:
            return StepReport(index, ForwardMode.IDLE, 0, 0)
        tracks = [scheduler.reserve_track(request, 1) for request in running]
        newest = [request.span(request.computed, request.computed + 1) for request in running]
        output = self._uniform(ForwardMode.DECODE, running, newest, tracks)
        found = self._tokens(output, len(running))
        self._observe(running, [1] * len(running), [1] * len(running), output.hidden)
        for row, request in enumerate(running):
            if request.state is RequestState.RUNNING:
                request.computed += 1
                request.steps += 1
                request.kept_tokens = 1
                found.give(request, row, [])
            scheduler.publish(request, tracks[row])
        return StepReport(index, ForwardMode.DECODE, len(running), len(running))

    def _verify(self, index: int, drafter: Drafter) -> StepReport:
        """The newest token of each request and its drafts; accepted ones are committed, the others never happened.

        Where nobody has a draft the step decodes.
        """
        width = self._parts.settings.draft_token_num
        drafts = self._drafts(drafter)
        if not any(drafts.values()):
            return self._decode(index)
        running = self._placed(width, list(drafts))
        if not running:
            return StepReport(index, ForwardMode.IDLE, 0, 0)
        tokens = [[*r.span(r.computed, r.computed + 1), *drafts[r]][:width] for r in running]
        tokens = [[*row, *[0] * (width - len(row))] for row in tokens]
        output = self._uniform(ForwardMode.TARGET_VERIFY, running, tokens, [PADDED] * len(running))
        found = self._tokens(output, len(running) * width)
        starts, kept = [request.computed for request in running], [1] * len(running)
        for row, request in enumerate(running):
            if request.state is RequestState.RUNNING:
                kept[row] = max(1, found.give(request, row * width, tokens[row][1:]))
                request.accepted[kept[row] - 1] += 1
                request.steps += 1
                request.computed += kept[row]
                request.kept_tokens = kept[row]
        self._commit(running, starts, kept)
        self._observe(running, [width] * len(running), kept, output.hidden)
        return StepReport(index, ForwardMode.TARGET_VERIFY, len(running), len(running) * width)

    def _commit(self, running: Sequence[Request], starts: Sequence[int], kept: Sequence[int]) -> None:
        """Tell the sidecar which step of each request was the last right one, and snapshot what crossed a boundary."""
        size, scheduler = self._parts.settings.chunk_size, self._parts.scheduler
        steps, tracks = [], []
        for request, start, count in zip(running, starts, kept, strict=True):
            boundary = (start + count) // size * size
            crossed = boundary > start and request.state is RequestState.RUNNING
            slot = scheduler.reserve_boundary(request, boundary) if crossed else PADDED
            tracks.append(slot)
            steps.append(boundary - start - 1 if slot > 0 else PADDED)
        columns = [[r.row for r in running], [count - 1 for count in kept], tracks, steps, starts]
        rows, last, track, track_steps, computed = torch.tensor(columns).to(self._parts.device)
        tracking = any(slot > 0 for slot in tracks)
        self._parts.sidecar.update_mamba_state_after_mtp_verify(
            req_pool_indices=rows,
            last_correct_step_indices=last,
            mamba_track_indices=track if tracking else None,
            mamba_steps_to_track=track_steps if tracking else None,
            computed_lens=computed,
        )
        for request, slot in zip(running, tracks, strict=True):
            scheduler.publish(request, slot)

    # tokens

    def _tokens(self, output: ForwardOutput, rows: int) -> _Tokens:
        """What the forward's first rows name; the host waits for the tokens, and logits leave the device only where
        they are kept."""
        # a copy: the next replay fills the same tensor
        wanted = self._parts.settings.keep_logits
        kept = output.logits[:rows].to("cpu", torch.float32, copy=True) if wanted else None
        return _Tokens(output.tokens[:rows].tolist(), output.logits, kept, self._parts.fail)

    # drafters

    def _drafts(self, drafter: Drafter) -> dict[Request, list[int]]:
        """What the drafter proposes for each request that runs after it was asked: it may cancel some."""
        asked, hook = list(self._parts.scheduler.running), f"{type(drafter).__name__}.propose"
        proposed = drafter.propose(asked, self._parts.settings.draft_tokens)
        count = len(proposed) if isinstance(proposed, Sequence) else -1
        if count != len(asked):
            got = f"{count} lists" if count >= 0 else type(proposed).__name__
            raise ArgumentError(hook, "drafts", got, f"a list of tokens for each of {len(asked)} requests")
        vocabulary = self._parts.model.config.vocab_size
        found = [
            (request, token_ids(hook, f"drafts of request {request.request_id}", tokens, vocabulary))
            for request, tokens in zip(asked, proposed, strict=True)
        ]
        self._parts.after_drafts()
        return {request: tokens for request, tokens in found if request.state is RequestState.RUNNING}

    def _observe(
        self, requests: Sequence[Request], counts: Sequence[int], kept: Sequence[int], hidden: Tensor | None
    ) -> None:
        """Show the drafter the hidden states of the tokens that each request keeps."""
        if self._parts.drafter is None or hidden is None:
            return
        parts, offset = [], 0
        for count, keep in zip(counts, kept, strict=True):
            # a copy: the next replay fills the same tensor
            parts.append(hidden[offset : offset + keep].clone())
            offset += count
        seen = [(r, part) for r, part in zip(requests, parts, strict=True) if r.state is RequestState.RUNNING]
        self._parts.drafter.observe([request for request, _ in seen], [part for _, part in seen])


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The greatest token of each row of a forward's logits, the logits [rows, vocabulary] on the device, and on the
    host where they are kept."""

    greedy: list[int]
    logits: Tensor
    kept: Tensor | None
    fail: Callable[[Request, Exception], None]

    def give(self, request: Request, first: int, drafts: Sequence[int]) -> int:
        """Give a request its tokens from row `first` on, as long as the drafts are right and it is not done; returns
        how many. What its own sampler raises fails this request alone."""
        try:
            return self._give(request, first, drafts)
        except Exception as error:
            self.fail(request, error)
            return 0

    def _give(self, request: Request, first: int, drafts: Sequence[int]) -> int:
        taken = 0
        for row in range(first, first + len(drafts) + 1):
            sampler = request.sampler
            draws = sampler is not None and not sampler.plain
            token = sampler.choose(request, self.logits[row]) if sampler and draws else self.greedy[row]
            if request.keep_logprobs:
                request.logprobs.append(float(self.logits[row].float().log_softmax(-1)[token]))
            taken += request.extend([token], None if self.kept is None else [self.kept[row]])
            if request.done or taken > len(drafts) or drafts[taken - 1] != token:
                break
        return taken
