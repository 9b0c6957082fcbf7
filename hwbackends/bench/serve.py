"""What `hwbackends bench serve` measures: the packed runner's decode, verify and prefill on one model, against the
bytes that a step must read and against stock `generate`. Weights are random; comparing tokens is what the tests do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

import hwbackends
from hwbackends.errors import DeviceError
from hwbackends.runner.drafters import Drafter
from hwbackends.runner.graphs import CudaRecorder
from hwbackends.runner.requests import Request
from hwbackends.runner.serving import PackedRunner
from hwbackends.runner.settings import RunnerSettings

LFM2_1B: dict[str, Any] = {
    "vocab_size": 65536,
    "hidden_size": 2048,
    "intermediate_size": 12288,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "conv_L_cache": 3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
"""The shape of LFM2-1.2B."""
SMALL: dict[str, Any] = {
    **LFM2_1B,
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "full_attn_idxs": [1, 3],
}
"""A shape that shows in seconds on a CPU that the benchmark runs."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of a run: (batch, context) of decode steps, the wave of prompts, drafts, and steps that are timed."""

    decode: tuple[tuple[int, int], ...]
    wave: tuple[int, int]
    drafts: int
    steps: int

    @property
    def rows(self) -> int:
        """Measurements that the plan asks for."""
        return len(self.decode) + 3


FULL = Plan(((1, 512), (8, 512), (32, 512), (128, 512), (32, 8192)), (32, 512), 4, 48)
QUICK = Plan(((1, 24), (3, 24), (3, 48)), (3, 24), 2, 4)


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. `floor_ms`: weights, own keys and values and conv state at the copy bandwidth; None where the
    device's was not measured. `host_ms`: of a step, what is not the replay."""

    work: str
    batch: int
    context: int
    ms: float
    tokens_per_s: float
    floor_ms: float | None = None
    host_ms: float | None = None
    note: str = ""

    @property
    def of_floor(self) -> float | None:
        """Times the floor."""
        return None if self.floor_ms is None else self.ms / self.floor_ms


class Wrong(Drafter):
    """Always drafts, and hardly ever what the model says: every verify step has its full width."""

    def propose(self, requests: Any, count: int) -> list[list[int]]:
        """The same tokens for everybody."""
        return [[1 + index for index in range(count)] for _ in requests]


def make_model(device: torch.device, small: bool) -> Any:
    """An LFM2 with random weights: bfloat16 on a GPU, float32 elsewhere."""
    import transformers

    config = transformers.Lfm2Config(**(SMALL if small else LFM2_1B))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model: Any = transformers.Lfm2ForCausalLM(config)
    return model.to(dtype).eval()


