"""One SSM of a small pool, steps of it through a backend's hooks, and a float64 oracle that shares no code with
them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hwbackends.ssm.layouts import SSMKind, SSMLayout
from hwbackends.ssm.state import SSMStream
from hwbackends.step.batch import ForwardMode
from hwbackends.step.metadata import MetadataBuffers, MetadataLimits, StepMetadata
from hwbackends.step.pool import StatePool

MODES = {
    "ssm_decode": ForwardMode.DECODE,
    "ssm_extend": ForwardMode.EXTEND,
    "ssm_target_verify": ForwardMode.TARGET_VERIFY,
    "ssm_draft_extend": ForwardMode.DRAFT_EXTEND,
}
SLOTS, REQUESTS = 6, 5
START = 7
"""Computed length of a request that has a state."""


class Lab:
    """A pool with one state in one layer, weights, and a stream of tokens per request.

    Requests 0 and 1 have slots 2 and 4 and request rows 3 and 1; everything else is free or padding.
    """

    slots, rows = (2, 4), (3, 1)

    def __init__(
        self, hooks: Any, kind: SSMKind, layout: SSMLayout = "ring", *, dtype: torch.dtype = torch.float32,
        inputs: torch.dtype = torch.float32, drafts: int = 2, ring: int = 4, heads: tuple[int, int] = (1, 2),
        dims: tuple[int, int] = (16, 8), device: str = "cpu",
    ) -> None:  # fmt: skip
        self.hooks, self.kind, self.layout, self.drafts, self.device = hooks, kind, layout, drafts, device
        (self.H, self.HV), (self.K, self.V) = heads, dims
        stream = SSMStream(
            "s", kind, self.H, self.HV, self.K, self.V, dtype=dtype, layout=layout,
            ring_rows=ring if layout == "ring" else None,
        )  # fmt: skip
        self.pool = StatePool(
            [], num_slots=SLOTS, request_rows=REQUESTS, draft_token_num=drafts, states=[stream], device=device
        )
        for row, slot in zip(self.rows, self.slots, strict=True):
            self.pool.mamba_index_mapping[row] = slot
        self.state = self.pool.state("s", 0)
        generator = torch.Generator().manual_seed(5)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        self.state.tensor.copy_(draw(*self.state.tensor.shape) * 0.3)
        if layout == "ring":
            self.state.state_lens.fill_(START)
            for ring_part in (self.state.ring_k, self.state.ring_u, self.state.ring_d):
                ring_part.fill_(math.nan)
        wide = (self.K,) if kind == "kda" else ()
        self.weights = (draw(self.HV).abs(), draw(self.HV, *wide))
        self.options: dict[str, Any] = {"use_qk_l2norm_in_kernel": kind != "mamba2"}
        if kind == "mamba2":
            self.options |= {"D": draw(self.HV), "dt_limit": (0.05, 1.5)}
        if kind == "kda":
            self.options["lower_bound"] = -3.0
        keys = self.H * self.K
        self.stream = draw(2, 16, 2 * keys + self.HV * self.V).to(inputs)
        self.gates = draw(2, 16, self.HV, *wide).to(inputs), draw(2, 16, self.HV).to(inputs)

    def tokens(self, request: int, first: int, count: int) -> tuple[Tensor, ...]:
        """q, k, v, a, b of some tokens of a request."""
        keys, rows = self.H * self.K, slice(first, first + count)
        packed = self.stream[request, rows]
        q, k, v = packed[:, :keys], packed[:, keys : 2 * keys], packed[:, 2 * keys :]
        heads = (q.unflatten(1, (self.H, self.K)), k.unflatten(1, (self.H, self.K)), v.unflatten(1, (self.HV, self.V)))
        return (*heads, self.gates[0][request, rows], self.gates[1][request, rows])

    def metadata(
        self, hook: str, positions: Sequence[int], counts: Sequence[int], padded: int = 1, tail: int = 0, **fields: Any
    ) -> StepMetadata:
        """Of a step of both requests and `padded` rows behind them; `tail` rows of tokens behind the last request."""
        mode, batch = MODES[hook], len(positions) + padded
        each = counts[0] if mode is not ForwardMode.EXTEND else 1
        lengths = [*counts, *([each] * padded)]
        total = sum(lengths) + tail
        drafts = each if mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND) else 1
        buffers = MetadataBuffers(MetadataLimits(batch, total, drafts), self.device, torch.int32)
        step = buffers.view(mode, batch, total, drafts, "mamba_track_indices" in fields)
        none = [-1] * padded
        given: dict[str, Any] = {
            "cache_indices": [*self.slots[: len(positions)], *none],
            "draft_indices": [*self.rows[: len(positions)], *none],
            "computed_lens": [*positions, *([0] * padded)],
            "has_initial_state": [*([True] * len(positions)), *([False] * padded)],
            "query_start_loc": [sum(lengths[:i]) for i in range(batch + 1)],
            "seq_idx": [b for b, n in enumerate(lengths) for _ in range(n)] + [-1] * tail,
        }
        given["source_indices"] = given["cache_indices"]
        for name, value in (given | fields).items():
            getattr(step, name).copy_(torch.tensor(value))
        return step

    def run(
        self, hook: str, first: Sequence[int], counts: Sequence[int], hooks: Any = None, padded: int = 1, tail: int = 0,
        parents: Tensor | None = None, start: int = START, **fields: Any,
    ) -> list[Tensor]:  # fmt: skip
        """A step over tokens first[b] .. first[b] + counts[b] - 1; returns each request's outputs, then the rest's."""
        step = self.metadata(hook, [start + n for n in first], counts, padded, tail, **fields)
        parts = [self.tokens(b, n, c) for b, (n, c) in enumerate(zip(first, counts, strict=True))]
        extra = step.num_tokens - sum(counts)
        parts.append(self.tokens(0, 0, max(extra, 1)))
        parts[-1] = tuple(t[:extra] * math.nan for t in parts[-1])
        q, k, v, a, b = (torch.cat(each) for each in zip(*parts, strict=True))
        packed = torch.cat([t.flatten(1) for t in (q, k, v)], 1)  # views of one row per token, as a conv leaves them
        keys = self.H * self.K
        q, k = packed[:, :keys].view(q.shape), packed[:, keys : 2 * keys].view(k.shape)
        v = packed[:, 2 * keys :].view(v.shape)
        options = self.options if parents is None else {**self.options, "retrieve_parent_token": parents}
        given = (q, k, v, a, None if self.kind == "mamba2" else b, *self.weights)
        out = getattr(hooks or self.hooks, hook)(*given, self.state, step, **options)
        return list(out.split([*counts, extra]))

    def materialize(self, done: Sequence[int]) -> None:
        """Bring both checkpoints up to START + done[b]."""
        rows, lens = torch.tensor(self.rows[: len(done)]), torch.tensor([START + n for n in done])
        self.hooks.materialize_slots(self.pool, rows.int().to(self.device), lens.int().to(self.device))

    def oracle(self, request: int, count: int) -> tuple[Tensor, Tensor]:
        """Outputs and states of a request's first tokens in float64, rounded nowhere."""
        S = self.state.tensor[self.slots[request]].double().cpu()
        q, k, v, a, b = (t.double().cpu() for t in self.tokens(request, 0, count))
        A_log, bias = (t.double().cpu() for t in self.weights)
        outputs, states = [], []
        for t in range(count):
            y = torch.empty(self.HV, self.V, dtype=torch.float64)
            S = S.clone()
            for h in range(self.HV):
                key, query = k[t, h // (self.HV // self.H)], q[t, h // (self.HV // self.H)]
                x = a[t, h] + bias[h]
                rate = A_log[h].exp()
                soft = torch.log1p(x.exp())
                if self.kind == "mamba2":
                    dt = soft.clamp(0.05, 1.5)
                    S[h] = S[h] * (-rate * dt).exp() + (dt * v[t, h])[:, None] * key
                    y[h] = S[h] @ query + self.options["D"][h].double().cpu() * v[t, h]
                    continue
                gate = -rate * soft if self.kind == "gdn" else -3.0 / (1 + (-rate * x).exp())
                key, query = key / (key @ key + 1e-6).sqrt(), query / (query @ query + 1e-6).sqrt()
                S[h] = S[h] * gate.exp()
                u = (v[t, h] - S[h] @ key) / (1 + (-b[t, h]).exp())
                S[h] = S[h] + u[:, None] * key
                y[h] = S[h] @ query / math.sqrt(self.K)
            outputs.append(y)
            states.append(S)
        return torch.stack(outputs), torch.stack(states)
