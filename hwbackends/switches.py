"""How an environment variable that is on or off is read; nothing else."""

from __future__ import annotations

import os


def switched_on(variable: str) -> bool:
    """Whether an environment variable is set to anything but nothing or 0."""
    return os.environ.get(variable, "0") not in ("", "0")
