"""The kinds of an SSM state, where it lies on each layout, and the sizes of what lies there."""

from __future__ import annotations

from typing import Literal, get_args

SSMKind = Literal["gdn", "kda", "mamba2"]
SSMLayout = Literal["intermediate", "ring"]
KINDS: tuple[SSMKind, ...] = get_args(SSMKind)
LAYOUTS: tuple[SSMLayout, ...] = get_args(SSMLayout)

LENS_ROWS = 8
"""Rows of V that one entry of `state_lens` covers: the smallest tile that a kernel may own."""


def lens_tiles(head_v_dim: int) -> int:
    """Entries of `state_lens` per head."""
    return -(-head_v_dim // LENS_ROWS)


def least_ring_rows(draft_token_num: int) -> int:
    """2N: no step then overwrites a row that a replay of the same step may still read."""
    return 2 * max(1, draft_token_num)


def default_ring_rows(draft_token_num: int) -> int:
    """A power of two of at least 4N, and 8 at least: a checkpoint is written every few steps."""
    return max(8, 1 << (4 * max(1, draft_token_num) - 1).bit_length())
