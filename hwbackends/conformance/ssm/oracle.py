"""SSM state in float64, token by token, from the sentences of the contract alone; and how far float32
work may lie from it, element by element. Nothing here comes from an implementation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwbackends.conformance.oracle import ulp

Array = NDArray[Any]
UNIT = 2.0**-24
"""Half a unit in the last place of 1 in float32."""
GATE = 16.0
"""Units that an exponential, a logarithm, a sigmoid or a square root of float32 may err by; CUDA's err by 1 to 4."""
EPS = 1e-6


@dataclass(frozen=True)
class Rules:
    """What a hook is told besides tokens: kind, weights and options.

    Attributes:
        A_log: [HV].
        dt_bias: [HV], kda [HV, K]; None for none.
        D: [HV], Mamba2's skip; None for none.
    """

    kind: str
    A_log: Array
    dt_bias: Array | None = None
    D: Array | None = None
    dt_limit: tuple[float, float] | None = None
    scale: float | None = None
    lower_bound: float | None = None
    l2norm: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of a hook that are no tensors."""
        plain = {"dt_limit": self.dt_limit, "scale": self.scale, "lower_bound": self.lower_bound}
        return {**plain, "use_qk_l2norm_in_kernel": self.l2norm}


@dataclass
class Trail:
    """What a request's tokens did to its state.

    Attributes:
        states: S(p), S(p + 1), ..., [HV, V, K] each; `errors` how far a float32 computation may lie from each.
        outputs, output_errors: of each token, [HV, V].
        factors: (d, k, u) of each token: [HV, 1 or K], [H, K], [HV, V].
    """

    states: list[Array]
    errors: list[Array]
    outputs: list[Array] = field(default_factory=list)
    output_errors: list[Array] = field(default_factory=list)
    factors: list[tuple[Array, Array, Array]] = field(default_factory=list)


def softplus(x: float) -> float:
    """log(1 + exp(x)), and x itself above 20."""
    return x if x > 20 else math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def log_decay(rules: Rules, head: int, a: Array) -> Array:
    """log d of one token in one head, [1] or [K]."""
    bias = 0.0 if rules.dt_bias is None else rules.dt_bias[head]
    x = np.atleast_1d(np.asarray(a + bias, np.float64))
    rate = math.exp(float(rules.A_log[head]))
    if rules.lower_bound is not None:
        return np.array([rules.lower_bound * sigmoid(rate * value) for value in x])
    if rules.kind == "mamba2":
        return np.array([-rate * step(rules, value) for value in x])
    return np.array([-rate * softplus(value) for value in x])


def step(rules: Rules, x: float) -> float:
    """Mamba2's dt from a + dt_bias."""
    dt = softplus(x)
    return dt if rules.dt_limit is None else min(max(dt, rules.dt_limit[0]), rules.dt_limit[1])


def unit(x: Array, wanted: bool) -> Array:
    """x / sqrt(sum(x * x) + 1e-6) where it is wanted."""
    return x / math.sqrt(float((x * x).sum()) + EPS) if wanted else x


def run(
    rules: Rules, start: Array, tokens: Mapping[str, Array], state_dtype: str = "float32", bounded: bool = True
) -> Trail:
    """Decode tokens one after the other.

    Args:
        start: [HV, V, K] before the first.
        tokens: q, k [T, H, K], v [T, HV, V], a [T, HV] or [T, HV, K], b [T, HV].
        state_dtype: what the state is rounded to after every token; here it widens the errors alone.
        bounded: whether errors are wanted; zeros otherwise.
    """
    trail = Trail([np.asarray(start, np.float64)], [np.zeros(start.shape)])
    for t in range(len(tokens["v"])):
        _token(rules, trail, {name: value[t] for name, value in tokens.items()}, state_dtype, bounded)
    return trail


