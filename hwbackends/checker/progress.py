"""One line on the terminal while a long run goes on; nothing where nobody watches."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_PATIENCE = 0.7  # seconds before anything is drawn
_EVERY = 0.1
_WIDTH = 24


class Progress:
    """Draws a bar on stderr once a run takes longer than a moment; ``shown`` None asks the terminal."""

    def __init__(self, shown: bool | None = None, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.shown = self.stream.isatty() if shown is None else shown
        self._next = time.monotonic() + (0.0 if shown else _PATIENCE)
        self._drawn = False

    def step(self, what: str, done: int, total: int) -> None:
        """Say that ``done`` of ``total`` are through with ``what``."""
        now = time.monotonic()
        if not self.shown or now < self._next:
            return
        self._next, self._drawn = now + _EVERY, True
        filled = _WIDTH * done // max(total, 1)
        bar = "#" * filled + "." * (_WIDTH - filled)
        self.stream.write(f"\r\x1b[K[{bar}] {100 * done // max(total, 1):3d}% {what}")
        self.stream.flush()

    def clear(self) -> None:
        """Leave the line as it was found."""
        if self._drawn:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
