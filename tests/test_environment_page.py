"""docs/environment.md lists the variables that the source reads, and no others."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")


def named_in_source() -> set[str]:
    text = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "hwbackends").rglob("*.py")))
    return set(re.findall(r"\bHWBACKENDS_[A-Z_]*[A-Z]", text))


def test_every_variable_of_the_source_has_a_row_and_every_row_a_variable() -> None:
    rows = set(re.findall(r"^\| `(HWBACKENDS_\w+)`", PAGE, flags=re.MULTILINE))
    assert rows == named_in_source()
