"""The pytest side of a conformance run: sends each test to the worker process, turns outcomes into reports, holds them
against the waivers, and closes with one line and the report files. Imports no torch and no backend."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import pytest

from hwbackends.conformance.inventory import shipped_tests
from hwbackends.conformance.marks import FRESH_PROCESS
from hwbackends.conformance.plugin import PACKAGE
from hwbackends.conformance.report import Report, Result, write
from hwbackends.conformance.waivers import read_waivers, unknown_ids, waived_clauses
from hwbackends.conformance.workers import Job, Outcome, Settings, Worker
from hwbackends.errors import ContractError

_PROPERTY = "hwbackends"
_STATUS = {"not_claimed": ("not claimed", "n", "NOT CLAIMED"), "waived": ("waived", "w", "WAIVED")}


def test_id(item: pytest.Function) -> str:
    """`test_file.py::test_name[case]`, wherever the kit is installed; a node id depends on the folder of the run."""
    return f"{item.module.__name__.rpartition('.')[2]}.py::{item.name}"


def _check_options(hang_timeout: float, report: str | None) -> None:
    """Refuse before the run what would spoil its end."""
    if not hang_timeout > 0:
        raise pytest.UsageError(f"--hang-timeout: got {hang_timeout}, wanted more than 0 seconds")
    if report is None:
        return
    path = Path(report)
    if path.suffix == ".html":
        raise pytest.UsageError(
            f"--report: got {report}, wanted a JSON file; the page beside it takes the suffix .html"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise pytest.UsageError(f"--report: got {report}: {error.strerror}, wanted a file that can be made") from error
    if path.is_dir():
        raise pytest.UsageError(f"--report: got {report}, a folder, wanted a file")


class Session:
    """One run of the kit; registered as a pytest plugin."""

    def __init__(self, config: pytest.Config) -> None:
        option = config.option
        _check_options(option.hang_timeout, option.report)
        self.config = config
        self.is_xdist_worker = hasattr(config, "workerinput")
        self.settings = Settings(option.hwbackend, option.device, option.seed)
        self.worker = Worker(self.settings, option.hang_timeout)
        self.results: dict[str, Result] = {}
        self.collected: set[str] = set()
        self.expected: set[str] = set()
        self.deselected = 0
        self.whole = False
        self.info: dict[str, Any] = {}
        try:
            self.waivers = read_waivers(Path(option.waivers)) if option.waivers else ()
        except ContractError as error:
            raise pytest.UsageError(str(error)) from error

    @pytest.fixture
    def kit(self) -> None:
        """The tests' only fixture; the real object is made in the worker process."""

    # --- before ---

    def pytest_sessionstart(self) -> None:
        """Load the backend once, in the worker, to learn what it is; one that does not load ends the run."""
        if self.is_xdist_worker or self.config.option.collectonly:
            return
        answer = self.worker.run(Job("backend"))
        if answer.outcome != "passed":
            self.worker.close()
            raise pytest.UsageError(f"backend {self.settings.backend!r}: {answer.reason} {answer.details}".strip())
        self.info = answer.info

    def pytest_report_header(self) -> str:
        """Name the backend in pytest's header."""
        return f"hwbackends conformance: backend {self.settings.backend}, device {self.settings.device}"

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Take note of every test, then leave out what the quick lane leaves out."""
        self.collected = {test_id(item) for item in items if _is_kit(item)}
        self.whole = _whole([item for item in items if _is_kit(item)])
        if self.config.option.quick:
            out = [item for item in items if _is_kit(item) and item.get_closest_marker("full")]
            items[:] = [item for item in items if item not in set(out)]
            self.config.hook.pytest_deselected(items=out)
        self.expected = {test_id(item) for item in items if _is_kit(item)}

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Count what was left out, by whomever."""
        self.deselected += len(items)

    # --- each test ---

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Run a test of the kit in the worker process."""
        if not _is_kit(pyfuncitem):
            return None
        name = test_id(pyfuncitem)
        declared = tuple(pyfuncitem.function.clauses)
        if getattr(pyfuncitem.function, FRESH_PROCESS, False):
            self.worker.finish()
        callspec = getattr(pyfuncitem, "callspec", None)
        params = dict(callspec.params) if callspec else {}
        function = pyfuncitem.originalname or pyfuncitem.name
        outcome = self.worker.run(Job(name, pyfuncitem.module.__name__, function, params))
        if outcome.outcome == "failed" and not outcome.clauses:  # a crash tells nothing of single clauses
            outcome.clauses = dict.fromkeys(declared, False)
        result = self._judge(name, outcome, declared)
        pyfuncitem.user_properties.append((_PROPERTY, result.as_dict()))
        _raise(result)
        return True

    def _judge(self, name: str, outcome: Outcome, declared: tuple[str, ...]) -> Result:
        """Hold an outcome against the waivers."""
        waived = waived_clauses(self.waivers, name)
        failed = {clause for clause, holds in outcome.clauses.items() if not holds}
        result = Result.of(name, outcome, declared)
        if waived and not waived <= failed:
            result.outcome = "failed"
            idle = ", ".join(sorted(waived - failed))
            result.reason = f"the waiver for {idle} is not needed here ({outcome.outcome}): remove it"
        elif failed and failed <= waived:
            result.outcome = "waived"
        return result

    def pytest_report_teststatus(self, report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, str] | None:
        """Own columns for what is not claimed and what is waived."""
        result = _property(report)
        return _STATUS.get(result["outcome"]) if result and getattr(report, "when", "") == "call" else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect results; with pytest-xdist they arrive here from its workers."""
        result = _property(report)
        if report.when == "call" and result and not self.is_xdist_worker:
            self.results[result["id"]] = Result.from_dict(result, report.duration)

    # --- after ---

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """What a worker of pytest-xdist collected; all of them collect the same."""
        sent = getattr(node, "workeroutput", {}).get(_PROPERTY)
        if sent:
            collected, expected, self.deselected, self.whole = sent
            self.collected, self.expected = set(collected), set(expected)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Close the worker, and make a useless waiver an error of the run."""
        self.worker.close()
        if self.is_xdist_worker:
            sent = sorted(self.collected), sorted(self.expected), self.deselected, self.whole
            self.config.workeroutput[_PROPERTY] = sent  # type: ignore[attr-defined]
            return
        self.report = self._report()
        if self.report.problems and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.config.option.report and self.info:
            write(self.report, Path(self.config.option.report))

    def _report(self) -> Report:
        partial = list(self._partial())
        problems = unknown_ids(self.waivers, self.collected) if self.whole else []
        command = [f"--hwbackend {self.settings.backend}", f"--device {self.settings.device}"]
        command += [f"--seed {self.settings.seed}"] if self.settings.seed else []
        return Report(self.info, list(self.results.values()), self.waivers, partial, problems, " ".join(command))

    def _partial(self) -> Iterable[str]:
        """Why this run is not the whole kit."""
        if not self.whole:
            yield "not every test of the kit was asked for"
        if self.deselected:
            yield f"{self.deselected} deselected"
        unfinished = len(self.expected - set(self.results))
        if unfinished:
            yield f"{unfinished} without a result"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One line that says it all."""
        if not self.is_xdist_worker and hasattr(self, "report"):
            for problem in self.report.problems:
                terminalreporter.write_line(f"ERROR: {problem}", red=True)
            terminalreporter.write_line(self.report.line, bold=True)


