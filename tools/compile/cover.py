"""Chooses of a product of scenes and chips few tasks that show every pair of values that occurs in it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import fields

from families import AnyScene

Task = tuple[str, AnyScene]
Pair = tuple[tuple[str, object], tuple[str, object]]


def pairs(task: Task) -> Iterator[Pair]:
    """Every two values of a task: of its chip, and of every field of its scene."""
    chip, scene = task
    values = [("chip", chip), *((field.name, getattr(scene, field.name)) for field in fields(scene))]
    return itertools.combinations(values, 2)


def cover(tasks: Sequence[Task], kept: Sequence[Task] = ()) -> list[Task]:
    """Tasks that together have every pair of values that `tasks` have: `kept`, and then always one that adds most
    pairs, the first of them where several do. In the order of `tasks`."""
    missing = {pair for task in tasks for pair in pairs(task)}
    chosen = set(kept)
    for task in kept:
        missing.difference_update(pairs(task))
    queue = [(-sum(1 for _ in pairs(task)), at) for at, task in enumerate(tasks) if task not in chosen]
    heapq.heapify(queue)
    while missing:
        _, at = heapq.heappop(queue)
        gain = -sum(pair in missing for pair in pairs(tasks[at]))
        if queue and (gain, at) > queue[0]:
            heapq.heappush(queue, (gain, at))
        else:
            chosen.add(tasks[at])
            missing.difference_update(pairs(tasks[at]))
    return [task for task in tasks if task in chosen]
