"""vLLM's caches and steps as hwbackends sees them, with stand-ins that have vLLM's field names and no vLLM. The taps
spell the window that was read; speculation gives the bits of plain decoding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hwbackends.engines.vllm.steps import Steps, VllmStep, padded_prompts, ragged
from hwbackends.registry.loading import load
from hwbackends.testing.recorder import CpuGraph

S, D, DRAFTS, BLOCKS = 3, 5, 3, 11
EACH = DRAFTS + 1
TAPS = torch.tensor([1.0, 10.0, 100.0, 1000.0])
LAYERS = ("model.layers.0.conv", "model.layers.3.conv")


def metadata(
    decodes: list[tuple[int, int, int]], prefills: list[tuple[int, int, int]] = (), *, padded: tuple[int, ...] = ()
) -> SimpleNamespace:
    """vLLM's short-conv metadata; decodes are (block, tokens, accepted), prefills (block, tokens, computed before)."""

    def offsets(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int32).cumsum(0).tolist()], dtype=torch.int32)

    decode_lengths, prefill_lengths = [d[1] for d in decodes], [p[1] for p in prefills]
    seq_lens = [100] * len(decodes) + [tokens + before for _, tokens, before in prefills]
    return SimpleNamespace(
        num_decodes=len(decodes),
        num_decode_tokens=sum(decode_lengths),
        num_prefills=len(prefills),
        num_prefill_tokens=sum(prefill_lengths),
        num_reqs=len(decodes) + len(prefills),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        state_indices_tensor_d=torch.tensor([[d[0]] * EACH for d in decodes], dtype=torch.int32).view(-1, EACH),
        state_indices_tensor_p=torch.tensor([p[0] for p in prefills], dtype=torch.int32),
        query_start_loc_d=offsets(decode_lengths) if decodes else None,
        query_start_loc_p=offsets(prefill_lengths) if prefills else None,
        has_initial_states_p=torch.tensor([p[2] > 0 for p in prefills]) if prefills else None,
        num_accepted_tokens=torch.tensor([d[2] for d in decodes], dtype=torch.int32),
        padded_prompts=padded,
    )


class Engine:
    """vLLM's caches for two layers, and the steps over them."""

    def __init__(self, drafts: int = DRAFTS) -> None:
        self.caches = {name: torch.full((BLOCKS, S + drafts, D), float("nan")) for name in LAYERS}
        self.steps = Steps(load("reference"), drafts, max_batch=5, max_tokens=7)
        self.steps.bind(self.caches, S + 1)

    def run(self, step: SimpleNamespace, values: list[float]) -> list[float]:
        """The conv of both layers; every channel gets the same values and must answer the same."""
        prepared: VllmStep = self.steps.prepare(step)
        x = torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, D).contiguous()
        first, second = (prepared.conv(name, x, TAPS.expand(D, S + 1), None) for name in LAYERS)
        assert torch.equal(first, second)
        assert torch.equal(first, first[:, :1].expand_as(first))
        answers: list[float] = first[:, 0].tolist()
        return answers


def test_a_prefill_then_decodes_without_speculation() -> None:
    engine = Engine(drafts=0)
    assert engine.run(metadata([], [(4, 5, 0)]), [1, 2, 3, 4, 5]) == [1000, 2100, 3210, 4321, 5432]
    step = metadata([(4, 1, 1)])
    step.num_accepted_tokens = None
    assert engine.run(step, [6]) == [6543]
    assert engine.run(step, [7]) == [7654]


def test_a_chunk_goes_on_where_the_last_one_stopped() -> None:
    engine = Engine()
    engine.run(metadata([], [(4, 2, 0), (7, 1, 0)]), [1, 2, 9])
    assert engine.run(metadata([], [(7, 2, 1), (4, 1, 2)]), [8, 7, 3]) == [8900, 7890, 3210]


