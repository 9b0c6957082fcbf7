"""A tiny checkpoint that every test serves, and the figures that the results page gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from figures import FIGURES

HERE = Path(__file__).parent


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line per figure."""
    for figure in FIGURES:
        terminalreporter.write_line(figure)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's folder, with what Transformers generates from it."""
    folder = tmp_path_factory.mktemp("lfm2")
    subprocess.run([sys.executable, HERE / "tiny_lfm2.py", folder], check=True)
    return folder


@pytest.fixture(scope="session")
def expected(checkpoint: Path) -> list[list[int]]:
    """Tokens of plain greedy decoding; no two logits are so close that rounding could swap them."""
    data = json.loads((checkpoint / "expected.json").read_text())
    assert data["margin"] > 1e-3
    tokens: list[list[int]] = data["tokens"]
    return tokens
