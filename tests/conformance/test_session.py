"""The pytest plugin, run as a vendor runs it: in a process of its own, away from this tree's settings."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hwbackends
from tests.conformance.forked import Forks

ROOT = Path(__file__).parents[2]
MUTANT = "tests.conformance.mutants:plugins.gives_no_reason"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest in a process that nothing was imported into."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=580)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """Where pytest runs."""
    made = Forks()
    yield made
    made.close()


@pytest.fixture
def run(tmp_path: Path, forks: Forks) -> Run:
    """`run("arguments", ...)` in an empty folder, which has settings of its own."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    return lambda *arguments: forks.run(tmp_path, *arguments)


def kit(lane: str, backend: str = "reference") -> tuple[str, ...]:
    return "--pyargs", f"hwbackends.conformance.step.{lane}", "--hwbackend", backend


def test_the_plugin_costs_nothing_when_it_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(
        "import sys\n\ndef test_nothing_was_imported():\n"
        "    loaded = [name for name in sys.modules if name.startswith('hwbackends')]\n"
        "    known = {'hwbackends', 'hwbackends.lazy', 'hwbackends.conformance', 'hwbackends.conformance.plugin'}\n"
        "    assert set(loaded) <= known\n"
        "    assert 'torch' not in sys.modules and 'yaml' not in sys.modules\n"
    )
    assert "1 passed" in call(tmp_path, "test_own.py").stdout


