"""What the SSM benchmark measures: models' head counts, launch shapes, and the batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hwbackends.ssm.layouts import SSMKind
from hwbackends.ssm.state import SSMStorage
from hwbackends.triton_ops.traits import SsmShape

DRAFTS = 4
"""Tokens of a verify step."""
ACCEPTED = 3
"""Of these kept, in the steady state that is measured."""


@dataclass(frozen=True, slots=True)
class Size:
    """One model's SSM. `q, k [T, H, K]`, `v [T, HV, V]`; Mamba2: groups, dstate, heads, head dim."""

    name: str
    kind: SSMKind
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one request's state in one layer."""
        return self.num_v_heads * self.head_v_dim * self.head_k_dim * dtype.itemsize

    def ring_row_bytes(self) -> int:
        """Bytes of one ring row, all float32."""
        decays = self.num_v_heads * (self.head_k_dim if self.kind == "kda" else 1)
        return 4 * (self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim + decays)

    def token_bytes(self) -> int:
        """Bytes of a token's inputs and output, bfloat16."""
        wide = self.head_k_dim if self.kind == "kda" else 1
        gates = self.num_v_heads * wide + (0 if self.kind == "mamba2" else self.num_v_heads)
        return 2 * (2 * self.num_k_heads * self.head_k_dim + 2 * self.num_v_heads * self.head_v_dim + gates)


SIZES = (
    Size("gdn", "gdn", 16, 32, 128, 128),
    Size("kda", "kda", 32, 32, 128, 128),
    Size("mamba2", "mamba2", 8, 128, 128, 64),
    Size("gdn_tp4", "gdn", 4, 8, 128, 128),
    Size("kda_tp4", "kda", 8, 8, 128, 128),
    Size("mamba2_tp4", "mamba2", 2, 32, 128, 64),
)
TINY = (
    Size("gdn", "gdn", 1, 2, 32, 16),
    Size("kda", "kda", 2, 2, 32, 16),
    Size("mamba2", "mamba2", 1, 2, 32, 16),
)
BATCHES = (1, 8, 32, 128)

VERIFY_SHAPES = (
    SsmShape(16, 1),
    SsmShape(16, 1, registers=128),
    SsmShape(16, 1, unroll=2),
    SsmShape(16, 1, staged=False),
    SsmShape(16, 1, late=False),
    SsmShape(32, 2, registers=128),
    SsmShape(32, 1),
    SsmShape(64, 4),
    SsmShape(64, 4, registers=128),
    SsmShape(64, 4, unroll=2),
    SsmShape(128, 8, registers=128),
)
DECODE_SHAPES = (
    SsmShape(16, 1, staged=False),
    SsmShape(16, 1),
    SsmShape(16, 1, staged=False, registers=128),
    SsmShape(32, 1, staged=False),
    SsmShape(64, 4),
    SsmShape(64, 4, registers=128),
    SsmShape(8, 1, staged=False),
)


def label(shape: SsmShape) -> str:
    """A launch shape in a table."""
    parts = [f"{shape.rows}x{shape.warps}", "staged" if shape.staged else "", "" if shape.late else "early"]
    parts += [f"u{shape.unroll}" if shape.unroll > 1 else "", f"r{shape.registers}" if shape.registers else ""]
    return " ".join(part for part in parts if part)


def steady(ring_rows: int, drafts: int, accepted: int) -> list[int]:
    """Pending tokens before each step of a long run that keeps `accepted` of `drafts` tokens a step."""
    pending, seen = accepted, []
    while pending not in seen:
        seen.append(pending)
        pending = accepted if pending + 2 * drafts > ring_rows else pending + accepted
    return seen[seen.index(pending) :]


class Inputs:
    """Tokens of a step as a conv leaves them: one packed row each (q, k, v; Mamba2: C, B, x), and weights."""

    def __init__(self, size: Size, tokens: int, device: str, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).bfloat16()

        keys = size.num_k_heads * size.head_k_dim
        self.mixed = draw(tokens, 2 * keys + size.num_v_heads * size.head_v_dim)
        self.q = self.mixed[:, :keys].view(tokens, size.num_k_heads, size.head_k_dim)
        self.k = self.mixed[:, keys : 2 * keys].view(tokens, size.num_k_heads, size.head_k_dim)
        self.v = self.mixed[:, 2 * keys :].view(tokens, size.num_v_heads, size.head_v_dim)
        if size.kind == "mamba2":
            self.k.mul_(0.3)
        wide = (size.head_k_dim,) if size.kind == "kda" else ()
        self.a = draw(tokens, size.num_v_heads, *wide)
        self.b = None if size.kind == "mamba2" else draw(tokens, size.num_v_heads)

    def rows(self, index: Tensor) -> Inputs:
        """The tokens of an index, packed anew."""
        found = object.__new__(Inputs)
        found.mixed = self.mixed[index]
        keys = self.q.shape[1] * self.q.shape[2]
        found.q = found.mixed[:, :keys].view(-1, *self.q.shape[1:])
        found.k = found.mixed[:, keys : 2 * keys].view(-1, *self.k.shape[1:])
        found.v = found.mixed[:, 2 * keys :].view(-1, *self.v.shape[1:])
        found.a, found.b = self.a[index], None if self.b is None else self.b[index]
        return found


class Weights:
    """A_log, dt_bias, and D of Mamba2."""

    def __init__(self, size: Size, device: str) -> None:
        generator = torch.Generator(device).manual_seed(1)
        heads = size.num_v_heads
        self.A_log = torch.rand(heads, generator=generator, device=device)
        wide = (heads, size.head_k_dim) if size.kind == "kda" else (heads,)
        self.dt_bias = torch.randn(wide, generator=generator, device=device)
        self.D = torch.randn(heads, generator=generator, device=device) if size.kind == "mamba2" else None


def storage(
    size: Size, layers: int, slots: int, requests: int, dtype: torch.dtype, device: str, ring_rows: int, drafts: int
) -> SSMStorage:
    """Random states on a ring."""
    shape = (layers, slots, size.num_v_heads, size.head_v_dim, size.head_k_dim)
    tensor = torch.empty(shape, dtype=dtype, device=device).normal_(std=0.1)
    return SSMStorage.wrap(
        tensor,
        kind=size.kind,
        num_k_heads=size.num_k_heads,
        request_rows=requests,
        layout="ring",
        draft_token_num=drafts,
        ring_rows=ring_rows,
    )


def layers_for(size: Size, batch: int, dtype: torch.dtype) -> int:
    """Layers whose states together are well past the L2."""
    return max(2, min(400, -(-(200 << 20) // (size.state_bytes(dtype) * batch))))
