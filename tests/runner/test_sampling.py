"""Tokens are chosen as `generate` chooses them: config, processors, criteria, draws; and drafts change none of it."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import transformers

from hwbackends.engines.transformers.tiny import tiny_model
from hwbackends.errors import ArgumentError, RequestError, UnsupportedError
from hwbackends.runner.drafters import Drafter, NGramDrafter
from hwbackends.runner.requests import Request
from hwbackends.runner.serving import PackedRunner
from tests.engines.transformers.scenes import NEW_TOKENS, PROMPTS, answer, make_runner, models, seeded

LONG = PROMPTS[8]


def runner_of(name: str = "lfm2", drafter: Drafter | None = None, **choices: Any) -> PackedRunner:
    return make_runner(name, drafter, recorded=False, **choices)


def stock(name: str, prompt: tuple[int, ...], model: Any = None, **options: Any) -> list[int]:
    model = tiny_model(name, seed=3) if model is None else model
    ids = torch.tensor([prompt])
    given = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **given)
    return list(out[0, len(prompt) :].tolist())


OPTIONS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 1},
    {"suppress_tokens": list(range(0, 256, 2))},
    {"begin_suppress_tokens": list(range(200))},
    {"bad_words_ids": [[token] for token in range(0, 256, 3)]},
    {"eos_token_id": [3, 5], "min_new_tokens": 15},
    {"forced_eos_token_id": 9},
    {"sequence_bias": [[[65], 30.0]]},
    {"repetition_penalty": 1.3, "eos_token_id": list(range(100, 120))},
    {"max_new_tokens": None, "max_length": 60},
    {"max_new_tokens": None},
]


@pytest.mark.parametrize("name", ["lfm2", pytest.param("inkling", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_a_config_gives_the_stock_tokens(name: str, options: dict[str, Any]) -> None:
    given = {"max_new_tokens": NEW_TOKENS, **options}
    want = stock(name, LONG, **given)
    for drafts in (0, 3):
        runner = runner_of(name, NGramDrafter(), draft_tokens=drafts)
        config = transformers.GenerationConfig(**given)
        requests = [runner.add(LONG, **given), runner.add(LONG, generation_config=config)]
        runner.run()
        assert [request.generated for request in requests] == [want, want]


@models
def test_the_models_own_config_counts_unless_another_is_given(name: str) -> None:
    tokens = answer(name, LONG).tokens
    model = tiny_model(name, seed=3)
    model.generation_config.eos_token_id = [tokens[4], 255]
    model.generation_config.suppress_tokens = [tokens[1]]
    want = stock(name, LONG, tiny_model(name, seed=3), eos_token_id=[tokens[4], 255], suppress_tokens=[tokens[1]])
    runner = runner_of(name, model=model)
    assert runner.add(LONG, NEW_TOKENS).result() == want
    model.generation_config.suppress_tokens = None
    assert runner.add(LONG, NEW_TOKENS).result() == tokens[: tokens.index(tokens[4]) + 1]
    assert runner.add(LONG, NEW_TOKENS, eos_token_ids=()).result() == tokens
    assert runner.add(LONG, NEW_TOKENS, eos_token_ids=[tokens[7]]).result() == tokens[: tokens.index(tokens[7]) + 1]


SAMPLED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.5, "top_p": 0.9},
    {"min_p": 0.05, "top_k": 0, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("options", SAMPLED, ids=str)
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_seed_gives_the_draws_of_stock_generate_under_that_seed(options: dict[str, Any], drafts: int) -> None:
    """With drafts, kept and not, beside others, and through a preemption."""
    torch.manual_seed(11)
    want = stock("lfm2", LONG, do_sample=True, **options)
    runner = runner_of(
        "lfm2", seeded("lfm2", [LONG, PROMPTS[5], PROMPTS[4], PROMPTS[4]]), draft_tokens=drafts, max_batch=2
    )
    request = runner.add(LONG, NEW_TOKENS, seed=11, do_sample=True, **options)
    runner.add(PROMPTS[5], NEW_TOKENS)
    for _ in range(14):
        runner.step()
    runner.add(PROMPTS[4], 2, priority=1, do_sample=True)
    runner.add(PROMPTS[4], 2, priority=1)
    runner.run()
    assert request.generated == want
    assert want != answer("lfm2", LONG).tokens


class Favourite(Drafter):
    """Proposes one token, whatever came before."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def propose(self, requests: Any, count: int) -> list[list[int]]:
        return [self.tokens[:count] for _ in requests]


