"""Launch sizes by regime: channels per program, tokens per program and warps. Measured on an H200 (docs/cuda.md);
any choice gives the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwbackends.triton_ops.launch import cdiv, power_of_two
from hwbackends.triton_ops.traits import SsmShape

if TYPE_CHECKING:
    from hwbackends.ssm.state import SSMState


def decode(rows: int, dim: int) -> tuple[int, int]:
    """Channels per program and warps of decode, for `rows` requests."""
    block = min(power_of_two(dim), 512 if rows * dim <= 1 << 17 else 1024)
    return block, max(1, block // 128)


AHEAD_ROWS = 64
"""Rows of x up to which a captured decode conv fetches ahead for the next one."""


def draft(requests: int, dim: int) -> tuple[int, int]:
    """Channels per program and warps of verify and draft extend."""
    block = min(power_of_two(dim), 512 if requests * dim <= 1 << 16 else 256)
    return block, max(1, block // 128)


EXTEND = (
    (1 << 21, (1024, 8, 4)),
    (1 << 24, (512, 8, 4)),
    (1 << 62, (256, 8, 2)),
)
"""Elements of x up to which a choice holds: channels per program, tokens per program, warps."""


def extend(tokens: int, dim: int) -> tuple[int, int, int]:
    """Channels per program, tokens per program, and warps of extend."""
    block, tile, warps = next(choice for most, choice in EXTEND if tokens * dim <= most)
    narrow = min(power_of_two(dim), block)
    return narrow, tile, max(1, warps * narrow // block)


STREAMED = 1 << 25
"""Elements of x below which extend asks the caches to drop x and the output first: more do not fit them anyway."""


def streamed(tokens: int, dim: int) -> bool:
    """Whether extend asks the caches to drop x and the output first."""
    return tokens * dim < STREAMED


def epilogue(rows: int, dim: int, decode: bool) -> int:
    """Warps of the fused epilogue, which takes all channels in one program. Behind a matrix product a wide program
    waits longer for a place than its width saves."""
    most = 16 if rows <= (AHEAD_ROWS if decode else 8) else 32 if rows <= 128 else 8
    return max(1, min(most, power_of_two(dim) // 128))


def commit(dim: int) -> tuple[int, int]:
    """Channels per program and warps of the commit."""
    block = min(power_of_two(dim), 1024)
    return block, max(1, block // 256)


def ssm(state: SSMState, requests: int, tokens: int, through: bool) -> SsmShape:
    """How decode (`through`: with the state written), verify, draft extend and extend of an SSM are launched."""
    return SsmShape(rows=16, warps=1, staged=not through)


def ssm_defers(state: SSMState, requests: int) -> bool:
    """Whether a decode on a ring keeps its token there, instead of writing the state."""
    return False


def prepare(rows: int) -> tuple[int, int]:
    """Requests per program and warps of the prepare hooks of uniform phases."""
    block = min(128, max(32, power_of_two(rows)))
    return block, block // 32


MAX_REQUEST_PROGRAMS = 64
MAX_TOKEN_PROGRAMS = 128
"""Bounds that keep the work of reading lengths linear in the number of requests."""


def prepare_extend(rows: int, tokens: int) -> tuple[int, int, int, int]:
    """Requests per tile of lengths, requests per request program, tokens per token program, warps."""
    tile, warps = (128, 1) if rows <= 128 else (512, 2) if rows <= 512 else (2048, 8) if rows <= 2048 else (4096, 8)
    requests = max(32 * warps, power_of_two(cdiv(rows, MAX_REQUEST_PROGRAMS)))
    owners = max(min(256 * warps, 1024), power_of_two(cdiv(tokens, MAX_TOKEN_PROGRAMS)))
    return tile, requests, min(owners, 8192), warps
