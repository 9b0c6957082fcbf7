"""Packed continuous batching gives each request the tokens and logits that the stock model gives it alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hwbackends
from hwbackends.engines.transformers.tiny import stock_answer, tiny_model
from hwbackends.errors import ArgumentError, GraphLimitError, UnsupportedError
from hwbackends.runner.drafters import Drafter, NGramDrafter, missing_counts
from hwbackends.runner.graphs import CudaRecorder
from hwbackends.runner.requests import Request, RequestState
from hwbackends.runner.serving import PackedRunner
from hwbackends.runner.settings import RunnerSettings
from hwbackends.step.batch import ForwardMode
from hwbackends.testing.guards import no_sync
from tests.engines.transformers.scenes import (
    CHUNK,
    NEW_TOKENS,
    PROMPTS,
    answer,
    assert_stock,
    layouts,
    make_runner,
    models,
    models_and_layouts,
    seeded,
    serve_all,
)


@models_and_layouts
def test_decoding_gives_the_stock_tokens(name: str, layout: str) -> None:
    serve_all(make_runner(name, layout=layout), name)


@models_and_layouts
def test_verified_drafts_give_the_stock_tokens_and_every_accepted_count_occurs(name: str, layout: str) -> None:
    runner = make_runner(name, seeded(name, PROMPTS), layout=layout, draft_tokens=3)
    serve_all(runner, name)
    assert missing_counts(runner.requests, 3) == []
    assert runner.counters.by_mode.get("decode") is None


@models
@pytest.mark.parametrize("drafts", [1, 2, 6])
def test_any_number_of_drafts_gives_the_stock_tokens(name: str, drafts: int) -> None:
    prompts = PROMPTS[:4]
    runner = make_runner(name, seeded(name, prompts), layout="ring", draft_tokens=drafts)
    serve_all(runner, name, prompts)
    assert missing_counts(runner.requests, drafts) == []


@pytest.mark.parametrize(("max_batch", "drafts"), [(1, 2), (2, 0), (5, 2), (16, 0)])
def test_any_batch_size_gives_the_stock_tokens(max_batch: int, drafts: int) -> None:
    drafter = seeded("inkling", PROMPTS) if drafts else None
    serve_all(make_runner("inkling", drafter, max_batch=max_batch, draft_tokens=drafts), "inkling", apart=5)


@pytest.mark.slow
@models_and_layouts
@pytest.mark.parametrize("max_batch", range(1, 17))
@pytest.mark.parametrize("drafts", [0, 1, 2, 3, 5])
def test_the_whole_matrix_gives_the_stock_tokens(name: str, layout: str, max_batch: int, drafts: int) -> None:
    drafter = seeded(name, PROMPTS, seed=max_batch) if drafts else None
    serve_all(make_runner(name, drafter, layout=layout, max_batch=max_batch, draft_tokens=drafts), name)


EVENTS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["inkling", "lfm2"]),
        "layout": st.sampled_from(["window", "ring", "lazy"]),
        "draft_tokens": st.integers(0, 4),
        "max_batch": st.integers(1, 6),
        "chunk_size": st.integers(1, 11),
        "prefix_slots": st.integers(0, 4),
        "pause": st.sampled_from([0, 2, 3]),
        "recorded": st.sampled_from([False, False, True]),  # recording takes longer than serving
        "prompts": st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=7),
        "arrivals": st.lists(st.integers(0, 12), min_size=7, max_size=7),
        "lengths": st.lists(st.integers(1, NEW_TOKENS), min_size=7, max_size=7),
        "cancels": st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=3),
    }
)


def serve_events(events: dict[str, Any]) -> None:
    """Requests join at their arrival and some leave early; what each was given is the stock model's."""
    name, prompts = events.pop("name"), events.pop("prompts")
    arrivals, lengths, cancels = events.pop("arrivals"), events.pop("lengths"), events.pop("cancels")
    pause = events.pop("pause")
    drafter = seeded(name, prompts, pause=pause) if events["draft_tokens"] else None
    runner = make_runner(name, drafter, **events)
    for prompt, length, arrival in zip(prompts, lengths, arrivals, strict=False):
        runner.add(prompt, length, arrival=arrival)
    while not runner.idle:
        for step, request in cancels:
            if step == runner.counters.steps and request < len(runner.requests):
                runner.cancel(runner.requests[request])
        runner.step()
    for request, length in zip(runner.requests, lengths, strict=False):
        assert_stock(name, request)
        assert request.state is RequestState.CANCELLED or len(request.generated) == length
    runner.close()
    assert not runner.scheduler.allocator.used


