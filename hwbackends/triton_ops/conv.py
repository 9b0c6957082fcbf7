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
    plan = metadata.cache.get(state)
    if type(plan) is ConvPlan and plan.hook == hook and plan.serves(x, weight, bias, activation, residual, out):
        return plan(x, weight, bias, out)
    return _plan(hook, traits_of, x, weight, bias, state, metadata, activation, residual, out)(x, weight, bias, out)


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
    plan = state.cache.get(hook)
    if type(plan) is ConvPlan and plan.metadata is metadata and plan.serves(x, weight, bias, activation, residual, out):
        return plan(x, weight, bias, out)
    return _plan(hook, traits_of, x, weight, bias, state, metadata, activation, residual, out)(x, weight, bias, out)


class Call:
    """What a launch plan fixes of a conv call, and how it tells that another call is of the same kind: by everything
    but the addresses of x and out."""

    __slots__ = (
        "activation", "bias", "bias_form", "dense", "device", "dtype", "out_strides", "residual", "shape", "strides",
        "weight", "weight_form",
    )  # fmt: skip

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, residual: bool, out: Tensor | None
    ) -> None:
        self.dtype, self.shape, self.strides, self.device = x.dtype, x.shape, x.stride(), x.get_device()
        self.dense = x.is_contiguous()
        self.weight, self.weight_form = weight, _form(weight)
        self.bias, self.bias_form = bias, _form(bias)
        self.activation, self.residual = activation, residual
        self.out_strides = None if out is None else out.stride()

    def serves(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, residual: bool, out: Tensor | None
    ) -> bool:
        """Whether the plan fits a call."""
        return (
            x.shape == self.shape
            and x.dtype is self.dtype
            and (x.is_contiguous() if self.dense else x.stride() == self.strides)
            and x.get_device() == self.device
            and (weight is self.weight or _form(weight) == self.weight_form)
            and (bias is self.bias or _form(bias) == self.bias_form)
            and activation == self.activation
            and residual is self.residual
            and (out is None if self.out_strides is None else self._same_out(out))
        )

    def _same_out(self, out: Tensor | None) -> bool:
        return (
            out is not None
            and out.stride() == self.out_strides
            and out.shape == self.shape
            and out.dtype is self.dtype
            and out.get_device() == self.device
        )

    def output(self, x: Tensor) -> Tensor:
        """A new output."""
        return torch.empty_like(x) if self.dense else torch.empty_like(x, memory_format=torch.contiguous_format)


def _form(tensor: Tensor | None) -> tuple[object, ...] | None:
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride(), tensor.device)


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

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        """Launch; returns out, allocated if None."""
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
    plan = ConvPlan(hook, (x, weight, bias, activation, residual, out), launch, span(state))
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
    return Launch(traits, conv_decode_kernel, grid, [metadata.num_reqs], constants, warps, fixed)


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
    scalars = [requests, rows, metadata.num_tokens]
    return Launch(traits, conv_extend_kernel, grid, scalars, ordered(conv_extend_kernel, options), warps, fixed)


def draft_constants(state: ConvState, metadata: StepMetadata) -> dict[str, Any]:
    """Compile-time arguments about draft rows; unused ones are 0."""
    drafts = state.draft_rows
    strides = (0, 0, 0) if drafts is None else drafts.stride()
    return {"N": metadata.draft_token_num, "RS": strides[0], "RR": strides[1], "RD": strides[2] if state.dim > 1 else 1}


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
    grid, scalars = requests * cdiv(state.dim, block), [metadata.num_reqs, rows]
    return Launch(traits, conv_draft_kernel, grid, scalars, ordered(conv_draft_kernel, options), warps, fixed)