def test_other_plugins_may_have_an_option_called_device(tmp_path: Path, run: Run) -> None:
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--device', default='theirs')\n"
    )
    (tmp_path / "test_own.py").write_text(
        "def test_device(pytestconfig):\n    assert pytestconfig.getoption('device') == 'mine'\n"
    )
    assert "1 passed" in run("test_own.py", "--device", "mine").stdout


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--report=file/out.json", "--report: got file/out.json: "),
        ("--report=folder", "--report: got folder, a folder, wanted a file"),
        ("--report=out.html", "--report: got out.html, wanted a JSON file"),
        ("--hang-timeout=-1", "--hang-timeout: got -1.0, wanted more than 0 seconds"),
    ],
)
def test_an_option_that_would_spoil_the_runs_end_is_refused_first(
    option: str, message: str, tmp_path: Path, run: Run
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    done = run(*kit("test_probe"), option)
    assert done.returncode == 4
    assert f"ERROR: {message}" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_without_a_backend_it_says_which_option_is_missing(run: Run) -> None:
    done = run("--pyargs", "hwbackends.conformance.step.test_probe")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--hwbackend NAME" in done.stdout + done.stderr


def test_an_unknown_backend_ends_the_run_with_the_names_that_there_are(run: Run) -> None:
    done = run(*kit("test_probe", "refrence"))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "did you mean 'reference'?" in done.stdout + done.stderr


def test_a_part_of_the_kit_is_partial_and_never_certified(run: Run) -> None:
    done = run(*kit("test_probe"), "-k", "reasons")
    assert done.returncode == 0
    line = done.stdout.splitlines()[-1] if "PARTIAL" in done.stdout.splitlines()[-1] else done.stdout
    assert "PARTIAL (not every test of the kit was asked for; 1 deselected)" in line
    assert "passed/claimed/total 1/1/1" in line
    assert "certified" not in done.stdout
    assert "%" not in re.sub(r"\[ *\d+%\]", "", done.stdout)  # pytest's own progress apart


def test_a_failure_prints_the_clause_the_values_and_the_seed(run: Run) -> None:
    done = run(*kit("test_probe", MUTANT))
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "CS-PROBE-01: probe(None) gives no reason" in done.stdout
    assert re.search(r"seed \d+", done.stdout)
    assert "failed" in done.stdout


def _waive(folder: Path, **changes: str) -> str:
    waiver = {
        "id": "step/test_probe.py::test_the_probe_answers_with_reasons[once]", "clause": "CS-PROBE-01",
        "reason": "driver 1.2", "url": "https://example.org/1", "expires": "2999-01-31", **changes,
    }  # fmt: skip
    path = folder / "waivers.yaml"
    path.write_text("- " + json.dumps(waiver), encoding="utf-8")
    return str(path)


def test_a_waived_failure_is_not_a_failure_and_not_certified(tmp_path: Path, run: Run) -> None:
    report = tmp_path / "out.json"
    done = run(*kit("test_probe", MUTANT), "--waivers", _waive(tmp_path), "--report", str(report))
    assert done.returncode == 0, done.stdout
    assert "1 waived" in done.stdout
    assert "certified" not in done.stdout
    data = json.loads(report.read_text())
    assert data["counts"]["waived"] == 1
    assert data["waivers"][0]["reason"] == "driver 1.2"


@pytest.mark.parametrize(
    ("changes", "backend", "status", "message"),
    [
        ({"expires": "2020-01-31"}, MUTANT, 4, "expired on 2020-01-31"),
        ({"clause": "CS-PROBE-09"}, MUTANT, 4, "unknown clause 'CS-PROBE-09'"),
        ({}, "reference", 1, "the waiver for CS-PROBE-01 is not needed here (passed): remove it"),
    ],
)
def test_a_waiver_that_does_not_hold_is_an_error(
    tmp_path: Path, run: Run, changes: dict[str, str], backend: str, status: int, message: str
) -> None:
    done = run(*kit("test_probe", backend), "--waivers", _waive(tmp_path, **changes))
    assert done.returncode == status
    assert message in done.stdout + done.stderr


def test_a_conftest_that_drops_cases_quietly_makes_the_run_partial(tmp_path: Path, run: Run) -> None:
    (tmp_path / "conftest.py").write_text("def pytest_collection_modifyitems(items):\n    del items[3:]\n")
    done = run("--pyargs", "hwbackends.conformance", "--hwbackend", "reference")
    assert done.returncode == 0
    assert "PARTIAL (not every test of the kit was asked for): passed/claimed/total 3/3/3" in done.stdout


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of the quick lane on the reference, in a process of pytest-xdist."""
    folder = tmp_path_factory.mktemp("quick")
    waivers = _waive(folder, id="step/test_probe.py::test_of_another_release")
    kit = ("--pyargs", "hwbackends.conformance", "--hwbackend=reference", "--quick")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    done = call(folder, *kit, "-n", "1", "--report=out.json", "--waivers", waivers)
    data: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return {**data, "html": (folder / "out.html").read_text(), "status": done.returncode, "stdout": done.stdout}


def test_results_of_xdist_workers_are_all_in_the_report(quick: dict[str, Any]) -> None:
    counts = quick["counts"]
    assert counts["failed"] == counts["waived"] == counts["not_claimed"] == 0, [
        t for t in quick["tests"] if t["outcome"] == "failed"
    ]
    assert counts["passed"] == counts["total"] == len(quick["tests"]) > 200
    assert [reason.split()[1] for reason in quick["partial"]] == ["deselected"]


def test_a_waiver_for_an_unknown_test_is_an_error_of_the_run(quick: dict[str, Any]) -> None:
    (problem,) = quick["problems"]
    assert problem.startswith("waiver for unknown test 'step/test_probe.py::test_of_another_release'")
    assert quick["status"] == 1
    assert quick["verdict"] == "failed"
    assert "ERROR: waiver for unknown test" in quick["stdout"]


def test_the_report_names_no_folder_of_the_machine(quick: dict[str, Any]) -> None:
    """Files go by their package: the report is read elsewhere."""
    assert quick["origins"]["conv_decode"]["location"].startswith("hwbackends/torch_ops/conv.py:")
    assert "hwbackends/reference/plugin.py" in quick["modules"]["files"]
    assert quick["certificate"]["plugin"].keys() == set(quick["modules"]["files"])
    text = json.dumps({key: value for key, value in quick.items() if key not in ("stdout", "status")})
    assert str(Path(hwbackends.__file__).parent) not in text


def test_the_report_counts_by_clause_and_says_where_it_ran(quick: dict[str, Any]) -> None:
    clauses = {row["id"]: row for row in quick["clauses"]}
    assert all(row["status"] == "passed" for row in clauses.values())
    assert clauses["CS-CONV-01"]["worst_ulp"] > 0
    assert 0.1 < clauses["CS-CONV-02"]["worst_share_of_bound"] <= 1
    assert {"python", "torch", "hwbackends", "platform"} <= set(quick["environment"])
    assert quick["emulated"] is False


def test_the_page_stands_alone(quick: dict[str, Any]) -> None:
    page = quick["html"]
    assert page.startswith("<!doctype html>")
    for word in (
        "CS-COMMIT-02",
        "Lanes",
        "passed/claimed/total",
        "worst ulp",
        "torch",
        "certificate",
        "step: ",
        "conv: ",
    ):
        assert word in page
    addresses = re.findall(r"https?://[^\s<\"]+", page)
    assert addresses == ["https://example.org/1"]  # the waiver's own; nothing is loaded
    assert "<script" not in page
    assert "<link" not in page


VENDORS = "tests.conformance.vendors:plugins"


@pytest.mark.parametrize(("name", "how"), [("dies_at_import", "CRASH"), ("hangs_at_import", "HANG")])
def test_a_crash_or_hang_at_import_names_clause_seed_and_command(name: str, how: str, run: Run) -> None:
    done = run(*kit("test_probe", f"{VENDORS}.{name}"), "--hang-timeout=15", "--seed=7")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    text = done.stdout + done.stderr
    assert f"{how}: importing the plugin" in text
    assert "clause CS-PROBE-01" in text
    assert "seed 7; repeat: pytest --pyargs hwbackends.conformance --hwbackend" in text


def _decode(run: Run, name: str, *more: str) -> subprocess.CompletedProcess[str]:
    return run(
        "--pyargs", "hwbackends.conformance.conv.test_exact", "--hwbackend", f"{VENDORS}.{name}", "-k", "decode", *more
    )


def test_a_hang_costs_one_time_out_per_hook(tmp_path: Path, run: Run) -> None:
    done = _decode(run, "sleeps", "--hang-timeout=10", "--report=out.json")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    # not counted on the terminal, where pytest may say a failure twice: in its summary too, when it runs in a CI
    tests = json.loads((tmp_path / "out.json").read_text())["tests"]
    reasons = [test["reason"].partition("ProcessLost: ")[2] for test in tests if test["outcome"] == "failed"]
    waited, spared = "HANG: conv_decode: no answer in 10 s", "not called again: HANG: conv_decode: no answer in 10 s"
    assert len(reasons) > 10
    assert sorted(reasons) == sorted([waited, *[spared] * (len(reasons) - 1)])


@pytest.mark.parametrize("name", ["patches_the_kit", "right_only_beside_the_kit", "says_it_is_not_claimed", "zeros"])
def test_a_judge_that_the_judged_cannot_reach(name: str, run: Run) -> None:
    done = _decode(run, name, "--quick")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "not_claimed" not in done.stdout.replace(name, "")
    assert "smallest input that fails: conv_decode(" in done.stdout


def test_a_plugin_that_pytest_imports_into_the_judge_is_not_certified(tmp_path: Path, run: Run) -> None:
    (tmp_path / "conftest.py").write_text("import tests.conformance.vendors\n")
    done = run("--pyargs", "hwbackends.conformance.step.test_probe", "--hwbackend", f"{VENDORS}.good")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "the judge's process imported tests.conformance" in done.stdout
