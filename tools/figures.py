"""Writes figures of kept results into the pages that quote them: `python tools/figures.py [--check]`.

A page says "661 of 661" because `benchmarks/results/conformance-cuda.json` does, and changes when that file changes.
Each rule below is a page, a pattern whose groups are the figures, and where they come from."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def kit(backend: str, *counts: str) -> tuple[str, ...]:
    """Counts of the last kept run of the conformance kit on a backend: total, claimed, passed, ..."""
    kept = json.loads((RESULTS / f"conformance-{backend}.json").read_text(encoding="utf-8"))["counts"]
    return tuple(str(kept[count]) for count in counts)


def suite_tests() -> str:
    """Tests of the cuda backend that passed: the first two rows of the suite's page."""
    rows = re.findall(r"^\|.*\| (\d+) passed in ", (RESULTS / "h200" / "suite.md").read_text(encoding="utf-8"), re.M)
    return str(int(rows[0]) + int(rows[1]))


class Rule(NamedTuple):
    """A page, a pattern with one group per figure, and the figures."""

    page: str
    pattern: str
    figures: Callable[[], tuple[str, ...]]


RULES = (
    Rule(
        "README.md",
        r"(\d+) tests and the conformance kit \((\d+) of (\d+), no waivers\)",
        lambda: (suite_tests(), *kit("cuda", "passed", "claimed")),
    ),
    Rule(
        "benchmarks/results/h200/suite.md",
        r"(\d+) of (\d+) claimed passed, certified",
        lambda: kit("cuda", "passed", "claimed"),
    ),
    Rule("docs/add-a-backend.md", r"passed/claimed/total \d+/\d+/(\d+)", lambda: kit("reference", "total")),
    Rule(
        "docs/add-a-backend.md",
        r"total (\d+)/(\d+)/(\d+), certified",
        lambda: kit("reference", "passed", "claimed", "total"),
    ),
    Rule("docs/ascend.md", r"conformance kit \((\d+) of (\d+)\)", lambda: kit("ascend-emulated", "passed", "claimed")),
)


def rendered(text: str, rule: Rule) -> str:
    """The page with fresh figures wherever the rule's pattern stands.

    Raises:
        ValueError: the pattern stands nowhere, so that nothing would be kept fresh.
    """
    figures = rule.figures()

    def fresh(match: re.Match[str]) -> str:
        whole, start = match[0], match.start()
        for group in range(len(figures), 0, -1):
            whole = whole[: match.start(group) - start] + figures[group - 1] + whole[match.end(group) - start :]
        return whole

    text, count = re.subn(rule.pattern, fresh, text)
    if not count:
        raise ValueError(f"{rule.page}: nothing like {rule.pattern!r} is there")
    return text


def main() -> int:
    """Write the figures, or with --check say whether one is stale."""
    stale = 0
    for rule in RULES:
        path = ROOT / rule.page
        text = path.read_text(encoding="utf-8")
        fresh = rendered(text, rule)
        if fresh != text:
            stale = 1
            if "--check" in sys.argv[1:]:
                print(f"{rule.page}: stale, run python tools/figures.py")
            else:
                path.write_text(fresh, encoding="utf-8")
    return stale if "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
