"""The conv hooks in pure torch: outputs first, from rows read before anything is written, then the state."""

from __future__ import annotations

import torch
from torch import Tensor

from hwbackends.conv.state import ConvState
from hwbackends.step import checks
from hwbackends.step.metadata import StepMetadata
from hwbackends.torch_ops.rows import (
    masked_write,
    new_output,
    read_history,
    virtual_rows,
    window_rows,
    within,
    writing,
)


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
    with writing(state.tensor, state.draft_rows, out):
        return decode(x, weight, bias, state, metadata, activation, residual, out)


def decode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ConvState,
    metadata: StepMetadata,
    activation: str | None,
    residual: bool,
    out: Tensor | None,
) -> Tensor:
    """`conv_decode` over arguments that were checked."""
    step = _Step(x, state, metadata, tokens=1)
    y = step.convolve(weight, bias, activation, residual, out)
    if state.layout == "lazy":
        step.write_lazy()
    else:
        step.write_window(step.tensor_of(1), step.fresh_rows(1))
    if metadata.tracks:
        step.write_track()
    return y


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
    with writing(state.tensor, state.draft_rows, out):
        step = _Step(x, state, metadata, tokens=None)
        y = step.convolve(weight, bias, activation, residual, out)
        lengths = step.lengths
        rewritten = ~metadata.has_initial_state | (metadata.source_indices != metadata.cache_indices)
        fresh = step.fresh_rows(lengths) | rewritten[:, None]
        step.write_window(lengths, fresh & (lengths > 0)[:, None])
        if metadata.tracks:
            step.write_track()
        return y


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
    with writing(state.tensor, state.draft_rows, out):
        return target_verify(x, weight, bias, state, metadata, activation, residual, out)


def target_verify(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ConvState,
    metadata: StepMetadata,
    activation: str | None,
    residual: bool,
    out: Tensor | None,
) -> Tensor:
    """`conv_target_verify` over arguments that were checked."""
    step = _Step(x, state, metadata, tokens=metadata.draft_token_num)
    y = step.convolve(weight, bias, activation, residual, out)
    if state.layout == "window":
        step.save_drafts()
    elif state.layout == "ring":
        step.write_ring_drafts()
    else:
        step.write_lazy()
    return y


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
    with writing(state.tensor, state.draft_rows, out):
        step = _Step(x, state, metadata, tokens=metadata.draft_token_num)
        step.live = step.live & (metadata.num_accept_tokens >= 0)
        y = step.convolve(weight, bias, activation, residual, out)
        accepted = metadata.num_accept_tokens.clamp(0, metadata.draft_token_num).long()
        if state.layout == "ring":
            step.write_ring_drafts()
            step.write_window(accepted, ~metadata.has_initial_state[:, None] & ~step.fresh_rows(accepted))
        else:
            step.write_window(accepted, step.all_rows())
        if metadata.tracks:
            step.write_track()
        return y