@settings(max_examples=12)
@given(EVENTS)
def test_requests_may_join_and_leave_at_any_step(events: dict[str, Any]) -> None:
    serve_events(events)


@pytest.mark.slow
@settings(max_examples=400)
@given(EVENTS)
def test_requests_may_join_and_leave_at_any_step_at_length(events: dict[str, Any]) -> None:
    serve_events(events)


def test_prompts_go_in_chunks_beside_decoding_requests() -> None:
    runner = make_runner("lfm2", max_batch=2, prefix_slots=0)
    first = runner.add(PROMPTS[0], NEW_TOKENS)
    long = runner.add(PROMPTS[8], NEW_TOKENS, arrival=3)
    for _ in range(3):
        runner.step()
    before = len(first.generated)
    report = runner.step()
    assert (report.forward_mode, report.requests, report.tokens) == (ForwardMode.EXTEND, 2, 1 + CHUNK)
    assert len(first.generated) == before + 1
    assert long.computed == CHUNK
    assert not long.generated
    for request in runner.run():
        assert_stock("lfm2", request)


def test_a_cancelled_request_frees_its_slot_for_another() -> None:
    runner = make_runner("inkling", max_batch=1, prefix_slots=0)
    leaving = runner.add(PROMPTS[8], NEW_TOKENS)
    waiting = runner.add(PROMPTS[5], NEW_TOKENS)
    never = runner.add(PROMPTS[4], NEW_TOKENS)
    runner.step()
    slot = leaving.slot
    runner.cancel(leaving)
    runner.cancel(never)
    runner.cancel(never)
    assert leaving.state is never.state is RequestState.CANCELLED
    runner.step()
    assert waiting.slot == slot
    runner.run()
    assert_stock("inkling", waiting)
    assert never.generated == []


@models_and_layouts
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_shared_prefix_is_computed_once(name: str, layout: str, drafts: int) -> None:
    """The donor's prompt is snapshot by extend, its answer by decode or by the commit of a verify step."""
    donor, heir = PROMPTS[5], PROMPTS[5] + tuple(answer(name, PROMPTS[5]).tokens[:19]) + tuple(TAIL)
    sibling = PROMPTS[7]
    prompts = [donor, heir, sibling]
    drafter = seeded(name, prompts) if drafts else None
    runner = make_runner(name, drafter, layout=layout, draft_tokens=drafts, prefix_slots=9)
    for prompt in prompts:
        runner.add(prompt, NEW_TOKENS)
        runner.run()
    _, longest, other = runner.requests
    assert longest.reused == (len(donor) + 19) // CHUNK * CHUNK
    assert other.reused == 3 * CHUNK
    for request in runner.requests:
        assert_stock(name, request)


TAIL = b"!?"


def test_prefixes_give_way_when_their_slots_are_needed() -> None:
    runner = make_runner("lfm2", max_batch=3, prefix_slots=2)
    serve_all(runner, "lfm2", [*PROMPTS, *PROMPTS[4:]], apart=1)
    assert len(runner.scheduler.prefixes) <= 2
    runner.close()
    assert not runner.scheduler.allocator.used
    assert not len(runner.scheduler.prefixes)


