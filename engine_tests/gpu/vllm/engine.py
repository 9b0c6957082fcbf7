"""One vLLM engine in a process of its own, driven line by line: a JSON request on stdin, a line `RESULT {...}` on
stdout. Two of them, stock and plugin, can so be measured in turns on one GPU; see `speed.py`.

    python engine.py FOLDER OPTIONS        OPTIONS: JSON, arguments of `vllm.LLM`, and `count_convs`

Requests, by `do`:
    measure  {batch, prompt, steps}: prefill and decode steps of `batch` requests of `prompt` tokens
    profile  {batch, prompt, steps, trace}: torch's profiler over `steps` decode steps; a summary
    generate {prompts, new}: greedy tokens
    stop     {}
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Watch:
    """Seconds spent in functions of the engine, measured where they are called."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def over(self, owner: Any, name: str, label: str) -> None:
        """Measure a method from now on; nested measurements are counted in both."""
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[label] += time.perf_counter() - start
                self.calls[label] += 1

        setattr(owner, name, timed)

    def over_collector(self, label: str) -> None:
        """Measure Python's cycle collector from now on."""
        begun = [0.0]

        def note(phase: str, info: dict[str, int]) -> None:
            if phase == "start":
                begun[0] = time.perf_counter()
            else:
                self.seconds[label] += time.perf_counter() - begun[0]

        gc.callbacks.append(note)

    def clear(self) -> None:
        """Start anew."""
        self.seconds.clear()
        self.calls.clear()


def watch_engine() -> Watch:
    """Measures what the conv's metadata costs on the host, and how long the host waits for the GPU."""
    import torch
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    watch = Watch()
    builder = MambaAttentionBackendEnum.SHORT_CONV.get_class().get_builder_cls()
    watch.over(builder, "build", "builder")
    watch.over(builder, "update_block_table", "builder")
    if torch.cuda.is_available():
        watch.over(torch.cuda.Event, "synchronize", "waiting")
    watch.over_collector("collector")
    return watch


def watch_convs() -> Watch:
    """Counts whose convs run from Python: in captures and in eager steps. Made before the engine."""
    from vllm.model_executor.layers.mamba import short_conv

    watch = Watch()
    watch.over(short_conv, "causal_conv1d_fn", "vLLM's conv")
    watch.over(short_conv, "causal_conv1d_update", "vLLM's conv")
    if os.environ.get("HWBACKENDS_VLLM") == "1":
        from hwbackends.engines.vllm import steps

        watch.over(steps.Steps, "prepare", "plugin's preparation")
        watch.over(steps.Half, "conv", "plugin's conv")
    return watch


