"""The fused epilogue in pure torch: conv, then add to the residual stream, then RMSNorm, composed from its parts."""

from __future__ import annotations

import torch
from torch import Tensor

from hwbackends.conv.state import ConvState
from hwbackends.step import checks
from hwbackends.step.metadata import StepMetadata
from hwbackends.torch_ops.conv import decode, target_verify
from hwbackends.torch_ops.rows import new_output, within, writing


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
    call = (x, weight, bias, state, metadata)
    checks.fused("fused_decode_add_rmsnorm", *call, residual_stream, norm_weight, eps, activation, out)
    with writing(state.tensor, state.draft_rows, residual_stream, out):
        y = decode(*call, activation, residual, None)
        return _add_rmsnorm(y, state, metadata, 1, residual_stream, norm_weight, eps, out)


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
    call = (x, weight, bias, state, metadata)
    checks.fused("fused_target_verify_add_rmsnorm", *call, residual_stream, norm_weight, eps, activation, out)
    with writing(state.tensor, state.draft_rows, residual_stream, out):
        y = target_verify(*call, activation, residual, None)
        return _add_rmsnorm(y, state, metadata, metadata.draft_token_num, residual_stream, norm_weight, eps, out)


def _add_rmsnorm(
    y: Tensor,
    state: ConvState,
    metadata: StepMetadata,
    tokens: int,
    residual_stream: Tensor,
    norm_weight: Tensor,
    eps: float,
    out: Tensor | None,
) -> Tensor:
    """h = residual_stream + y; residual_stream <- h; out = h * rsqrt(mean(h * h) + eps) * norm_weight.

    h stays in float32 (float64 for float64) until each of the two stores.
    """
    compute = torch.float64 if y.dtype == torch.float64 else torch.float32
    live = within(metadata.cache_indices, state.slots).repeat_interleave(tokens, output_size=metadata.num_reqs * tokens)
    live = torch.nn.functional.pad(live, (0, y.shape[0] - len(live)), value=False)[:, None]
    h = residual_stream.to(compute) + y.to(compute)
    scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    normed = h * scale * norm_weight.to(compute)
    residual_stream.copy_(torch.where(live, h.to(y.dtype), residual_stream))
    out = new_output(y) if out is None else out
    out.copy_(torch.where(live, normed, torch.zeros((), dtype=compute, device=y.device)))
    return out
