"""`model.generate` with our cache gives what it gives with the cache of Transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import hwbackends
from hwbackends.engines.transformers.cache import ConvStateCache
from hwbackends.engines.transformers.tiny import tiny_model
from hwbackends.errors import ArgumentError
from tests.engines.transformers.scenes import (
    LOGITS_BOUND,
    NEW_TOKENS,
    PROMPTS,
    answer,
    layouts,
    models,
    models_and_layouts,
)


def cache_for(model: Any, layout: str = "window", **settings: Any) -> ConvStateCache:
    return ConvStateCache(model, hwbackends.load("reference"), layout=layout, **settings)  # type: ignore[arg-type]


def generate(model: Any, ids: Tensor, cache: ConvStateCache, **kwargs: Any) -> Any:
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS, "do_sample": False, **kwargs}
    return model.generate(ids, **{cache.spec.cache_argument: cache}, **given)


@models_and_layouts
def test_greedy_generation_gives_the_stock_tokens_and_logits(name: str, layout: str) -> None:
    model = tiny_model(name, seed=3)
    cache = cache_for(model, layout)
    for prompt in (PROMPTS[0], PROMPTS[2], PROMPTS[8]):
        cache.reset()
        out = generate(model, torch.tensor([prompt]), cache, output_logits=True, return_dict_in_generate=True)
        stock = answer(name, prompt)
        assert out.sequences[0, len(prompt) :].tolist() == stock.tokens
        difference = (torch.cat(out.logits) - stock.logits).abs().max().item()
        assert difference <= LOGITS_BOUND


@models_and_layouts
def test_prompt_lookup_gives_the_stock_tokens(name: str, layout: str) -> None:
    model = tiny_model(name, seed=3)
    for prompt in (PROMPTS[0], PROMPTS[5], PROMPTS[8]):
        cache = cache_for(model, layout, draft_tokens=5)
        out = generate(model, torch.tensor([prompt]), cache, prompt_lookup_num_tokens=5)
        assert out[0, len(prompt) :].tolist() == answer(name, prompt).tokens


@models_and_layouts
def test_an_assistant_that_is_often_right_gives_the_stock_tokens(name: str, layout: str) -> None:
    """The assistant is the model with a little noise in its head, so that some drafts are kept and some taken back."""
    model = tiny_model(name, seed=3)
    prompt = torch.tensor([PROMPTS[5]])
    stock = copy.deepcopy(model).generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    assistant = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        noise = torch.randn(assistant.lm_head.weight.shape, generator=generator)
        assistant.lm_head.weight.add_(0.03 * noise)
    cache = cache_for(model, layout)
    kept: list[int] = []
    removed: list[int] = []
    crop = cache.crop

    def note(tokens_to_remove: int) -> None:
        kept.append(cache.drafted - 1 + tokens_to_remove)
        removed.append(-tokens_to_remove)
        crop(tokens_to_remove)

    cache.crop = note  # type: ignore[method-assign]
    out = generate(model, prompt, cache, assistant_model=assistant)
    assert torch.equal(out, stock)
    later = slice(1, None)  # the first forward holds the prompt too
    assert max(kept[later]) > 0, "no draft was ever kept"
    assert max(removed[later]) > 0, "no draft was ever taken back"


@models
def test_a_padded_batch_gives_the_stock_tokens(name: str) -> None:
    model = tiny_model(name, seed=3)
    ids = torch.zeros(3, 11, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate((11, 4, 1)):
        ids[row, -length:] = torch.tensor(PROMPTS[8][:length])
        mask[row, -length:] = 1
    stock = copy.deepcopy(model).generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert torch.equal(generate(model, ids, cache_for(model, max_batch=3), attention_mask=mask), stock)


def test_generation_continues_from_what_the_cache_holds() -> None:
    model = tiny_model("inkling", seed=3)
    cache = cache_for(model)
    prompt = torch.tensor([PROMPTS[5]])
    first = generate(model, prompt, cache, max_new_tokens=9)
    second = generate(model, first, cache, max_new_tokens=NEW_TOKENS - 9)
    assert second[0, prompt.shape[1] :].tolist() == answer("inkling", PROMPTS[5]).tokens


@models
def test_prompts_may_come_in_chunks_and_beyond_the_buffers(name: str) -> None:
    model = tiny_model(name, seed=3)
    for settings, kwargs in (({"max_tokens": 3}, {}), ({}, {"prefill_chunk_size": 5})):
        out = generate(model, torch.tensor([PROMPTS[8]]), cache_for(model, "ring", **settings), **kwargs)
        assert out[0, len(PROMPTS[8]) :].tolist() == answer(name, PROMPTS[8]).tokens


def test_a_reset_cache_has_clean_slots() -> None:
    model = tiny_model("lfm2", seed=3)
    cache = cache_for(model)
    generate(model, torch.tensor([PROMPTS[8]]), cache)
    assert cache.has_previous_state()
    cache.reset()
    assert not cache.has_previous_state()
    assert not any(tensor.any() for tensor in cache.pool.storages())


def test_the_cache_answers_what_transformers_asks() -> None:
    inkling, lfm2 = (cache_for(tiny_model(name)) for name in ("inkling", "lfm2"))
    assert inkling.is_sliding == [True, False, True]
    assert [inkling.get_max_length(layer) for layer in range(3)] == [24, -1, 24]
    assert [lfm2.get_max_length(layer) for layer in range(5)] == [-1] * 5
    assert inkling.is_recording_past(0)
    assert (inkling.is_compileable, lfm2.is_compileable) == (False, False)


@models_and_layouts
def test_more_candidates_than_draft_tokens_are_taken_back_as_well(name: str, layout: str) -> None:
    model = tiny_model(name, seed=3)
    for prompt in (PROMPTS[0], PROMPTS[8]):
        out = generate(
            model, torch.tensor([prompt]), cache_for(model, layout, draft_tokens=1), prompt_lookup_num_tokens=7
        )
        assert out[0, len(prompt) :].tolist() == answer(name, prompt).tokens


@models_and_layouts
@pytest.mark.parametrize("removed", [1, 4])
def test_a_recorded_text_is_taken_back_and_goes_on_as_another(name: str, layout: str, removed: int) -> None:
    model = tiny_model(name, seed=3)
    cache = cache_for(model, layout)
    cache.activate_past_recording()
    prompt = torch.tensor([PROMPTS[8]])
    first = generate(model, prompt, cache, max_new_tokens=12)
    cache.crop(-removed)
    kept = first[:, : first.shape[1] - 1 - removed]
    assert cache.get_seq_length() == kept.shape[1] or name == "lfm2"
    other = torch.cat([kept, torch.tensor([[33, 34]])], dim=1)
    again = generate(model, other, cache, max_new_tokens=8)
    assert torch.equal(again, copy.deepcopy(model).generate(other, max_new_tokens=8, do_sample=False))
    cache.crop(-5)
    once_more = generate(model, again[:, :-5], cache, max_new_tokens=5)
    assert torch.equal(once_more, again)


def test_recording_may_begin_behind_a_text() -> None:
    for layout in ("window", "ring", "lazy"):
        model = tiny_model("lfm2", seed=3)
        cache = cache_for(model, layout)
        first = generate(model, torch.tensor([PROMPTS[8]]), cache, max_new_tokens=4)
        cache.activate_past_recording()
        second = generate(model, first, cache, max_new_tokens=4)
        cache.crop(-4)
        with pytest.raises(ArgumentError, match=r"wanted -0 to 0, .*activate_past_recording"):
            cache.crop(-1)
        third = generate(model, first, cache, max_new_tokens=4)
        assert torch.equal(second, third)


def test_a_crop_of_tokens_that_were_not_recorded_is_refused() -> None:
    model = tiny_model("lfm2", seed=3)
    cache = cache_for(model)
    generate(model, torch.tensor([PROMPTS[4]]), cache)
    for removed in (-1, 1):
        with pytest.raises(ArgumentError, match=r"tokens_to_remove: .*call activate_past_recording\(\) before"):
            cache.crop(removed)


def test_a_batch_beyond_the_caches_is_refused() -> None:
    model = tiny_model("lfm2", seed=3)
    with pytest.raises(ArgumentError, match="batch: got 3, wanted at most 2"):
        generate(model, torch.tensor([PROMPTS[4]] * 3), cache_for(model, max_batch=2))


@models_and_layouts
def test_beams_give_the_stock_beams(name: str, layout: str) -> None:
    model = tiny_model(name, seed=3)
    ids = torch.tensor([PROMPTS[8][:9], PROMPTS[5][:9]])
    stock = copy.deepcopy(model)
    for extra in ({"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}):
        given = {"max_new_tokens": 9, "do_sample": False, "attention_mask": torch.ones_like(ids), **extra}
        ours = generate(model, ids, cache_for(model, layout, max_batch=8), **given)
        assert torch.equal(ours, stock.generate(ids, **given))


@layouts
def test_sequences_are_multiplied_and_selected(layout: str) -> None:
    model = tiny_model("inkling", seed=3)
    cache = cache_for(model, layout, max_batch=4)
    prompt = torch.tensor([PROMPTS[8][:9], PROMPTS[5][:9]])
    first = generate(model, prompt, cache, max_new_tokens=3)
    cache.batch_repeat_interleave(2)
    second = generate(model, first.repeat_interleave(2, 0), cache, max_new_tokens=4)
    assert torch.equal(second[0], second[1])
    cache.batch_select_indices(torch.tensor([2]))
    third = generate(model, second[2:3], cache, max_new_tokens=5)
    stock = copy.deepcopy(model).generate(prompt[1:], max_new_tokens=12, do_sample=False)
    assert torch.equal(third, stock)
    with pytest.raises(ArgumentError, match="batch: got 5, wanted at most 4"):
        cache.batch_repeat_interleave(5)


@models
def test_a_copy_of_a_cache_goes_on_by_itself(name: str) -> None:
    """A prompt that many questions begin with is computed once."""
    model = tiny_model(name, seed=3)
    cache = cache_for(model)
    prompt = torch.tensor([PROMPTS[8]])
    with torch.no_grad():
        model(prompt, **{cache.spec.cache_argument: cache}, use_cache=True)
    for tail in ([65, 66], [67]):
        ids = torch.cat([prompt, torch.tensor([tail])], dim=1)
        stock = copy.deepcopy(model).generate(ids, max_new_tokens=6, do_sample=False)
        assert torch.equal(generate(model, ids, copy.deepcopy(cache), max_new_tokens=6), stock)


@models
def test_the_cache_of_an_output_is_ours_and_goes_on(name: str) -> None:
    model = tiny_model(name, seed=3)
    out = generate(model, torch.tensor([PROMPTS[5]]), cache_for(model), max_new_tokens=9, return_dict_in_generate=True)
    found = out.cache if "cache" in out else out.past_key_values
    assert isinstance(found, ConvStateCache)
    more = generate(model, out.sequences, found, max_new_tokens=NEW_TOKENS - 9)
    assert more[0, len(PROMPTS[5]) :].tolist() == answer(name, PROMPTS[5]).tokens


def test_a_half_precision_conv_rounds_where_the_stock_one_does() -> None:
    """The stock module computes in float32 and rounds once; so does the hook, from a state of half the bytes."""
    model = tiny_model("inkling", seed=3).to(torch.bfloat16)
    for layer in model.model.layers:
        layer.mlp_sconv.float()
    stock, x = copy.deepcopy(model.model.layers[0].mlp_sconv), torch.randn(1, 9, 48, generator=_seeded()).bfloat16()
    model.model.layers[0].self_attn.k_sconv.float()
    cache = cache_for(model)
    first = model.model.layers[0].self_attn.k_sconv
    first(torch.zeros(1, 9, 16, dtype=torch.bfloat16), cache=cache)  # the first module of a forward begins the step
    ours = model.model.layers[0].mlp_sconv(x, cache=cache)
    assert cache.pool.conv_state("mlp", 0).tensor.dtype == torch.bfloat16
    difference = (ours.float() - stock(x).float()).abs()
    assert (difference <= 2**-8 * ours.float().abs() + 2**-20).all(), "more than one unit in the last place"


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(11)
