"""Drafters: who proposes the tokens that a verify step checks. The n-gram drafter needs nothing but the text; the
seeded one knows the answer and spoils it on purpose, so that every rollback happens. Inkling's own heads: `mtp`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hwbackends.errors import ArgumentError
from hwbackends.runner.requests import Request
from hwbackends.step.pool import StatePool


@dataclass(frozen=True, slots=True)
class DrafterHost:
    """What a runner lends its drafter.

    Attributes:
        model: the model that verifies.
        backend: the bound backend.
        pool: the model's state pool; parts of a drafter share its slots and map.
        max_batch: requests that run at once.
        max_len: tokens of one request, at most.
        chunk_size: tokens of a prompt per step, at most.
        draft_tokens: drafts per verify step, at most.
    """

    model: Any
    backend: Any
    pool: StatePool
    max_batch: int
    max_len: int
    chunk_size: int
    draft_tokens: int


class Drafter:
    """Proposes drafts for verify steps; subclasses say how.

    Attributes:
        needs_hidden: whether `observe` wants the model's last hidden states of every token. Prefixes are not shared
            then: nobody kept the hidden states of theirs.
    """

    needs_hidden = False

    def attach(self, host: DrafterHost) -> None:
        """A runner takes this drafter; called once, before anything else."""

    def propose(self, requests: Sequence[Request], count: int) -> list[list[int]]:
        """At most `count` draft tokens for each request, in order; fewer or none are padded."""
        raise NotImplementedError

    def observe(self, requests: Sequence[Request], hidden: Sequence[Tensor]) -> None:
        """After a step, where `needs_hidden`: hidden states [tokens, D] of what each request computed for good."""

    def finish(self, request: Request) -> None:
        """The request left, whatever its state; forget it."""


class NGramDrafter(Drafter):
    """Proposes what followed the last occurrence of the newest tokens (prompt lookup).

    Args:
        longest: longest run of tokens that is looked for; shorter ones are tried next.
        shortest: shortest run that counts as a match.
    """

    def __init__(self, longest: int = 3, shortest: int = 1) -> None:
        if not 1 <= shortest <= longest:
            raise ArgumentError("NGramDrafter", "shortest, longest", (shortest, longest), "1 <= shortest <= longest")
        self.longest, self.shortest = longest, shortest

    def propose(self, requests: Sequence[Request], count: int) -> list[list[int]]:
        """What followed the newest tokens the last time they occurred."""
        return [self._lookup(request.tokens, count) for request in requests]

    def _lookup(self, tokens: tuple[int, ...], count: int) -> list[int]:
        for size in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            pattern = tokens[-size:]
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start : start + size] == pattern:
                    return list(tokens[start + size : start + size + count])
        return []


class SeededDrafter(Drafter):
    """Proposes the known answer, with one token spoiled at a seeded place, so that every accepted count occurs.

    Counts are drawn without replacement from a shuffled 0..N and start over when all were drawn: N + 1 verify steps
    with room for N drafts see every count.

    Args:
        answers: request id to the tokens that the stock model generates.
        vocab_size: tokens are below it.
        seed: seed of the draws.
        pause: every how many proposals nobody gets a draft, so that the step decodes; 0: never.
    """

    def __init__(self, answers: Mapping[int, Sequence[int]], vocab_size: int, seed: int = 0, pause: int = 0) -> None:
        self.answers = answers
        self.vocab_size = vocab_size
        self.pause = pause
        self._proposals = 0
        self._random = random.Random(seed)
        self._bag: list[int] = []

    def propose(self, requests: Sequence[Request], count: int) -> list[list[int]]:
        """The answer's next tokens, spoiled behind a drawn number of them; nothing in a pause, of which the second
        proposal is the first."""
        self._proposals += 1
        if self.pause and self._proposals % self.pause == 2 % self.pause:
            return [[] for _ in requests]
        return [self._spoil(request, count) for request in requests]

    def _spoil(self, request: Request, count: int) -> list[int]:
        done = len(request.generated)
        drafts = list(self.answers[request.request_id][done : done + count])
        right = self._draw(min(count, request.remaining - 1), count)
        if right < len(drafts):
            drafts[right] = (drafts[right] + self._random.randrange(1, self.vocab_size)) % self.vocab_size
        return drafts

    def _draw(self, most: int, count: int) -> int:
        if not any(value <= most for value in self._bag):
            fresh = list(range(count + 1))
            self._random.shuffle(fresh)
            self._bag.extend(fresh)
        index = next(i for i, value in enumerate(self._bag) if value <= most)
        return self._bag.pop(index)


def missing_counts(requests: Sequence[Request], drafts: int) -> list[int]:
    """Accepted counts of 0..drafts that no verify step of these requests had."""
    seen: Counter[int] = Counter()
    for request in requests:
        seen.update(request.accepted)
    return [count for count in range(drafts + 1) if not seen[count]]
