"""What one token does to an SSM state, in float32: gates, the update u, the state, the output. No batch, slot or ring.

Every phase calls the functions below on the same values in the same order, which is why a verify equals decodes bit for
bit. Sums are folded in halves by element-wise additions, so that their order hangs on the extent alone, never on the
batch, strides or threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from hwbackends.ssm.layouts import SSMKind

NORM_EPS = 1e-6
SOFTPLUS_LINEAR = 20.0
"""softplus(x) is x above it."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of a step with everything of theirs that does not hang on the state, float32, each [T, HV, ...].

    Attributes:
        d: decay, [T, HV, 1 or K].
        k, q: [T, HV, K], as they came.
        v: [T, HV, V]; Mamba2 dt * v, its u.
        beta, k_norm: [T, HV, 1], factors of u; None for Mamba2.
        q_norm: [T, HV, 1], factor of the output.
        skip: [T, HV, V], what the output gets besides; None for none.
    """

    d: Tensor
    k: Tensor
    q: Tensor
    v: Tensor
    beta: Tensor | None
    k_norm: Tensor | None
    q_norm: Tensor
    skip: Tensor | None

    def at(self, index: Tensor) -> Tokens:
        """The tokens of these indices [n]."""

        def cut(value: Tensor | None) -> Any:
            return None if value is None else value.index_select(0, index)

        return Tokens(*(cut(getattr(self, field.name)) for field in fields(self)))


def tokens(
    kind: SSMKind,
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
    """Gates, norms and heads of a step's tokens; arguments are the hook's."""
    heads, width = v.shape[1], q.shape[2]
    share = heads // q.shape[1]
    rate = steady(torch.exp, A_log)
    x = a.float()
    if dt_bias is not None:
        x = x + dt_bias.float().reshape(x.shape[1:])
    q_norm = torch.ones(v.shape[0], heads, 1, dtype=torch.float32, device=v.device)
    wide = q.float().repeat_interleave(share, 1), k.float().repeat_interleave(share, 1)
    if kind == "mamba2":
        dt = steady(_softplus, x)
        if dt_limit is not None:
            dt = dt.clamp(*dt_limit)
        d = steady(torch.exp, -rate * dt)[..., None]
        skip = None if D is None else D.float()[:, None] * v.float()
        factor = q_norm if scale is None else q_norm * scale
        return Tokens(d, wide[1], wide[0], dt[..., None] * v.float(), None, None, factor, skip)
    assert b is not None
    rate = rate if x.dim() == 2 else rate[:, None]
    gate = -rate * steady(_softplus, x) if lower_bound is None else lower_bound * steady(torch.sigmoid, rate * x)
    d = steady(torch.exp, gate)
    k_norm = reciprocal_norm(k).repeat_interleave(share, 1) if l2norm else q_norm
    if l2norm:
        q_norm = reciprocal_norm(q).repeat_interleave(share, 1)
    q_norm = q_norm * (width**-0.5 if scale is None else scale)
    beta = steady(torch.sigmoid, b)[..., None]
    return Tokens(d if d.dim() == 3 else d[..., None], wide[1], wide[0], v.float(), beta, k_norm, q_norm, None)


def update(state: Tensor, token: Tokens) -> Tensor:
    """u [n, HV, V] of one token per state [n, HV, V, K]."""
    if token.beta is None or token.k_norm is None:
        return token.v
    seen = fold(state * token.d[:, :, None, :] * token.k[:, :, None, :])
    return (token.v - seen * token.k_norm) * token.beta * token.k_norm


def apply(state: Tensor, d: Tensor, k: Tensor, u: Tensor, dtype: torch.dtype) -> Tensor:
    """round(d * state + u (x) k): state [n, HV, V, K], d [n, HV, 1 or K], k [n, HV, K], u [n, HV, V]."""
    return (state * d[:, :, None, :] + u[..., None] * k[:, :, None, :]).to(dtype).float()


def output(state: Tensor, token: Tokens) -> Tensor:
    """o [n, HV, V] from the state behind the token's update."""
    o = fold(state * token.q[:, :, None, :]) * token.q_norm
    return o if token.skip is None else o + token.skip


def fold(x: Tensor) -> Tensor:
    """The sum over the last dimension: halves added to halves."""
    width = x.shape[-1]
    whole = 1 << max(0, width - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, whole - width))
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def reciprocal_norm(x: Tensor) -> Tensor:
    """1 / sqrt(sum(x * x) + 1e-6) of each head, [..., 1]."""
    wide = x.float()
    return 1.0 / torch.sqrt(fold(wide * wide) + NORM_EPS)[..., None]


def steady(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of x in float32, with bits that do not depend on where an element stands.

    Vector and scalar exponentials of float32 differ in the last bit: float64 rounds that away, and padding to whole
    vectors keeps every element on one path. An NPU has no float64, and vector functions alone.
    """
    if x.device.type == "npu":
        return function(x.float())
    flat = x.double().reshape(-1)
    whole = torch.nn.functional.pad(flat, (0, -flat.shape[0] % 64))
    return function(whole)[: flat.shape[0]].reshape(x.shape).float()


def _softplus(x: Tensor) -> Tensor:
    return torch.where(x > SOFTPLUS_LINEAR, x, torch.log1p(torch.exp(x.clamp(max=SOFTPLUS_LINEAR))))
