"""Launch sizes by regime: channels per program, tokens per program and warps. Measured on an H200 (docs/cuda.md);
any choice gives the same bits."""

from __future__ import annotations

from hwbackends.cuda.launch import power_of_two


def decode(rows: int, dim: int) -> tuple[int, int]:
    """Channels per program and warps of decode, for `rows` requests."""
    block = min(power_of_two(dim), 512 if rows * dim <= 1 << 17 else 1024)
    return block, max(1, block // 128)


def draft(requests: int, dim: int) -> tuple[int, int]:
    """Channels per program and warps of verify and draft extend."""
    block = min(power_of_two(dim), 512 if requests * dim <= 1 << 16 else 256)
    return block, max(1, block // 128)


def extend(tokens: int, dim: int) -> tuple[int, int, int]:
    """Channels per program, tokens per program, and warps of extend."""
    block = min(power_of_two(dim), 1024)
    tile = 4 if tokens * dim <= 1 << 22 else 8
    return block, tile, max(1, block // 128)


def epilogue(rows: int, dim: int) -> int:
    """Warps of the fused epilogue, which takes all channels in one program."""
    return max(1, min(16 if rows <= 8 else 32, power_of_two(dim) // 128))


def commit(dim: int) -> tuple[int, int]:
    """Channels per program and warps of the commit."""
    block = min(power_of_two(dim), 1024)
    return block, max(1, block // 256)
