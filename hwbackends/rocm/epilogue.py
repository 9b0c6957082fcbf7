"""The fused epilogue, over the launchers that GPU backends share: conv, add to the residual stream, RMSNorm."""

from __future__ import annotations

from torch import Tensor

from hwbackends.conv.state import ConvState
from hwbackends.rocm.traits import traits_of
from hwbackends.step.metadata import StepMetadata
from hwbackends.triton_ops.epilogue import run


def fused_decode_add_rmsnorm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ConvState,
    metadata: StepMetadata,
    residual_stream: Tensor,
    norm_weight: Tensor,
    eps: float,
    activation: str | None = None,
    residual: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """See `hookspecs.fused_decode_add_rmsnorm`."""
    hook, stream = "fused_decode_add_rmsnorm", (residual_stream, norm_weight, eps)
    return run(hook, traits_of, x, weight, bias, state, metadata, *stream, activation, residual, out)


def fused_target_verify_add_rmsnorm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ConvState,
    metadata: StepMetadata,
    residual_stream: Tensor,
    norm_weight: Tensor,
    eps: float,
    activation: str | None = None,
    residual: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """See `hookspecs.fused_target_verify_add_rmsnorm`."""
    hook, stream = "fused_target_verify_add_rmsnorm", (residual_stream, norm_weight, eps)
    return run(hook, traits_of, x, weight, bias, state, metadata, *stream, activation, residual, out)
