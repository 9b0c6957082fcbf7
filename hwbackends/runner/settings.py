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
    """

    layout: Layout = "window"
    max_batch: int = 8
    max_len: int = 512
    chunk_size: int = 32
    draft_tokens: int = 0
    prefix_slots: int = 4
    keep_logits: bool = False

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise UnsupportedError("RunnerSettings", "layout", repr(self.layout), f"one of {', '.join(LAYOUTS)}")
        for name, least in (
            ("max_batch", 1),
            ("max_len", 2),
            ("chunk_size", 1),
            ("draft_tokens", 0),
            ("prefix_slots", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ArgumentError("RunnerSettings", name, repr(value), f"a whole number, at least {least}")

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
        """Tokens of one step, at most: one of each decoding request, and a chunk."""
        return max(self.max_batch + self.chunk_size, self.max_batch * max(1, self.draft_token_num))
