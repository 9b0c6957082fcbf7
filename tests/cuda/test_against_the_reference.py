"""Every phase, layout, width and dtype on the GPU: metadata and state bit for bit as the reference writes them,
outputs within the oracle's bound, and the same bits whichever phase computes a token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hwbackends.conv.state import ConvStream
from hwbackends.registry.loading import load
from hwbackends.step.batch import ForwardMode
from hwbackends.step.pool import StatePool
from tests.backend.lab import same_bits
from tests.cuda.steps import DRAFTS, PHASE, Case, Setting
from tests.gpu import GPU

pytestmark = pytest.mark.cuda
LAYOUTS = ["window", "ring", "lazy"]
MODES = list(PHASE)
HALF = [torch.float16, torch.bfloat16]


def compare(setting: Setting, mode: ForwardMode) -> None:
    ours, theirs = Case(setting, "cuda"), Case(setting, "cuda")
    exact, bound = ours.allowed(mode)
    found, y = ours.run(load(GPU, "cuda"), mode, out=torch.full_like(ours.inputs(ours.batch(mode)), float("nan")))
    wanted, z = theirs.run(load("reference", "cuda"), mode)
    for name, tensor in found.tensors().items():
        if name == "seq_idx" and mode is not ForwardMode.EXTEND:
            continue
        if name == "num_accept_tokens" and mode is not ForwardMode.DRAFT_EXTEND:
            continue
        assert torch.equal(tensor, getattr(wanted, name)), name
    assert same_bits(ours.state.tensor, theirs.state.tensor)
    if ours.state.draft_rows is not None and theirs.state.draft_rows is not None:
        assert same_bits(ours.state.draft_rows, theirs.state.draft_rows)
    error = np.abs(y.double().cpu().numpy() - exact)
    assert (error <= bound).all(), f"worst {float((error - bound).max())} beyond the bound"
    assert torch.equal(y == 0, z == 0) or bool((exact != 0).any())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [2, 3, 4, 5, 6, 7, 8])
def test_every_width_agrees_with_reference_and_oracle(layout: str, width: int, mode: ForwardMode) -> None:
    compare(Setting(layout=layout, width=width, dim=37, bias=True, residual=True), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_every_dtype_agrees_with_reference_and_oracle(
    layout: str, dtype: torch.dtype, activation: str | None, mode: ForwardMode
) -> None:
    compare(Setting(layout=layout, dim=136, dtype=dtype, activation=activation, residual=True, bias=True), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "pair", [(a, b) for a in (*HALF, torch.float32) for b in (*HALF, torch.float32) if a != b], ids=str
)
def test_every_pair_of_dtypes_agrees_with_the_reference(
    layout: str, pair: tuple[torch.dtype, torch.dtype], mode: ForwardMode
) -> None:
    compare(Setting(layout=layout, dim=40, dtype=pair[0], state_dtype=pair[1], eighths=True), mode)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [1, 7, 4096])
def test_odd_and_large_widths_of_channels(layout: str, dim: int) -> None:
    for mode in MODES:
        compare(Setting(layout=layout, dim=dim, dtype=torch.bfloat16, residual=True), mode)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_token_has_the_same_bits_in_every_phase(layout: str, activation: str | None, dtype: torch.dtype) -> None:
    setting = Setting(layout=layout, dim=264, dtype=dtype, activation=activation, residual=True, bias=True, track=False)
    hooks = load(GPU, "cuda")
    verified = Case(setting, "cuda")
    _, drafts = verified.run(hooks, ForwardMode.TARGET_VERIFY)
    drafts = drafts.view(setting.requests, DRAFTS, -1)
    plain = Case(setting, "cuda")
    x = plain.inputs(plain.batch(ForwardMode.TARGET_VERIFY)).view(setting.requests, DRAFTS, -1)
    for token in range(DRAFTS):
        batch = plain.batch(ForwardMode.DECODE)
        batch.computed_lens = plain.lengths.to("cuda") + token
        if layout == "lazy" and token:
            batch.num_accepted_tokens = torch.ones_like(batch.num_accepted_tokens)
        view = plain.prepare(hooks, batch)
        given = (setting.activation, setting.residual)
        y = hooks.conv_decode(x[:, token].contiguous(), plain.weight, plain.bias, plain.state, view, *given)
        assert torch.equal(y, drafts[:, token]), token
    once = Case(setting, "cuda")
    batch = once.batch(ForwardMode.EXTEND)
    batch.extend_seq_lens = torch.full((setting.requests,), DRAFTS, device="cuda")
    batch.extend_seq_lens[3] = 0
    batch.has_initial_state = torch.ones(setting.requests, dtype=torch.bool, device="cuda")
    live = [b for b in range(setting.requests - 1) if b != 3]
    batch.num_tokens = DRAFTS * len(live)
    view = once.prepare(hooks, batch)
    packed = x[live].reshape(-1, setting.dim).contiguous()
    y = hooks.conv_extend(packed, once.weight, once.bias, once.state, view, setting.activation, setting.residual)
    assert torch.equal(y.view(len(live), DRAFTS, -1), drafts[live])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [37, 512, 4096])
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_fused_epilogue_keeps_state_and_stream_as_the_reference(
    layout: str, dim: int, mode: ForwardMode, dtype: torch.dtype
) -> None:
    setting = Setting(layout=layout, dim=dim, dtype=dtype, residual=True)
    outputs, streams, cases = [], [], []
    for backend in (GPU, "reference"):
        case, hooks = Case(setting, "cuda"), load(backend, "cuda")
        batch = case.batch(mode)
        view = case.prepare(hooks, batch)
        x = case.inputs(batch)
        stream = case.noise[-batch.num_tokens :].to("cuda")
        gain = case.noise[0].to("cuda")
        fused = getattr(hooks, f"fused_{PHASE[mode]}_add_rmsnorm")
        outputs.append(fused(x, case.weight, None, case.state, view, stream, gain, 1e-6, None, True))
        streams.append(stream)
        cases.append(case)
    assert same_bits(cases[0].state.tensor, cases[1].state.tensor)
    eps = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-20
    # the two sums differ by float32 rounding, which may move a rounded value to its neighbour
    assert torch.allclose(streams[0].float(), streams[1].float(), rtol=eps, atol=eps)
    assert torch.allclose(outputs[0].float(), outputs[1].float(), rtol=2 * eps, atol=2 * eps)
    padded = torch.arange(len(outputs[0]), device="cuda") // batch.tokens_per_req == 3
    assert (outputs[0][padded] == 0).all()
    assert torch.equal(streams[0][padded], case.noise[-batch.num_tokens :].to("cuda")[padded])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("track", [False, True])
@pytest.mark.parametrize("ssm", [None, (3, 5)])
@pytest.mark.parametrize("translated", [False, True])
def test_commit_copy_and_clear_move_the_bits_that_the_reference_moves(
    layout: str, track: bool, ssm: tuple[int, ...] | None, translated: bool
) -> None:
    pools = []
    for backend in (GPU, "reference"):
        generator = torch.Generator().manual_seed(5)
        table = None
        if translated:
            table = torch.tensor([0, *(torch.randperm(16, generator=generator) + 1).tolist()], device="cuda")
        pool = StatePool(
            [ConvStream("k", 24, torch.bfloat16), ConvStream("v", 16, torch.bfloat16), ConvStream("m", 7)],
            num_slots=17,
            width=4,
            layers=3,
            layout=layout,  # type: ignore[arg-type]
            draft_token_num=DRAFTS,
            request_rows=11,
            device="cuda",
            ssm_shape=ssm,
            mamba_v2p_table=table,
        )
        tensors = [*pool.storages(), *pool.draft_storages()]
        tensors += (
            [] if pool.ssm_state is None or pool.intermediate_ssm is None else [pool.ssm_state, pool.intermediate_ssm]
        )
        for tensor in tensors:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        pool.mamba_index_mapping[2:9].copy_(torch.randperm(7, generator=generator) + 1)
        rows = torch.tensor([2, -1, 5, 3, 0, 8], device="cuda")
        steps = torch.tensor([0, 2, -1, 2, 1, 1], device="cuda")
        given = {}
        if track:
            given = {
                "mamba_track_indices": torch.tensor([9, 10, 11, -1, 13, 14], device="cuda"),
                "mamba_steps_to_track": torch.tensor([1, 0, 2, 0, 1, 0], device="cuda"),
                "computed_lens": torch.tensor([0, 4, 9, 2, 7, 1], device="cuda"),
            }
        hooks = load(backend, "cuda")
        for _ in range(2):
            hooks.update_mamba_state_after_mtp_verify(pool, rows, steps, **given)
        hooks.copy_slots(pool, torch.tensor([3, 0, 5], device="cuda"), torch.tensor([15, 12, -1], device="cuda"))
        hooks.clear_slots(pool, torch.tensor([6, -1, 0], device="cuda"))
        pools.append(tensors)
    for mine, theirs in zip(*pools, strict=True):
        assert same_bits(mine, theirs)
