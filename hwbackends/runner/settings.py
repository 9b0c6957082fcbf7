"""Limits and choices of a runner, and what is out of range."""

from __future__ import annotations

from dataclasses import dataclass

from hwbackends.conv.layouts import LAYOUTS, Layout
from hwbackends.errors import ArgumentError, UnsupportedError


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """Limits and choices of a runner.

    Args:
        layout: state layout, `window`, `ring` or `lazy`.
        max_batch: requests that run at once.
        max_len: tokens of prompt and answer of one request, at most.
        chunk_size: tokens of a prompt per step, at most; also the track interval of the prefix cache.
        draft_tokens: N, drafts per verify step; 0: no speculation.
        prefix_slots: track slots for shared prefixes; 0: none are kept.
        keep_logits: whether requests keep the logits of each generated token.
        step_tokens: tokens of one step over all requests, at most: the chunks of several prompts, and one of each
            request that decodes; 0: a chunk of every request.
        page_size: tokens per page of keys and values; 0: 16, or what `varlen_attn` wants where it is used.
        kv_tokens: tokens of keys and values that are held at once, over requests and prefixes; 0: what `max_batch`
            requests of `max_len` need. Without recorded graphs memory is taken when it is used.
        keep_finished: ended requests that `PackedRunner.requests` still lists.
    """

    layout: Layout = "window"
    max_batch: int = 8
    max_len: int = 512
    chunk_size: int = 32
    draft_tokens: int = 0
    prefix_slots: int = 4
    keep_logits: bool = False
    step_tokens: int = 0
    page_size: int = 0
    kv_tokens: int = 0
    keep_finished: int = 128

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise UnsupportedError("RunnerSettings", "layout", repr(self.layout), f"one of {', '.join(LAYOUTS)}")
        for name, least in (
            ("max_batch", 1),
            ("max_len", 2),
            ("chunk_size", 1),
            ("draft_tokens", 0),
            ("prefix_slots", 0),
            ("step_tokens", 0),
            ("page_size", 0),
            ("kv_tokens", 0),
            ("keep_finished", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ArgumentError("RunnerSettings", name, repr(value), f"a whole number, at least {least}")
        if self.page_size == 1:
            raise ArgumentError("RunnerSettings", "page_size", 1, "0, or at least 2")

    @property
    def draft_token_num(self) -> int:
        """Tokens per request in a verify step: the newest token and its drafts; 0 without speculation."""
        return self.draft_tokens + 1 if self.draft_tokens else 0

    @property
    def row_len(self) -> int:
        """Keys and values per request: a verify step may write drafts behind the last position of a request."""
        return self.max_len + self.draft_tokens

    @property
    def max_tokens(self) -> int:
        """Tokens of one step, at most."""
        least = self.max_batch * max(1, self.draft_token_num)
        wanted = self.step_tokens or self.max_batch * self.chunk_size
        # a chunk beside requests that decode: a prompt always gets on
        return max(least, wanted, self.max_batch + self.chunk_size)
