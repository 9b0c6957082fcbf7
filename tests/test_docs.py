"""What the pages show runs as shown, and what is generated into them is fresh."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", ["README.md", "docs/transformers.md"])
def test_the_python_of_a_page_runs_as_shown(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    assert capsys.readouterr().out


def test_the_table_of_hooks_is_made_from_the_contract() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "hook_table.py"))
    text = (ROOT / "README.md").read_text()
    assert tool["rendered"](text) == text, "run python tools/hook_table.py"


def test_every_page_that_the_readme_names_is_there() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing


def test_the_page_of_checks_is_made_from_the_rules() -> None:
    pytest.importorskip("torch", reason="the rules are about tensors")
    tool = runpy.run_path(str(ROOT / "tools" / "checks_table.py"))
    assert tool["page"]() == (ROOT / "docs" / "checks.md").read_text(), "run python tools/checks_table.py"
