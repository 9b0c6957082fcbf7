"""The conv hooks over Triton kernels. Arguments are checked once per launch plan; a plan serves every later call with
the same shapes, strides, dtypes and options."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from hwbackends.conv.layouts import LAYOUT_CODES
from hwbackends.conv.state import ConvState
from hwbackends.errors import DeviceError
from hwbackends.step import checks
from hwbackends.step.metadata import StepMetadata
from hwbackends.triton_ops.kernels_conv import conv_decode_kernel, conv_draft_kernel, conv_extend_kernel
from hwbackends.triton_ops.launch import Launch, capturing, cdiv, interpreting, ordered
from hwbackends.triton_ops.traits import Traits, TraitsOf


def run(
    hook: str,
    traits_of: TraitsOf,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ConvState,
    metadata: StepMetadata,
    activation: str | None,
    residual: bool,
    out: Tensor | None,
) -> Tensor:
    """A conv hook of every phase but extend, by its name. See `hookspecs`."""
    try:
        plan = metadata.cache.get(state)
        if type(plan) is ConvPlan and plan.hook == hook:
            done = plan(x, weight, bias, activation, residual, out)
            if done is not None:
                return done
    except NOT_ARGUMENTS:
        checks.conv(hook, x, weight, bias, state, metadata, activation, out)
        raise
    plan = _plan(hook, traits_of, x, weight, bias, state, metadata, activation, residual, out)
    return plan.launched(x, weight, bias, out)


def run_extend(
    hook: str,
    traits_of: TraitsOf,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ConvState,
    metadata: StepMetadata,
    activation: str | None,
    residual: bool,
    out: Tensor | None,
) -> Tensor:
    """The conv hook of extend. See `hookspecs.conv_extend`."""
    try:
        plan = state.cache.get(hook)
        if type(plan) is ConvPlan and plan.metadata is metadata:
            done = plan(x, weight, bias, activation, residual, out)
            if done is not None:
                return done
    except NOT_ARGUMENTS:
        checks.conv(hook, x, weight, bias, state, metadata, activation, out)
        raise
    plan = _plan(hook, traits_of, x, weight, bias, state, metadata, activation, residual, out)
    return plan.launched(x, weight, bias, out)


NOT_ARGUMENTS = (AttributeError, TypeError)
"""What a look at something that is no argument of the contract raises, None among them: the checks then name it."""


class Call:
    """What a launch plan fixes of a conv call, and how it tells that another call is of the same kind: by everything
    but the addresses of x and out. Weights and bias are told by address and strides, never by identity alone: their
    memory may have been swapped underneath.

    Args:
        x, weight, bias, activation, residual, out: the planned call.
        state: its state; x and out may lie anywhere but in it.
    """

    __slots__ = (
        "activation", "apart", "at_weight", "bias", "dense", "device", "dtype", "out_span", "out_strides", "read",
        "residual", "shape", "state_from", "state_to", "strides", "weight", "weight_strides", "x_span",
    )  # fmt: skip

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        residual: bool,
        out: Tensor | None,
        state: ConvState,
    ) -> None:
        self.dtype, self.shape, self.strides, self.device = x.dtype, x.shape, x.stride(), x.get_device()
        self.dense = x.is_contiguous()
        self.weight, self.at_weight, self.weight_strides = weight, weight.data_ptr(), weight.stride()
        self.bias = None if bias is None else (bias.data_ptr(), *_form(bias))
        self.activation, self.residual = activation, residual
        self.out_strides = None if out is None else out.stride()
        self.x_span = spanned(x)
        self.read = [(tensor.data_ptr(), spanned(tensor)) for tensor in (weight, bias) if tensor is not None]
        self.out_span = 0 if out is None else spanned(out)
        self.apart = 0 if out is None else out.data_ptr() - x.data_ptr()
        reach = max(self.x_span, self.out_span)
        lows, highs = zip(*_ranges(state), strict=True)
        self.state_from, self.state_to = min(lows) - reach, max(highs)

    def serves(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, residual: bool, out: Tensor | None
    ) -> bool:
        """Whether the plan fits a call. Memory that might be shared sends the call back to the checks."""
        return (
            x.shape == self.shape
            and x.dtype is self.dtype
            and (x.is_contiguous() if self.dense else x.stride() == self.strides)
            and x.get_device() == self.device
            and weight.data_ptr() == self.at_weight
            and weight.stride() == self.weight_strides
            and (weight is self.weight or _form(weight) == _form(self.weight))
            and (bias is None if self.bias is None else bias is not None and self._same_bias(bias))
            and activation == self.activation
            and residual is self.residual
            and not self.state_from < x.data_ptr() < self.state_to
            and (out is None if self.out_strides is None else out is not None and self._same_out(x, out))
        )

    def _same_bias(self, bias: Tensor) -> bool:
        return (bias.data_ptr(), *_form(bias)) == self.bias

    def _same_out(self, x: Tensor, out: Tensor) -> bool:
        at = out.data_ptr()
        between = at - x.data_ptr()
        return self.alone(at, self.out_span) and (
            out.stride() == self.out_strides
            and out.shape == self.shape
            and out.dtype is self.dtype
            and out.get_device() == self.device
            and (between == self.apart or not -self.out_span < between < self.x_span)
        )

    def alone(self, at: int, span: int) -> bool:
        """Whether memory of `span` bytes at an address surely holds nothing of the state, the weights and the bias."""
        for other, reach in self.read:
            if -span < at - other < reach:
                return False
        return not self.state_from < at < self.state_to

    def output(self, x: Tensor) -> Tensor:
        """A new output."""
        return torch.empty_like(x) if self.dense else torch.empty_like(x, memory_format=torch.contiguous_format)


def _form(tensor: Tensor) -> tuple[object, ...]:
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.device)


def spanned(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to behind its last one."""
    steps = sum(stride * (extent - 1) for stride, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent)
    return (steps + 1) * tensor.element_size()


