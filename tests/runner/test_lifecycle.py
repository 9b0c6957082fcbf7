"""A request's life: it is added, cancelled and waited for from any thread, a step that fails costs nobody a wrong
token, a change of the model is noticed, and nothing is kept for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hwbackends.engines.transformers.tiny import stock_answer, tiny_model
from hwbackends.errors import ArgumentError, RequestError, UnsupportedError
from hwbackends.runner.requests import Request, RequestState
from hwbackends.runner.serving import PackedRunner
from tests.engines.transformers.scenes import (
    NEW_TOKENS,
    PROMPTS,
    answer,
    assert_stock,
    make_runner,
    models,
    models_and_layouts,
    seeded,
)


def runner_of(name: str = "lfm2", **choices: Any) -> PackedRunner:
    return make_runner(name, **choices)


def in_forward(runner: PackedRunner, at: int, what: Callable[[], None]) -> Any:
    """Do something in the middle of the `at`-th forward from now."""
    left = [at]

    def hook(*_: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            what()

    return runner.model.model.layers[-1].register_forward_pre_hook(hook)


def assert_nothing_held(runner: PackedRunner) -> None:
    runner.close()
    assert not runner.scheduler.allocator.used
    assert runner.stats()["kv_pages"] == 0


@models_and_layouts
@pytest.mark.parametrize("at", [2, *(pytest.param(at, marks=pytest.mark.slow) for at in (6, 9))])
def test_a_request_that_leaves_during_a_forward_publishes_nothing(name: str, layout: str, at: int) -> None:
    runner = runner_of(name, layout=layout, max_batch=3, prefix_slots=8)
    leaving = runner.add(PROMPTS[8], NEW_TOKENS)
    beside = runner.add(PROMPTS[5], NEW_TOKENS)
    hook = in_forward(runner, at, lambda: runner.cancel(leaving))
    runner.run()
    hook.remove()
    assert leaving.state is RequestState.CANCELLED
    for prompt in (PROMPTS[8], PROMPTS[7]):
        runner.add(prompt, NEW_TOKENS)
        runner.run()
    for request in runner.requests:
        assert_stock(name, request)
    assert len(beside.generated) == NEW_TOKENS
    assert_nothing_held(runner)


@models_and_layouts
@pytest.mark.parametrize(("error", "drafts"), [(KeyboardInterrupt, 0), (torch.OutOfMemoryError, 3)])
@pytest.mark.parametrize("at", [2, 12])
def test_an_interrupted_step_repeats_exactly(
    name: str, layout: str, error: type[BaseException], drafts: int, at: int
) -> None:
    drafter = seeded(name, PROMPTS[5:9]) if drafts else None
    runner = make_runner(name, drafter, layout=layout, max_batch=3, draft_tokens=drafts)
    requests = [runner.add(prompt, NEW_TOKENS) for prompt in PROMPTS[5:9]]

    def fail() -> None:
        raise error

    hook = in_forward(runner, at, fail)
    with pytest.raises(error):
        runner.run()
    hook.remove()
    runner.run()
    for request in requests:
        assert len(request.generated) == NEW_TOKENS
        assert_stock(name, request)
    assert runner.stats()["failed_steps"] == 1
    assert runner.stats()["recomputed"] > 0
    assert_nothing_held(runner)


def test_requests_whose_steps_always_fail_fail_by_name_and_others_go_on() -> None:
    runner = runner_of()
    request = runner.add(PROMPTS[8], 9)

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    hook = runner.model.model.layers[-1].register_forward_pre_hook(fail)
    for _ in range(3):
        with pytest.raises(MemoryError):
            runner.run()
    hook.remove()
    assert request.state is RequestState.FAILED
    with pytest.raises(RequestError, match="request 0 failed after 0 tokens: MemoryError: no room; add it again"):
        request.result()
    assert runner.idle
    assert runner.add(PROMPTS[5], NEW_TOKENS).result() == answer("lfm2", PROMPTS[5]).tokens
    assert_nothing_held(runner)


def test_tokens_come_by_iterator_callback_and_streamer() -> None:
    class Streamer:
        def __init__(self) -> None:
            self.got: list[Any] = []

        def put(self, value: torch.Tensor) -> None:
            self.got.append(value.tolist())

        def end(self) -> None:
            self.got.append("end")

    want, streamer, called = answer("lfm2", PROMPTS[5]).tokens, Streamer(), []
    runner = runner_of()
    request = runner.add(
        PROMPTS[5], NEW_TOKENS, on_token=lambda who, token: called.append((who, token)), streamer=streamer
    )
    seen = []
    for token in request:
        seen.append(token)
        assert request.generated[: len(seen)] == seen
    assert seen == want == request.result() == list(request)
    assert called == [(request, token) for token in want]
    assert streamer.got == [list(PROMPTS[5]), *([token] for token in want), "end"]


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_runner_serves_threads_that_add_wait_and_cancel(drafts: int) -> None:
    name = "lfm2"
    runner = make_runner(name, draft_tokens=drafts, max_batch=3)
    results: dict[int, list[int]] = {}

    def ask(index: int) -> None:
        request = runner.add(PROMPTS[index], NEW_TOKENS)
        if index == 6:
            next(iter(request))
            runner.cancel(request)
        results[index] = request.result(timeout=300)

    with runner.start():
        threads = [threading.Thread(target=ask, args=(index,)) for index in range(2, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for index, tokens in results.items():
        want = answer(name, PROMPTS[index]).tokens
        assert tokens == want[: len(tokens)]
        assert index == 6 or len(tokens) == NEW_TOKENS
    assert len(results) == 7
    assert not runner.scheduler.allocator.used
    with pytest.raises(ArgumentError, match="after close"):
        runner.start()


def test_a_failed_step_does_not_end_the_loop_in_the_background() -> None:
    runner = runner_of()

    def fail() -> None:
        raise MemoryError

    hook = in_forward(runner, 3, fail)
    with runner.start():
        request = runner.add(PROMPTS[8], NEW_TOKENS)
        assert request.result(timeout=300) == answer("lfm2", PROMPTS[8]).tokens
    hook.remove()
    assert runner.stats()["failed_steps"] == 1


def test_waiting_ends_at_its_timeout_and_the_request_goes_on() -> None:
    runner = runner_of()
    with runner.start():
        runner.pause()
        request = runner.add(PROMPTS[5], NEW_TOKENS)
        with pytest.raises(TimeoutError, match="request 0 has not ended"):
            request.result(timeout=0.05)
        runner.resume()
        assert request.result(timeout=300) == answer("lfm2", PROMPTS[5]).tokens


def test_a_paused_runner_takes_no_step() -> None:
    runner = runner_of()
    runner.add(PROMPTS[5], 3)
    runner.pause()
    with pytest.raises(ArgumentError, match=r"a paused runner, .*call resume\(\)"):
        runner.run()
    runner.resume()
    runner.run()
    assert_stock("lfm2", runner.requests[0])


def test_a_listener_that_raises_loses_its_own_request() -> None:
    def refuse(request: Request, token: int) -> None:
        raise ValueError("full")

    runner = runner_of()
    lost, beside = runner.add(PROMPTS[8], 9, on_token=refuse), runner.add(PROMPTS[5], NEW_TOKENS)
    runner.run()
    assert lost.state is RequestState.FAILED
    with pytest.raises(RequestError, match="ValueError: full"):
        lost.result()
    assert_stock("lfm2", beside)
    assert_nothing_held(runner)


def test_a_callback_may_add_and_cancel_but_not_step() -> None:
    runner = runner_of()
    added: list[Request] = []

    def react(request: Request, token: int) -> None:
        if not added:
            added.append(runner.add(PROMPTS[4], NEW_TOKENS))
            with pytest.raises(ArgumentError, match="a step within a step"):
                runner.step()
            with pytest.raises(ArgumentError, match=r"Request\.result"):
                added[0].result()
        if len(request.generated) == 5:
            runner.cancel(request)

    request = runner.add(PROMPTS[5], NEW_TOKENS, on_token=react)
    runner.run()
    assert (request.state, len(request.generated)) == (RequestState.CANCELLED, 5)
    assert len(added[0].generated) == NEW_TOKENS
    assert_stock("lfm2", added[0])


def test_a_runner_closed_within_a_step_ends_behind_its_forward() -> None:
    runner = runner_of()
    requests = [runner.add(prompt, NEW_TOKENS) for prompt in PROMPTS[5:8]]
    hook = in_forward(runner, 4, runner.close)
    runner.run()
    hook.remove()
    assert {request.state for request in requests} == {RequestState.CANCELLED}
    assert not runner.scheduler.allocator.used


def test_ended_requests_are_not_kept_for_ever() -> None:
    runner = runner_of(keep_finished=5)
    held = [runner.add(PROMPTS[0], 1) for _ in range(20)]
    served = runner.run()
    assert [request.request_id for request in runner.requests] == [15, 16, 17, 18, 19]
    assert served[-5:] == held[-5:]
    runner.cancel(held[0])  # it has ended: nothing happens


# priorities and pages


@models_and_layouts
def test_a_higher_priority_takes_a_place_and_the_lower_one_resumes_exactly(name: str, layout: str) -> None:
    runner = runner_of(name, layout=layout, max_batch=1)
    low = runner.add(PROMPTS[8], NEW_TOKENS)
    for _ in range(12):
        runner.step()
    assert 0 < len(low.generated) < NEW_TOKENS
    high = runner.add(PROMPTS[5], NEW_TOKENS, priority=3)
    runner.step()
    assert (low.state, high.state) == (RequestState.WAITING, RequestState.RUNNING)
    runner.run()
    assert low.preempted == runner.stats()["preemptions"] == 1
    for request in (low, high):
        assert_stock(name, request)
        assert len(request.generated) == NEW_TOKENS


@models
def test_requests_give_way_where_pages_run_out_and_resume_exactly(name: str) -> None:
    runner = runner_of(name, layout="ring", max_batch=4, page_size=4, kv_tokens=100, prefix_slots=3)
    requests = [runner.add(prompt, NEW_TOKENS) for prompt in PROMPTS[5:9]]
    runner.run()
    assert runner.stats()["preemptions"] > 0
    for request in requests:
        assert len(request.generated) == NEW_TOKENS
        assert_stock(name, request)
    assert_nothing_held(runner)


def test_memory_is_taken_when_it_is_used() -> None:
    model = tiny_model("lfm2", seed=3, max_position_embeddings=2**20)
    runner = runner_of(model=model, max_len=2**20, max_batch=8)
    request = runner.add(PROMPTS[5], NEW_TOKENS)
    runner.run()
    assert_stock("lfm2", request)
    assert runner.store.pages < 32


def test_fewer_pages_than_one_request_needs_are_refused() -> None:
    with pytest.raises(ArgumentError, match="kv_tokens: got 32, wanted at least 96"):
        runner_of(kv_tokens=32)


# prefixes


def test_a_shared_prompt_is_reused_behind_long_tails_and_answers() -> None:
    """All defaults but the length; each request alone would fill every slot with snapshots of its own tail."""
    draw = torch.Generator().manual_seed(1)

    def text(count: int) -> list[int]:
        return torch.randint(1, 256, (count,), generator=draw).tolist()

    shared = text(64)
    runner = runner_of(max_len=512, chunk_size=32, keep_logits=False)
    reused = []
    for _ in range(5):
        request = runner.add(shared + text(150), 100)
        runner.run()
        reused.append(request.reused)
    assert reused == [0, 0, 64, 64, 64]
    assert runner.stats()["reused_tokens"] == 192
    assert runner.stats()["prefix_evictions"] > 0
    runner.reset_prefixes()
    request = runner.add(shared + text(9), 1)
    runner.run()
    assert request.reused == 0


@models
def test_a_shared_prompt_is_computed_once_in_one_wave(name: str) -> None:
    runner = runner_of(name, max_batch=6)
    wave = [runner.add((*PROMPTS[5][:21], 40 + index), 3) for index in range(5)]
    runner.run()
    assert [request.reused for request in wave] == [0, 21, 21, 21, 21]
    for request in wave:
        assert request.generated == stock_answer(tiny_model(name, seed=3), request.prompt, 3).tokens


# changes of the model


def spoil(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].feed_forward.w2.weight.mul_(-2)


@pytest.mark.parametrize("recorded", [False, True])
def test_new_weights_are_noticed(recorded: bool) -> None:
    model = tiny_model("lfm2", seed=3)
    runner = make_runner("lfm2", model=model, recorded=recorded)
    assert runner.add(PROMPTS[8], 9).result() == answer("lfm2", PROMPTS[8]).tokens[:9]
    spoil(model)
    changed = tiny_model("lfm2", seed=3)
    spoil(changed)
    assert runner.add(PROMPTS[8], 9).result() == stock_answer(changed, PROMPTS[8], 9).tokens
    assert runner.stats()["model_changes"] == 1
    model.load_state_dict(tiny_model("lfm2", seed=3).state_dict(), assign=True)
    assert runner.add(PROMPTS[8], 9).result() == answer("lfm2", PROMPTS[8]).tokens[:9]


@models
@pytest.mark.parametrize("recorded", [False, True])
def test_another_attention_implementation_is_noticed(name: str, recorded: bool) -> None:
    model = tiny_model(name, seed=3)
    runner = make_runner(name, model=model, recorded=recorded, max_batch=2)
    runner.add(PROMPTS[8], 4)
    runner.run()
    model.set_attn_implementation("eager")
    request = runner.add(PROMPTS[8], NEW_TOKENS)
    runner.run()
    assert_stock(name, request)
    model.config._attn_implementation = "flash_attention_2"
    runner.add(PROMPTS[8], 4)
    with pytest.raises(UnsupportedError, match="attn_implementation: got 'flash_attention_2'"):
        runner.run()


def test_a_model_that_moved_to_another_dtype_is_refused() -> None:
    model = tiny_model("lfm2", seed=3)
    runner = runner_of(model=model)
    model.to(torch.bfloat16)
    runner.add(PROMPTS[5], 3)
    with pytest.raises(ArgumentError, match=r"got torch.bfloat16 on cpu, wanted torch.float32 on cpu"):
        runner.run()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it
def test_adapters_are_noticed() -> None:
    peft = pytest.importorskip("peft")

    def lora() -> Any:
        torch.manual_seed(5)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(tiny_model("lfm2", seed=3), config).eval()

    ours, stock = lora(), lora()
    with pytest.raises(UnsupportedError, match=r"pass model.get_base_model\(\)"):
        runner_of(model=ours)
    runner = runner_of(model=ours.get_base_model())
    with ours.disable_adapter():
        assert runner.add(PROMPTS[8], 9).result() == answer("lfm2", PROMPTS[8]).tokens[:9]
    with_adapter = stock_answer(stock, PROMPTS[8], 9).tokens
    assert with_adapter != answer("lfm2", PROMPTS[8]).tokens[:9]
    assert runner.add(PROMPTS[8], 9).result() == with_adapter


def test_autocast_is_refused_by_name() -> None:
    runner = runner_of()
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(UnsupportedError, match=r"autocast: got torch.bfloat16.*load the model with dtype"),
    ):
        runner.add(PROMPTS[5], 3)
