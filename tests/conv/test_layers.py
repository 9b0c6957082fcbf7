"""The conv module of engines: it reads the sidecar's handle, and loads this rank's channels of a checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hwbackends
from hwbackends.conv.layers import ShortConvolution
from hwbackends.conv.state import ConvStream
from hwbackends.errors import ArgumentError, ShapeError, WidthError
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.pool import StatePool
from hwbackends.step.sidecar import ConvStateSidecar

TAPS = torch.tensor([1.0, 10.0, 100.0, 1000.0])


def sidecar_for(channels: int) -> ConvStateSidecar:
    """A sidecar over a pool of layers 3 and 7, with request row 2 on slot 5."""
    pool = StatePool([ConvStream("k", channels)], num_slots=11, width=4, layers=[3, 7], request_rows=6)
    pool.mamba_index_mapping[2] = 5
    return ConvStateSidecar(hwbackends.load("reference"), pool, max_batch=3, max_tokens=9)


def extend(sidecar: ConvStateSidecar, tokens: int) -> None:
    one = torch.tensor([2])
    batch = StepBatch(ForwardMode.EXTEND, one, 1, tokens, extend_seq_lens=one - 2 + tokens, extend_prefix_lens=one - 2)
    sidecar.init_forward_metadata(batch)


def spelling_layer(channels: int, **settings: object) -> ShortConvolution:
    layer = ShortConvolution(channels, 4, 7, "k", **settings)  # type: ignore[arg-type]
    layer.weight_loader(layer.weight, TAPS.expand(channels, 1, 4))
    return layer


def test_the_layer_runs_the_conv_of_its_own_layer_and_stream() -> None:
    sidecar = sidecar_for(channels=3)
    extend(sidecar, tokens=5)
    x = torch.arange(1.0, 6.0)[:, None].expand(5, 3)
    y = spelling_layer(3)(x, sidecar)
    assert y.tolist() == [[value] * 3 for value in (1000, 2100, 3210, 4321, 5432)]
    assert sidecar.pool.conv_state("k", 7).tensor[5, :, 0].tolist() == [3, 4, 5]
    assert not sidecar.pool.conv_state("k", 3).tensor.any()


def test_bias_activation_and_residual_reach_the_backend() -> None:
    sidecar = sidecar_for(channels=3)
    extend(sidecar, tokens=1)
    layer = ShortConvolution(3, 4, 3, "k", bias=True, activation="silu", residual=True)
    assert layer.bias is not None
    layer.weight_loader(layer.bias, torch.tensor([0.5, -1.0, 2.0]))
    y = layer(torch.ones(1, 3), sidecar)
    expected = torch.nn.functional.silu(torch.tensor([0.5, -1.0, 2.0])) + 1
    torch.testing.assert_close(y[0], expected, rtol=2**-23, atol=0)


def test_the_fused_epilogue_adds_to_the_stream_and_normalises() -> None:
    sidecar = sidecar_for(channels=3)
    batch = StepBatch(ForwardMode.DECODE, torch.tensor([2, -1]), 2, 2, seq_lens=torch.tensor([1, 0]))
    sidecar.init_forward_metadata(batch)
    stream = torch.tensor([[3.0, 4.0, 5.0], [7.0, 7.0, 7.0]])
    x = torch.tensor([[1.0, 2.0, 3.0], [9.0, 9.0, 9.0]])
    out = spelling_layer(3).forward_add_rmsnorm(x, sidecar, stream, torch.tensor([1.0, 2.0, 4.0]), eps=0.0)
    h = torch.tensor([1003.0, 2004.0, 3005.0])
    assert stream.tolist() == [h.tolist(), [7.0, 7.0, 7.0]]
    expected = h * torch.rsqrt((h * h).mean()) * torch.tensor([1.0, 2.0, 4.0])
    torch.testing.assert_close(out[0], expected, rtol=2**-22, atol=0)
    assert out[1].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("layout", ["[D, 1, W]", "[D, W]"])
@pytest.mark.parametrize("tp_size", [1, 3])
def test_the_ranks_together_hold_the_checkpoint(layout: str, tp_size: int) -> None:
    checkpoint = torch.arange(9.0 * 4).view(9, 4)
    loaded = checkpoint[:, None] if layout == "[D, 1, W]" else checkpoint
    held: list[Tensor] = []
    for rank in range(tp_size):
        layer = ShortConvolution(9, 4, 0, "k", bias=True, tp_rank=rank, tp_size=tp_size)
        for parameter, tensor in ((layer.weight, loaded), (layer.bias, checkpoint[:, 0])):
            parameter.weight_loader(parameter, tensor)  # type: ignore[union-attr]
        held.append(torch.cat([layer.weight.t(), layer.bias[:, None]], dim=1))  # type: ignore[index]
    assert torch.equal(torch.cat(held), torch.cat([checkpoint, checkpoint[:, :1]], dim=1))


def test_a_weight_of_another_shape_is_refused_and_nothing_is_copied() -> None:
    layer = spelling_layer(5)
    before = layer.weight.clone()
    for wrong in (torch.ones(4, 5), torch.ones(5, 2, 4), torch.ones(7, 4)):
        with pytest.raises(ShapeError, match="weight_loader: loaded"):
            layer.weight_loader(layer.weight, wrong)
    assert torch.equal(layer.weight, before)


def test_channels_lie_side_by_side_in_memory() -> None:
    assert spelling_layer(5).weight.t().stride() == (1, 5)


def test_bad_settings_are_named() -> None:
    with pytest.raises(WidthError, match="width: got 1"):
        ShortConvolution(6, 1, 0, "k")
    with pytest.raises(ArgumentError, match="hidden_size: got 7, wanted a multiple of tp_size 3"):
        ShortConvolution(7, 4, 0, "k", tp_size=3)
    for rank in (-1, 3):
        with pytest.raises(ArgumentError, match="tp_rank"):
            ShortConvolution(6, 4, 0, "k", tp_rank=rank, tp_size=3)


def test_its_name_says_which_state_it_reads() -> None:
    assert "layer=7, stream='k'" in repr(spelling_layer(3))
