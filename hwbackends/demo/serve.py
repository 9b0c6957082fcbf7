"""What the demo does: build a model twice, ask the stock one, serve the other through a backend, and compare."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.attention
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import hwbackends
from hwbackends.conv.layouts import Layout
from hwbackends.demo.text import make_prompts, read_text
from hwbackends.engines.transformers.models import describe
from hwbackends.engines.transformers.tiny import StockAnswer, stock_answer, tiny_model
from hwbackends.errors import DeviceError
from hwbackends.runner.drafters import SeededDrafter, missing_counts
from hwbackends.runner.graphs import CudaRecorder, Record
from hwbackends.runner.requests import Request
from hwbackends.runner.serving import PackedRunner
from hwbackends.runner.settings import RunnerSettings
from hwbackends.runner.steps import StepReport
from hwbackends.switches import switched_on

CHUNK = 32
LONGEST_PROMPT = 160
TIE_MARGIN = 1e-4
LOGITS_BOUND = 2e-5
LEAST_ANSWER = 32
PAUSE = 4
"""Every so many steps nobody drafts, so that decode steps stand between the verify steps."""
DEVICE_OF_BACKEND = {"cuda": "cuda", "rocm": "cuda", "ascend": "npu"}


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """The options of `hwbackends demo`."""

    model: str = "inkling"
    backend: str | None = None
    device: str | None = None
    layout: Layout = "ring"
    draft: int = 3
    requests: int = 10
    text: Path | None = None
    seed: int = 0
    emulate: bool = False
    graphs: bool = True


@dataclass(frozen=True, slots=True)
class Check:
    """One claim that the demo proves, whether it holds, and the figures behind it."""

    name: str
    passed: bool
    detail: str


@dataclass(slots=True)
class DemoResult:
    """What was served and what was found. `graphs`: forward mode to its steps that a graph replayed, and that ran
    eagerly; `step_ms`: forward mode to the median time of its steps, in milliseconds."""

    settings: DemoSettings
    backend: str
    device: str
    requests: list[Request]
    checks: list[Check] = field(default_factory=list)
    ties: list[tuple[int, int]] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)
    graphs: dict[str, dict[str, int]] = field(default_factory=dict)
    step_ms: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every check holds."""
        return all(check.passed for check in self.checks)


def run_demo(settings: DemoSettings, quiet: bool = False) -> DemoResult:
    """Run the demo.

    Args:
        settings: the options.
        quiet: no progress bar.

    Raises:
        HwBackendsError: bad text, no such backend or device, a host synchronisation on the emulated device.
    """
    text = read_text(settings.text)
    # models this small are slower on more threads, and much slower where the cores are shared
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    device = resolve_device(settings)
    backend = hwbackends.load(settings.backend, device=str(device))
    # torch lets cuDNN round the stock model's convs to 10 bits of mantissa unless told otherwise
    torch.backends.cudnn.allow_tf32 = False
    # the emulated device has no model code of its own: the stock answers come from the CPU that it emulates with
    stock = tiny_model(settings.model, settings.seed, "cpu" if settings.emulate else device)
    spec = describe(stock)
    prompts = make_prompts(text, settings.requests, CHUNK, spec.width, LONGEST_PROMPT, settings.seed)
    lengths = answer_lengths(settings)
    started = time.perf_counter()
    with _progress(quiet) as advance, _exact_attention():
        answers = []
        for prompt, length in zip(prompts, lengths, strict=True):
            answers.append(stock_answer(stock, prompt, length))
            advance("stock model", sum(lengths), length)
        runner = make_runner(settings, backend, device, answers, max(lengths))
        before = runner.addresses()
        times = _serve(runner, prompts, lengths, lambda tokens: advance("hwbackends", sum(lengths), tokens))
    result = DemoResult(settings, backend.name, str(device), runner.requests, seconds=time.perf_counter() - started)
    result.steps = dict(runner.counters.by_mode)
    result.graphs = _graph_counts(runner)
    result.step_ms = {mode: round(1e3 * statistics.median(seconds), 3) for mode, seconds in times.items()}
    _compare(result, answers)
    _inspect(result, runner, before)
    return result


