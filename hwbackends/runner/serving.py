"""Packed continuous batching of a stock model of Transformers: requests join and leave at any step and from any thread,
prompts go in chunks beside decoding requests, drafts are verified for the whole batch and committed through the
sidecar, and prompts that share a chunk-aligned prefix start from its snapshot. Decode and verify steps are replays of
recorded forwards.

One thread steps at a time. What others ask for waits in an inbox and takes effect between steps: whoever holds the
stepping lock empties it."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self, cast

import torch
from torch import nn

from hwbackends.engines.transformers.attention import PAGE_OF_VARLEN, varlen_serves
from hwbackends.engines.transformers.convs import SidecarConvs
from hwbackends.engines.transformers.models import ModelSpec, describe
from hwbackends.engines.transformers.patches import patch_model
from hwbackends.errors import ArgumentError, DeviceError, DtypeError, UnsupportedError
from hwbackends.runner.drafters import Drafter, DrafterHost, NGramDrafter
from hwbackends.runner.graphs import CudaRecorder, Record, StepGraphs
from hwbackends.runner.packed import PackedCache
from hwbackends.runner.pages import RESERVED, PagePool, PageStore, pages_of
from hwbackends.runner.requests import Listeners, Request, RequestState, token_ids, whole
from hwbackends.runner.sampling import Asked, choose_by
from hwbackends.runner.scheduler import Scheduler
from hwbackends.runner.settings import RunnerSettings
from hwbackends.runner.steps import Guard, StepParts, StepReport, Steps, StepVoidError
from hwbackends.runner.watch import autocast_dtype, fingerprint
from hwbackends.step.batch import ForwardMode
from hwbackends.step.pool import StatePool
from hwbackends.step.sidecar import ConvStateSidecar

ATTENTION_KINDS = ("sdpa", "eager")
PAGE = 16
"""Tokens per page, unless something else is asked for or needed."""
TRIES = 3
"""Failed steps in a row after which a request fails."""
PATIENCE = 0.05
"""Seconds after which the loop in the background looks again whether there is work."""


@dataclass(slots=True)
class RunnerCounters:
    """Counts over a runner's life: steps (idle ones too), steps with a forward by forward mode, calls of the model
    from Python, which are the steps that no graph replayed, steps that failed, and changes of the model."""

    steps: int = 0
    by_mode: dict[str, int] = field(default_factory=dict)
    model_calls: int = 0
    failed_steps: int = 0
    model_changes: int = 0


class PackedRunner:
    """Serves generation requests with one stock model.

    Tokens are those that `generate` gives each prompt alone with the same `GenerationConfig`. `add`, `cancel`, `close`
    and `pause` may be called from any thread, and from callbacks and hooks of the model.

    Attributes:
        attention: `varlen_attn`, or how the model's own attention runs: `sdpa`, `eager`.
        attention_reason: why it is not `varlen_attn`.
        counters: what happened so far; `stats()` has all of it.

    Args:
        model: `InklingForCausalLM` or `Lfm2ForCausalLM`; its short convs and attention layers are patched in place.
        backend: a bound backend, as `hwbackends.load` returns it.
        settings: limits and choices.
        drafter: who proposes drafts where `settings.draft_tokens` > 0; default: an `NGramDrafter`.
        record: how decode and verify forwards are recorded (a `graphs.CudaRecorder` on a GPU); None: they run eagerly.
        guard: context around each forward of the model, such as one that forbids host synchronisations.

    Raises:
        UnsupportedError: model, version or setting that is not supported.
        ArgumentError: an argument of another kind.
        DeviceError: CUDA graphs of a model that is not on a GPU, or a model that is not whole on one device.
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
        self.settings = settings = RunnerSettings() if settings is None else settings
        self.spec = describe(model)
        _check_arguments(model, backend, settings, drafter, record)
        patch_model(model)
        self.model = cast(Any, model)
        self.drafter = (drafter or NGramDrafter()) if settings.draft_tokens else None
        self.device = next(model.parameters()).device
        self._check_model(self.spec)
        self._record = record
        self.counters = RunnerCounters()
        self._make_threads()
        self.pool = self._make_pool()
        self.sidecar = make_sidecar(self.pool, backend, settings)
        self.store = self._make_store(record is not None)
        self.scheduler = self._make_scheduler()
        self._convs = SidecarConvs(self.sidecar, self.spec)
        self.cache = PackedCache(self.store, self._convs, self.spec)
        self._steps = Steps(self._make_parts())
        self._hook: Any = None
        if self.drafter is not None:
            self._attach(self.drafter, backend)
        self._captured = 0
        self._make_graphs()
        self._fingerprint = fingerprint(model)

    # how it is made

    def _make_threads(self) -> None:
        self._stepping = threading.Lock()
        self._stepper: int | None = None
        self._inbox: deque[Callable[[], None]] = deque()
        self._news = threading.Condition()
        self._loop: threading.Thread | None = None
        self._stop = self._paused = self._closed = False
        self._ids = 0

    def _check_model(self, spec: ModelSpec) -> None:
        kind = spec.attention_kind
        if kind not in ATTENTION_KINDS:
            hint = "load the model with attn_implementation='sdpa'"
            wanted = f"one of {', '.join(ATTENTION_KINDS)}: packed steps need a mask"
            raise UnsupportedError("PackedRunner", "attn_implementation", repr(kind), wanted, hint)
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if limit is not None and self.settings.max_len > limit:
            raise UnsupportedError("PackedRunner", "max_len", self.settings.max_len, f"at most {limit}, as the model")

    def _check_experts(self) -> None:
        if self.spec.expert_loop:
            hint = "load the model with experts_implementation='batched_mm'"
            wanted = "experts without a loop on the host: a graph cannot record one"
            raise UnsupportedError("PackedRunner", "experts_implementation", "'eager'", wanted, hint)

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

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.get_input_embeddings().weight.dtype
        return dtype

    def _make_store(self, recorded: bool) -> PageStore:
        """Pages on demand; all of them at once where graphs will hold their addresses."""
        self.attention, self.attention_reason = self._choose_attention()
        self._varlen = self.attention == "varlen_attn"
        size = self.settings.page_size or (PAGE_OF_VARLEN if self._varlen else PAGE)
        per_row = pages_of(self.settings.row_len, size)
        limit = pages_of(self.settings.kv_tokens, size) or self.settings.max_batch * per_row
        if limit < per_row:
            wanted = f"at least {per_row * size}, one request of max_len"
            raise ArgumentError("RunnerSettings", "kv_tokens", self.settings.kv_tokens, wanted)
        self._pages = PagePool(limit)
        held = RESERVED + limit if recorded else min(RESERVED + limit, RESERVED + self.settings.max_batch)
        return PageStore(self.spec, held, size, self._dtype, self.device)

    def _choose_attention(self) -> tuple[str, str]:
        if not self.spec.plain_attention:
            return self.spec.attention_kind, "the model adds a bias to its scores"
        if self.spec.attention_kind != "sdpa":
            return self.spec.attention_kind, f"the model asks for {self.spec.attention_kind}"
        if self.settings.page_size % PAGE_OF_VARLEN:
            return self.spec.attention_kind, f"page_size is no multiple of {PAGE_OF_VARLEN}"
        sizes = {shape.head_dim for shape in self.spec.attention.values()}
        reasons = [varlen_serves(self.device, self._dtype, size) for size in sizes]
        reason = next((reason for reason in reasons if reason), "")
        return (self.spec.attention_kind if reason else "varlen_attn"), reason

    def _make_scheduler(self) -> Scheduler:
        drafter = self.drafter
        share = drafter is None or not drafter.needs_hidden
        finish = drafter.finish if drafter is not None else lambda request: None
        return Scheduler(self.settings, self.pool, self.store, self._pages, share, self._varlen, finish)

    def _make_parts(self) -> StepParts:
        return StepParts(
            model=self.model,
            spec=self.spec,
            settings=self.settings,
            scheduler=self.scheduler,
            sidecar=self.sidecar,
            cache=self.cache,
            drafter=self.drafter,
            device=self.device,
            guard=lambda: self._guard(),
            page_size=self.store.page_size,
            varlen=self._varlen,
            between=self._between,
            after_drafts=self._drain,
            fail=lambda request, error: self.scheduler.end(request, RequestState.FAILED, error),
        )

    def _make_graphs(self) -> None:
        """Record decode and verify forwards; what that takes is no step."""
        settings = self.settings
        if self._record is not None:
            self._check_experts()
        before = (self.sidecar.resolutions, self._convs.calls, self._steps.model_calls)
        old = getattr(self, "graphs", None)
        self.graphs = StepGraphs(
            self.sidecar,
            self.spec,
            settings,
            lambda step: self._steps.call_model(step, 0),
            self._record,
            self.store.page_size,
            self._varlen,
        )
        if old is not None:
            self.graphs.counters = old.counters
        self.sidecar.init_graph_state(settings.max_batch, settings.max_tokens, max(1, settings.draft_token_num))
        self.graphs.capture()
        self._steps.graphs = self.graphs
        self._captured += self.sidecar.resolutions - before[0]
        self._convs.calls, self._steps.model_calls = before[1], before[2]

    def _attach(self, drafter: Drafter, backend: Any) -> None:
        limits = self.settings
        sizes = (limits.max_batch, limits.max_len, limits.chunk_size, limits.draft_tokens)
        drafter.attach(DrafterHost(self.model, backend, self.pool, *sizes))
        if drafter.needs_hidden:
            self._hook = self.model.get_decoder().register_forward_hook(self._steps.keep_hidden)

    # requests

    def add(
        self,
        prompt: Sequence[int],
        max_new_tokens: int | None = None,
        generation_config: Any = None,
        *,
        eos_token_ids: Sequence[int] | None = None,
        arrival: int = 0,
        priority: int = 0,
        seed: int | None = None,
        logprobs: bool = False,
        on_token: Callable[[Request, int], None] | None = None,
        streamer: Any = None,
        logits_processor: Sequence[Any] = (),
        stopping_criteria: Sequence[Any] = (),
        tokenizer: Any = None,
        **options: Any,
    ) -> Request:
        """Queue a request; it joins as soon as a row is free. Iterate over it for its tokens, or ask its `result()`.

        Args:
            prompt: token ids, at least one.
            max_new_tokens: tokens to generate, at least one; None: what the config says, as `generate` reads it.
            generation_config: a `GenerationConfig` of Transformers; None: the model's own, end tokens included.
            eos_token_ids: tokens that end the answer; None: the config's; empty: none do.
            arrival: first step that may admit it.
            priority: higher ones join first, and take the place of lower ones, which resume where they were.
            seed: of the draws, where the config samples; None: drawn from torch's own generator.
            logprobs: whether the log-probability of each token is kept.
            on_token: called with the request and each token, in the thread that steps.
            streamer: a `BaseStreamer` of Transformers, `TextIteratorStreamer` for one.
            logits_processor: processors behind those of the config.
            stopping_criteria: criteria beside those of the config.
            tokenizer: the model's; `stop_strings` need it.
            options: fields of the config to change, such as `do_sample=True, temperature=0.7`.

        Raises:
            ArgumentError: empty prompt, tokens outside the vocabulary, more tokens than `max_len`, an argument of
                another kind, autocast is on, or the runner is closed.
            UnsupportedError: a config that asks for beams, assistants, guidance or several sequences.
        """
        hook = "PackedRunner.add"
        self._refuse_closed(hook)
        self._refuse_autocast(hook)
        tokens = token_ids(hook, "prompt", prompt, self.model.config.vocab_size)
        if not tokens:
            raise ArgumentError(hook, "prompt", "no token", "at least one", "begin with the model's bos token")
        asked = Asked(
            generation_config,
            max_new_tokens,
            eos_token_ids,
            seed,
            logits_processor,
            stopping_criteria,
            tokenizer,
            options,
        )
        choice = choose_by(self.model, tokens, asked)
        total, limit = len(tokens) + choice.max_new_tokens, self.settings.max_len
        if total > limit:
            wanted = f"at most {limit} (max_len)"
            raise ArgumentError(hook, "prompt + max_new_tokens", total, wanted, "make max_len larger")
        arrives, first = whole(hook, "arrival", arrival), whole(hook, "priority", priority)
        with self._news:
            number, self._ids = self._ids, self._ids + 1
        request = Request(
            number,
            tuple(tokens),
            choice.max_new_tokens,
            choice.eos_token_ids,
            arrives,
            first,
            choice.sampler,
            logprobs,
            listeners=Listeners(on_token, streamer),
            drive=self._drive,
        )
        self._submit(lambda: self._enter(request))
        return request

    def add_n(self, prompt: Sequence[int], n: int, *args: Any, seed: int | None = None, **kwargs: Any) -> list[Request]:
        """`n` requests of one prompt, whose tokens are computed once; with a seed, the i-th has `seed + i`. Other
        arguments are those of `add`."""
        count = whole("PackedRunner.add_n", "n", n, 1)
        return [self.add(prompt, *args, seed=None if seed is None else seed + i, **kwargs) for i in range(count)]

    def _enter(self, request: Request) -> None:
        self.scheduler.add(request)
        if self._closed:
            self.scheduler.end(request, RequestState.CANCELLED)

    def cancel(self, request: Request) -> None:
        """Take a request out wherever it stands, at once or, from within a step, as soon as its forward has run; what
        it generated so far stays with it. One that has ended stays as it is.

        Raises:
            ArgumentError: another runner's request, or none.
        """
        if getattr(getattr(request, "drive", None), "__self__", None) is not self:
            got = type(request).__name__
            raise ArgumentError("PackedRunner.cancel", "request", f"a {got} that it does not know", "one of its own")
        self._submit(lambda: self._cancel(request))

    def _cancel(self, request: Request) -> None:
        self.scheduler.end(request, RequestState.CANCELLED)
        self._announce([request])

    @property
    def requests(self) -> list[Request]:
        """Requests that run or wait, and the newest `keep_finished` that ended, in the order in which they were
        added."""
        return self.scheduler.requests

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits."""
        return self.scheduler.idle and not self._inbox

    def run(self, progress: Callable[[StepReport], None] | None = None) -> list[Request]:
        """Step until no request runs or waits; `progress` sees each step. Returns those that ended meanwhile, and the
        others that `requests` lists. With a loop in the background, it waits for that."""
        found = {request.request_id: request for request in self.requests}
        while not self.idle:
            if self._in_background():
                with self._news:
                    self._news.wait(PATIENCE)
            else:
                report = self.step()
                if progress is not None:
                    progress(report)
            found.update({request.request_id: request for request in self.requests})
        return [found[number] for number in sorted(found)]

    def close(self) -> None:
        """Cancel what runs or waits and forget every prefix: every slot is free, and the runner serves no more. From
        within a step it takes effect when the step's forward has run."""
        self._closed = True
        self.stop()
        self._submit(self._close)
        if not self._inside():
            with self._alone():
                pass

    def _close(self) -> None:
        requests = self.requests
        self.scheduler.close()
        self._announce(requests)
        if self._hook is not None:
            self._hook.remove()

    # the loop in the background

    def start(self) -> Self:
        """Step in a thread of its own whenever there is work, until `stop` or `close`; a failed step fails or repeats
        its requests and the loop goes on. `with runner.start():` closes the runner at the end.

        Raises:
            ArgumentError: the runner is closed.
        """
        self._refuse_closed("PackedRunner.start")
        if not self._in_background():
            self._stop = False
            self._loop = threading.Thread(target=self._serve, name="hwbackends-runner", daemon=True)
            self._loop.start()
        return self

    def stop(self) -> None:
        """End the loop in the background after its step; requests stay where they are."""
        self._stop = True
        with self._news:
            self._news.notify_all()
        loop = self._loop
        if loop is not None and loop is not threading.current_thread():
            loop.join()
            self._loop = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _serve(self) -> None:
        while not self._stop:
            with self._news:
                if self._paused or self.idle:
                    self._news.wait(PATIENCE)
            if self._paused or self.idle or self._stop:
                continue
            # what failed is known to its requests, and counted
            with contextlib.suppress(Exception):
                self.step()

    def _in_background(self) -> bool:
        return self._loop is not None and self._loop.is_alive() and self._loop is not threading.current_thread()

    def _drive(self) -> bool:
        """Make progress for somebody who waits for a request."""
        if self._inside():
            hint = "read `generated`, or wait in another thread"
            raise ArgumentError("Request.result", "thread", "the one that steps", "another one", hint)
        if self._in_background():
            return False
        self.step()
        return True

    def pause(self) -> None:
        """Let the step under way end and take no other until `resume`: for changes of the model, for one."""
        self._paused = True
        if not self._inside():
            with self._alone():
                pass

    def resume(self) -> None:
        """Step again."""
        self._paused = False
        with self._news:
            self._news.notify_all()

    def reset_prefixes(self) -> None:
        """Forget every shared prefix. Changes of weights, adapters and attention are noticed without it, except for
        writes through `tensor.data`, which leave no trace."""
        self._submit(self.scheduler.prefixes.clear)

    # who may touch what

    def _inside(self) -> bool:
        """Whether this thread is in a step."""
        return self._stepper == threading.get_ident()

    def _submit(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        self._drain_if_free()
        with self._news:
            self._news.notify_all()

    def _drain(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _drain_if_free(self) -> None:
        # a command that arrives behind the last look of a step would wait for the next one
        while self._inbox and self._stepping.acquire(blocking=False):
            try:
                self._stepper = threading.get_ident()
                self._drain()
            finally:
                self._stepper = None
                self._stepping.release()

    @contextlib.contextmanager
    def _alone(self) -> Any:
        """No step runs meanwhile, and nobody else's commands."""
        with self._stepping:
            self._stepper = threading.get_ident()
            try:
                yield
                self._drain()
            finally:
                self._stepper = None
        self._drain_if_free()

    def _refuse_closed(self, hook: str) -> None:
        if self._closed:
            raise ArgumentError(hook, "prompt", "a request after close()", "none", "make another runner")

    def _refuse_autocast(self, hook: str) -> None:
        if (dtype := autocast_dtype(self.device)) is not None:
            hint = f"load the model with dtype={dtype}, or leave the autocast block"
            raise UnsupportedError(hook, "torch.autocast", str(dtype), "none: it would not reach every step", hint)

    # steps

    @torch.no_grad()
    def step(self) -> StepReport:
        """Admit what may join, run one forward, take its tokens.

        A step that fails or is interrupted leaves nothing half done: its requests lose what they held and start over
        from the tokens they were given; after three failures in a row they fail with the error. It is raised again.

        Raises:
            ArgumentError: called from within a step, or while the runner is paused.
        """
        hook = "PackedRunner.step"
        if self._inside():
            hint = "steps do not nest; callbacks may add and cancel requests"
            raise ArgumentError(hook, "thread", "a step within a step", "one at a time", hint)
        self._refuse_autocast(hook)
        with self._alone():
            if self._paused:
                raise ArgumentError(hook, "runner", "a paused runner", "one that runs", "call resume() first")
            return self._step()

    def _step(self) -> StepReport:
        self._drain()
        index = self.counters.steps
        self.counters.steps += 1
        self._steps.plan = []
        try:
            if self._is_other():
                self._model_changed()
            self.scheduler.admit(index)
            if not self.scheduler.running:
                return StepReport(index, ForwardMode.IDLE, 0, 0)
            report = self._forward(index)
        except BaseException as error:
            self._recover(error)
            raise
        self.counters.model_calls = self._steps.model_calls
        for request in self._steps.plan:
            request.failures = 0
            if request.state is RequestState.RUNNING and request.done:
                self.scheduler.end(request, RequestState.FINISHED)
                report.finished.append(request)
        if report.forward_mode is not ForwardMode.IDLE:
            mode = report.forward_mode.value
            self.counters.by_mode[mode] = self.counters.by_mode.get(mode, 0) + 1
        self._announce(list(self._steps.plan))
        return report

    def _forward(self, index: int) -> StepReport:
        self.cache.touched = False
        try:
            return self._steps.run(index)
        except StepVoidError:
            self._model_changed()
            return StepReport(index, ForwardMode.IDLE, 0, 0)

    def _between(self) -> bool:
        """After a forward was launched, while the device works: take what others asked for, and look at the model."""
        self._drain()
        return fingerprint(self.model) != self._fingerprint

    def _recover(self, error: BaseException) -> None:
        """The step failed at any place: nobody keeps state that it may have written."""
        self.counters.failed_steps += 1
        self.scheduler.prefixes.abandon()
        drafted = self.drafter is not None and self.drafter.needs_hidden
        failed = []
        for request in list(self._steps.plan or self.scheduler.running):
            request.failures += 1
            if request.ended:
                continue
            if request.failures >= TRIES or request.done:
                state = RequestState.FINISHED if request.done else RequestState.FAILED
                self.scheduler.end(request, state, None if request.done else error)
                failed.append(request)
            elif request.state is RequestState.RUNNING and (self.cache.touched or drafted):
                self.scheduler.counters.recomputed += 1
                self.scheduler.requeue(request)
        self._drain()
        self._announce(failed)

    def _announce(self, requests: Sequence[Request]) -> None:
        """Tell owners what is new. A listener that raises loses its own request and no other."""
        for request in requests:
            try:
                request.announce()
                if request.ended:
                    request.close_stream()
            except Exception as error:
                self.scheduler.end(request, RequestState.FAILED, error)
                with contextlib.suppress(Exception):  # whoever reads the stream must not wait for ever
                    request.close_stream()
        with self._news:
            self._news.notify_all()

    # changes of the model

    def _model_changed(self) -> None:
        """State of the model that was is worth nothing: prefixes and graphs go, and running requests are computed
        again by the model that is.

        Raises:
            UnsupportedError: attention, a form or an implementation that the runner does not serve.
            DtypeError: another dtype, or another device.
        """
        self.counters.model_changes += 1
        self.scheduler.prefixes.abandon()
        for request in list(self.scheduler.running):
            self.scheduler.counters.recomputed += 1
            self.scheduler.requeue(request)
        self.scheduler.prefixes.clear()
        spec = describe(self.model)
        self._refuse_other(spec)
        self._check_model(spec)
        self.spec = self.cache.spec = self._steps.use(spec)
        self._make_graphs()
        self._fingerprint = fingerprint(self.model)

    def _is_other(self) -> bool:
        """What a forward could not even begin with; all else is looked at while the device works."""
        kind = self.model.config._attn_implementation
        return bool(kind != self.spec.attention_kind or self._dtype != self.store.dtype)

    def _refuse_other(self, spec: ModelSpec) -> None:
        device = next(self.model.parameters()).device
        if (spec.streams, self._dtype, device) != (self.spec.streams, self.store.dtype, self.device):
            got, wanted = f"{self._dtype} on {device}", f"{self.store.dtype} on {self.device}, as it was made for"
            raise DtypeError("PackedRunner.step", "model", got, wanted, "make another runner")

    # what happened

    def stats(self) -> dict[str, Any]:
        """Every counter by name: steps, reuse of prefixes and their evictions, queue times, preemptions, failures,
        requests that run and wait, pages in use."""
        counters = self.scheduler.counters
        prompt = counters.reused_tokens + counters.computed_prompt_tokens
        return {
            **asdict(self.counters),
            **asdict(counters),
            "reused_share": counters.reused_tokens / prompt if prompt else 0.0,
            "prefixes": len(self.scheduler.prefixes),
            "prefix_evictions": self.scheduler.prefixes.evictions,
            "running": len(self.scheduler.running),
            "waiting": self.scheduler.waiting,
            "kv_pages": self._pages.used,
            "kv_pages_limit": self._pages.limit,
            "attention": self.attention,
        }

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
        # without graphs the store grows, and moves
        return {**self.sidecar.addresses(), **(store if self.graphs.recorded else {}), **static}


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
