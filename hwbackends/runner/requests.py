"""One generation request: what was asked, how far it is, what it was given, and how its owner hears of it: an iterator,
a callback, a streamer, or a result that is waited for. Host side only."""

from __future__ import annotations

import enum
import operator
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hwbackends.errors import ArgumentError, RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from hwbackends.runner.prefixes import PrefixEntry
    from hwbackends.runner.sampling import Sampler

Drive = Callable[[], bool]
"""Has the runner of a request make progress in the calling thread; false where another thread does."""


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
    FAILED = "failed"


ENDED = (RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED)
"""States that no request leaves."""


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who hears of a request's tokens.

    Attributes:
        on_token: called with the request and each new token, in the thread that steps.
        streamer: a `BaseStreamer` of Transformers; given the prompt, then each token, then the end.
    """

    on_token: Callable[[Request, int], None] | None = None
    streamer: Any = None


@dataclass(slots=True)
class RequestTimes:
    """When things happened, in seconds of `time.monotonic`; None: not yet."""

    added: float = field(default_factory=time.monotonic)
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None

    @property
    def queue_seconds(self) -> float:
        """Time from `add` until the request joined, or until now."""
        return (self.started if self.started is not None else self.ended or time.monotonic()) - self.added


@dataclass(slots=True, eq=False)
class Request:
    """One request of the runner. Iterate over it for its tokens as they come; `result` waits for all of them.

    Attributes:
        request_id: position in the order in which requests were added.
        prompt: token ids, at least one.
        max_new_tokens: tokens to generate, at most.
        eos_token_ids: tokens that end the request; they are part of the answer.
        arrival: first step of the runner that may admit the request.
        priority: higher ones join first, and may take the place of lower ones.
        sampler: chooses its tokens; None: the greatest logit does.
        keep_logprobs: whether `logprobs` are kept.
        generated: token ids so far.
        logits: [vocabulary] float32 of each generated token, where the runner keeps them.
        logprobs: log-probability of each generated token under the model's own distribution, where they are kept.
        accepted: how often a verify step accepted 0, 1, 2, ... drafts of this request.
        steps: model forwards that the request took part in.
        computed: tokens whose keys, values and conv state are computed.
        reused: tokens that came from a shared prefix, when the request joined last.
        preempted: how often the request lost its place and was computed again.
        row: request row while running, else -1.
        slot: state slot while running, else -1.
        pages: pages of its keys and values while running.
        source: prefix whose slot holds the history until the first step has run.
        kept_tokens: tokens that the last step of this request kept (`num_accepted_tokens`).
        error: why it failed.
        times: when it was added, joined, gave its first token and ended.
    """

    request_id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    arrival: int = 0
    priority: int = 0
    sampler: Sampler | None = None
    keep_logprobs: bool = False
    generated: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    accepted: Counter[int] = field(default_factory=Counter)
    steps: int = 0
    computed: int = 0
    reused: int = 0
    preempted: int = 0
    row: int = -1
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    source: PrefixEntry | None = None
    kept_tokens: int = 1
    state: RequestState = RequestState.WAITING
    error: BaseException | None = None
    times: RequestTimes = field(default_factory=RequestTimes)
    listeners: Listeners = field(default_factory=Listeners, repr=False)
    drive: Drive | None = field(default=None, repr=False)
    # the scheduler's
    target: int = 0
    checked: int = 0
    failures: int = 0
    boundaries: set[int] = field(default_factory=set, repr=False)
    keys: tuple[int, ...] = field(default=(), repr=False)
    _stopped: bool = field(default=False, repr=False)
    _delivered: int = field(default=-1, repr=False)
    _news: threading.Condition = field(default_factory=threading.Condition, repr=False)

    def __post_init__(self) -> None:
        self.target = len(self.prompt)

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
        """Whether a part of what was known when the request joined is still to be computed."""
        return self.computed < self.target

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.max_new_tokens - len(self.generated)

    @property
    def ended(self) -> bool:
        """Whether no more tokens will come: finished, cancelled or failed."""
        return self.state in ENDED

    def token_at(self, position: int) -> int:
        """The token at an absolute position."""
        split = len(self.prompt)
        return self.prompt[position] if position < split else self.generated[position - split]

    def span(self, start: int, end: int) -> list[int]:
        """Tokens start..end-1."""
        split = len(self.prompt)
        return [*self.prompt[start:end], *self.generated[max(0, start - split) : max(0, end - split)]]

    def extend(self, tokens: Sequence[int], logits: Sequence[Tensor] | None) -> int:
        """Append new tokens until the request is done; returns how many were taken."""
        taken = 0
        for index, token in enumerate(tokens):
            if self.done:
                break
            self.generated.append(token)
            if logits is not None:
                self.logits.append(logits[index])
            if self.sampler is not None and self.sampler.stops(self):
                self._stopped = True
            taken += 1
        return taken

    @property
    def done(self) -> bool:
        """Whether the answer is complete."""
        last = self.generated[-1] if self.generated else None
        return self.remaining <= 0 or self._stopped or last in self.eos_token_ids

    # what its owner asks

    def __iter__(self) -> Iterator[int]:
        """Its tokens, each as soon as it is there; from the first one on, however often it is asked.

        Raises:
            RequestError: the request failed.
        """
        index = 0
        while True:
            self._wait(lambda seen=index: len(self.generated) > seen or self.ended, None)  # type: ignore[misc]
            if index >= len(self.generated):
                self._raise_failure()
                return
            yield self.generated[index]
            index += 1

    def result(self, timeout: float | None = None) -> list[int]:
        """Its tokens when it has ended; a cancelled request gives what it had. Without a loop in the background the
        calling thread steps the runner.

        Args:
            timeout: seconds to wait, at most.

        Raises:
            TimeoutError: it has not ended by then; it goes on.
            RequestError: the request failed.
        """
        self._wait(lambda: self.ended, timeout)
        self._raise_failure()
        return list(self.generated)

    def _wait(self, ready: Callable[[], bool], timeout: float | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while not ready():
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"request {self.request_id} has not ended after {timeout:g} seconds; it goes on")
            if self.drive is not None and self.drive():
                continue
            with self._news:
                # woken by news, and now and then to see whether the loop in the background is still there
                self._news.wait_for(ready, 0.1 if left is None else min(left, 0.1))

    def _raise_failure(self) -> None:
        if self.state is RequestState.FAILED:
            raise RequestError(self.request_id, self.error, len(self.generated)) from self.error

    # what the runner tells

    def announce(self) -> None:
        """Tell the owner what is new. A listener's error is its own: it fails this request alone."""
        if self._delivered < 0:
            self._delivered = 0
            self._stream(self.prompt)
        while self._delivered < len(self.generated):
            token = self.generated[self._delivered]
            self._delivered += 1
            if self.listeners.on_token is not None:
                self.listeners.on_token(self, token)
            self._stream([token])
        with self._news:
            self._news.notify_all()

    def end(self, state: RequestState, error: BaseException | None = None) -> None:
        """The request ended; everybody who waits for it hears of it."""
        self.error = error
        self.times.ended = time.monotonic()
        self.state = state
        with self._news:
            self._news.notify_all()

    def close_stream(self) -> None:
        """No more tokens come: the streamer hears of it."""
        streamer, self.listeners = self.listeners.streamer, Listeners()
        if streamer is not None:
            streamer.end()

    def _stream(self, tokens: Sequence[int]) -> None:
        if self.listeners.streamer is not None:
            import torch

            self.listeners.streamer.put(torch.tensor(list(tokens)))