def test_metadata_is_resolved_once_per_step_and_decode_metadata_by_replay() -> None:
    runner = make_runner("inkling", recorded=True, max_batch=4)
    captures, reads = runner.sidecar.resolutions, runner.sidecar.reads
    before = runner.addresses()
    serve_all(runner, "inkling")
    modes = runner.counters.by_mode
    steps = sum(modes.values())
    assert runner.resolutions == steps
    assert runner.conv_calls == steps * 12
    assert runner.sidecar.reads == reads + modes["extend"] * 12
    assert runner.sidecar.resolutions == captures + modes["extend"]
    assert runner.addresses() == before


@layouts
def test_layouts_give_the_same_bits(layout: str) -> None:
    logits = []
    for chosen in ("window", layout):
        runner = make_runner("lfm2", seeded("lfm2", PROMPTS), layout=chosen, draft_tokens=3)
        serve_all(runner, "lfm2")
        logits.append([torch.stack(request.logits) for request in runner.requests])
    assert all(torch.equal(*pair) for pair in zip(*logits, strict=True))


def test_a_forward_never_waits_for_the_device() -> None:
    """Inkling only: LFM2's rotary embedding moves its frequencies to x.device, which on a CPU names the host. The
    demo's emulated device watches both models."""
    name = "inkling"
    backend = hwbackends.load("reference")
    limits = RunnerSettings(max_batch=3, max_len=96, chunk_size=CHUNK, draft_tokens=2, keep_logits=True)
    runner = PackedRunner(tiny_model(name, seed=3), backend, limits, seeded(name, PROMPTS), guard=no_sync)
    serve_all(runner, name)


@models
def test_the_n_gram_drafter_changes_no_token(name: str) -> None:
    runner = make_runner(name, NGramDrafter(), draft_tokens=4, layout="lazy")
    serve_all(runner, name)


def repetitive_model() -> Any:
    """A tied model whose layers whisper: its answers repeat themselves, as those of trained models often do."""
    model = tiny_model("lfm2", seed=3, tie_word_embeddings=True)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "out_proj" in key or "w2" in key:
                parameter.mul_(0.5)
    return model


def test_n_grams_are_accepted_where_text_repeats_itself() -> None:
    runner = make_runner("lfm2", model=repetitive_model(), layout="ring", draft_tokens=3)
    requests = [runner.add(prompt, 40) for prompt in (PROMPTS[2], PROMPTS[7], PROMPTS[8])]
    runner.run()
    for request in requests:
        assert request.generated == stock_answer(repetitive_model(), request.prompt, 40).tokens
    accepted = sum(count * times for request in requests for count, times in request.accepted.items())
    assert accepted > 20
    assert all(request.steps < 40 for request in requests)


def test_checked_mode_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWBACKENDS_CHECKED", "1")
    drafter = seeded("lfm2", PROMPTS)
    serve_all(make_runner("lfm2", drafter, draft_tokens=2, layout="window"), "lfm2")


def test_an_end_token_ends_the_answer() -> None:
    stock = answer("inkling", PROMPTS[5]).tokens
    end = stock[9]
    for drafts in (0, 4):
        runner = make_runner("inkling", seeded("inkling", PROMPTS[5:6]), draft_tokens=drafts)
        request = runner.add(PROMPTS[5], NEW_TOKENS, eos_token_ids=[end])
        runner.run()
        assert request.generated == stock[: stock.index(end) + 1]
        assert request.state is RequestState.FINISHED


def test_logits_stay_on_the_device_unless_they_are_kept() -> None:
    runner = make_runner("lfm2", seeded("lfm2", PROMPTS[5:6]), draft_tokens=2, keep_logits=False)
    request = runner.add(PROMPTS[5], NEW_TOKENS)
    runner.run()
    assert request.generated == answer("lfm2", PROMPTS[5]).tokens
    assert request.logits == []


def test_a_run_reports_each_step() -> None:
    runner = make_runner("lfm2", max_batch=2)
    runner.add(PROMPTS[2], 3, arrival=1)
    reports = []
    runner.run(reports.append)
    modes = [ForwardMode.IDLE, ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.DECODE]
    assert [report.forward_mode for report in reports] == modes
    assert [report.index for report in reports] == [0, 1, 2, 3]
    assert [len(report.finished) for report in reports] == [0, 0, 0, 1]


