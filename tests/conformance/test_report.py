"""The verdict: certified only for the whole kit without a failure, a waiver, or a deselected test."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from hwbackends.conformance.inventory import judged
from hwbackends.conformance.page import page
from hwbackends.conformance.report import SPEAKS_OF, Report, Result
from hwbackends.conformance.waivers import Waiver

INFO = {"backend": "acme", "device": "cpu"}
WAIVER = Waiver("test_a.py::test_b", "CS-CONV-01", "why", "https://example.org", datetime.date(2999, 1, 1))


def _result(outcome: str, clause: str = "CS-CONV-01", name: str = "test_exact.py::test_decode[ring]") -> Result:
    booked = {"waived": "failed"}.get(outcome, outcome)
    return Result(name, outcome, "why", "values", {clause: booked}, seed=17)


REQUIRED = {clause: "passed" for clause, hook in judged().clauses.items() if not hook.optional}
WHOLE = Result("conv/test_all.py::test_all[once]", "passed", clauses=REQUIRED)
"""A passed test for every clause of a required hook."""


@pytest.mark.parametrize(
    ("outcomes", "extra", "verdict"),
    [
        (["passed"], {}, "certified"),
        (["passed", "not_claimed"], {}, "certified"),
        (["passed", "failed"], {}, "failed"),
        (["passed"], {"partial": ["3 deselected"]}, "partial"),
        (["passed", "failed"], {"partial": ["3 deselected"]}, "failed"),
        (["passed", "waived"], {"waivers": [WAIVER]}, "waived"),
        (["passed"], {"waivers": [WAIVER]}, "waived"),
        (["passed"], {"problems": ["waiver for unknown test"]}, "failed"),
        (["not_claimed"], {}, "nothing claimed"),
        ([], {}, "nothing claimed"),
    ],
)
def test_the_verdict(outcomes: list[str], extra: dict[str, Any], verdict: str) -> None:
    whole = [WHOLE] if outcomes and outcomes != ["not_claimed"] else []
    report = Report(INFO, [*whole, *(_result(outcome) for outcome in outcomes)], **extra)
    assert report.verdict == verdict
    assert ("certified" in report.line) == (verdict == "certified")
    assert "%" not in report.line


def test_a_backend_without_every_required_hook_is_incomplete() -> None:
    report = Report({**INFO, "hooks_claimed": ["probe", "conv_decode"]}, [_result("passed")])
    assert report.verdict == "incomplete"
    assert report.line.endswith("passed/claimed/total 1/1/1, incomplete: 15 required hooks not claimed")


def test_an_optional_hook_need_not_be_claimed() -> None:
    required = [name for name, hook in judged().hooks.items() if not hook.optional]
    assert Report({**INFO, "hooks_claimed": required}, [WHOLE]).verdict == "certified"


@pytest.mark.parametrize("clause", sorted(REQUIRED))
def test_no_certificate_while_a_clause_has_no_passed_test(clause: str) -> None:
    booked = {**REQUIRED, clause: "not_claimed"}
    report = Report(INFO, [_result("passed", name="a"), Result("b", "passed", clauses=booked)])
    if clause != "CS-CONV-01":  # the first result passes that one
        assert report.verdict == "incomplete"
        assert report.line.endswith(f"incomplete: no passed test for {clause}")


def test_a_clause_that_speaks_of_unclaimed_layouts_only_is_not_missed() -> None:
    layouts = {"window", "ssm intermediate"}
    booked = {clause: said for clause, said in REQUIRED.items() if layouts & set(SPEAKS_OF.get(clause, layouts))}
    claimed = {"layouts": ["window"], "index_dtypes": ["int32"], "ssm_layouts": ["intermediate"]}
    info = {**INFO, "capabilities": claimed}
    report = Report(info, [Result("b", "passed", clauses=booked)])
    assert report.line.endswith("certified for window, int32, SSM intermediate")
    assert Report(INFO, [Result("b", "passed", clauses=booked)]).verdict == "incomplete"


def test_a_backend_is_judged_by_the_contracts_that_its_manifest_names() -> None:
    booked = {clause: outcome for clause, outcome in REQUIRED.items() if not clause.startswith("CS-SSM")}
    info = {**INFO, "contracts": {"step": "1.0", "conv": "1.0"}}
    report = Report(info, [Result("b", "passed", clauses=booked)])
    assert report.verdict == "certified"
    assert not [row for row in report.clauses() if row["contract"] == "ssm"]
    assert Report(INFO, [Result("b", "passed", clauses=booked)]).verdict == "incomplete"


def test_the_line_has_passed_claimed_and_total() -> None:
    report = Report(INFO, [_result(o) for o in ("passed", "passed", "failed", "not_claimed", "not_claimed")])
    assert report.line == "hwbackends conformance: acme on cpu: passed/claimed/total 2/3/5, 1 failed, failed"


def test_an_emulated_device_is_marked() -> None:
    report = Report({"backend": "acme", "device": "npu:0", "emulated": True}, [_result("passed")])
    assert "acme on npu:0 (emulated)" in report.line
    assert "Emulated: every op ran on the CPU" in page(report.as_dict())


def test_what_is_not_claimed_has_its_own_column() -> None:
    report = Report(INFO, [_result("passed"), _result("not_claimed"), _result("not_claimed", "CS-CONV-03")])
    rows = {row["id"]: row for row in report.clauses()}
    assert (rows["CS-CONV-01"]["passed"], rows["CS-CONV-01"]["not_claimed"]) == (1, 1)
    assert rows["CS-CONV-01"]["status"] == "passed"
    assert rows["CS-CONV-03"]["status"] == "not claimed"
    assert rows["CS-CONV-05"]["status"] == "not run"


def test_a_waived_clause_is_neither_red_nor_green() -> None:
    rows = {row["id"]: row for row in Report(INFO, [_result("waived"), _result("passed")]).clauses()}
    assert rows["CS-CONV-01"]["status"] == "waived"


def test_a_failure_on_the_page_says_how_to_repeat_it() -> None:
    html = page(Report(INFO, [_result("failed")], options="--hwbackend acme --device cpu").as_dict())
    assert "seed 17" in html
    assert "hwbackends.conformance.test_exact::test_decode[ring]" in html
    assert "--hwbackend acme --device cpu" in html


def test_text_of_a_vendor_is_escaped() -> None:
    result = Result(
        "test_exact.py::test_decode", "failed", "<script>alert(1)</script>", clauses={"CS-CONV-01": "failed"}
    )
    assert "<script>" not in page(Report(INFO, [result]).as_dict())