class Requests:
    """Requests of one shape, run through the engine's own steps."""

    def __init__(self, llm: Any, watch: Watch) -> None:
        self._engine, self._watch, self._count = llm.llm_engine, watch, 0

    def start(self, batch: int, prompt: int, new: int) -> float:
        """Submit and run until every request has its first token; seconds."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        for i in range(batch):
            ids = [(7 * (i + self._count) + 3 * j + j * j) % 60000 + 2 for j in range(prompt)]
            self._engine.add_request(f"{self._count}", {"prompt_token_ids": ids}, sampling)
            self._count += 1
        first: set[str] = set()
        while len(first) < batch:
            first |= {o.request_id for o in self._engine.step() if o.outputs[0].token_ids}
        return time.perf_counter() - begun

    def steps(self, count: int) -> list[float]:
        """Seconds of each of so many decode steps."""
        taken = []
        for _ in range(count):
            begun = time.perf_counter()
            self._engine.step()
            taken.append(time.perf_counter() - begun)
        return taken

    def finish(self) -> None:
        """Run until nothing is left."""
        while self._engine.has_unfinished_requests():
            self._engine.step()


WARM = 8


def measure(requests: Requests, watch: Watch, batch: int, prompt: int, steps: int) -> dict[str, Any]:
    """One prefill, and so many decode steps behind it: their median and mean, and of the mean what the host did without
    waiting for the GPU, in the conv's metadata builder, and in Python's cycle collector."""
    prefill = requests.start(batch, prompt, steps + 2 * WARM)
    requests.steps(WARM)
    watch.clear()
    taken = requests.steps(steps)
    total, spent = sum(taken), watch.seconds.copy()
    requests.finish()
    return {
        "batch": batch,
        "prompt": prompt,
        "decode_ms": statistics.median(taken) * 1e3,
        "mean_ms": total / steps * 1e3,
        "host_ms": (total - spent["waiting"]) / steps * 1e3,
        "builder_ms": spent["builder"] / steps * 1e3,
        "collector_ms": spent["collector"] / steps * 1e3,
        "prefill_tokens_per_s": batch * prompt / prefill,
    }


def profile(requests: Requests, batch: int, prompt: int, steps: int, prefill: bool, trace: str) -> dict[str, Any]:
    """Kernels, their time and their gaps, and what the host did, in `steps` decode steps or in one prefill."""
    import cProfile
    import pstats

    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    new = 4 * steps + 4 * WARM
    if not prefill:
        requests.start(batch, prompt, new)
        requests.steps(WARM)
    with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        if prefill:
            requests.start(batch, prompt, new)
            steps = 1
        else:
            requests.steps(steps)
    found = summary(recorded, steps)
    calls = cProfile.Profile()
    calls.enable()
    requests.steps(steps)
    calls.disable()
    requests.finish()
    with Path(trace).open("w") as out:
        for table in ("cpu", "gpu"):
            print(table, *found.pop(table), sep="\n", file=out)
        pstats.Stats(calls, stream=out).sort_stats("cumulative").print_stats(70)
        pstats.Stats(calls, stream=out).sort_stats("tottime").print_stats(50)
    return found | {"batch": batch, "prompt": prompt, "steps": steps}


def summary(recorded: Any, steps: int) -> dict[str, Any]:
    """Per step: kernels, busy time of the GPU, idle time between its first and last kernel; and both tables."""
    from torch.autograd import DeviceType

    kernels = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in recorded.events()
        if event.device_type == DeviceType.CUDA
    )
    end, busy = 0.0, 0.0
    for start, stop, _ in kernels:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    by_name: dict[str, list[float]] = {}
    for start, stop, name in kernels:
        by_name.setdefault(name, []).append(stop - start)
    ranked = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    cpu = sorted((a for a in recorded.key_averages() if a.self_cpu_time_total), key=lambda a: -a.self_cpu_time_total)
    return {
        "kernels_per_step": len(kernels) / steps,
        "gpu_busy_us_per_step": busy / steps,
        "gpu_span_us_per_step": (end - kernels[0][0]) / steps if kernels else 0.0,
        "gpu": [f"{sum(t) / steps:10.1f} us/step {len(t) / steps:7.1f} x {n[:110]}" for n, t in ranked[:45]],
        "cpu": [
            f"{a.self_cpu_time_total / steps:10.1f} us/step {a.count / steps:7.1f} x {a.key[:90]}" for a in cpu[:45]
        ],
    }


def generate(llm: Any, convs: Watch, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """Greedy tokens and their logprobs, all prompts at once; and whose convs have run since the start."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=0)
    answers = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    logprobs = [[next(iter(x.values())).logprob for x in a.outputs[0].logprobs] for a in answers]
    tokens = [list(a.outputs[0].token_ids) for a in answers]
    return {"tokens": tokens, "logprobs": logprobs, "calls": dict(convs.calls)}


def main(folder: str, options: dict[str, Any]) -> None:
    """Serve requests from stdin until it ends."""
    from vllm import LLM

    begun = time.time()
    count = options.pop("count_convs", False)
    convs = watch_convs() if count else Watch()
    llm = LLM(folder, skip_tokenizer_init=True, enable_prefix_caching=False, **options)
    watch = watch_engine()
    requests = Requests(llm, watch)
    print("RESULT " + json.dumps({"ready_s": time.time() - begun}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        what = asked.pop("do")
        if what == "stop":
            break
        if what == "measure":
            answer = measure(requests, watch, **asked)
        elif what == "profile":
            answer = profile(requests, **asked)
        else:
            answer = generate(llm, convs, **asked)
        print("RESULT " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
