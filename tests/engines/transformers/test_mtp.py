"""Inkling's own heads: they name the tokens that Transformers' heads name, for a whole batch, and change no answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from hwbackends.engines.transformers.mtp import MtpDrafter
from hwbackends.engines.transformers.tiny import tiny_model
from hwbackends.errors import UnsupportedError
from hwbackends.runner.drafters import missing_counts
from hwbackends.runner.requests import Request
from tests.engines.transformers.scenes import (
    NEW_TOKENS,
    PROMPTS,
    answer,
    layouts,
    make_runner,
    seeded,
    serve_all,
)
from tests.engines.transformers.test_generate import cache_for, generate

HEADS = 3


def random_heads(model: Any, **changes: Any) -> Any:
    """Heads with weights of their own for a model; `changes` go into a config of theirs."""
    for name, value in changes.items():
        setattr(model.config, name, value)
    model.config.num_mtp_layers = HEADS
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        heads: Any = MtpModel(model, HEADS)
        for name, parameter in heads.named_parameters():
            if name.startswith("layers.") and parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.1)
    return heads.eval()


@torch.no_grad()
def stock_drafts(model: Any, heads: Any, tokens: Sequence[int]) -> list[int]:
    """What the heads of Transformers name behind `tokens`, from the whole text and an empty cache."""
    ids = torch.tensor([tokens])
    hidden = model.model(ids[:, :-1]).last_hidden_state
    positions = torch.arange(1, ids.shape[1])[None]
    cache = MtpCache(config=model.config.get_mtp_config())
    drafts = heads(ids[:, 1:], hidden, torch.ones_like(positions), positions, cache)[0]
    return list(drafts[0].tolist())


class Watched(MtpDrafter):
    """Compares each draft with that of Transformers."""

    def __init__(self, heads: Any, model: Any) -> None:
        super().__init__(heads)
        self._stock = model, heads
        self.compared = 0

    def propose(self, requests: Sequence[Request], count: int) -> list[list[int]]:
        drafts = super().propose(requests, count)
        for request, named in zip(requests, drafts, strict=True):
            assert named == stock_drafts(*self._stock, request.tokens)[:count], request.request_id
            self.compared += 1
        return drafts


@pytest.mark.parametrize(("layout", "drafts"), [("window", HEADS), ("ring", 1), ("lazy", 2)])
def test_the_heads_name_what_the_stock_heads_name(layout: str, drafts: int) -> None:
    model = tiny_model("inkling", seed=3)
    drafter = Watched(random_heads(model), model)
    runner = make_runner("inkling", drafter, layout=layout, draft_tokens=drafts, max_batch=3)
    serve_all(runner, "inkling", PROMPTS[2:7])
    assert drafter.compared > 5


def test_heads_with_a_shared_norm_name_what_the_stock_heads_name() -> None:
    model = tiny_model("inkling", seed=3)
    heads = random_heads(model, chain_hidden_post_norm=True)
    assert heads.use_shared_post_norm
    drafter = Watched(heads, model)
    serve_all(make_runner("inkling", drafter, layout="ring", draft_tokens=2, max_batch=2), "inkling", PROMPTS[4:7])


class Prompted(Watched):
    """Proposes known answers with spoiled tokens after asking the heads, so that every rollback reaches their state."""

    def __init__(self, heads: Any, model: Any, known: Any) -> None:
        super().__init__(heads, model)
        self._known = known

    def propose(self, requests: Sequence[Request], count: int) -> list[list[int]]:
        super().propose(requests, count)
        drafts: list[list[int]] = self._known.propose(requests, count)
        return drafts


@layouts
def test_the_heads_follow_every_accepted_count(layout: str) -> None:
    prompts = PROMPTS[3:8]
    model = tiny_model("inkling", seed=3)
    drafter = Prompted(random_heads(model), model, seeded("inkling", prompts))
    runner = make_runner("inkling", drafter, layout=layout, draft_tokens=HEADS, max_batch=3)
    serve_all(runner, "inkling", prompts)
    assert missing_counts(runner.requests, HEADS) == []


def test_finished_requests_leave_nothing_behind() -> None:
    model = tiny_model("inkling", seed=3)
    drafter = MtpDrafter(random_heads(model))
    runner = make_runner("inkling", drafter, draft_tokens=2, max_batch=2)
    serve_all(runner, "inkling", PROMPTS[:4])
    assert drafter._rows == {}
    decoder = runner.model.get_decoder()
    assert decoder._forward_hooks
    runner.close()
    assert not decoder._forward_hooks
    assert not runner.scheduler.allocator.used


def test_more_drafts_than_heads_are_refused() -> None:
    drafter = MtpDrafter(random_heads(tiny_model("inkling", seed=3)))
    with pytest.raises(UnsupportedError, match="draft_tokens: got 4, wanted at most 3, the model's heads"):
        make_runner("inkling", drafter, draft_tokens=4)


def test_a_model_without_heads_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="without num_mtp_layers"):
        make_runner("lfm2", MtpDrafter(), draft_tokens=2)


def checkpoint(folder: Path) -> Any:
    """A model with heads, saved and loaded again, as a released checkpoint would be."""
    model = tiny_model("inkling", seed=3)
    heads = random_heads(model)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    weights = {f"model.mtp.{k}": v.contiguous() for k, v in heads.state_dict().items() if k.startswith("layers.")}
    save_file({**load_file(file), **weights}, file, metadata={"format": "pt"})
    loaded: Any = type(model).from_pretrained(folder, experts_implementation="batched_mm")
    return loaded.eval()


@layouts
def test_generate_with_heads_gives_the_stock_tokens(layout: str, tmp_path: Path) -> None:
    model = checkpoint(tmp_path)
    prompt = PROMPTS[5]
    out = generate(model, torch.tensor([prompt]), cache_for(model, layout), use_mtp=True)
    assert out[0, len(prompt) :].tolist() == answer("inkling", prompt).tokens[:NEW_TOKENS]


def test_heads_come_from_the_checkpoint(tmp_path: Path) -> None:
    model = checkpoint(tmp_path)
    runner = make_runner("inkling", MtpDrafter(), model=model, draft_tokens=HEADS)
    serve_all(runner, "inkling", PROMPTS[4:6])
