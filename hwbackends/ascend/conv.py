"""The conv hooks in the triton tier: checks, what the kernels do not serve (passed to the torch ops), and launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hwbackends.ascend import kernels_conv, launch, variants
from hwbackends.conv.state import ConvState
from hwbackends.step import checks
from hwbackends.step.metadata import StepMetadata
from hwbackends.torch_ops import conv as torch_conv


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
    checks.conv("conv_decode", x, weight, bias, state, metadata, activation, out)
    if not _served(x, weight, bias, state, 1):
        return torch_conv.conv_decode(x, weight, bias, state, metadata, activation, residual, out)
    return _uniform("decode", 1, x, weight, bias, state, metadata, activation, residual, out)


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
    checks.conv("conv_target_verify", x, weight, bias, state, metadata, activation, out)
    tokens = metadata.draft_token_num
    if not _served(x, weight, bias, state, tokens):
        return torch_conv.conv_target_verify(x, weight, bias, state, metadata, activation, residual, out)
    return _uniform("target_verify", tokens, x, weight, bias, state, metadata, activation, residual, out)


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
    checks.conv("conv_draft_extend", x, weight, bias, state, metadata, activation, out)
    tokens = metadata.draft_token_num
    if not _served(x, weight, bias, state, tokens):
        return torch_conv.conv_draft_extend(x, weight, bias, state, metadata, activation, residual, out)
    return _uniform("draft_extend", tokens, x, weight, bias, state, metadata, activation, residual, out)


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
    checks.conv("conv_extend", x, weight, bias, state, metadata, activation, out)
    if not _served(x, weight, bias, state, 1):
        return torch_conv.conv_extend(x, weight, bias, state, metadata, activation, residual, out)
    x, bias, out = _rows(x), _rows(bias), _output(x, out)
    tiles = variants.extend_tiles(state.width)
    channels, reqs, tokens = launch.blocks(state.dim, tiles["BLOCK"]), metadata.num_reqs, x.shape[0]
    if not reqs:
        return out.zero_()
    items = channels * (reqs + -(-tokens // tiles["ROWS"]))
    kernels_conv.conv_extend_kernel[launch.grid(items)](
        x, weight, x if bias is None else bias, state.tensor, out,
        metadata.cache_indices, metadata.source_indices, metadata.query_start_loc,
        metadata.seq_idx if metadata.num_tokens else metadata.query_start_loc,  # an empty tensor has no address
        launch.flags(metadata.has_initial_state), metadata.computed_lens, metadata.history_offset,
        metadata.mamba_track_indices, metadata.mamba_track_tokens,
        channels * reqs, items, channels, reqs, tokens, state.dim, state.rows, x.stride(0), *weight.stride(),
        out.stride(0), *state.tensor.stride(), metadata.num_tokens, state.slots,
        **_flags(weight, bias, state, metadata, activation, residual), **tiles,
    )  # fmt: skip
    return out


def _uniform(
    mode: str,
    tokens_per_req: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ConvState,
    metadata: StepMetadata,
    activation: str | None,
    residual: bool,
    out: Tensor | None,
) -> Tensor:
    """Launch the kernel of the phases in which every request has `tokens_per_req` tokens."""
    x, bias, out = _rows(x), _rows(bias), _output(x, out)
    tiles = variants.uniform_tiles(mode, state.width, tokens_per_req)
    channels, reqs, tokens = launch.blocks(state.dim, tiles["BLOCK"]), metadata.num_reqs, x.shape[0]
    if not reqs:
        return out.zero_()
    drafts = state.tensor if state.draft_rows is None else state.draft_rows
    items = channels * -(-tokens // tokens_per_req)
    flags = _flags(weight, bias, state, metadata, activation, residual)
    flags["TRACK"] &= mode != "target_verify"
    kernels_conv.conv_uniform_kernel[launch.grid(items)](
        x, weight, x if bias is None else bias, state.tensor, drafts, out,
        metadata.cache_indices, metadata.source_indices, launch.flags(metadata.has_initial_state),
        metadata.computed_lens, metadata.draft_indices, metadata.num_accept_tokens, metadata.history_offset,
        metadata.mamba_track_indices, metadata.mamba_track_tokens,
        items, channels, reqs, tokens, state.dim, state.rows, x.stride(0), *weight.stride(), out.stride(0),
        *state.tensor.stride(), *drafts.stride(), state.slots,
        0 if state.draft_rows is None else state.draft_rows.shape[0],
        MODE=variants.MODES[mode], N=tokens_per_req, **flags, **tiles,
    )  # fmt: skip
    return out


def _flags(
    weight: Tensor,
    bias: Tensor | None,
    state: ConvState,
    metadata: StepMetadata,
    activation: str | None,
    residual: bool,
) -> dict[str, Any]:
    """The compile-time flags that both kernels take."""
    stored = [state.tensor] if state.draft_rows is None else [state.tensor, state.draft_rows]
    return {
        "LAYOUT": variants.LAYOUTS[state.layout],
        "W": state.width,
        "BIAS": bias is not None,
        "SILU": activation == "silu",
        "RESIDUAL": residual,
        "TRACK": metadata.tracks,
        "W_UNIT": weight.stride(0) == 1,
        "S_UNIT": all(tensor.stride(-1) == 1 for tensor in stored),
    }


def _served(x: Tensor, weight: Tensor, bias: Tensor | None, state: ConvState, tokens_per_req: int) -> bool:
    """Whether the kernels have a variant for this call and its offsets fit their arithmetic."""
    floats = [x, weight, state.tensor, *(t for t in (bias, state.draft_rows) if t is not None)]
    return (
        state.width in variants.WIDTHS
        and tokens_per_req <= variants.MAX_TOKENS
        and all(tensor.dtype in launch.FLOATS for tensor in floats)
        and launch.fits(x, *floats[2:])
        and launch.fits(weight, behind=0)
        and x.stride(0) * max(variants.EXTEND_ROWS, tokens_per_req) < launch.MAX_OFFSET
    )


def _rows(given: Any) -> Any:
    """The tensor with its last dimension contiguous."""
    return given if given is None or given.stride(-1) == 1 else given.contiguous()


def _output(x: Tensor, out: Tensor | None) -> Tensor:
    if out is not None:
        return out
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
