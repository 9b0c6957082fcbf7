"""`hwbackends conformance`: the kit from the command line, over reports that are written here."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hwbackends.cli import main
from hwbackends.conformance import command, inventory, report
from hwbackends.conformance.digests import digest
from hwbackends.conformance.inventory import judged


def _call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["conformance", *arguments])


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A report with one test of each kind."""
    results = [
        report.Result("test_exact.py::test_decode", "passed", clauses={"CS-CONV-01": "passed"}),
        report.Result("test_exact.py::test_extend", "failed", "CS-EXTEND-01: state", "", {"CS-EXTEND-01": "failed"}),
        report.Result("test_exact.py::test_verify[ring]", "not_claimed", "layout ring"),
    ]
    path = tmp_path / "out.json"
    report.write(report.Report({"backend": "acme", "device": "cpu"}, results), path)
    return path


def test_report_shows_clauses_failures_and_the_line(written: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = _call("report", str(written), "--html", str(page))
    assert done.exit_code == 1  # not certified
    assert "CS-EXTEND-01     failed" in done.output
    assert "FAILED test_exact.py::test_extend: CS-EXTEND-01: state" in done.output
    assert "passed/claimed/total 1/2/3, 1 failed, failed" in done.output
    assert page.read_text() == written.with_suffix(".html").read_text()


def test_a_certified_report_is_status_zero(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    passed = dict.fromkeys(judged().clauses, "passed")
    result = report.Result("test_a.py::test_b", "passed", clauses=passed)
    report.write(report.Report({"backend": "acme", "device": "cpu"}, [result]), path)
    assert _call("report", str(path)).exit_code == 0


def test_show_skips_lists_what_is_not_claimed_and_why(written: Path) -> None:
    done = _call("show-skips", str(written))
    assert done.output == "test_exact.py::test_verify[ring]: layout ring\n1 of 3 tests are not claimed\n"


def test_a_summary_keeps_all_but_the_tests_and_is_not_taken_for_a_report(honest: Path, tmp_path: Path) -> None:
    whole = json.loads(honest.read_text())
    kept = json.loads(_call("summary", str(honest)).output)
    assert "tests" not in kept
    same = ("verdict", "line", "counts", "certificate", "lanes", "date", "digest")
    assert [kept[key] for key in same] == [whole[key] for key in same]
    booked = {clause: sum(row.values()) for clause, row in kept["clauses"].items()}
    assert booked == {row["id"]: sum(row[name] for name in report.OUTCOMES) for row in whole["clauses"]}
    (tmp_path / "kept.json").write_text(json.dumps(kept))
    refused = _call("verify", str(tmp_path / "kept.json"))
    assert refused.exit_code == 1
    assert "a summary; give the report" in refused.output


def test_a_file_that_is_no_report_is_named(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    done = _call("report", str(tmp_path / "other.json"))
    assert done.exit_code == 1
    assert "not a conformance report" in done.output


@pytest.mark.parametrize("command", ["report", "show-skips"])
def test_a_file_that_is_no_json_is_named(command: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_bytes(b"{\xff")
    done = _call(command, str(tmp_path / "other.json"))
    assert done.exit_code == 1
    assert "other.json: not a conformance report" in done.output
    assert done.output.startswith("Error: ")


def test_coverage_is_complete() -> None:
    done = _call("coverage", "--fail-on-unknown")
    assert done.exit_code == 0
    assert "112 clauses, 0 without a test" in done.output


def test_coverage_fails_on_a_clause_without_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = {name: ids for name, ids in inventory.shipped_tests().items() if "CS-COPY-01" not in ids}
    monkeypatch.setattr(
        command, "find_coverage", lambda: inventory.coverage({**tests, "test_x.py::test_y": ("CS-Z-01",)})
    )
    done = _call("coverage", "--fail-on-unknown")
    assert done.exit_code == 1
    assert "no test names CS-COPY-01" in done.output
    assert "test_x.py::test_y names CS-Z-01, which the contract does not have" in done.output
    assert _call("coverage").exit_code == 0


def test_run_is_pytest_with_the_kits_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(pytest, "main", lambda arguments: seen.extend(arguments) or 3)
    waivers = tmp_path / "waivers.yaml"
    waivers.write_text("[]")
    done = _call(
        "run", "acme", "--device", "cuda", "--quick", "--waivers", str(waivers), "--report", "o.json", "-n", "2", "-x"
    )
    assert done.exit_code == 3
    assert seen == [
        "--pyargs", "hwbackends.conformance", "--hwbackend=acme", "--device=cuda", "--seed=0", f"--waivers={waivers}",
        "--report=o.json", "--quick", "-n", "2", "-x",
    ]  # fmt: skip


@pytest.fixture
def honest(tmp_path: Path) -> Path:
    """A report of one failed and one passed test, as a run would have written it."""
    results = [
        _of(name, outcome) for name, outcome in (("a.py::test_a[once]", "passed"), ("b.py::test_b[once]", "failed"))
    ]
    info = {"backend": "acme", "device": "cpu", "capabilities": {}, "hooks_present": []}
    path = tmp_path / "honest.json"
    report.write(report.Report(info, results), path)
    return path


def _of(name: str, outcome: str) -> report.Result:
    return report.Result(name, outcome, clauses={"CS-CONV-01": outcome}, seed=zlib.crc32(name.encode()))


def test_a_report_as_it_was_written_is_verified(honest: Path) -> None:
    done = _call("verify", str(honest))
    assert done.exit_code == 0, done.output
    assert "holds" in done.output


def _edit(path: Path, change: Callable[[dict[str, Any]], object], again: bool = False) -> None:
    data = json.loads(path.read_text())
    change(data)
    if again:
        data["digest"] = digest(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(verdict="certified"),
        lambda data: data["tests"].pop(),
        lambda data: data["certificate"].update(seed=3),
        lambda data: data["tests"][1].update(outcome="passed"),
    ],
)
def test_an_edited_report_is_refused(honest: Path, change: Callable[[dict[str, Any]], object]) -> None:
    _edit(honest, change)
    done = _call("verify", str(honest))
    assert done.exit_code == 1
    assert "the report was edited" in done.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(verdict="certified"), "its results give 'failed'"),
        (lambda data: data["clauses"][0].update(status="passed"), "its results give not run"),
        (lambda data: data["tests"][0].update(seed=5), "its seed does not follow"),
        (lambda data: data["certificate"].update(kit="0" * 64), "another kit"),
        (
            lambda data: data["certificate"]["plugin"].update({"hwbackends/errors.py": "0"}),
            "is not the file that was judged",
        ),
    ],
)
def test_what_can_be_computed_again_is_even_under_a_new_digest(
    honest: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    _edit(honest, change, again=True)
    done = _call("verify", str(honest))
    assert done.exit_code == 1
    assert message in done.output
