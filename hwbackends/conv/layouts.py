"""Where the rows of a conv's history lie in a slot: the layouts and their sizes."""

from __future__ import annotations

from typing import Literal, get_args

Layout = Literal["window", "ring", "lazy"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
LAYOUT_CODES: dict[str, int] = {layout: code for code, layout in enumerate(LAYOUTS)}
"""The numbers by which kernels know the layouts."""


def history_rows(width: int) -> int:
    """S = W - 1, rows of history that a conv of width W reads."""
    return width - 1


def layout_rows(layout: Layout, width: int, draft_token_num: int) -> int:
    """Rows per slot: window S, ring S + max(1, N), lazy S + max(1, N) - 1, with N = `draft_token_num`."""
    drafts = max(1, draft_token_num)
    extra = {"window": 0, "ring": drafts, "lazy": drafts - 1}
    return history_rows(width) + extra[layout]