def _ranges(state: ConvState) -> list[tuple[int, int]]:
    """Addresses of the state and of its draft rows."""
    tensors = [state.tensor] if state.draft_rows is None else [state.tensor, state.draft_rows]
    return [(tensor.data_ptr(), tensor.data_ptr() + spanned(tensor)) for tensor in tensors]


class ConvPlan(Call):
    """One conv call made ready: its launch.

    Args:
        hook: the hook that was called.
        call: the call that is planned, as `Call` takes it.
        launch: kernel, grid, constants and the tensors that never move.
        span: addresses of the state that the launch reads early and writes.
    """

    __slots__ = ("copy", "hook", "launch", "metadata", "span")

    def __init__(self, hook: str, call: tuple[Any, ...], launch: Launch, span: tuple[int, int]) -> None:
        super().__init__(*call)
        self.hook = hook
        self.metadata: StepMetadata | None = None
        self.launch, self.span = launch, span
        self.copy = not _rows_contiguous(call[0])

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, residual: bool, out: Tensor | None
    ) -> Tensor | None:
        """Launch and return out, allocated if None; None where the plan does not fit the call."""
        if self.serves(x, weight, bias, activation, residual, out):
            return self.launched(x, weight, bias, out)
        return None

    def launched(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        """Launch for a call that the plan fits; returns out, allocated if None."""
        if self.copy:
            x = x.contiguous()
        if out is None:
            out = self.output(x)
        if capturing():
            tensors = [x, weight, weight if bias is None else bias, out]
            launch_conv(self.launch, tensors, self.span, self.shape[0])
            return out
        at_x, at_w, at_out = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        at_bias = at_w if bias is None else bias.data_ptr()
        if (at_x | at_w | at_bias | at_out) & 15 or not self.launch.at((at_x, at_w, at_bias, at_out)):
            self.launch([x, weight, weight if bias is None else bias, out])
        return out


def _plan(
    hook: str,
    traits_of: TraitsOf,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ConvState,
    metadata: StepMetadata,
    activation: str | None,
    residual: bool,
    out: Tensor | None,
) -> ConvPlan:
    checks.conv(hook, x, weight, bias, state, metadata, activation, out)
    traits = traits_of(x.device)
    check_device(hook, "x", x.device, traits)
    make = {"conv_decode": _decode, "conv_extend": _extend}.get(hook, _draft)
    options = conv_constants(x, weight, bias, state, activation, residual, out)
    launch = make(traits, hook, x, state, metadata, options)
    if hook == "conv_decode" and traits.fetch_ahead is not None:
        traits.fetch_ahead(launch, conv_decode_kernel, state, weight, metadata, options)
    plan = ConvPlan(hook, (x, weight, bias, activation, residual, out, state), launch, span(state))
    if hook == "conv_extend":
        # the extents of a prefill seldom come back: one plan per state, not one per extent
        plan.metadata, state.cache[hook] = metadata, plan
    else:
        metadata.cache[state] = plan
    return plan


def check_device(hook: str, parameter: str, device: torch.device, traits: Traits) -> None:
    """Refuse tensors that no kernel of this backend can reach; torch calls the devices of ROCm `cuda` too."""
    if device.type != "cuda" and not interpreting():
        raise DeviceError(hook, parameter, device, traits.devices, "load the reference backend for this device")


def launch_conv(launch: Launch, tensors: list[Tensor], span: tuple[int, int], rows: int) -> None:
    """Launch a conv while the current stream is captured; see `traits.Dependents.launch_in_capture`."""
    dependents = launch.traits.dependents
    if dependents is None:
        launch(tensors)
    else:
        dependents.launch_in_capture(launch, tensors, span, rows)


def _rows_contiguous(x: Tensor) -> bool:
    return x.shape[1] <= 1 or x.stride(1) == 1


def conv_constants(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ConvState,
    activation: str | None,
    residual: bool,
    out: Tensor | None,
) -> dict[str, Any]:
    """Compile-time arguments that every conv kernel takes. What makes a launch adds its own to them."""
    tensor = state.tensor
    return {
        "D": state.dim,
        "W": state.width,
        "LAYOUT": LAYOUT_CODES[state.layout],
        "C": state.rows,
        "SX": x.stride(0) if _rows_contiguous(x) else state.dim,
        "SO": state.dim if out is None else out.stride(0),
        "SS": tensor.stride(0),
        "SR": tensor.stride(1),
        "SD": tensor.stride(2) if state.dim > 1 else 1,
        "SWD": weight.stride(0),
        "SWW": weight.stride(1),
        "SB": 1 if bias is None else bias.stride(0),
        "BIAS": bias is not None,
        "SILU": activation == "silu",
        "RESIDUAL": bool(residual),
        "ACC": tl.float64 if x.dtype == torch.float64 else tl.float32,
    }


def positions(state: ConvState, metadata: StepMetadata) -> Tensor:
    """What tells where a history begins: lengths on the ring, offsets on lazy; unused on window."""
    return metadata.history_offset if state.layout == "lazy" else metadata.computed_lens


def span(state: ConvState) -> tuple[int, int]:
    """Addresses of slot 0's first row. Two states of one pool share channels exactly where these overlap."""
    tensor = state.tensor
    start = tensor.data_ptr()
    width = (state.dim - 1) * abs(tensor.stride(2)) + 1
    return start, start + width * tensor.element_size()


def _decode(
    traits: Traits, hook: str, x: Tensor, state: ConvState, metadata: StepMetadata, options: dict[str, Any]
) -> Launch:
    rows = x.shape[0]
    block, warps = traits.tuning.decode(rows, state.dim)
    options |= {"TRACK": metadata.tracks, "TAIL": rows > metadata.num_reqs, "PDL": False, "BLOCK_D": block}
    fixed = [state.tensor, metadata.cache_indices, positions(state, metadata), metadata.mamba_track_indices]
    constants = ordered(conv_decode_kernel, options)
    grid = rows * cdiv(state.dim, block)
    return Launch(traits, conv_decode_kernel, grid, [metadata.num_reqs, state.slots], constants, warps, fixed)


def _extend(
    traits: Traits, hook: str, x: Tensor, state: ConvState, metadata: StepMetadata, options: dict[str, Any]
) -> Launch:
    rows, requests = x.shape[0], metadata.num_reqs
    block, tile, warps = traits.tuning.extend(rows, state.dim)
    options |= {"TRACK": metadata.tracks, "PDL": False, "BLOCK_D": block, "BLOCK_T": tile}
    options["STREAMED"] = traits.tuning.streamed(rows, state.dim)
    fixed = [
        state.tensor, metadata.cache_indices, metadata.source_indices, metadata.query_start_loc,
        metadata.has_initial_state, positions(state, metadata), metadata.seq_idx, metadata.mamba_track_indices,
        metadata.mamba_track_tokens,
    ]  # fmt: skip
    grid = (requests + cdiv(rows, tile)) * cdiv(state.dim, block)
    scalars = [requests, rows, metadata.num_tokens, state.slots]
    return Launch(traits, conv_extend_kernel, grid, scalars, ordered(conv_extend_kernel, options), warps, fixed)


def draft_constants(state: ConvState, metadata: StepMetadata) -> dict[str, Any]:
    """Compile-time arguments about draft rows; unused ones are 0."""
    drafts = state.draft_rows
    strides = (0, 0, 0) if drafts is None else drafts.stride()
    return {"N": metadata.draft_token_num, "RS": strides[0], "RR": strides[1], "RD": strides[2] if state.dim > 1 else 1}


def draft_row_count(state: ConvState) -> int:
    """Rows of the draft buffers; 0 where there are none."""
    return 0 if state.draft_rows is None else state.draft_rows.shape[0]


def _draft(
    traits: Traits, hook: str, x: Tensor, state: ConvState, metadata: StepMetadata, options: dict[str, Any]
) -> Launch:
    commit = hook == "conv_draft_extend"
    rows, drafts = x.shape[0], metadata.draft_token_num
    requests = cdiv(rows, drafts)
    block, warps = traits.tuning.draft(requests, state.dim)
    options |= draft_constants(state, metadata)
    # a draft extend commits at once: only a ring keeps its draft rows, which are the committed rows too
    options |= {"COMMIT": commit, "SAVE": not commit or state.layout == "ring"}
    options |= {"TRACK": commit and metadata.tracks, "PDL": False, "BLOCK_D": block}
    fixed = [
        state.tensor, state.tensor if state.draft_rows is None else state.draft_rows, metadata.cache_indices,
        positions(state, metadata), metadata.draft_indices, metadata.has_initial_state, metadata.num_accept_tokens,
        metadata.mamba_track_indices, metadata.mamba_track_tokens,
    ]  # fmt: skip
    grid = requests * cdiv(state.dim, block)
    scalars = [metadata.num_reqs, rows, state.slots, draft_row_count(state)]
    return Launch(traits, conv_draft_kernel, grid, scalars, ordered(conv_draft_kernel, options), warps, fixed)
