"""Every case of `cases/*.md`, and the examples of every rule's page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checker.mdcases import Case, cases, differences

PAGES = sorted((Path(__file__).parent / "cases").glob("*.md"))
CASES = [(page.stem, case) for page in PAGES for case in cases(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("case", [case for _, case in CASES], ids=[f"{page}: {case.title}" for page, case in CASES])
def test_a_tree_is_reported_where_its_comments_say_and_nowhere_else(case: Case, tmp_path: Path) -> None:
    assert not differences(case, tmp_path)


def test_no_two_cases_of_a_page_have_one_name() -> None:
    names = [(page, case.title) for page, case in CASES]
    assert len(names) == len(set(names))


def test_a_wrong_expectation_is_told_both_ways(tmp_path: Path) -> None:
    page = "## a\n```python\ndef f(a): ...\n\nf(1, 2)\nf(1)  # HWB103: 2nd positional\n```\n"
    (case,) = cases(page)
    assert [line.partition(":")[0] for line in differences(case, tmp_path)] == ["not wanted", "not found"]
