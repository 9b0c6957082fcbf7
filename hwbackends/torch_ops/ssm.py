"""The SSM hooks in pure torch, token by token: outputs and states from what is read before anything is written."""

from __future__ import annotations

import torch
from torch import Tensor

from hwbackends.ssm import checks
from hwbackends.ssm.layouts import LENS_ROWS
from hwbackends.ssm.state import SSMState, SSMStorage
from hwbackends.step.batch import ForwardMode
from hwbackends.step.metadata import StepMetadata
from hwbackends.step.pool import StatePool
from hwbackends.torch_ops import recurrence
from hwbackends.torch_ops.metadata import translate
from hwbackends.torch_ops.recurrence import Tokens
from hwbackends.torch_ops.rows import masked_write, new_output, within, writing


def ssm_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor | None,
    state: SSMState,
    metadata: StepMetadata,
    D: Tensor | None = None,
    dt_limit: tuple[float, float] | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """One token per request; the state becomes S(n_b + 1). See `hookspecs.ssm.SsmDecode`."""
    given = (q, k, v, a, b, A_log, dt_bias, D, dt_limit, scale, lower_bound, use_qk_l2norm_in_kernel)
    checks.compute("ssm_decode", *given[:7], state, metadata, *given[7:], None, out)
    with writing(state.tensor, out):
        if metadata.forward_mode is ForwardMode.IDLE:  # no live row, and perhaps no row of the inputs for it either
            return (new_output(v) if out is None else out).zero_()
        step = _Step(state, metadata, _tokens(state, *given))
        y = step.uniform(1)
        if state.layout == "ring":
            step.write_ring(1)
        else:
            step.write_slots(step.states[0], step.live)
        if metadata.tracks:
            step.write_track(step.after(metadata.mamba_track_tokens))
        return step.result(y, v, out)


