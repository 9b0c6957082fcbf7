"""One generation request: what was asked, how far it is, and what it was given. Host side only."""

from __future__ import annotations

import enum
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hwbackends.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

    from hwbackends.runner.prefixes import PrefixEntry


def whole(hook: str, parameter: str, value: Any, least: int | None = None) -> int:
    """`value` as a whole number.

    Raises:
        ArgumentError: it is none, or below `least`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        wanted = "a whole number" if least is None else f"a whole number, at least {least}"
        raise ArgumentError(hook, parameter, repr(value), wanted)
    return number


def token_ids(hook: str, parameter: str, value: Any, vocabulary: int) -> list[int]:
    """`value` as token ids: a list, a tuple, an array or tensor of one dimension.

    Raises:
        ArgumentError: it is no such thing, or a token is outside of the vocabulary.
    """
    hint = ""
    try:
        found = [operator.index(token) for token in value]
        if all(0 <= token < vocabulary for token in found):
            return found
        hint = "outside: " + ", ".join(str(token) for token in found if not 0 <= token < vocabulary)[:40]
    except TypeError:
        if isinstance(value, str):
            hint = "tokenize it first"
        elif isinstance(value, int):
            hint = "put a single token in a list"
        elif value is not None:
            hint = "one request at a time, in one dimension"
    got = repr(value)
    wanted = f"token ids from 0 to {vocabulary - 1}"
    raise ArgumentError(hook, parameter, got if len(got) <= 60 else f"{got[:57]}...", wanted, hint)


class RequestState(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class Request:
    """One request of the runner.

    Attributes:
        request_id: position in the order in which requests were added.
        prompt: token ids, at least one.
        max_new_tokens: tokens to generate, at most.
        eos_token_ids: tokens that end the request; they are part of the answer.
        arrival: first step of the runner that may admit the request.
        generated: token ids so far.
        logits: [vocabulary] float32 of each generated token, where the runner keeps them.
        accepted: how often a verify step accepted 0, 1, 2, ... drafts of this request.
        steps: model forwards that the request took part in.
        computed: tokens whose keys, values and conv state are computed.
        reused: tokens that came from a shared prefix.
        row: request row while running, else -1.
        slot: state slot while running, else -1.
        source: prefix whose slot holds the history until the first step has run.
        kept_tokens: tokens that the last step of this request kept (`num_accepted_tokens`).
    """

    request_id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    arrival: int = 0
    generated: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    accepted: Counter[int] = field(default_factory=Counter)
    steps: int = 0
    computed: int = 0
    reused: int = 0
    row: int = -1
    slot: int = -1
    source: PrefixEntry | None = None
    kept_tokens: int = 1
    state: RequestState = RequestState.WAITING

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and answer so far."""
        return (*self.prompt, *self.generated)

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.prompt) + len(self.generated)

    @property
    def prefilling(self) -> bool:
        """Whether a part of the prompt is still to be computed."""
        return self.computed < len(self.prompt)

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.max_new_tokens - len(self.generated)

    def token_at(self, position: int) -> int:
        """The token at an absolute position."""
        split = len(self.prompt)
        return self.prompt[position] if position < split else self.generated[position - split]

    def span(self, start: int, end: int) -> list[int]:
        """Tokens start..end-1."""
        return [self.token_at(position) for position in range(start, end)]

    def extend(self, tokens: Sequence[int], logits: Sequence[Tensor] | None) -> int:
        """Append new tokens until the request is done; returns how many were taken."""
        taken = 0
        for index, token in enumerate(tokens):
            if self.done:
                break
            self.generated.append(token)
            if logits is not None:
                self.logits.append(logits[index])
            taken += 1
        return taken

    @property
    def done(self) -> bool:
        """Whether the answer is complete."""
        return self.remaining <= 0 or bool(self.generated and self.generated[-1] in self.eos_token_ids)
