"""What the tests measured, for the lines that pytest prints at the end."""

from __future__ import annotations

FIGURES: list[str] = []