def test_bad_requests_are_refused_and_change_nothing() -> None:
    runner = make_runner("lfm2")
    bad: list[tuple[str, Any, Any]] = [
        ("prompt: got no token", (), 3),
        ("token ids from 0 to 255; outside: 256", (3, 256), 3),
        ("token ids from 0 to 255; outside: -1", (-1,), 3),
        ("prompt: got 'Hi', wanted token ids from 0 to 255; tokenize it first", "Hi", 3),
        ("put a single token in a list", 72, 3),
        ("one request at a time", [[72, 105]], 3),
        ("one request at a time", torch.tensor([[72, 105]]), 3),
        (r"prompt: got \[1.5\]", [1.5], 3),
        ("prompt: got None", None, 3),
        ("max_new_tokens: got 0, wanted a whole number, at least 1", (1,), 0),
        ("max_new_tokens: got 2.5", (1,), 2.5),
        ("prompt \\+ max_new_tokens: got 97, wanted at most 96", (1,) * 90, 7),
    ]
    for message, prompt, length in bad:
        with pytest.raises(ArgumentError, match=message):
            runner.add(prompt, length)
    with pytest.raises(ArgumentError, match=r"eos_token_ids: got 5, .*put a single token in a list"):
        runner.add((1,), 3, eos_token_ids=5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="arrival: got 'soon', wanted a whole number"):
        runner.add((1,), 3, arrival="soon")  # type: ignore[arg-type]
    assert runner.requests == []
    assert runner.idle


@layouts
def test_a_step_that_fails_before_the_model_ran_may_be_tried_again_and_leaks_no_slot(layout: str) -> None:
    runner = make_runner("lfm2", layout=layout, max_batch=3, prefix_slots=5)
    forwards = 0

    @contextlib.contextmanager
    def guard() -> Iterator[None]:
        nonlocal forwards
        forwards += 1
        if forwards % 3 == 0:
            raise MemoryError
        yield

    runner._guard = guard
    for prompt in PROMPTS:
        runner.add(prompt, NEW_TOKENS)
    while not runner.idle:
        with contextlib.suppress(MemoryError):
            runner.step()
    for request in runner.requests:
        assert len(request.generated) == NEW_TOKENS
        assert_stock("lfm2", request)
    assert len(runner.scheduler.prefixes) > 0
    runner.close()
    assert not runner.scheduler.allocator.used


def test_prompts_may_be_arrays_and_tensors() -> None:
    runner = make_runner("lfm2")
    for prompt in (bytes(PROMPTS[4]), torch.tensor(PROMPTS[4]), torch.tensor(PROMPTS[4]).numpy()):
        assert runner.add(prompt, 3).prompt == PROMPTS[4]  # type: ignore[arg-type]


def test_only_its_own_requests_are_cancelled_and_none_is_taken_after_close() -> None:
    runner, other = make_runner("lfm2"), make_runner("lfm2")
    request = other.add(PROMPTS[2], 3)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="cancel: request: got a Request that it does not know"):
            runner.cancel(request)
        other.step()
    assert request.state is RequestState.RUNNING
    other.close()
    with pytest.raises(ArgumentError, match=r"a request after close.*make another runner"):
        other.add(PROMPTS[2], 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "reference"}, "backend: got 'reference', wanted a bound backend; hwbackends.load"),
        ({"backend": None}, "backend: got None"),
        ({"settings": {"max_batch": 3}}, "settings: got dict, wanted RunnerSettings"),
        ({"drafter": NGramDrafter}, "drafter: got <class .* wanted an instance"),
        ({"record": CudaRecorder}, r"record: got <class .* wanted a function such as CudaRecorder\(\)"),
        ({"record": True}, "record: got True"),
        ({"record": lambda launch: None}, "record: got a function that returned None"),
        ({"record": CudaRecorder()}, "record: got .* for a model on cpu, wanted a model on a GPU"),
    ],
)
def test_arguments_of_another_kind_are_refused(arguments: dict[str, Any], message: str) -> None:
    given = {"backend": hwbackends.load("reference"), "settings": RunnerSettings(max_batch=3, max_len=13), **arguments}
    with pytest.raises(ArgumentError, match=message):
        PackedRunner(tiny_model("lfm2"), **given)


