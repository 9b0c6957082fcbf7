"""Where the demo's prompts come from: a file, or this project's own README and licence."""

from __future__ import annotations

import random
from importlib import metadata
from pathlib import Path

from hwbackends.errors import ArgumentError

LEAST_BYTES = 512


def read_text(path: Path | None) -> bytes:
    """The bytes of a UTF-8 file, or of the README and the licence of this package.

    Raises:
        ArgumentError: the file is missing, not a file, not UTF-8, or shorter than 512 bytes.
    """
    if path is None:
        return own_text()
    hook, hint = "hwbackends demo", "pass a text file in UTF-8, or leave --text out"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArgumentError(hook, "--text", f"{path}: {error.strerror}", "a readable file", hint) from error
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(hook, "--text", f"{path}: byte {error.start} is not UTF-8", "UTF-8", hint) from error
    if len(data) < LEAST_BYTES:
        raise ArgumentError(hook, "--text", f"{path}: {len(data)} bytes", f"at least {LEAST_BYTES} bytes", hint)
    return data


def own_text() -> bytes:
    """README and licence, from the source tree if this is one, else from the installed package's metadata."""
    root = Path(__file__).resolve().parents[2]
    files = [root / "README.md", root / "LICENSE"]
    if all(file.is_file() for file in files):
        return b"\n".join(file.read_bytes() for file in files)
    distribution = metadata.distribution("hwbackends")
    readme = str(distribution.metadata.get_payload())  # type: ignore[attr-defined]
    licences = [file.read_text() for file in distribution.files or () if file.name == "LICENSE"]
    return "\n".join([readme, *licences]).encode()


def make_prompts(text: bytes, count: int, chunk: int, width: int, longest: int, seed: int) -> list[list[int]]:
    """Byte prompts of every kind that matters, the first ones fixed, the rest drawn.

    Shorter than the conv's history, a chunk less one, exactly a chunk, several chunks, and pairs that share a prefix of
    at least one whole chunk.

    Args:
        count: number of prompts.
        chunk: tokens of a prompt per step.
        width: W of the convs.
        longest: tokens of a prompt, at most.
    """
    draw = random.Random(seed)
    wanted = [1, 3 * chunk + 5, max(1, width - 2), chunk - 1, chunk, 2 * chunk + 1, width]
    prompts: list[list[int]] = []
    for index in range(count):
        size = wanted[index] if index < len(wanted) else draw.randrange(1, longest)
        size = min(size, longest)
        start = draw.randrange(0, len(text) - size)
        prompt = list(text[start : start + size])
        donors = [other for other in prompts if len(other) > chunk]
        if donors and index % 3 == 2 and index >= len(wanted):
            shared = draw.choice(donors)
            keep = len(shared) // chunk * chunk
            prompt = [*shared[:keep], *prompt[: longest - keep]]
        prompts.append(prompt)
    return prompts
