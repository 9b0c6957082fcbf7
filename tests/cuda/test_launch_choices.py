"""Launch sizes, strides and addresses change no bit: block and warp choices that the launcher does not make, repeats,
strided inputs, transposed pools, and offsets past 2**31 and 2**32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hwbackends.conv.state import ConvState
from hwbackends.registry.loading import load
from hwbackends.step.batch import ForwardMode
from hwbackends.step.pool import StatePool
from tests.backend.lab import same_bits
from tests.cuda.steps import PHASE, Case, Setting
from tests.gpu import GPU

pytestmark = pytest.mark.cuda
MODES = list(PHASE)


def choose(monkeypatch: pytest.MonkeyPatch, block: int, warps: int, tile: int) -> None:
    from hwbackends.cuda import tuning
    from hwbackends.rocm.tuning import Tuning

    place: Any = Tuning if GPU == "rocm" else tuning
    # the arguments are the same but for a self
    monkeypatch.setattr(place, "decode", lambda *sizes: (block, warps))
    monkeypatch.setattr(place, "draft", lambda *sizes: (block, warps))
    monkeypatch.setattr(place, "extend", lambda *sizes: (block, tile, warps))


@pytest.mark.parametrize("layout", ["window", "ring", "lazy"])
@pytest.mark.parametrize("mode", MODES)
def test_a_hundred_repeats_with_unusual_blocks_equal_the_reference(
    layout: str, mode: ForwardMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(
        layout=layout, dim=1037, dtype=torch.float16, state_dtype=torch.float32, residual=True, eighths=True
    )
    hooks, wanted = load(GPU, "cuda"), Case(setting, "cuda")
    wanted.run(load("reference", "cuda"), mode)
    for block, warps, tile in ((32, 1, 1), (64, 8, 2), (128, 2, 16), (512, 8, 3), (2048, 16, 5), (256, 4, 7)):
        choose(monkeypatch, block, warps, tile)
        first = None
        for repeat in range(17):
            case = Case(setting, "cuda")
            _, y = case.run(hooks, mode)
            assert same_bits(case.state.tensor, wanted.state.tensor), (block, warps, tile, repeat)
            first = y if first is None else first
            assert torch.equal(y, first)


@pytest.mark.parametrize("mode", MODES)
def test_strides_of_x_weight_and_out_change_no_bit(mode: ForwardMode) -> None:
    setting = Setting(layout="ring", dim=72, dtype=torch.bfloat16, residual=True)
    hooks = load(GPU, "cuda")
    plain, strided, scattered = (Case(setting, "cuda") for _ in range(3))
    _, y = plain.run(hooks, mode)
    x = plain.inputs(plain.batch(mode))
    wide = torch.full((len(x), 3 * setting.dim + 1), float("nan"), dtype=x.dtype, device="cuda")
    wide[:, setting.dim + 1 : 2 * setting.dim + 1] = x
    out = torch.full((len(x), 2 * setting.dim), float("nan"), dtype=x.dtype, device="cuda")[:, : setting.dim]
    strided.weight = strided.weight.contiguous()
    _, z = strided.run(hooks, mode, x=wide[:, setting.dim + 1 : 2 * setting.dim + 1], out=out)
    assert torch.equal(y, z)
    assert same_bits(plain.state.tensor, strided.state.tensor)
    _, z = scattered.run(hooks, mode, x=x.t().contiguous().t())
    assert torch.equal(y, z)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["window", "ring", "lazy"])
def test_a_pool_with_channels_outside_rows_gives_the_same_bits(layout: str, mode: ForwardMode) -> None:
    setting = Setting(layout=layout, dim=136, dtype=torch.bfloat16)
    plain, turned = Case(setting, "cuda"), Case(setting, "cuda")
    tensor = turned.pool.conv_streams["k"].transpose(-1, -2).contiguous().transpose(-1, -2)
    drafts = {"k": turned.pool.draft_rows["k"]} if turned.pool.draft_rows else None
    turned.pool = StatePool.wrap(
        {"k": tensor},
        width=setting.width,
        mamba_index_mapping=turned.pool.mamba_index_mapping,
        layout=layout,  # type: ignore[arg-type]
        draft_token_num=turned.pool.draft_token_num,
        draft_rows=drafts,
        track_interval=turned.pool.track_interval,
    )
    turned.state = turned.pool.conv_state("k", 0)
    hooks = load(GPU, "cuda")
    _, y = plain.run(hooks, mode)
    _, z = turned.run(hooks, mode)
    assert torch.equal(y, z)
    assert same_bits(plain.state.tensor, turned.state.tensor)


@pytest.mark.parametrize("stride", [2**31 + 64, 2**32 + 64])
@pytest.mark.parametrize("what", ["slots", "tokens"])
def test_offsets_past_32_bits_are_exact(stride: int, what: str) -> None:
    if torch.cuda.mem_get_info()[0] < 8 * stride:
        pytest.skip(f"needs {8 * stride >> 30} GiB of free device memory")
    hooks = load(GPU, "cuda")
    taps = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.bfloat16, device="cuda").expand(8, 4)
    pool = StatePool(
        [_stream()], num_slots=3, width=4, device="cuda", request_rows=3, layout="window", draft_token_num=1
    )
    pool.mamba_index_mapping.copy_(torch.tensor([0, 1, 2]))
    state, x = pool.conv_state("k", 0), torch.ones(3, 8, dtype=torch.bfloat16, device="cuda")
    memory = torch.zeros(2 * stride + 4096, dtype=torch.bfloat16, device="cuda")
    if what == "slots":
        state = ConvState(memory.as_strided((3, 3, 8), (stride, 8, 1)), "window", 4)
    else:
        x = memory.as_strided((3, 8), (stride, 1))
        x.fill_(1)
    state.tensor[2] = 1
    from hwbackends.step.batch import StepBatch
    from hwbackends.step.metadata import MetadataBuffers, MetadataLimits

    view = MetadataBuffers(MetadataLimits(3, 3), "cuda", torch.int64).view(ForwardMode.DECODE, 3, 3)
    rows = torch.tensor([2, -1, 1], device="cuda")
    batch = StepBatch(ForwardMode.DECODE, rows, 3, 3, computed_lens=torch.full((3,), 3, device="cuda"))
    hooks.prepare_decode_metadata(batch, pool, view)
    y = hooks.conv_decode(x, taps, None, state, view)
    assert y[:, 0].tolist() == [15.0, 0.0, 8.0]
    assert state.tensor[1, :, 0].tolist() == [0, 0, 1]
    extended = MetadataBuffers(MetadataLimits(3, 3), "cuda", torch.int64).view(ForwardMode.EXTEND, 2, 3)
    lengths = torch.tensor([1, 2], device="cuda")
    batch = StepBatch(
        ForwardMode.EXTEND, torch.tensor([2, 1], device="cuda"), 2, 3, extend_seq_lens=lengths,
        extend_prefix_lens=torch.tensor([3, 3], device="cuda"),
    )  # fmt: skip
    hooks.prepare_extend_metadata(batch, pool, extended)
    y = hooks.conv_extend(x, taps, None, state, extended)
    assert y[:, 0].tolist() == [15.0, 12.0, 14.0]


def _stream() -> Any:
    from hwbackends.conv.state import ConvStream

    return ConvStream("k", 8, torch.bfloat16)
