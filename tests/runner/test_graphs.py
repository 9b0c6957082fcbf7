"""Whole decode and verify forwards are replays of recorded graphs, which give the stock tokens and touch nothing else:
with the recorder of torch ops on a CPU, with CUDA graphs on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hwbackends.engines.transformers.models import describe
from hwbackends.engines.transformers.tiny import tiny_model
from hwbackends.errors import ArgumentError, DeviceError, UnsupportedError
from hwbackends.runner.drafters import missing_counts
from hwbackends.runner.graphs import CudaRecorder, StepRow
from hwbackends.runner.packed import Segment, pack, pack_rows
from hwbackends.runner.pages import NOTHING, SCRATCH
from hwbackends.runner.serving import PackedRunner
from hwbackends.step.batch import ForwardMode
from tests.engines.transformers.scenes import (
    LOGITS_BOUND,
    NEW_TOKENS,
    PROMPTS,
    answer,
    assert_stock,
    make_runner,
    models,
    models_and_layouts,
    seeded,
    serve_all,
    stock_model,
)
from tests.gpu import GPU

places = pytest.mark.parametrize(
    ("backend", "device"),
    [
        pytest.param("reference", "cpu", id="reference-cpu"),
        pytest.param("reference", "cuda", id="reference-cuda", marks=pytest.mark.cuda),
        pytest.param(GPU, "cuda", id=GPU, marks=pytest.mark.cuda),
    ],
)


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a GPU the fused attention kernels put the stock Inkling apart from itself; cuDNN rounds to 10 bits."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    with sdpa_kernel(SDPBackend.MATH):
        yield


def mixed_runner(name: str, recorded: bool = True, **choices: Any) -> PackedRunner:
    """Every third step decodes, the others verify three drafts."""
    drafter = seeded(name, PROMPTS, pause=3)
    return make_runner(name, drafter, recorded, max_batch=3, draft_tokens=3, **choices)


@models_and_layouts
@places
def test_decode_and_verify_steps_are_replays_and_give_the_stock_tokens(
    name: str, layout: str, backend: str, device: str
) -> None:
    runner = mixed_runner(name, layout=layout, backend=backend, device=device)
    before = runner.addresses()
    serve_all(runner, name)
    modes, graphs = runner.counters.by_mode, runner.graphs.counters
    assert graphs.replayed == {"decode": modes["decode"], "target_verify": modes["target_verify"]}
    assert not graphs.eager
    assert runner.counters.model_calls == modes["extend"], "only prompts run the model from Python"
    assert runner.resolutions == sum(modes.values())
    assert runner.addresses() == before
    assert missing_counts(runner.requests, 3) == []


@models
@places
def test_replays_and_eager_steps_give_the_same_bits(name: str, backend: str, device: str) -> None:
    answers = []
    for recorded in (False, True):
        runner = mixed_runner(name, recorded, layout="ring", backend=backend, device=device)
        serve_all(runner, name)
        answers.append([(request.generated, torch.stack(request.logits)) for request in runner.requests])
    for (eager_tokens, eager), (tokens, replayed) in zip(*answers, strict=True):
        assert eager_tokens == tokens
        assert torch.equal(eager, replayed)


def live_bytes(runner: PackedRunner) -> dict[str, torch.Tensor]:
    """The keys and values of every page that may be given out, and the conv state of every slot."""
    first = runner.store.page_size
    stores = {f"{part}{i}": t[first:] for part in ("keys", "values") for i, t in getattr(runner.store, part).items()}
    pool = runner.pool
    convs = {
        f"{stream}{layer}": pool.conv_state(stream, layer).tensor
        for layer in runner.spec.conv_layers
        for stream in {runner.spec.stream_names[key] for key in runner.spec.stream_names if key[0] == layer}
    }
    return {**stores, **convs}


def bytes_of(runner: PackedRunner) -> dict[str, torch.Tensor]:
    """Copies of `live_bytes`."""
    return {name: tensor.clone() for name, tensor in live_bytes(runner).items()}


@models_and_layouts
@places
def test_recording_and_padded_rows_write_nothing(name: str, layout: str, backend: str, device: str) -> None:
    runner = mixed_runner(name, layout=layout, backend=backend, device=device)
    before = bytes_of(runner)
    assert not any(state.any() for state in before.values())
    runner.graphs.run(ForwardMode.DECODE, [])
    runner.graphs.run(ForwardMode.TARGET_VERIFY, [])
    runner.pool.mamba_index_mapping[2] = 3
    runner.graphs.run(ForwardMode.DECODE, [StepRow(2, 4, 1, [65], [5])])
    after = bytes_of(runner)
    place = 4 * runner.store.page_size + 4
    for key, tensor in after.items():
        outside = torch.ones_like(tensor, dtype=torch.bool)
        if key.startswith(("keys", "values")):
            outside[place] = False
        else:
            outside[3] = False
        assert torch.equal(tensor[outside], before[key][outside]), key
        assert tensor[~outside].any(), key


@models_and_layouts
@places
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "eager"])
def test_nan_left_behind_by_others_reaches_nobody(
    name: str, layout: str, backend: str, device: str, recorded: bool
) -> None:
    """Keys, values and conv state of earlier requests, of padded tokens and of rejected drafts: 0 times NaN is NaN."""
    runner = mixed_runner(name, recorded, layout=layout, backend=backend, device=device, prefix_slots=0)
    for state in live_bytes(runner).values():
        state.fill_(torch.nan)
    for store in (*runner.store.keys.values(), *runner.store.values.values()):
        store[SCRATCH] = torch.nan
    runner.graphs.run(ForwardMode.DECODE, [])
    serve_all(runner, name, PROMPTS[:4])
    assert not any(store[NOTHING].any() for store in (*runner.store.keys.values(), *runner.store.values.values()))


@models_and_layouts
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "eager"])
def test_a_request_that_overflows_spoils_itself_alone(name: str, layout: str, recorded: bool) -> None:
    """One token of the vocabulary gives NaN. Those that share its steps have the stock tokens, those after it too, and
    no prefix of it is kept."""
    model = tiny_model(name, seed=3)
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = torch.nan
    runner = make_runner(name, None, recorded, model=model, layout=layout, max_batch=3, prefix_slots=5)
    lost = runner.add((7, *PROMPTS[8]), 9)
    beside = [runner.add(PROMPTS[index], NEW_TOKENS) for index in (5, 4)]
    runner.run()
    assert torch.stack(lost.logits).isnan().all()
    for prompt in (PROMPTS[5], PROMPTS[8], PROMPTS[5]):
        beside.append(runner.add(prompt, NEW_TOKENS))
        runner.run()
    for request in beside:
        assert 7 not in request.tokens
        assert len(request.generated) == NEW_TOKENS
        assert_stock(name, request)
    assert len(runner.scheduler.prefixes) > 0
    assert not any(7 in tokens for tokens in runner.scheduler.prefixes._entries)
    runner.close()
    assert not runner.scheduler.allocator.used


def spoil(runner: PackedRunner) -> None:
    """Live rows in the static inputs, garbage in the metadata, NaN in what padded tokens wrote and graphs gave."""
    graphs, metadata = runner.graphs, runner.sidecar._buffers._full
    graphs._inputs.fill_(2)
    graphs._inputs[0] = torch.arange(graphs._inputs.shape[1], device=runner.device)
    graphs._tokens.fill_(77)
    graphs._live.fill_(3)
    graphs._track_mask.fill_(True)
    for field in dataclasses.fields(metadata):
        if isinstance(tensor := getattr(metadata, field.name), torch.Tensor):
            tensor.fill_(1)
    for store in (*runner.store.keys.values(), *runner.store.values.values()):
        store[SCRATCH] = torch.nan
    for bucket in graphs._buckets.values():
        if bucket.output is not None:
            bucket.output.logits.fill_(torch.nan)
            bucket.output.tokens.fill_(-1)


@models_and_layouts
@places
def test_nothing_stale_in_static_buffers_reaches_a_live_row(name: str, layout: str, backend: str, device: str) -> None:
    runner = mixed_runner(name, layout=layout, backend=backend, device=device)
    for index, prompt in enumerate(PROMPTS[:7]):
        runner.add(prompt, NEW_TOKENS, arrival=3 * index)
    while not runner.idle:
        spoil(runner)
        runner.step()
    for request in runner.requests:
        assert len(request.generated) == NEW_TOKENS
        assert_stock(name, request)


@models
def test_a_request_alone_and_among_others_has_the_same_logits(name: str) -> None:
    """In the bucket of one, and in that of five beside requests of other lengths."""
    runner = make_runner(name, seeded(name, PROMPTS), draft_tokens=2, max_batch=5, layout="ring", recorded=True)
    requests = [runner.add(prompt, NEW_TOKENS) for prompt in PROMPTS[3:8]]
    while any(request.prefilling for request in requests):
        runner.step()
    tokens = [request.span(request.computed, request.computed + 1) * 3 for request in requests]
    for request in requests:
        runner.scheduler.reach(request, request.computed + 3)
    rows = [StepRow(r.row, r.computed, r.kept_tokens, t, r.pages) for r, t in zip(requests, tokens, strict=True)]
    together = runner.graphs.run(ForwardMode.TARGET_VERIFY, rows).logits.clone().view(5, 3, -1)
    for index, row in enumerate(rows):
        alone = runner.graphs.run(ForwardMode.TARGET_VERIFY, [row])
        assert torch.allclose(alone.logits, together[index], rtol=0, atol=LOGITS_BOUND)
        assert torch.equal(alone.tokens, together[index].argmax(-1))


@models
def test_rows_are_packed_as_segments_are(name: str) -> None:
    """Masks, positions and places of a step out of device tensors, against those that the host lays out."""
    spec, size = describe(stock_model(name)), 16
    rows, computed, tokens = [4, 0, -1], [61, 0, 0], [[7, 8, 9], [5, 6, 7], [1, 1, 1]]
    tables = [[3, 9, 1, 6], [2, 0, 0, 0], [0, 0, 0, 0]]
    given = (torch.tensor(part) for part in (rows, computed, tokens, tables))
    packed = pack_rows(*given, spec, size, varlen=False)
    segments = [Segment(tables[i], computed[i], tokens[i]) for i in range(2)]
    wanted = pack(segments, spec, size, torch.device("cpu"))
    live = slice(0, 6)
    assert packed.input_ids[:, live].equal(wanted.input_ids)
    assert packed.position_ids[:, live].equal(wanted.position_ids)
    assert packed.kv_write[live].equal(wanted.kv_write)
    assert packed.kv_write[6:].eq(SCRATCH).all()
    assert packed.query_offset[live].equal(wanted.query_offset)
    [together] = packed.groups
    read = together.read.view(3, 64)
    assert read[2].eq(NOTHING).all(), "padded requests read nothing"
    assert len(wanted.groups) == 2, "64 places and 3 do not make one batch"
    for row, group in enumerate(wanted.groups):
        assert read[row, : group.length].equal(group.read)
        assert read[row, group.length :].eq(NOTHING).all(), "what holds nothing of a request is not even read"
        for window, mask in group.masks.items():
            ours = together.masks[window][row : row + 1]
            assert ours[..., : group.length].equal(mask)
            assert not ours[..., group.length :].any()


@pytest.mark.parametrize(
    ("mode", "rows", "message"),
    [
        ("extend", [StepRow(0, 1, 1, [3], [1])], r"mode: got extend, wanted one of \['decode'\]; capture\(\) first"),
        ("target_verify", [StepRow(0, 1, 1, [3], [1])], "mode: got target_verify"),
        ("decode", [StepRow(row, 1, 1, [3], [1]) for row in range(4)], "rows: got 4 requests, wanted at most 3"),
        (
            "decode",
            [StepRow(1, 1, 1, [3], [1]), StepRow(1, 5, 1, [3], [1])],
            "rows: got .* wanted each request row once",
        ),
        ("decode", [StepRow(3, 1, 1, [3], [1])], "row: got 3, wanted a request row from 0 to 2"),
        ("decode", [StepRow(0, 1, 1, [3, 5], [1])], "tokens: got 2 of row 0, wanted 1 in a decode step"),
        ("decode", [StepRow(0, 13, 1, [3], [1])], "computed: got 13, wanted from 0 to 12: a row holds 13 tokens"),
        ("decode", [StepRow(0, 9, 1, [3], [])], "pages: got 0 of row 0, wanted pages for 10 tokens"),
    ],
)
def test_rows_that_would_touch_those_of_others_are_refused(mode: str, rows: list[StepRow], message: str) -> None:
    runner = make_runner("lfm2", max_batch=3, max_len=13)
    before = bytes_of(runner)
    with pytest.raises(ArgumentError, match=message):
        runner.graphs.run(ForwardMode(mode), rows)
    after = bytes_of(runner)
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_cuda_graphs_are_refused_by_name_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"CudaRecorder.*wanted an NVIDIA GPU; record=None"):
        CudaRecorder()(lambda: None)


def test_a_graph_cannot_record_experts_that_the_host_loops_over() -> None:
    model = tiny_model("inkling", seed=3)
    model.set_experts_implementation("eager")
    with pytest.raises(UnsupportedError, match=r"experts_implementation: got 'eager'.*batched_mm"):
        make_runner("inkling", model=model, recorded=True)
    runner = make_runner("inkling", model=model)
    request = runner.add(PROMPTS[5], 5)
    runner.run()
    assert request.generated == answer("inkling", PROMPTS[5]).tokens[:5]


@pytest.mark.parametrize("inside", ["made", "run"])
def test_a_runner_is_made_in_one_inference_mode_and_run_in_another(inside: str) -> None:
    model = tiny_model("lfm2", seed=3)
    with torch.inference_mode(inside == "made"):
        runner = mixed_runner("lfm2", model=model)
    with torch.inference_mode(inside == "run"):
        serve_all(runner, "lfm2", PROMPTS[:5])


@pytest.mark.parametrize("experts", ["batched_mm", "grouped_mm"])
def test_experts_without_a_loop_are_recorded(experts: str) -> None:
    model = tiny_model("inkling", seed=3)
    model.set_experts_implementation(experts)
    serve_all(make_runner("inkling", model=model, recorded=True, max_batch=2), "inkling", PROMPTS[2:6])


def test_where_nobody_has_a_draft_the_step_decodes() -> None:
    runner = mixed_runner("lfm2")
    runner.add(PROMPTS[5], 9)
    found = []
    runner.run(lambda report: found.append(report.forward_mode))
    generating = [mode for mode in found if mode is not ForwardMode.EXTEND]
    assert generating[:3] == [ForwardMode.TARGET_VERIFY, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY]