class Serving:
    """Measures one model on one device.

    Args:
        device: where.
        plan: what.
        small: the small model.
        bandwidth: bytes per second of a copy on this device; None: no floors.
    """

    def __init__(self, device: torch.device, plan: Plan, small: bool, bandwidth: float | None) -> None:
        if device.type == "cuda" and not torch.cuda.is_available():
            raise DeviceError("hwbackends bench serve", "--device", "cuda", "a device of this machine", "--device cpu")
        self.device, self.plan, self.bandwidth = device, plan, bandwidth
        self.model = make_model(device, small)
        self.backend = hwbackends.load(device=str(device))
        self.attention = ""

    def rows(self) -> Iterator[Row]:
        """Each measurement as it is there; every runner is made for it and closed behind it."""
        batch, context = self.plan.wave
        for size, length in self.plan.decode:
            yield self._steps("decode", size, length, 0)
        yield self._steps("verify", batch, context, self.plan.drafts)
        yield self._prefill(batch, context)
        yield self._stock(batch, context)

    def _runner(self, batch: int, context: int, drafts: int = 0, chunk: int = 0) -> PackedRunner:
        steps = self.plan.steps + 8
        settings = RunnerSettings(
            layout="ring",
            max_batch=batch,
            max_len=context + steps * (drafts + 1),
            chunk_size=chunk or min(context, 512),
            step_tokens=8192 if self.device.type == "cuda" else 0,
            draft_tokens=drafts,
            prefix_slots=0,
        )
        record = CudaRecorder() if self.device.type == "cuda" else None
        runner = PackedRunner(self.model, self.backend, settings, Wrong() if drafts else None, record)
        self.attention = runner.attention
        return runner

    def _fill(self, runner: PackedRunner, batch: int, context: int) -> list[Request]:
        vocabulary = self.model.config.vocab_size - 2
        tokens = [[2 + (7 * b + 3 * j + j * j) % vocabulary for j in range(context)] for b in range(batch)]
        return [runner.add(prompt, self.plan.steps + 4, eos_token_ids=()) for prompt in tokens]

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _timed(self, work: Callable[[], object]) -> float:
        self._wait()
        started = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - started

    def _steps(self, work: str, batch: int, context: int, drafts: int) -> Row:
        """The median step of a full batch behind its prompts."""
        runner = self._runner(batch, context, drafts)
        requests = self._fill(runner, batch, context)
        while any(request.prefilling for request in requests):
            runner.step()
        runner.step()
        given = sum(len(request.generated) for request in requests)
        seconds = [self._timed(runner.step) for _ in range(self.plan.steps)]
        tokens = sum(len(request.generated) for request in requests) - given
        replay = self._replay(runner, drafts)
        runner.close()
        ms = 1e3 * statistics.median(seconds)
        host = None if replay is None else ms - replay
        return Row(work, batch, context, ms, tokens / sum(seconds), self._floor_ms(batch, context), host)

    def _replay(self, runner: PackedRunner, drafts: int) -> float | None:
        """Milliseconds of one replay of the largest batch, alone; its rows keep what the last step gave them."""
        replays = [bucket.replay for bucket in runner.graphs.largest(drafts > 0) if bucket.replay is not None]
        if not replays:
            return None
        return 1e3 * statistics.median(self._timed(replays[-1]) for _ in range(self.plan.steps))

    def _floor_ms(self, batch: int, context: int) -> float | None:
        if self.bandwidth is None:
            return None
        config, item = self.model.config, next(self.model.parameters()).element_size()
        weights = sum(parameter.numel() for parameter in self.model.parameters()) * item
        attention = sum(kind != "conv" for kind in config.layer_types)
        head = config.hidden_size // config.num_attention_heads
        keys = 2 * attention * config.num_key_value_heads * head * context * item
        state = 2 * (len(config.layer_types) - attention) * config.hidden_size * (config.conv_L_cache - 1) * item
        return float(1e3 * (weights + batch * (keys + state)) / self.bandwidth)

    def _prefill(self, batch: int, context: int) -> Row:
        def once() -> float:
            runner = self._runner(batch, context)
            requests = self._fill(runner, batch, context)

            def prompts() -> None:
                while any(request.prefilling for request in requests):
                    runner.step()

            seconds = self._timed(prompts)
            runner.close()
            return seconds

        once()
        seconds = min(once() for _ in range(2))
        return Row("prefill", batch, context, 1e3 * seconds, batch * context / seconds)

    def _stock(self, batch: int, context: int) -> Row:
        """Answers of `generate` over the same batch with the cache that Transformers makes."""
        count = self.plan.steps
        ids = torch.randint(2, self.model.config.vocab_size, (batch, context), device=self.device)
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}

        def answer(new: int) -> Callable[[], object]:
            return lambda: self.model.generate(ids, max_new_tokens=new, **options)

        answer(2)()
        seconds = self._timed(answer(count + 1)) - self._timed(answer(1))
        return Row("stock generate", batch, context, 1e3 * seconds / count, batch * count / seconds)


def document(rows: list[Row], title: str) -> str:
    """The rows as a Markdown table."""
    lines = [
        f"# {title}",
        "",
        "| work | batch | context | ms | tokens/s | of its floor | host ms |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        floor = "-" if row.of_floor is None else f"{row.of_floor:.2f}"
        host = "-" if row.host_ms is None else f"{row.host_ms:.2f}"
        lines.append(
            f"| {row.work} | {row.batch} | {row.context} | {row.ms:.3f} | {row.tokens_per_s:.0f} | {floor} | {host} |"
        )
    return "\n".join(lines) + "\n"


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    """The rows as plain data, with their ratio to the floor."""
    return [{**asdict(row), "of_floor": row.of_floor} for row in rows]


def plot(rows: list[Row], path: Any) -> None:
    """Decode steps over batch, one line per context, with the floors.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    decode = [row for row in rows if row.work == "decode"]
    for context in sorted({row.context for row in decode}):
        line = sorted((row for row in decode if row.context == context), key=lambda row: row.batch)
        batches = [row.batch for row in line]
        axes.plot(batches, [row.ms for row in line], marker="o", label=f"context {context}")
        if all(row.floor_ms is not None for row in line):
            axes.plot(batches, [row.floor_ms for row in line], linestyle=":", label=f"floor, context {context}")
    axes.set(xscale="log", yscale="log", xlabel="batch", ylabel="ms per decode step")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