def _is_kit(item: pytest.Item) -> TypeGuard[pytest.Function]:
    return isinstance(item, pytest.Function) and item.module.__name__.startswith(f"{PACKAGE}.test_")


def _whole(items: list[pytest.Function]) -> bool:
    """Whether every case of every shipped test is there."""
    found: dict[str, int] = {}
    wanted = dict.fromkeys(shipped_tests(), 1)
    for item in items:
        name = test_id(item).partition("[")[0]
        found[name] = found.get(name, 0) + 1
        wanted[name] = math.prod(len(mark.args[1]) for mark in item.iter_markers("parametrize"))
    return found == wanted


def _property(report: Any) -> dict[str, Any] | None:
    found: dict[str, Any] | None = dict(getattr(report, "user_properties", ())).get(_PROPERTY)
    return found


def _raise(result: Result) -> None:
    if result.outcome == "failed":
        _fail(result)
    if result.outcome == "not_claimed":
        pytest.skip(f"not claimed: {result.reason}")
    if result.outcome == "waived":
        pytest.skip(f"waived: {result.reason}")


def _fail(result: Result) -> NoReturn:
    text = result.details if result.details.startswith(result.reason) else f"{result.reason}\n{result.details}"
    pytest.fail(f"{text}\nseed {result.seed}", pytrace=False)
