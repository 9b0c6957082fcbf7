"""What is measured and what it has to reach: sizes, bytes that the work must move, and the target ratios."""

from __future__ import annotations

WIDTH = 4
HISTORY = WIDTH - 1
DRAFTS = 4
RING_ROWS = 8
LAYERS = 24
DIM = 4096
KV_DIM = 1024
STREAMS = (("k", KV_DIM), ("v", KV_DIM), ("attn", DIM), ("mlp", DIM))
BYTES = 2
"""bfloat16."""

DECODE = (1, 8, 32, 128, 512)
BATCHES = (1, 32, 128)
EXTEND_REQUESTS = 8
EXTEND = (512, 4096, 16384)
EXTEND_METADATA = (8, 128, 2047, 16384)
EXTEND_METADATA_TOKENS = 16384

TARGETS: dict[tuple[str, int], float] = {
    **{("metadata decode", b): 0.65 for b in (1, 32, 128, 512)},
    ("metadata extend", 8): 0.5,
    ("metadata extend", 128): 0.2,
    ("metadata extend", 2047): 0.35,
    ("decode ring", 1): 0.50,
    ("decode ring", 32): 0.52,
    ("decode ring", 128): 0.50,
    ("decode ring", 512): 0.62,
    ("decode window", 1): 0.55,
    ("decode window", 32): 0.56,
    ("decode window", 128): 0.62,
    ("decode window", 512): 0.84,
    ("decode k and v", 1): 0.28,
    ("decode k and v", 32): 0.34,
    ("decode k and v", 128): 0.34,
    ("extend", 512): 0.36,
    ("extend", 4096): 0.50,
    ("extend", 16384): 0.56,
    ("verify ring", 1): 0.30,
    ("verify ring", 32): 0.36,
    ("verify ring", 128): 0.38,
    ("commit window", 32): 0.40,
    ("commit window", 128): 0.38,
    **{("draft extend ring", b): 0.25 for b in BATCHES},
    ("conv, add, RMSNorm", 1): 0.48,
    ("conv, add, RMSNorm", 32): 0.43,
    ("conv, add, RMSNorm", 128): 0.47,
    ("decode step, fused", 1): 0.86,
    ("decode step, fused", 32): 0.85,
    ("decode step, fused", 128): 0.87,
    ("decode step", 1): 0.88,
    ("decode step", 32): 0.87,
    ("decode step", 128): 0.90,
    ("verify step, fused", 1): 0.66,
    ("verify step, fused", 32): 0.66,
    ("verify step, fused", 128): 0.74,
}
"""Ours over SGLang's fastest path (verify: its Triton path; verify step: its default path), by work and size."""


def decode_bytes(batch: int, dim: int, layout: str) -> int:
    """Bytes that a decode conv must move: x, y, weights, rows read and written."""
    rows = HISTORY + (1 if layout == "ring" else HISTORY)
    return BYTES * dim * (WIDTH + batch * (2 + rows))


def extend_bytes(requests: int, tokens: int, dim: int) -> int:
    """x and y once, history, window and snapshot of each request."""
    return BYTES * dim * (WIDTH + 2 * tokens + 3 * HISTORY * requests)


def verify_bytes(batch: int, dim: int, layout: str) -> int:
    """x and y of the drafts, history, and what is kept."""
    kept = DRAFTS if layout == "ring" else DRAFTS + HISTORY
    return BYTES * dim * (WIDTH + batch * (2 * DRAFTS + HISTORY + kept))


def commit_bytes(batch: int, dims: int) -> int:
    """Windows read and written, in every layer."""
    return BYTES * LAYERS * batch * dims * 2 * HISTORY


def draft_extend_bytes(batch: int, dim: int) -> int:
    """As verify on a ring, and a snapshot."""
    return verify_bytes(batch, dim, "ring") + BYTES * dim * batch * HISTORY


def fused_bytes(batch: int, dim: int) -> int:
    """Decode on a ring, the residual stream read and written, the norm's weight."""
    return decode_bytes(batch, dim, "ring") + BYTES * dim * (2 * batch + 1)
