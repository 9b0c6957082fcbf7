"""What the code base holds itself to, counted by its own tools."""

from __future__ import annotations

import runpy
import statistics
from pathlib import Path
from typing import Any

import pytest

from hwbackends.conformance.digests import kit_digest

ROOT = Path(__file__).parent.parent
SIZE: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "size.py"))
FIGURES: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "figures.py"))


def test_no_function_is_longer_than_62_lines_and_the_median_is_at_most_6() -> None:
    each = list(SIZE["functions"](SIZE["sources"]("hwbackends")))
    assert len(each) > 1000
    assert [f"{f.path}: {f.name}, {f.lines} lines" for f in each if f.lines > 62] == []
    assert statistics.median(f.lines for f in each) <= 6


def test_lines_of_code_leave_out_blank_lines_comments_and_docstrings() -> None:
    text = '"""A page."""\n\n# why\nX = (\n    1,\n)\n\n\ndef f():\n    """What."""\n    return """text"""\n'
    assert SIZE["lines_of"](text) == 5
    (function,) = SIZE["functions"]({"a.py": text})
    assert (function.name, function.lines) == ("f", 2)
    assert not list(SIZE["functions"]({"a/kernels_conv.py": text}))


@pytest.mark.parametrize("rule", FIGURES["RULES"], ids=lambda rule: rule.page)
def test_the_figures_of_a_page_are_those_of_the_kept_results(rule: Any) -> None:
    text = (ROOT / rule.page).read_text(encoding="utf-8")
    assert FIGURES["rendered"](text, rule) == text, "run python tools/figures.py"


def test_a_stale_figure_is_written_anew_and_a_page_that_lost_its_place_is_told() -> None:
    rule = FIGURES["RULES"][0]
    stale = "1 tests and the conformance kit (2 of 3, no waivers)"
    fresh = FIGURES["rendered"](stale, rule)
    assert fresh != stale
    assert fresh == FIGURES["rendered"](fresh, rule)
    with pytest.raises(ValueError, match=r"README\.md: nothing like"):
        FIGURES["rendered"]("no figures", rule)


CERTIFICATES: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "certificates.py"))


def test_the_page_of_kept_certificates_says_which_were_made_with_this_kit() -> None:
    kept = CERTIFICATES["PAGE"].read_text(encoding="utf-8")
    assert CERTIFICATES["page"]() == kept, "run python tools/certificates.py --page, or make certificates"


@pytest.mark.parametrize(("kit", "said"), [(kit_digest(), "this kit"), ("0" * 64, "an older kit")])
def test_a_certificate_of_other_sources_is_told_apart(kit: str, said: str) -> None:
    counts = {"passed": 3, "claimed": 3, "total": 4}
    data = {"backend": "acme", "device": "cpu", "device_name": "x", "verdict": "certified", "counts": counts}
    assert CERTIFICATES["row"]({**data, "certificate": {"kit": kit}}).endswith(f"| {said} |")


GPU_SUITE: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "gpu_suite.py"))


def test_the_suite_of_a_gpu_tells_what_passed_failed_and_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = {
        "good": "{python} -c print('5_passed')",
        "bad": "{python} -c raise(SystemExit(3))",
        "long": "{python} -c __import__('time').sleep(60)",
        "never": "{python} -c print('late')",
    }
    monkeypatch.setitem(GPU_SUITE["suite"].__globals__, "STAGES", stages)
    found = GPU_SUITE["suite"](list(stages), tmp_path, 8, {})
    assert [(outcome.stage, outcome.status) for outcome in found] == [("good", 0), ("bad", 3), ("long", None)]
    rows = (tmp_path / "suite.md").read_text().splitlines()[-3:]
    assert [row.split(" | ")[2] for row in rows] == ["passed", "exit status 3", "cut off"]
    assert "5_passed" in rows[0]
    assert "`python -c" in rows[0]


def test_each_stage_of_the_suite_names_what_is_there() -> None:
    values = {"python": "python", "out": "OUT", "backend": "cuda", "workers": 2, "peers": ""}
    for command in GPU_SUITE["STAGES"].values():
        named = [word for word in command.format(**values).split() if word.startswith("tests/")]
        assert [word for word in named if not (ROOT / word).exists()] == []
