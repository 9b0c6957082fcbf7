"""The conv hooks of a GPU backend, made for its devices' traits, so that no backend repeats their signatures."""

from __future__ import annotations

from torch import Tensor

from hwbackends.contract.hookspecs.conv import Conv, ConvAddRmsnorm
from hwbackends.conv.state import ConvState
from hwbackends.step.metadata import StepMetadata
from hwbackends.triton_ops import conv, epilogue
from hwbackends.triton_ops.traits import TraitsOf


def of_phase(hook: str, traits_of: TraitsOf) -> Conv:
    """`conv_decode`, `conv_extend`, `conv_target_verify` or `conv_draft_extend`, whose parameters are the same."""
    run = conv.run_extend if hook == "conv_extend" else conv.run

    def call(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: ConvState,
        metadata: StepMetadata,
        activation: str | None = None,
        residual: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """A conv hook over Triton kernels. See `hookspecs.conv.Conv`."""
        return run(hook, traits_of, x, weight, bias, state, metadata, activation, residual, out)

    call.__name__ = call.__qualname__ = hook
    return call


def of_epilogue(hook: str, traits_of: TraitsOf) -> ConvAddRmsnorm:
    """`fused_decode_add_rmsnorm` or `fused_target_verify_add_rmsnorm`: conv, add to the residual stream, RMSNorm."""

    def call(
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
        """The fused epilogue over Triton kernels. See `hookspecs.conv.ConvAddRmsnorm`."""
        stream = (residual_stream, norm_weight, eps)
        return epilogue.run(hook, traits_of, x, weight, bias, state, metadata, *stream, activation, residual, out)

    call.__name__ = call.__qualname__ = hook
    return call
