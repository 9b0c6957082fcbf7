"""Prompts, stock answers and a way to serve them, shared by the tests of the Transformers adapter. Stock answers are
made once per process, by a model that never saw the adapter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import hwbackends
from hwbackends.engines.transformers.tiny import StockAnswer, stock_answer, tiny_model
from hwbackends.runner.drafters import Drafter, SeededDrafter
from hwbackends.runner.graphs import CudaRecorder
from hwbackends.runner.requests import Request
from hwbackends.runner.serving import PackedRunner
from hwbackends.runner.settings import RunnerSettings
from hwbackends.testing.recorder import CpuGraph

NEW_TOKENS = 23
CHUNK = 7
LOGITS_BOUND = 2e-5
"""Largest difference of any logit; the largest seen on a CPU was 5e-6."""
TEXT = (
    b"A request row is an index in the engine's request pool, a state slot is an index in the state pool, and the two "
    b"are different name spaces that never share a parameter name."
)
PROMPTS: tuple[tuple[int, ...], ...] = (
    tuple(TEXT[:1]),  # shorter than the history of either model
    tuple(TEXT[5:7]),
    tuple(TEXT[9:12]),
    tuple(TEXT[20 : 20 + CHUNK - 1]),
    tuple(TEXT[31 : 31 + CHUNK]),
    tuple(TEXT[:22]),  # three chunks and one token
    tuple(TEXT[:14]) + tuple(TEXT[60:65]),  # shares two chunks with the one before
    tuple(TEXT[:21]) + tuple(TEXT[80:91]),  # and this one three
    tuple(TEXT[40:93]),
    tuple(TEXT[100:113]),
    tuple(TEXT[:22]),  # a prompt seen before
)

models = pytest.mark.parametrize("name", ["inkling", "lfm2"])
layouts = pytest.mark.parametrize("layout", ["window", "ring", "lazy"])
_PAIRS = [("inkling", "ring"), ("lfm2", "window"), ("lfm2", "lazy")]
_OTHERS = [("inkling", "window"), ("inkling", "lazy"), ("lfm2", "ring")]
models_and_layouts = pytest.mark.parametrize(
    ("name", "layout"), [*_PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in _OTHERS)]
)
"""Each model and each layout at least once; the whole product with `-m slow`."""


@functools.cache
def stock_model(name: str) -> Any:
    return tiny_model(name, seed=3)


@functools.cache
def answer(name: str, prompt: tuple[int, ...]) -> StockAnswer:
    """What the stock model says to a prompt, `NEW_TOKENS` tokens."""
    found = stock_answer(stock_model(name), prompt, NEW_TOKENS)
    assert not found.ties(1e-4), "a stock step nearly ties: choose another seed"
    return found


def record(launch: Callable[[], None]) -> Callable[[], None]:
    """Record on the CPU."""
    graph = CpuGraph()
    with graph.capture():
        launch()
    return graph.replay


def make_runner(
    name: str,
    drafter: Drafter | None = None,
    recorded: bool = False,
    model: Any = None,
    backend: str = "reference",
    device: str = "cpu",
    **settings: Any,
) -> PackedRunner:
    """A runner over a fresh model with the stock model's weights, or over `model`. Recording takes longer than serving,
    so that whoever asks about graphs says `recorded`."""
    chosen = {"max_batch": 4, "max_len": 96, "chunk_size": CHUNK, "keep_logits": True, **settings}
    model = tiny_model(name, seed=3, device=device) if model is None else model
    bound = hwbackends.load(backend, device=None if device == "cpu" else device)
    recorder = (CudaRecorder() if device == "cuda" else record) if recorded else None
    return PackedRunner(model, bound, RunnerSettings(**chosen), drafter, recorder)


def seeded(name: str, prompts: Sequence[tuple[int, ...]], seed: int = 0, pause: int = 0) -> SeededDrafter:
    """A drafter that knows the stock answers to prompts that are added in this order."""
    answers = {index: answer(name, prompt).tokens for index, prompt in enumerate(prompts)}
    return SeededDrafter(answers, 256, seed, pause)


def assert_stock(name: str, request: Request) -> None:
    """The request's tokens are the stock model's, from the first on, and so are its logits."""
    stock = answer(name, request.prompt)
    count = len(request.generated)
    assert request.generated == stock.tokens[:count], f"request {request.request_id}"
    if count:
        difference = (torch.stack(request.logits) - stock.logits[:count]).abs().max().item()
        assert difference <= LOGITS_BOUND, f"request {request.request_id}: logits differ by {difference}"


def serve_all(runner: PackedRunner, name: str, prompts: Sequence[tuple[int, ...]] = PROMPTS, apart: int = 2) -> None:
    """Add every prompt, `apart` per step, run to the end, and compare each with the stock model."""
    for index, prompt in enumerate(prompts):
        runner.add(prompt, NEW_TOKENS, arrival=index // apart)
    for request in runner.run():
        assert len(request.generated) == NEW_TOKENS
        assert_stock(name, request)
