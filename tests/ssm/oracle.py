"""One request's tokens in float64, one after the other, from the sentences of `contracts/ssm.yaml`. Uses nothing of the
implementation, and plain loops over heads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def softplus(x: float) -> float:
    return x if x > 20 else math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def unit(x: np.ndarray) -> np.ndarray:
    return x / math.sqrt(float((x * x).sum()) + 1e-6)


def decay(kind: str, a: Any, A_log: float, bias: Any, lower_bound: float | None) -> np.ndarray:
    """exp of the gate, per head or per channel."""
    x = np.atleast_1d(a + bias)
    if lower_bound is not None:
        return np.array([math.exp(lower_bound * sigmoid(math.exp(A_log) * value)) for value in x])
    return np.array([math.exp(-math.exp(A_log) * softplus(value)) for value in x])


def run(kind: str, state: np.ndarray, tokens: dict[str, Any], weights: dict[str, Any], **options: Any) -> Any:
    """Outputs [T, HV, V] and the states behind each token [T, HV, V, K].

    Args:
        state: [HV, V, K] before the first token.
        tokens: q, k [T, H, K], v [T, HV, V], a [T, HV] or [T, HV, K], b [T, HV] or None.
        weights: A_log [HV], dt_bias [HV] or [HV, K], D [HV] or None.
        options: scale, lower_bound, dt_limit, l2norm.
    """
    state = state.astype(np.float64).copy()
    count, heads = tokens["v"].shape[:2]
    share, width = heads // tokens["q"].shape[1], tokens["q"].shape[2]
    scale = options.get("scale") or (1.0 if kind == "mamba2" else width**-0.5)
    outputs, states = np.zeros(tokens["v"].shape), []
    for t in range(count):
        for h in range(heads):
            q, k, v = tokens["q"][t, h // share], tokens["k"][t, h // share], tokens["v"][t, h]
            if options.get("l2norm"):
                q, k = unit(q), unit(k)
            rate, bias, a = weights["A_log"][h], weights["dt_bias"][h], tokens["a"][t, h]
            if kind == "mamba2":
                dt = softplus(a + bias)
                dt = min(max(dt, options["dt_limit"][0]), options["dt_limit"][1]) if options.get("dt_limit") else dt
                d, u = np.array([math.exp(-math.exp(rate) * dt)]), dt * v
                decayed = state[h] * d
            else:
                d = decay(kind, a, rate, bias, options.get("lower_bound"))
                decayed = state[h] * d[None, :]
                u = sigmoid(tokens["b"][t, h]) * (v - decayed @ k)
            state[h] = decayed + np.outer(u, k)
            outputs[t, h] = scale * (state[h] @ q)
            if weights.get("D") is not None:
                outputs[t, h] += weights["D"][h] * v
        states.append(state.copy())
    return outputs, np.stack(states)
