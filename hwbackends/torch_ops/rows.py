"""Where rows of history lie on each layout, and how rows are read and written without waiting for the device."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from hwbackends.conv.layouts import Layout
from hwbackends.conv.state import ConvState
from hwbackends.step.metadata import StepMetadata


def new_output(x: Tensor) -> Tensor:
    """An output like x that its caller may change in place: no inference tensor, no gradient."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def writing(*written: Tensor | None) -> AbstractContextManager[object]:
    """No gradients while a hook writes. What was made in inference mode may be written in it only; elsewhere that mode
    would hide what composite ops do from dispatch modes, so `no_grad` it is.

    Args:
        written: tensors that the hook writes into.
    """
    inference = any(tensor is not None and tensor.is_inference() for tensor in written)
    return torch.inference_mode() if inference else torch.no_grad()


def within(indices: Tensor, count: int) -> Tensor:
    """Which slots, or rows, are there: positive and below `count`. Whatever is not is padding."""
    return (indices > 0) & (indices < count)


def window_rows(layout: Layout, rows: int, history: int, end: Tensor) -> Tensor:
    """Row numbers that hold the window which ends before absolute position `end`.

    window and lazy: 0..S-1. ring: (end - S + i) mod C for i < S.

    Args:
        end: [B] positions.

    Returns:
        [B, S] int64.
    """
    offsets = torch.arange(history, device=end.device)
    if layout == "ring":
        return (end.long()[:, None] - history + offsets) % rows
    return offsets.expand(end.shape[0], history)


def read_history(state: ConvState, metadata: StepMetadata) -> Tensor:
    """The S rows before the step: the source slot's rows, or zeros where there is no initial state or no such slot.

    On the ring, positions below 0 are zeros as well. Selected, never multiplied: a dirty slot may hold NaN.

    Returns:
        [B, S, D] in the state's dtype.
    """
    source = metadata.source_indices.long()
    computed = metadata.computed_lens
    source = torch.where(within(source, state.slots), source, 0)
    valid = (metadata.has_initial_state & (source > 0))[:, None]
    rows = window_rows(state.layout, state.rows, state.history, computed)
    if state.layout == "ring":
        positions = computed[:, None] - state.history + torch.arange(state.history, device=computed.device)
        valid = valid & (positions >= 0)
    elif state.layout == "lazy":
        rows = rows + metadata.history_offset.clamp(0, state.rows - state.history)[:, None]
    found = state.tensor[source[:, None], rows]
    return torch.where(valid[..., None], found, torch.zeros((), dtype=found.dtype, device=found.device))


def virtual_rows(history: Tensor, x: Tensor, starts: Tensor, requests: Tensor, index: Tensor) -> Tensor:
    """Rows of v_b = history ++ x_b, for any mix of requests.

    Args:
        history: [B, S, D].
        x: [T, D], request b's rows from `starts[b]` on.
        starts: [B] token offsets.
        requests: [...] request of each wanted row.
        index: [...] index of each wanted row within v_b, of the same shape.

    Returns:
        [..., D] in the wider of both dtypes, so that neither loses a bit.
    """
    steps = history.shape[1]
    from_history = history[requests, index.clamp(0, steps - 1)].to(torch.promote_types(history.dtype, x.dtype))
    if not x.shape[0]:
        return from_history
    token = (starts.long()[requests] + index - steps).clamp(0, x.shape[0] - 1)
    return torch.where((index < steps)[..., None], from_history, x[token])


def masked_write(target: Tensor, first: Tensor, second: Tensor, values: Tensor, mask: Tensor) -> None:
    """`target[first, second] = values` where `mask` holds, without a boolean index.

    Entries outside the mask repeat the first entry inside it (or, when there is none, what already stands at their
    place), so that nothing else is written and duplicates always carry equal values.

    Args:
        target: [A, E, ...], mutated.
        first, second: [...] indices, may hold anything where the mask is false.
        values: [..., rest of target], cast to target's dtype.
        mask: [...] bool.
    """
    if not mask.numel() or not target.numel():
        return
    kept = mask.reshape(-1)
    flat = values.reshape(kept.shape[0], *target.shape[2:]).to(target.dtype)
    one, two = first.expand(mask.shape).reshape(-1).long(), second.expand(mask.shape).reshape(-1).long()
    lead = kept.to(torch.int32).argmax().reshape(1)
    one = torch.where(kept, one, one.index_select(0, lead)).clamp(0, target.shape[0] - 1)
    two = torch.where(kept, two, two.index_select(0, lead)).clamp(0, target.shape[1] - 1)
    tail = (1,) * (target.dim() - 2)
    spare = flat.index_select(0, lead)
    spare = torch.where(kept.index_select(0, lead).reshape(1, *tail), spare, target[one[:1], two[:1]])
    target.index_put_((one, two), torch.where(kept.reshape(-1, *tail), flat, spare))