class Scripted(Drafter):
    """Proposes what a function gives it."""

    def __init__(self, script: Any) -> None:
        self.propose = script


@pytest.mark.parametrize(
    ("proposed", "message"),
    [
        ([[7]], "Scripted.propose: drafts: got 1 lists, wanted a list of tokens for each of 2 requests"),
        (None, "drafts: got NoneType"),
        ([[7], [256]], "drafts of request 1: got .* from 0 to 255; outside: 256"),
        ([[7], None], "drafts of request 1: got None"),
    ],
)
def test_bad_drafts_are_refused_before_they_reach_the_model(proposed: Any, message: str) -> None:
    runner = make_runner("lfm2", Scripted(lambda requests, count: proposed), draft_tokens=2)
    for prompt in PROMPTS[:2]:
        runner.add(prompt, 5)
    with pytest.raises(ArgumentError, match=message):
        runner.run()


@pytest.mark.parametrize("drafts", [[], [1, 2]], ids=["decode", "verify"])
def test_a_drafter_may_cancel_and_add_requests_while_it_is_asked(drafts: list[int]) -> None:
    def script(requests: list[Request], count: int) -> list[list[int]]:
        if first in requests and len(first.generated) > 1:
            runner.cancel(first)
            had.append(list(first.generated))
            runner.add(PROMPTS[4], NEW_TOKENS)
        return [drafts for _ in requests]

    runner = make_runner("lfm2", Scripted(script), draft_tokens=2, max_batch=2)
    had: list[list[int]] = []
    first, *others = [runner.add(prompt, NEW_TOKENS) for prompt in PROMPTS[5:8]]
    runner.run()
    assert first.state is RequestState.CANCELLED
    assert had == [first.generated]
    for request in runner.requests:
        assert_stock("lfm2", request)
    assert len(others[-1].generated) == NEW_TOKENS
    runner.close()
    assert not runner.scheduler.allocator.used


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "heap"}, "layout: got 'heap', wanted one of window, ring, lazy"),
        ({"max_batch": 0}, "max_batch: got 0, wanted a whole number, at least 1"),
        ({"max_len": 1}, "max_len"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"draft_tokens": -1}, "draft_tokens"),
        ({"prefix_slots": 1.5}, "prefix_slots: got 1.5"),
        ({"max_batch": True}, "max_batch: got True"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        RunnerSettings(**change)


def test_drafts_come_from_n_grams_unless_a_drafter_is_given() -> None:
    assert isinstance(make_runner("lfm2", draft_tokens=2).drafter, NGramDrafter)
    assert make_runner("lfm2", NGramDrafter()).drafter is None, "without drafts nobody drafts"


def test_a_length_beyond_the_models_positions_is_refused() -> None:
    model = tiny_model("lfm2", max_position_embeddings=64)
    with pytest.raises(UnsupportedError, match="max_len: got 65, wanted at most 64"):
        PackedRunner(model, hwbackends.load("reference"), RunnerSettings(max_len=65))


@models
def test_eager_attention_gives_the_stock_tokens(name: str) -> None:
    model = tiny_model(name, seed=3)
    model.set_attn_implementation("eager")
    runner = make_runner(name, seeded(name, PROMPTS), model=model, draft_tokens=2, layout="ring")
    serve_all(runner, name)


def test_attention_without_masks_is_refused() -> None:
    model = tiny_model("lfm2")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(
        UnsupportedError, match="attn_implementation: got 'flash_attention_2', wanted one of sdpa, eager"
    ):
        PackedRunner(model, hwbackends.load("reference"))


def test_a_batch_beyond_the_graph_limits_is_refused() -> None:
    runner = make_runner("lfm2", max_batch=3)
    with pytest.raises(GraphLimitError, match="max_batch: got 4"):
        runner.sidecar.init_graph_state(4, 4)
