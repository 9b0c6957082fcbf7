"""The conv hooks, over the launchers that GPU backends share."""

from __future__ import annotations

from torch import Tensor

from hwbackends.conv.state import ConvState
from hwbackends.rocm.traits import traits_of
from hwbackends.step.metadata import StepMetadata
from hwbackends.triton_ops import conv


def conv_decode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ConvState,
    metadata: StepMetadata,
    activation: str | None = None,
    residual: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """One token per request; the slot becomes win_b(1). See `hookspecs.conv_decode`."""
    return conv.run("conv_decode", traits_of, x, weight, bias, state, metadata, activation, residual, out)


def conv_extend(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ConvState,
    metadata: StepMetadata,
    activation: str | None = None,
    residual: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Packed requests of any length; the slot becomes win_b(T_b). See `hookspecs.conv_extend`."""
    return conv.run_extend("conv_extend", traits_of, x, weight, bias, state, metadata, activation, residual, out)


def conv_target_verify(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ConvState,
    metadata: StepMetadata,
    activation: str | None = None,
    residual: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """N drafts per request; the committed state stays. See `hookspecs.conv_target_verify`."""
    return conv.run("conv_target_verify", traits_of, x, weight, bias, state, metadata, activation, residual, out)


def conv_draft_extend(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ConvState,
    metadata: StepMetadata,
    activation: str | None = None,
    residual: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """N drafts per request; the slot becomes win_b(num_accept_tokens[b]). See `hookspecs.conv_draft_extend`."""
    return conv.run("conv_draft_extend", traits_of, x, weight, bias, state, metadata, activation, residual, out)