def _exact_attention() -> contextlib.AbstractContextManager[Any]:
    """Attention as products and a softmax. On a GPU the fused kernels put the stock Inkling apart from itself: one
    prompt's logits differed by 0.27 between `generate` and a single forward (torch 2.11, H200)."""
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)


def resolve_device(settings: DemoSettings) -> torch.device:
    """The device that was asked for, or the one that the backend is for.

    Raises:
        DeviceError: it is not there.
    """
    if settings.emulate:
        from hwbackends.testing.emulated_npu import emulate_npu

        return emulate_npu()
    name = settings.device or DEVICE_OF_BACKEND.get(settings.backend or "", "cpu")
    hint = "leave --device out, or use --emulate for an npu without hardware"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(
            "hwbackends demo", "--device", f"{name!r}: {reason}", "a device of this machine", hint
        ) from error
    return device


def answer_lengths(settings: DemoSettings) -> list[int]:
    """Tokens to generate per request: drawn, and enough for every accepted count from 0 to the drafts to occur."""
    draw = random.Random(settings.seed + 1)
    counts = settings.draft + 1
    pauses = 1 + counts // (PAUSE - 1)
    least = max(LEAST_ANSWER, counts * (counts + 1) // 2 + settings.draft + pauses)
    return [least + draw.randrange(0, 16) for _ in range(settings.requests)]


def make_runner(
    settings: DemoSettings, backend: Any, device: torch.device, answers: Sequence[StockAnswer], longest: int
) -> PackedRunner:
    """A runner over a second model with the same weights, with recorded forwards where the device can record."""
    drafter = None
    if settings.draft:
        known = {index: answer.tokens for index, answer in enumerate(answers)}
        drafter = SeededDrafter(known, answers[0].logits.shape[-1], settings.seed, PAUSE)
    limits = RunnerSettings(
        layout=settings.layout,
        max_batch=min(8, settings.requests),
        max_len=LONGEST_PROMPT + longest,
        chunk_size=CHUNK,
        draft_tokens=settings.draft,
        prefix_slots=16,
        keep_logits=True,
        keep_finished=settings.requests,
    )
    model = tiny_model(settings.model, settings.seed, device)
    record = recorder_of(device) if settings.graphs else None
    return PackedRunner(model, backend, limits, drafter, record, guard=_guard(settings))


def recorder_of(device: torch.device) -> Record | None:
    """How forwards are recorded on a device: CUDA graphs, a recorder of torch ops on the CPU, or not at all."""
    if device.type == "cuda":
        return CudaRecorder()
    if device.type != "cpu":
        return None

    from hwbackends.testing.recorder import CpuGraph

    def record(launch: Callable[[], None]) -> Callable[[], None]:
        graph = CpuGraph()
        with graph.capture():
            launch()
        return graph.replay

    return record


def _guard(settings: DemoSettings) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    # checked mode reads device memory on purpose
    if not settings.emulate or switched_on("HWBACKENDS_CHECKED"):
        return contextlib.nullcontext
    from hwbackends.testing.emulated_npu import forbid_host_syncs

    return forbid_host_syncs


def _serve(
    runner: PackedRunner, prompts: Sequence[list[int]], lengths: Sequence[int], advance: Callable[[int], None]
) -> dict[str, list[float]]:
    """Queue everything, two requests per step, and run to the end; returns the seconds of each step by forward mode."""
    for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        runner.add(prompt, length, arrival=index // 2)
    seen, started = 0, time.perf_counter()
    times: dict[str, list[float]] = {}

    def progress(report: StepReport) -> None:
        nonlocal seen, started
        if report.requests:
            times.setdefault(report.forward_mode.value, []).append(time.perf_counter() - started)
        done = sum(len(request.generated) for request in runner.requests)
        advance(done - seen)
        seen, started = done, time.perf_counter()

    runner.run(progress)
    return times


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Yields advance(description, total, amount)."""
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    tasks: dict[str, Any] = {}
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), disable=quiet) as bar:

        def advance(description: str, total: int, amount: int) -> None:
            if description not in tasks:
                tasks[description] = bar.add_task(description, total=total)
            bar.advance(tasks[description], amount)

        yield advance


def _compare(result: DemoResult, answers: Sequence[StockAnswer]) -> None:
    """Tokens and logits against the stock model; steps where the stock model itself nearly tied are listed."""
    wrong, at_ties, worst, compared = [], 0, 0.0, 0
    for request, answer in zip(result.requests, answers, strict=True):
        ties = answer.ties(TIE_MARGIN)
        result.ties.extend((request.request_id, step) for step in ties)
        pairs = zip(request.generated, answer.tokens, strict=False)
        first = next((step for step, (got, wanted) in enumerate(pairs) if got != wanted), None)
        if first is None and len(request.generated) == len(answer.tokens):
            first = len(answer.tokens)
        elif first in ties:
            at_ties += 1
        else:
            wrong.append(request.request_id)
        # behind a first difference the two texts are different texts
        reach = min((first or 0) + 1, len(request.logits), len(answer.tokens))
        if reach:
            difference = torch.stack(request.logits[:reach]) - answer.logits[:reach]
            worst, compared = max(worst, difference.abs().max().item()), compared + reach
    total = sum(len(answer.tokens) for answer in answers)
    detail = f"{total} tokens of {len(answers)} requests"
    detail += f"; different: requests {wrong}" if wrong else ""
    detail += f"; {at_ties} parted at a tie" if at_ties else ""
    result.checks.append(Check("tokens equal to stock", not wrong, detail))
    detail = f"largest difference {worst:.1e} over {compared} steps, bound {LOGITS_BOUND:.0e}"
    result.checks.append(Check("logits equal to stock", worst <= LOGITS_BOUND, detail))


def _graph_counts(runner: PackedRunner) -> dict[str, dict[str, int]]:
    counters = runner.graphs.counters
    return {
        mode: {"replayed": counters.replayed[mode], "eager": steps - counters.replayed[mode]}
        for mode, steps in runner.counters.by_mode.items()
    }


def _check_graphs(result: DemoResult, runner: PackedRunner) -> Check:
    """Every decode and verify step came from a graph: counted by the graphs, and by the calls of the model, which are
    those of the prompts alone. Where the device records nothing there is nothing to hold."""
    modes = ["decode"] + ["target_verify"] * bool(result.settings.draft)
    found = {mode: result.graphs.get(mode, {"replayed": 0, "eager": 0}) for mode in modes}
    detail = "; ".join(f"{mode} {n['replayed']} replayed, {n['eager']} eager" for mode, n in found.items())
    calls = runner.counters.model_calls
    detail += f"; the model called from Python in {calls} of {sum(result.steps.values())} steps"
    replayed = all(n["replayed"] and not n["eager"] for n in found.values())
    passed = replayed and calls == result.steps.get("extend", 0)
    if not runner.graphs.recorded:
        passed, detail = True, f"nothing was recorded on {result.device}: {detail}"
    return Check("decode and verify replayed", passed, detail)


def _inspect(result: DemoResult, runner: PackedRunner, before: dict[str, int]) -> None:
    """What the run must not have done: resolve metadata twice, move a buffer, leak a slot, miss a rollback."""
    counters = runner.counters
    forwards = sum(counters.by_mode.values())
    asked = runner.conv_calls / max(1, forwards)
    detail = f"{runner.resolutions} for {forwards} steps; {asked:g} modules asked per step"
    result.checks.append(Check("metadata resolved once per step", runner.resolutions == forwards, detail))
    result.checks.append(_check_graphs(result, runner))
    after = runner.addresses()
    moved = sorted(name for name in before if before[name] != after.get(name))
    detail = f"{len(moved)} of {len(before)}" + (f": {', '.join(moved)}" if moved else "")
    result.checks.append(Check("addresses moved: none", not moved, detail))
    runner.close()
    leaked = sorted(runner.scheduler.allocator.used)
    result.checks.append(Check("slots leaked: none", not leaked, f"{len(leaked)} of {runner.pool.num_slots - 1}"))
    if result.settings.draft:
        missing = missing_counts(result.requests, result.settings.draft)
        detail = f"0..{result.settings.draft}" + (f"; missing {missing}" if missing else "")
        result.checks.append(Check("every accepted count occurred", not missing, detail))