def test_decodes_and_prefills_share_a_step() -> None:
    engine = Engine()
    engine.run(metadata([], [(4, 3, 0)]), [1, 2, 3])
    assert engine.run(metadata([(4, 1, 1)], [(7, 2, 0)]), [4, 8, 9]) == [4321, 8000, 9800]
    assert engine.run(metadata([(4, 1, 1), (7, 1, 1)]), [5, 7]) == [5432, 7980]


@pytest.mark.parametrize("kept", range(1, EACH + 1))
def test_a_step_reads_the_history_behind_what_the_last_one_kept(kept: int) -> None:
    engine = Engine()
    engine.run(metadata([], [(4, 3, 0)]), [1, 2, 3])
    assert engine.run(metadata([(4, EACH, 1)]), [4, 5, 6, 7]) == [4321, 5432, 6543, 7654]
    history = [1, 2, 3, 4, 5, 6, 7][: 3 + kept]
    expected = 9000 + 100 * history[-1] + 10 * history[-2] + history[-3]
    assert engine.run(metadata([(4, 1, kept)]), [9]) == [expected]


def test_requests_may_bring_unequal_numbers_of_drafts() -> None:
    engine = Engine()
    engine.run(metadata([], [(4, 3, 0), (7, 3, 0), (2, 3, 0)]), [1, 2, 3, 4, 5, 6, 7, 8, 9])
    step = metadata([(4, 2, 1), (7, EACH, 1), (2, 1, 1)])
    assert engine.run(step, [4, 5, 7, 8, 9, 1, 2]) == [4321, 5432, 7654, 8765, 9876, 1987, 2987]
    assert engine.run(metadata([(4, 1, 2), (7, 1, 3), (2, 1, 1)]), [6, 1, 3]) == [6543, 1987, 3298]


def test_a_recorded_step_reads_the_block_table_that_vllm_has_at_its_replay() -> None:
    engine, twin = Engine(drafts=0), Engine(drafts=0)
    prompts = metadata([], [(4, 3, 0), (7, 2, 0), (2, 1, 0)])
    for each in (engine, twin):
        each.run(prompts, [1, 2, 3, 4, 5, 6])
    table = torch.tensor([[0, 0], [0, 0], [0, 0]], dtype=torch.int32)  # wider than the state's block
    step = metadata([(0, 1, 1)] * 3)
    step.num_accepted_tokens, step.state_indices_tensor_d = None, table
    x, graph = torch.zeros(3, D), CpuGraph()
    engine.steps.prepare(step, recorded=True).conv(LAYERS[0], x, TAPS.expand(D, S + 1), None)  # vLLM warms up first
    before = engine.steps.resolutions
    with graph.capture():
        answer = engine.steps.prepare(step, recorded=True).conv(LAYERS[0], x, TAPS.expand(D, S + 1), None)
    assert engine.steps.resolutions == before + 1
    for blocks, values in (((7, 4, 0), (6.0, 4.0, 9.0)), ((2, 0, 0), (7.0, 9.0, 9.0)), ((4, 2, 7), (5.0, 8.0, 7.0))):
        live = [block for block in blocks if block]
        table[:, 0] = torch.tensor(blocks, dtype=torch.int32)
        x.copy_(torch.tensor(values)[:, None].expand(-1, D))
        graph.replay()
        eager = metadata([(block, 1, 1) for block in live])
        eager.num_accepted_tokens = None
        expected = twin.run(eager, list(values[: len(live)]))
        assert answer[:, 0].tolist() == [*expected, *[0.0] * (3 - len(live))]
        assert engine.steps.resolutions == before + 1, "a replay launches nothing from Python"
    moved, wanted = engine.caches[LAYERS[0]], twin.caches[LAYERS[0]]
    assert torch.equal(moved.nan_to_num(-1), wanted.nan_to_num(-1))


def test_blocks_of_new_prompts_are_emptied_where_a_graph_of_decodes_may_run_them() -> None:
    engine = Engine(drafts=0)
    engine.run(metadata([], [(4, 3, 0), (7, 3, 0)]), [1, 2, 3, 4, 5, 6])
    engine.steps.clear(torch.tensor([7], dtype=torch.int32))
    step = metadata([(4, 1, 1), (7, 1, 1)])
    step.num_accepted_tokens = None
    assert engine.run(step, [4, 9]) == [4321, 9000]


