"""Drawing combinations: rows of a parameter space in which every pair of values of any two parameters occurs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]
_Pair = tuple[int, int, int, int]


def pairwise(space: Mapping[str, Sequence[Any]], seed: int) -> list[Row]:
    """Rows that cover every pair, drawn greedily; the same rows for the same space and seed."""
    names, rng = list(space), np.random.default_rng(seed)
    counts = [len(space[name]) for name in names]
    missing: dict[_Pair, None] = {
        (i, a, j, b): None
        for i, j in itertools.combinations(range(len(names)), 2)
        for a in range(counts[i])
        for b in range(counts[j])
    }
    rows = []
    while missing:
        i, a, j, b = next(iter(missing))
        row = {i: a, j: b}
        for k in rng.permutation([k for k in range(len(names)) if k not in row]).tolist():
            row[k] = _best(k, counts[k], row, missing, rng)
        for one, other in itertools.combinations(sorted(row), 2):
            missing.pop((one, row[one], other, row[other]), None)
        rows.append({names[k]: space[names[k]][row[k]] for k in range(len(names))})
    return rows


def _best(k: int, count: int, row: Mapping[int, int], missing: Mapping[_Pair, None], rng: np.random.Generator) -> int:
    """The value that covers most of what is missing beside the values that are set."""
    gains = [
        sum((min(k, o), *((v, o) if k < o else (row[o], k)), row[o] if k < o else v)[0:4] in missing for o in row)
        for v in range(count)
    ]
    best = max(gains)
    return int(rng.choice([v for v in range(count) if gains[v] == best]))
