"""Prints the figures that the results page gives."""

from __future__ import annotations

import pytest
from figures import FIGURES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line per figure."""
    for figure in FIGURES:
        terminalreporter.write_line(figure)