class _Step:
    """One conv's inputs of one step: v_b = history ++ x_b is read here once, before anything is written."""

    def __init__(self, x: Tensor, state: ConvState, metadata: StepMetadata, tokens: int | None) -> None:
        self.x, self.state, self.metadata, self.tokens = x, state, metadata, tokens
        self.slots = metadata.cache_indices.long()
        self.live = within(self.slots, state.slots)
        self.history = read_history(state, metadata)
        offsets = metadata.query_start_loc.long().clamp(0, metadata.num_tokens)
        self.starts, self.lengths = offsets[:-1], (offsets[1:] - offsets[:-1]).clamp(min=0)
        self.requests = torch.arange(metadata.num_reqs, device=x.device)

    def tensor_of(self, value: int) -> Tensor:
        """[B] of one value."""
        return torch.full_like(self.slots, value)

    def convolve(
        self, weight: Tensor, bias: Tensor | None, activation: str | None, residual: bool, out: Tensor | None
    ) -> Tensor:
        """y_b[t] = act(bias + sum_i weight[:, i] * v_b[t + i]) + (x_b[t] if residual).

        The sum starts with the newest row's product and goes back in time, in every phase, so that a token's bits do
        not depend on the phase, the chunk or the batch that it is computed in.
        """
        out = new_output(self.x) if out is None else out
        if not self.x.shape[0] or not self.metadata.num_reqs:
            return out.zero_()
        owner, index, live = self._token_owners()
        compute = torch.float64 if self.x.dtype == torch.float64 else torch.float32
        taps = weight.to(compute)
        width = self.state.width
        total = torch.zeros((), dtype=compute, device=self.x.device)
        for tap in reversed(range(width)):
            rows = virtual_rows(self.history, self.x, self.starts, owner, index + tap)
            total = total + rows.to(compute) * taps[:, tap]
        if bias is not None:
            total = total + bias.to(compute)
        if activation == "silu":
            total = _silu(total)
        if residual:
            total = total + self.x.to(compute)
        zero = torch.zeros((), dtype=compute, device=self.x.device)
        out.copy_(torch.where(live[:, None], total, zero))
        return out

    def _token_owners(self) -> tuple[Tensor, Tensor, Tensor]:
        """For each row of x: its request, its index within the request, and whether it is live."""
        token = torch.arange(self.x.shape[0], device=self.x.device)
        if self.tokens is None:
            owner = self.metadata.seq_idx.long()
            owner = torch.nn.functional.pad(owner, (0, max(0, len(token) - len(owner))), value=-1)[: len(token)]
        else:
            owner = token // self.tokens
            owner = torch.where(owner < self.metadata.num_reqs, owner, torch.full_like(owner, -1))
        known = owner >= 0
        owner = owner.clamp(min=0)
        return owner, token - self.starts[owner], known & self.live[owner]

    def window(self, taken: Tensor) -> Tensor:
        """win_b(k) = v_b[k : k + S] for k = `taken` [B]; returns [B, S, D]."""
        index = taken[:, None] + torch.arange(self.state.history, device=taken.device)
        return virtual_rows(self.history, self.x, self.starts, self.requests[:, None].expand_as(index), index)

    def all_rows(self) -> Tensor:
        """[B, S] true."""
        return torch.ones_like(self.slots, dtype=torch.bool)[:, None].expand(-1, self.state.history)

    def fresh_rows(self, taken: Tensor | int) -> Tensor:
        """[B, S]: rows of win_b(taken) that the slot does not hold yet. Only a ring keeps rows where they are."""
        if self.state.layout != "ring":
            return self.all_rows()
        amount = taken if isinstance(taken, Tensor) else self.tensor_of(taken)
        index = amount[:, None] + torch.arange(self.state.history, device=amount.device)
        return index >= self.state.history

    def write_window(self, taken: Tensor, mask: Tensor) -> None:
        """Rows of win_b(taken) into the request's slot, where mask [B, S] holds and the request is live."""
        self._store(self.slots, taken, mask & self.live[:, None])

    def write_track(self) -> None:
        """win_b(mamba_track_tokens) into the track slot: all S rows, zeros included."""
        taken = self.metadata.mamba_track_tokens.long()
        target = self.metadata.mamba_track_indices.long()
        wanted = self.live & within(target, self.state.slots) & (taken >= 0)
        self._store(target, taken.clamp(min=0), wanted[:, None].expand(-1, self.state.history))

    def _store(self, slots: Tensor, taken: Tensor, mask: Tensor) -> None:
        end = self.metadata.computed_lens + taken
        rows = window_rows(self.state.layout, self.state.rows, self.state.history, end)
        masked_write(self.state.tensor, slots[:, None], rows, self.window(taken), mask)

    def _drafts(self, first: int) -> tuple[Tensor, Tensor]:
        """v_b from index `first` to its end: row counts [B, n] from 0 and the rows [B, n, D]."""
        assert self.tokens is not None
        count = self.state.history + self.tokens - first
        offsets = torch.arange(count, device=self.slots.device).expand(self.metadata.num_reqs, count)
        rows = virtual_rows(
            self.history, self.x, self.starts, self.requests[:, None].expand_as(offsets), offsets + first
        )
        return offsets, rows

    def save_drafts(self) -> None:
        """window: v_b, whole, into the draft rows of the request row."""
        assert self.state.draft_rows is not None
        index = self.metadata.draft_indices.long()
        offsets, rows = self._drafts(0)
        known = (index >= 0) & (index < self.state.draft_rows.shape[0])
        mask = (self.live & known)[:, None].expand_as(offsets)
        masked_write(self.state.draft_rows, index[:, None], offsets, rows, mask)

    def write_ring_drafts(self) -> None:
        """ring: draft t into row (n_b + t) mod C."""
        offsets, rows = self._drafts(self.state.history)
        places = (self.metadata.computed_lens.long()[:, None] + offsets) % self.state.rows
        masked_write(self.state.tensor, self.slots[:, None], places, rows, self.live[:, None].expand_as(offsets))

    def write_lazy(self) -> None:
        """lazy: v_b[1 : S + T_b] from row 0 on; the next step's offset picks the window."""
        offsets, rows = self._drafts(1)
        masked_write(self.state.tensor, self.slots[:, None], offsets, rows, self.live[:, None].expand_as(offsets))


def _silu(total: Tensor) -> Tensor:
    """silu whose bits do not depend on where a token stands in the batch.

    Vector and scalar float32 exponentials differ in the last bit: in float64 that is rounded away, and a float64 input
    is padded to whole vectors, so that no element takes the scalar path. An NPU has no float64 silu, and vector
    exponentials alone.
    """
    if total.device.type == "npu":
        return torch.nn.functional.silu(total)
    if total.dtype == torch.float64:
        flat = total.reshape(-1)
        whole = torch.nn.functional.pad(flat, (0, -flat.shape[0] % 64))
        return torch.nn.functional.silu(whole)[: flat.shape[0]].reshape(total.shape)
    return torch.nn.functional.silu(total.double()).to(total.dtype)