def test_decodes_of_unequal_drafts_and_prefills_share_one_answer() -> None:
    engine = Engine()
    engine.run(metadata([], [(4, 3, 0), (7, 3, 0)]), [1, 2, 3, 4, 5, 6])
    step = metadata([(4, 2, 1), (7, 1, 1)], [(2, 2, 0)])
    assert engine.run(step, [4, 5, 7, 8, 9]) == [4321, 5432, 7654, 8000, 9800]


def test_rows_that_a_graph_pads_change_no_block() -> None:
    engine = Engine()
    engine.run(metadata([], [(4, 3, 0)]), [1, 2, 3])
    step = metadata([(4, EACH, 1), (0, EACH, 1)])
    step.num_decodes, step.num_decode_tokens = 1, EACH
    assert engine.run(step, [4, 5, 6, 7, 8, 8, 8, 8]) == [4321, 5432, 6543, 7654, 0, 0, 0, 0]
    assert all(cache[0].isnan().all() for cache in engine.caches.values())


@pytest.mark.parametrize("kept", [1, EACH])
def test_a_prompt_that_brings_drafts_keeps_only_the_accepted_ones(kept: int) -> None:
    """vLLM pads a one-token prompt with placeholder drafts and calls it a prefill."""
    engine = Engine()
    engine.run(metadata([], [(4, 3, 0)]), [1, 2, 3])
    step = metadata([(4, 1, 1)], [(7, 2, 0), (2, EACH, 0)], padded=(1,))
    assert engine.run(step, [4, 8, 9, 5, 1, 2, 3]) == [4321, 8000, 9800, 5000, 1500, 2150, 3215]
    expected = {1: 9500, EACH: 9321}[kept]
    assert engine.run(metadata([(7, 1, 1), (2, 1, kept)]), [7, 9]) == [7980, expected]


def test_prompts_that_bring_drafts_are_found_among_the_prefills() -> None:
    step = metadata([(4, 2, 1)], [(7, 2, 0), (2, EACH, 0), (3, EACH, 0)])
    offsets = torch.tensor([0, 2, 4, 4 + EACH, 4 + 2 * EACH])
    assert padded_prompts(step, offsets, torch.tensor([1, -1, DRAFTS, -1]), EACH) == (1,)
    assert padded_prompts(step, offsets, None, EACH) == ()
    assert padded_prompts(step, offsets, torch.tensor([1, -1, 0, -1]), 1) == ()
    assert padded_prompts(metadata([(4, 2, 1)]), offsets, torch.tensor([1]), EACH) == ()


def test_ragged_requests_spread_and_gather_back() -> None:
    x = torch.arange(7)
    spread, gather = ragged(torch.tensor([0, 2, 6, 7]), 7, EACH)
    assert spread.shape == (3 * EACH,)
    assert torch.equal(x[spread][gather], x)
    assert spread.view(3, EACH)[:, 0].tolist() == [0, 2, 6]


def test_caches_are_wrapped_again_only_when_vllm_has_allocated_others() -> None:
    engine = Engine()
    wrapped: Any = engine.steps._decode
    engine.steps.bind(dict(engine.caches), S + 1)
    assert engine.steps._decode is wrapped
    engine.steps.bind({name: cache.clone() for name, cache in engine.caches.items()}, S + 1)
    assert engine.steps._decode is not wrapped


def test_state_stays_in_vllms_caches() -> None:
    engine = Engine()
    engine.run(metadata([], [(4, 5, 0)]), [1, 2, 3, 4, 5])
    for cache in engine.caches.values():
        assert torch.equal(cache[4, :S], torch.tensor([3.0, 4.0, 5.0])[:, None].expand(S, D))
        assert cache[7].isnan().all()


def test_an_empty_step_answers_nothing() -> None:
    assert Engine().run(metadata([]), []) == []