def _token(rules: Rules, trail: Trail, token: Mapping[str, Array], state_dtype: str, bounded: bool) -> None:
    """Add one token: q, k [H, K], v [HV, V], a [HV] or [HV, K], b [HV]."""
    before, error = trail.states[-1], trail.errors[-1]
    heads, _, width = before.shape
    share = heads // len(token["q"])
    q, k = (np.repeat([unit(x, rules.l2norm) for x in token[name]], share, 0) for name in ("q", "k"))
    gate = np.stack([log_decay(rules, h, token["a"][h]) for h in range(heads)])
    d = np.exp(gate)
    decayed = d[:, None, :] * before
    u, beta, seen = _update(rules, token, k, decayed)
    state = decayed + u[:, :, None] * k[:, None, :]
    scale = rules.scale if rules.scale is not None else (1.0 if rules.kind == "mamba2" else width**-0.5)
    output = scale * np.einsum("hvk,hk->hv", state, q)
    skip = 0.0 * token["v"] if rules.D is None else rules.D[:, None] * token["v"]
    spread = np.einsum("hvk,hk->hv", np.abs(state), np.abs(q))
    if bounded:
        d_error = d * (GATE * UNIT * (1 + 2 * np.abs(gate)))
        decayed_error = d[:, None, :] * error + np.abs(before) * d_error[:, None, :] + UNIT * np.abs(decayed)
        u_error = _update_error(rules, token, k, decayed, decayed_error, u, beta, seen)
        error = decayed_error + u_error[:, :, None] * np.abs(k)[:, None, :] + UNIT * np.abs(state)
        error = error + (GATE * UNIT) * np.abs(u)[:, :, None] * np.abs(k)[:, None, :]
        error = error + 0.5 * np.asarray(ulp(np.abs(state) + error, state_dtype), np.float64)
    output_error = abs(scale) * np.einsum("hvk,hk->hv", error, np.abs(q))
    output_error += abs(scale) * (width + GATE) * UNIT * spread + 2 * UNIT * np.abs(skip)
    trail.states.append(state)
    trail.errors.append(error)
    trail.outputs.append(output + skip)
    trail.output_errors.append(output_error + UNIT * np.abs(output + skip))
    norms = np.repeat([_norm_of(x, rules.l2norm) for x in token["k"]], share)
    trail.factors.append((d, np.asarray(token["k"], np.float64), u * norms[:, None]))


def _norm_of(k: Array, l2norm: bool) -> float:
    """What u takes over where the ring keeps k as it came."""
    return 1 / math.sqrt(float((k * k).sum()) + EPS) if l2norm else 1.0


def _update(rules: Rules, token: Mapping[str, Array], k: Array, decayed: Array) -> tuple[Array, Array, Array]:
    """u [HV, V], beta [HV, 1] and what the state says already, (d * S) k, [HV, V]."""
    v = np.asarray(token["v"], np.float64)
    if rules.kind == "mamba2":
        bias = np.zeros(len(v)) if rules.dt_bias is None else rules.dt_bias
        dt = np.array([step(rules, float(x)) for x in token["a"] + bias])[:, None]
        return dt * v, dt, 0.0 * v
    seen = np.einsum("hvk,hk->hv", decayed, k)
    beta = np.array([sigmoid(float(x)) for x in token["b"]])[:, None]
    return beta * (v - seen), beta, seen


def _update_error(
    rules: Rules, token: Mapping[str, Array], k: Array, decayed: Array, decayed_error: Array, u: Array, beta: Array,
    seen: Array,
) -> Array:  # fmt: skip
    """How far float32 work may lie from u, [HV, V]."""
    if rules.kind == "mamba2":
        return 2 * GATE * UNIT * np.abs(u)
    summed = np.einsum("hvk,hk->hv", np.abs(decayed), np.abs(k))
    seen_error = np.einsum("hvk,hk->hv", decayed_error, np.abs(k)) + (k.shape[1] + GATE) * UNIT * summed
    gap = np.abs(u) + beta * np.abs(token["v"] - seen)
    return np.asarray(beta * seen_error + (GATE + 4) * UNIT * gap)