def ssm_extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor | None,
    state: SSMState,
    metadata: StepMetadata,
    D: Tensor | None = None,
    dt_limit: tuple[float, float] | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Packed requests of any length; the state becomes S(n_b + T_b). See `hookspecs.ssm.SsmExtend`."""
    given = (q, k, v, a, b, A_log, dt_bias, D, dt_limit, scale, lower_bound, use_qk_l2norm_in_kernel)
    checks.compute("ssm_extend", *given[:7], state, metadata, *given[7:], None, out)
    with writing(state.tensor, out):
        step = _Step(state, metadata, _tokens(state, *given))
        y, last, tracked = step.packed()
        step.write_slots(last, step.live & (step.lengths > 0), step.lengths)
        if metadata.tracks:
            step.write_track(tracked)
        return step.result(y, v, out)


def ssm_target_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor | None,
    state: SSMState,
    metadata: StepMetadata,
    D: Tensor | None = None,
    dt_limit: tuple[float, float] | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    retrieve_parent_token: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """N drafts per request; the committed state stays. See `hookspecs.ssm.SsmTargetVerify`."""
    given = (q, k, v, a, b, A_log, dt_bias, D, dt_limit, scale, lower_bound, use_qk_l2norm_in_kernel)
    checks.compute("ssm_target_verify", *given[:7], state, metadata, *given[7:], retrieve_parent_token, out)
    with writing(state.tensor, state.intermediate, out):
        step = _Step(state, metadata, _tokens(state, *given))
        y = step.uniform(metadata.draft_token_num, retrieve_parent_token)
        if state.layout == "ring":
            step.write_ring(metadata.draft_token_num)
        else:
            step.write_intermediate()
        return step.result(y, v, out)


def ssm_draft_extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor | None,
    state: SSMState,
    metadata: StepMetadata,
    D: Tensor | None = None,
    dt_limit: tuple[float, float] | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """N drafts per request; the state becomes S(n_b + num_accept_tokens[b]). See `hookspecs.ssm.SsmDraftExtend`."""
    given = (q, k, v, a, b, A_log, dt_bias, D, dt_limit, scale, lower_bound, use_qk_l2norm_in_kernel)
    checks.compute("ssm_draft_extend", *given[:7], state, metadata, *given[7:], None, out)
    with writing(state.tensor, out):
        step = _Step(state, metadata, _tokens(state, *given))
        step.live = step.live & (metadata.num_accept_tokens >= 0)
        y = step.uniform(metadata.draft_token_num)
        if state.layout == "ring":
            step.write_ring(metadata.draft_token_num)
        else:
            step.write_slots(step.after(metadata.num_accept_tokens), step.live)
        if metadata.tracks:
            step.write_track(step.after(metadata.mamba_track_tokens))
        return step.result(y, v, out)


def materialize_slots(
    pool: StatePool, req_pool_indices: Tensor, computed_lens: Tensor, destination_indices: Tensor | None = None
) -> None:
    """The state of requests at a position into slots. See `hookspecs.ssm.MaterializeSlots`."""
    checks.materialize(pool, req_pool_indices, computed_lens, destination_indices)
    requests = req_pool_indices.long()
    known = (requests >= 0) & (requests < pool.request_rows)
    own = translate(pool, pool.mamba_index_mapping[torch.where(known, requests, 0)]).long()
    goal = own if destination_indices is None else translate(pool, destination_indices).long()
    wanted = known & within(own, pool.num_slots) & within(goal, pool.num_slots) & (computed_lens >= 0)
    move_states(pool, list(pool.states), own, requests, computed_lens.long(), goal, wanted)


def move_states(
    pool: StatePool,
    names: list[str],
    slots: Tensor,
    requests: Tensor,
    positions: Tensor,
    target: Tensor,
    wanted: Tensor,
) -> None:
    """S(positions) of slots with the rings of request rows into the target slots where `wanted` holds, all [B]."""
    for storage in (pool.states[name] for name in names):
        if not isinstance(storage, SSMStorage):
            continue
        with writing(storage.tensor):
            for index in range(pool.num_layers):
                state = storage.layer(index)
                source = torch.where(wanted, slots, 0)
                fresh = (positions == 0) & (state.layout == "ring")
                found, lens = state_at(state, source, requests, positions, fresh)
                masked_write(state.tensor.unsqueeze(1), target, torch.zeros_like(target), found, wanted)
                if state.state_lens is not None:
                    reached = torch.maximum(lens, positions[:, None, None]).int()
                    masked_write(state.state_lens.unsqueeze(1), target, torch.zeros_like(target), reached, wanted)


def commit_states(pool: StatePool, target: Tensor, drafts: Tensor, step: Tensor, wanted: Tensor) -> None:
    """On `intermediate`, the state after draft `step` of draft rows into the target slots, in every layer."""
    for storage in pool.states.values():
        if not isinstance(storage, SSMStorage) or storage.intermediate is None:
            continue
        saved = storage.intermediate
        known = wanted & (drafts >= 0) & (drafts < saved.shape[1])
        row = torch.where(known, drafts, 0)
        found = saved.movedim(0, 2)[row, step.clamp(0, saved.shape[2] - 1)]
        masked_write(storage.tensor.movedim(0, 1).unsqueeze(1), target, torch.zeros_like(target), found, known)


def state_at(
    state: SSMState, slots: Tensor, requests: Tensor, positions: Tensor, fresh: Tensor
) -> tuple[Tensor, Tensor]:
    """S(position) of each request, from its checkpoint and, on `ring`, what the ring holds behind it.

    Args:
        slots: [B] slots of the checkpoints, each one that is there.
        requests: [B] request rows of the rings; may hold anything where nothing is pending.
        positions: [B] int64.
        fresh: [B], where zeros stand for whatever the slot holds.

    Returns:
        The states [B, HV, V, K] float32, and up to where each tile of the checkpoint stands, [B, HV, tiles] int64.
    """
    zero = torch.zeros((), dtype=torch.float32, device=slots.device)
    found = torch.where(fresh[:, None, None, None], zero, state.tensor[slots].float())
    if state.state_lens is None:
        return found, torch.zeros(len(slots), 1, 1, dtype=torch.int64, device=slots.device)
    assert state.ring_k is not None
    assert state.ring_u is not None
    assert state.ring_d is not None
    lens = torch.where(fresh[:, None, None], positions[:, None, None], state.state_lens[slots].long())
    behind = lens.repeat_interleave(LENS_ROWS, 2)[:, :, : state.head_v_dim]  # [B, HV, V]
    share, count = state.num_v_heads // state.num_k_heads, state.ring_rows
    rows = torch.where((requests >= 0) & (requests < len(state.ring_u)), requests, 0)
    for back in range(count, 0, -1):
        position = positions - back
        place = (rows, position % count)
        d = state.ring_d[place] if state.kind == "kda" else state.ring_d[place][..., None]
        k = state.ring_k[place].float().repeat_interleave(share, 1)
        applied = recurrence.apply(found, d, k, state.ring_u[place], state.tensor.dtype)
        pending = (position[:, None, None] >= behind) & (position >= 0)[:, None, None]
        found = torch.where(pending[..., None], applied, found)
    return found, lens


def _tokens(
    state: SSMState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor | None,
    D: Tensor | None,
    dt_limit: tuple[float, float] | None,
    scale: float | None,
    lower_bound: float | None,
    l2norm: bool,
) -> Tokens:
    return recurrence.tokens(state.kind, q, k, v, a, b, A_log, dt_bias, D, dt_limit, scale, lower_bound, l2norm)


class _Step:
    """One SSM's step: the states that its requests start from are read here once, before anything is written.

    Attributes:
        live: [B] rows that are not padded.
        first: [B, HV, V, K], S(n_b), float32.
        lens: [B, HV, tiles] up to where the checkpoint stands; `ring` only.
        states: after `uniform`, the state behind each token.
        updates: after `uniform`, u of each token.
    """

    def __init__(self, state: SSMState, metadata: StepMetadata, tokens: Tokens) -> None:
        self.state, self.metadata, self.tokens = state, metadata, tokens
        self.slots = metadata.cache_indices.long()
        self.live = within(self.slots, state.slots)
        offsets = metadata.query_start_loc.long().clamp(0, metadata.num_tokens)
        self.starts, self.lengths = offsets[:-1], (offsets[1:] - offsets[:-1]).clamp(min=0)
        self.positions = metadata.computed_lens.long()
        source = metadata.source_indices.long()
        there = within(source, state.slots)
        self.fresh = ~(metadata.has_initial_state & there)
        if state.layout == "ring":
            self.fresh = self.fresh | (self.positions == 0)
        self.requests = metadata.draft_indices.long()
        source = torch.where(there, source, 0)
        self.first, self.lens = state_at(state, source, self.requests, self.positions, self.fresh)
        self.states: list[Tensor] = []
        self.updates: list[Tensor] = []

    def uniform(self, count: int, parents: Tensor | None = None) -> Tensor:
        """`count` tokens of every request; returns the outputs [B * count, HV, V] of float32."""
        base = torch.arange(self.metadata.num_reqs, device=self.slots.device) * count
        outputs = []
        for t in range(count):
            token = self.tokens.at(base + t)
            start = self._start(t, parents)
            u = recurrence.update(start, token)
            behind = recurrence.apply(start, token.d, token.k, u, self.state.tensor.dtype)
            if self.state.layout == "ring":  # a decode that ran before has this token in its checkpoint already
                behind = torch.where(self._has_run(t), start, behind)
            self.states.append(behind)
            self.updates.append(u)
            outputs.append(recurrence.output(behind, token))
        return torch.stack(outputs, 1).flatten(0, 1) if outputs else self.tokens.v[:0]

    def _start(self, t: int, parents: Tensor | None) -> Tensor:
        """The state that draft t starts from: the one behind the draft before it, or behind its parent."""
        if not t:
            return self.first
        if parents is None:
            return self.states[-1]
        parent = parents[:, t].long()
        index = (parent.clamp(max=t - 1) + 1).clamp(min=0)
        return torch.stack([self.first, *self.states])[index, torch.arange(len(index), device=index.device)]

    def _has_run(self, t: int) -> Tensor:
        """[B, HV, V, 1]: rows of the checkpoint that stand behind token t."""
        stands = self.lens.repeat_interleave(LENS_ROWS, 2)[:, :, : self.state.head_v_dim]
        return (stands > (self.positions + t)[:, None, None])[..., None]

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Requests of any length, one token of the packed batch after the other.

        Returns:
            Outputs [T, HV, V] of float32, S(n_b + T_b) and S(n_b + mamba_track_tokens), each [B, HV, V, K].
        """
        states = self.first.clone()
        tracked = self.first.clone()
        count = min(self.metadata.num_tokens, self.tokens.v.shape[0])
        if not self.metadata.num_reqs:
            count = 0
        y = torch.zeros_like(self.tokens.v)
        index = torch.arange(count, device=self.slots.device)
        owners = self.metadata.seq_idx[:count].long()
        for t in range(count):
            owner, token = owners[t : t + 1].clamp(min=0), self.tokens.at(index[t : t + 1])
            before = states.index_select(0, owner)
            u = recurrence.update(before, token)
            behind = recurrence.apply(before, token.d, token.k, u, self.state.tensor.dtype)
            behind = torch.where(owners[t] >= 0, behind, before)
            states.index_copy_(0, owner, behind)
            y[t : t + 1] = recurrence.output(behind, token)
            taken = self.metadata.mamba_track_tokens.index_select(0, owner)
            snap = (owners[t] >= 0) & (taken == t + 1 - self.starts.index_select(0, owner))
            old = tracked.index_select(0, owner)
            tracked.index_copy_(0, owner, torch.where(snap[:, None, None, None], behind, old))
        return y, states, tracked

    def after(self, taken: Tensor) -> Tensor:
        """S(n_b + taken) [B, HV, V, K], taken [B] clamped to the tokens of the step."""
        index = taken.long().clamp(0, len(self.states))
        return torch.stack([self.first, *self.states])[index, torch.arange(len(index), device=index.device)]

    def write_slots(self, states: Tensor, mask: Tensor, taken: Tensor | None = None) -> None:
        """States [B, HV, V, K] into the requests' slots where mask [B] holds; on `ring` with length n_b + taken."""
        self._store(self.slots, states, mask, None if taken is None else self.positions + taken)

    def write_track(self, states: Tensor) -> None:
        """States [B, HV, V, K] into the track slots, with their lengths."""
        taken, target = self.metadata.mamba_track_tokens.long(), self.metadata.mamba_track_indices.long()
        wanted = self.live & within(target, self.state.slots) & (taken >= 0)
        self._store(target, states, wanted, self.positions + taken)

    def _store(self, slots: Tensor, states: Tensor, mask: Tensor, lens: Tensor | None) -> None:
        masked_write(self.state.tensor.unsqueeze(1), slots, torch.zeros_like(slots), states, mask)
        if self.state.state_lens is not None and lens is not None:
            tiles = lens.int()[:, None, None].expand(-1, *self.state.state_lens.shape[1:])
            masked_write(self.state.state_lens.unsqueeze(1), slots, torch.zeros_like(slots), tiles, mask)

    def write_intermediate(self) -> None:
        """The state behind each draft, by draft row."""
        target = self.state.intermediate
        assert target is not None
        known = self.live & (self.requests >= 0) & (self.requests < len(target))
        places = torch.arange(len(self.states), device=self.slots.device).expand(len(known), -1)
        values = torch.stack(self.states, 1)
        masked_write(target, self.requests[:, None], places, values, known[:, None].expand_as(places))

    def write_ring(self, count: int) -> None:
        """(d, k, u) of the step's tokens into their rows; the checkpoint where the ring would run out, or begins."""
        state = self.state
        least = 2 * state.draft_token_num
        flush = (self.positions[:, None, None] - self.lens + least > state.ring_rows) | self.fresh[:, None, None]
        flush = flush & (self.lens <= self.positions[:, None, None]) & self.live[:, None, None]
        rows = flush.repeat_interleave(LENS_ROWS, 2)[:, :, : state.head_v_dim]
        assert state.state_lens is not None
        kept = torch.where(within(self.slots, state.slots), self.slots, 0)
        values = torch.where(rows[..., None], self.first.to(state.tensor.dtype), state.tensor[kept])
        lens = torch.where(flush, self.positions[:, None, None], state.state_lens[kept].long()).int()
        zeros = torch.zeros_like(self.slots)
        masked_write(state.tensor.unsqueeze(1), self.slots, zeros, values, self.live)
        masked_write(state.state_lens.unsqueeze(1), self.slots, zeros, lens, self.live)
        self._write_rows(count)

    def _write_rows(self, count: int) -> None:
        state, share = self.state, self.state.num_v_heads // self.state.num_k_heads
        assert state.ring_k is not None
        assert state.ring_u is not None
        assert state.ring_d is not None
        batch = self.metadata.num_reqs
        offsets = torch.arange(count, device=self.slots.device).expand(batch, count)
        places = (self.positions[:, None] + offsets) % state.ring_rows
        known = self.live & (self.requests >= 0) & (self.requests < len(state.ring_u))
        mask = known[:, None].expand_as(places)
        rows = self.requests[:, None]
        last = batch * count
        k, d = self.tokens.k[:last, ::share], self.tokens.d[:last]
        k, d = k.reshape(batch, count, *k.shape[1:]), d.reshape(batch, count, *d.shape[1:])
        masked_write(state.ring_k, rows, places, k, mask)
        masked_write(state.ring_d, rows, places, d if state.kind == "kda" else d[..., 0], mask)
        masked_write(state.ring_u, rows, places, torch.stack(self.updates, 1), mask)

    def result(self, y: Tensor, v: Tensor, out: Tensor | None) -> Tensor:
        """The outputs, rounded once; 0 in padded rows and behind the last request."""
        out = new_output(v) if out is None else out
        if not v.shape[0] or not self.metadata.num_reqs:
            return out.zero_()
        token = torch.arange(v.shape[0], device=v.device)
        if len(y) < len(token):
            y = torch.nn.functional.pad(y, (0, 0, 0, 0, 0, len(token) - len(y)))
        owner = self._owners(token)
        live = (owner >= 0) & self.live[owner.clamp(min=0)]
        zero = torch.zeros((), dtype=torch.float32, device=v.device)
        out.copy_(torch.where(live[:, None, None], y[: len(token)], zero))
        return out

    def _owners(self, token: Tensor) -> Tensor:
        """The request of each row, or -1."""
        if self.states:
            owner = token // len(self.states)
            return torch.where(owner < self.metadata.num_reqs, owner, torch.full_like(owner, -1))
        owner = self.metadata.seq_idx.long()
        return torch.nn.functional.pad(owner, (0, max(0, len(token) - len(owner))), value=-1)[: len(token)]