def test_drafts_leave_the_distribution_of_plain_sampling_as_it_is() -> None:
    """The second and third of three sampled tokens, of which drafts were proposed: chi-square against the model's own
    probabilities, at a level that a right sampler misses once in 100,000 runs. A rule that always kept the draft, or
    that drew anew from the whole distribution after a rejection, fails it."""
    model = tiny_model("lfm2", seed=3)
    options = {"do_sample": True, "top_k": 4, "temperature": 1.3}
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPTS[5], 65]])).logits[0, -1].float() / 1.3
    best = logits.topk(4)
    chances = dict(zip(best.indices.tolist(), best.values.softmax(0).tolist(), strict=True))
    favourite = best.indices[1].item()
    runner = runner_of(
        model=model,
        drafter=Favourite([int(favourite), 7]),
        draft_tokens=2,
        max_batch=16,
        keep_logits=False,
        keep_finished=0,
    )

    class First:
        """The first token is 65, so that the second one has one distribution."""

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if ids.shape[1] == len(PROMPTS[5]):
                scores = torch.full_like(scores, -math.inf)
                scores[:, 65] = 0
            return scores

    counts: Counter[int] = Counter()
    requests = [runner.add(PROMPTS[5], 3, seed=index, logits_processor=[First()], **options) for index in range(400)]
    runner.run()
    counts.update(request.generated[1] for request in requests)
    assert set(counts) <= set(chances)
    accepted = sum(sum(request.accepted.values()) and request.accepted[0] == 0 for request in requests)
    assert accepted > 10, "no draft was ever kept"
    chi_square = sum((counts[token] - 400 * chance) ** 2 / (400 * chance) for token, chance in chances.items())
    assert chi_square < 27.0  # 3 degrees of freedom, p = 6e-6


def test_several_answers_to_one_prompt_differ_and_compute_it_once() -> None:
    runner = runner_of(max_batch=4)
    requests = runner.add_n(LONG, 4, NEW_TOKENS, do_sample=True, seed=5)
    runner.run()
    assert [request.reused for request in requests] == [0, 49, 49, 49]
    assert len({tuple(request.generated) for request in requests}) == 4
    again = runner_of().add(LONG, NEW_TOKENS, do_sample=True, seed=7)
    assert again.result() == requests[2].generated


def test_logprobs_are_those_of_the_models_own_distribution() -> None:
    runner = runner_of()
    request = runner.add(LONG, NEW_TOKENS, logprobs=True, repetition_penalty=1.5)
    runner.run()
    for token, logits, logprob in zip(request.generated, request.logits, request.logprobs, strict=True):
        assert logprob == pytest.approx(logits.log_softmax(-1)[token].item(), abs=1e-5)


def test_criteria_and_stop_strings_end_an_answer() -> None:
    class AfterThree:
        def __call__(self, ids: torch.Tensor, scores: Any) -> torch.Tensor:
            return torch.tensor([ids.shape[1] >= len(LONG) + 3])

    runner = runner_of()
    assert runner.add(LONG, NEW_TOKENS, stopping_criteria=[AfterThree()]).result() == answer("lfm2", LONG).tokens[:3]
    with pytest.raises(ArgumentError, match="tokenizer: got None"):
        runner.add(LONG, NEW_TOKENS, stop_strings=["x"])


def test_a_request_that_nothing_can_be_drawn_for_fails_alone() -> None:
    class Nothing:
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return torch.full_like(scores, math.nan)

    runner = runner_of()
    lost: Request = runner.add(LONG, NEW_TOKENS, do_sample=True, logits_processor=[Nothing()])
    beside = runner.add(PROMPTS[5], NEW_TOKENS)
    runner.run()
    assert beside.generated == answer("lfm2", PROMPTS[5]).tokens
    with pytest.raises(RequestError, match="logits: got NaN or infinity"):
        lost.result()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_beams": 2}, UnsupportedError, "got beam search, wanted greedy search or sampling"),
        ({"num_return_sequences": 2, "do_sample": True}, UnsupportedError, r"add_n\(prompt, n\)"),
        ({"prompt_lookup_num_tokens": 3}, UnsupportedError, r"drafts come from PackedRunner\(drafter"),
        ({"guidance_scale": 1.5}, UnsupportedError, "guidance_scale: got 1.5"),
        ({"temprature": 1.5}, ArgumentError, "options: got temprature, wanted fields of GenerationConfig"),
        ({"generation_config": {"top_k": 3}}, ArgumentError, "generation_config: got dict"),
        ({"max_new_tokens": None, "max_length": 3}, ArgumentError, "max_length: got 3, wanted more than"),
        ({"seed": "x", "do_sample": True}, ArgumentError, "seed: got 'x'"),
        ({"temperature": -1.0, "do_sample": True}, ArgumentError, "generation_config: got .*temperature"),
    ],
)
def test_what_the_runner_does_not_do_is_refused_by_name(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = {"max_new_tokens": 5, **options}
    with pytest.raises(error, match=message):
        runner_of().add(LONG, **given)
