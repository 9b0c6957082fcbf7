"""The fused epilogue over its Triton kernel: conv, add to the residual stream, RMSNorm, one launch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hwbackends.conv.state import ConvState
from hwbackends.errors import UnsupportedError
from hwbackends.step import checks
from hwbackends.step.metadata import StepMetadata
from hwbackends.triton_ops.conv import (
    NOT_ARGUMENTS,
    Call,
    check_device,
    conv_constants,
    draft_constants,
    draft_row_count,
    launch_conv,
    positions,
    span,
    spanned,
)
from hwbackends.triton_ops.kernels_epilogue import fused_add_rmsnorm_kernel
from hwbackends.triton_ops.launch import Launch, capturing, cdiv, ordered, power_of_two
from hwbackends.triton_ops.traits import TraitsOf


def run(
    hook: str,
    traits_of: TraitsOf,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ConvState,
    metadata: StepMetadata,
    residual_stream: Tensor,
    norm_weight: Tensor,
    eps: float,
    activation: str | None,
    residual: bool,
    out: Tensor | None,
) -> Tensor:
    """A fused hook by its name. See `hookspecs`."""
    given = (residual_stream, norm_weight, eps)
    try:
        plan = metadata.cache.get((state, hook))
        ready = type(plan) is FusedPlan and plan.fits(x, weight, bias, activation, residual, out, *given)
    except NOT_ARGUMENTS:
        checks.fused(hook, x, weight, bias, state, metadata, *given, activation, out)
        raise
    if not ready:
        call = (x, weight, bias, activation, residual, out, state)
        plan = _plan(hook, traits_of, call, metadata, *given)
    return plan(x, weight, bias, out, residual_stream, norm_weight)  # type: ignore[operator,no-any-return]


class FusedPlan(Call):
    """One fused call made ready; see `conv.ConvPlan`."""

    __slots__ = ("_beside", "_copy", "_launch", "_norm", "_span", "_stream", "_stream_span")

    def __init__(
        self,
        call: tuple[Any, ...],
        launch: Launch,
        where: tuple[int, int],
        residual_stream: Tensor,
        norm: tuple[object, ...],
        norm_span: tuple[int, int],
    ) -> None:
        super().__init__(*call)
        self._launch, self._span = launch, where
        self._stream, self._norm = residual_stream.stride(), norm
        self._stream_span = spanned(residual_stream)
        self._beside = residual_stream.data_ptr() - call[0].data_ptr()
        self.read.append(norm_span)
        self._copy = call[0].shape[1] > 1 and call[0].stride(1) != 1

    def fits(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        residual: bool,
        out: Tensor | None,
        residual_stream: Tensor,
        norm_weight: Tensor,
        eps: float,
    ) -> bool:
        """Whether a call differs from the planned one in nothing but the addresses of x, out and residual stream."""
        return (
            self.serves(x, weight, bias, activation, residual, out)
            and residual_stream.stride() == self._stream
            and residual_stream.shape == self.shape
            and residual_stream.dtype is self.dtype
            and residual_stream.get_device() == self.device
            and self._apart(residual_stream.data_ptr(), x, out)
            and (norm_weight.data_ptr(), norm_weight.dtype, norm_weight.stride(), eps) == self._norm
        )

    def _apart(self, at: int, x: Tensor, out: Tensor | None) -> bool:
        """Whether the residual stream surely has memory of its own."""
        reach = self._stream_span
        return (
            self.alone(at, reach)
            and (at - x.data_ptr() == self._beside or not -reach < at - x.data_ptr() < self.x_span)
            and (out is None or not -reach < at - out.data_ptr() < self.out_span)
        )

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor | None,
        residual_stream: Tensor,
        norm_weight: Tensor,
    ) -> Tensor:
        """Launch; returns out, allocated if None."""
        if self._copy:
            x = x.contiguous()
        if out is None:
            out = self.output(x)
        tensors = [x, weight, weight if bias is None else bias, out, residual_stream, norm_weight]
        if capturing():
            launch_conv(self._launch, tensors, self._span, self.shape[0])
        else:
            self._launch(tensors)
        return out


def _plan(
    hook: str,
    traits_of: TraitsOf,
    call: tuple[Any, ...],
    metadata: StepMetadata,
    residual_stream: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> FusedPlan:
    x, weight, bias, activation, residual, out, state = call
    checks.fused(hook, x, weight, bias, state, metadata, residual_stream, norm_weight, eps, activation, out)
    traits = traits_of(x.device)
    check_device(hook, "x", x.device, traits)
    if state.dim > traits.epilogue_channels:
        hint = "compose conv, add and RMSNorm"
        raise UnsupportedError(hook, "x", f"{state.dim} channels", f"at most {traits.epilogue_channels}", hint)
    decode = hook == "fused_decode_add_rmsnorm"
    options = conv_constants(x, weight, bias, state, activation, residual, out) | draft_constants(state, metadata)
    tokens = options["N"] if decode or state.layout == "lazy" else 1
    options |= {"DECODE": decode, "TRACK": decode and metadata.tracks, "PDL": False, "TOKENS": tokens}
    options |= {"SH": residual_stream.stride(0), "BLOCK_D": power_of_two(state.dim)}
    grid, warps = cdiv(x.shape[0], tokens), traits.tuning.epilogue(x.shape[0], state.dim, decode)
    scalars = [float(eps), metadata.num_reqs, x.shape[0], state.slots, draft_row_count(state)]
    fixed = (
        state.tensor, state.tensor if state.draft_rows is None else state.draft_rows, metadata.cache_indices,
        positions(state, metadata), metadata.draft_indices, metadata.mamba_track_indices,
    )  # fmt: skip
    constants = ordered(fused_add_rmsnorm_kernel, options)
    launch = Launch(traits, fused_add_rmsnorm_kernel, grid, scalars, constants, warps, fixed)
    if decode and traits.fetch_ahead is not None:
        traits.fetch_ahead(launch, fused_add_rmsnorm_kernel, state, weight, metadata, options)
    norm = (norm_weight.data_ptr(), norm_weight.dtype, norm_weight.stride(), eps)
    plan = FusedPlan(call, launch, span(state), residual_stream, norm, (norm_weight.data_ptr(), spanned(norm_weight)))
    metadata.cache[state, hook] = plan
    return plan
