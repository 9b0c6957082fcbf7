"""The four convs: one loop over requests. v = history ++ x is read for every request before anything is written."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from hwbackends.conv.state import ConvState
from hwbackends.step import checks
from hwbackends.step.metadata import StepMetadata
from hwbackends_numpy.arrays import Array, only_window, view


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
    """One token per request; the slot becomes the window after it."""
    return _conv("conv_decode", x, weight, bias, state, metadata, activation, residual, out)


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
    """Any number of tokens per request; the slot becomes the window after the last."""
    return _conv("conv_extend", x, weight, bias, state, metadata, activation, residual, out)


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
    """The slot stays; v goes to the request's draft rows, for the commit."""
    return _conv("conv_target_verify", x, weight, bias, state, metadata, activation, residual, out)


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
    """As verify, and the slot becomes the window after the accepted tokens."""
    return _conv("conv_draft_extend", x, weight, bias, state, metadata, activation, residual, out)


def _conv(
    hook: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ConvState,
    metadata: StepMetadata,
    activation: str | None,
    residual: bool,
    out: Tensor | None,
) -> Tensor:
    checks.conv(hook, x, weight, bias, state, metadata, activation, out)
    only_window(hook, state.layout)
    inputs, taps = view(hook, "x", x), view(hook, "weight", weight)
    offset = None if bias is None else view(hook, "bias", bias)
    slots = view(hook, "state", state.tensor)
    precision = np.float64 if x.dtype == torch.float64 else np.float32
    y = np.zeros(inputs.shape, precision)
    found = list(_rows(hook, inputs, slots, metadata, precision))
    for span, _, v, _ in found:
        y[span] = _convolve(v, taps.astype(precision), offset, activation, residual)
    out = torch.empty(x.shape, dtype=x.dtype) if out is None else out
    with np.errstate(over="ignore"):  # a number beyond float16 becomes infinite, as everywhere
        out.numpy()[...] = y
        for _, b, v, kept in found:
            _write(hook, state, slots, metadata, b, v, kept)
    return out


def _rows(
    hook: str, inputs: Array, slots: Array, metadata: StepMetadata, precision: type
) -> Iterator[tuple[slice, int, Array, int]]:
    """(rows of x, request, v, tokens that the window moves on) of each live request."""
    ends, accept = metadata.query_start_loc.tolist(), metadata.num_accept_tokens.tolist()
    sources, flags = metadata.source_indices.tolist(), metadata.has_initial_state.tolist()
    for b, slot in enumerate(metadata.cache_indices.tolist()):
        span = slice(ends[b], ends[b + 1])
        kept = accept[b] if hook == "conv_draft_extend" else span.stop - span.start
        if slot <= 0 or kept < 0:
            continue
        history = slots[sources[b]] if flags[b] else np.zeros_like(slots[slot])
        yield span, b, np.concatenate([history.astype(precision), inputs[span].astype(precision)]), kept


def _convolve(v: Array, taps: Array, bias: Array | None, activation: str | None, residual: bool) -> Array:
    """y[t] = act(bias + sum of taps[:, i] * v[t + i]) + (x[t] if residual); the newest row first, in every phase."""
    width = taps.shape[1]
    tokens = len(v) - (width - 1)
    total = np.zeros((tokens, v.shape[1]), v.dtype)
    for i in reversed(range(width)):
        total += taps[:, i] * v[i : i + tokens]
    if bias is not None:
        total += bias.astype(v.dtype)
    if activation == "silu":
        wide = total.astype(np.float64)
        with np.errstate(over="ignore"):
            total = (wide / (1 + np.exp(-wide))).astype(v.dtype)
    return total + v[width - 1 :] if residual else total


def _write(hook: str, state: ConvState, slots: Array, metadata: StepMetadata, b: int, v: Array, kept: int) -> None:
    history = state.history
    if hook == "conv_target_verify":
        assert state.draft_rows is not None
        view(hook, "draft_rows", state.draft_rows)[int(metadata.draft_indices[b]), : len(v)] = v
        return
    if len(v) > history:  # without a token the slot is untouched; a snapshot may be asked for all the same
        slots[int(metadata.cache_indices[b])] = v[kept : kept + history]
    track, taken = int(metadata.mamba_track_indices[b]), int(metadata.mamba_track_tokens[b])
    if track > 0 and taken >= 0:
        slots[track] = v[taken : taken + history]
