"""The pytest side of a conformance run: makes the items of every test from the backend's claims, runs each test here,
where the plugin is never imported, turns outcomes into results, holds them against the waivers, and closes with one
line and the report files."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn, TypeGuard, cast

import pytest

from hwbackends.conformance import kit as kits
from hwbackends.conformance.kit import Kit, Outcome
from hwbackends.conformance.marks import FRESH_PROCESS, Item, items
from hwbackends.conformance.plugin import PACKAGE
from hwbackends.conformance.report import Report, Result, write
from hwbackends.conformance.waivers import read_waivers, unknown_ids, waived_clauses
from hwbackends.conformance.wanted import wanted_ids
from hwbackends.errors import ContractError
from hwbackends.remote.client import Client, HookError, ProcessLost

_PROPERTY = "hwbackends"
_STATUS = {"not_claimed": ("not claimed", "n", "NOT CLAIMED"), "waived": ("waived", "w", "WAIVED")}


def test_id(item: pytest.Function) -> str:
    """`conv/test_file.py::test_name[case]`, wherever the kit is installed; a node id depends on the run's folder."""
    return f"{file_of(item.module.__name__)}::{item.name}"


def file_of(module: str) -> str:
    """Path of a module of the kit inside it."""
    return module.removeprefix(f"{PACKAGE}.").replace(".", "/") + ".py"


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
        self.backend, self.device, self.seed = option.hwbackend, option.device, option.seed
        self.client = Client(option.hwbackend, option.device, option.hang_timeout)
        self._kit: Kit | None = None
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
        """The tests' only fixture; the session calls the tests itself."""

    @pytest.fixture
    def item(self) -> None:
        """Stands for one case at one point of the claims."""

    # --- before ---

    def pytest_sessionstart(self) -> None:
        """Load the backend once, in its process, to learn what it claims; one that does not load ends the run."""
        try:
            self._kit = Kit(self.client)
        except (HookError, ProcessLost, ContractError) as error:
            self.client.close()
            raise pytest.UsageError(f"backend {self.backend!r}: {self._how_to_repeat(str(error))}") from None
        self.info = {**self._kit.info, "hooks_claimed": list(self._kit.claims.hooks)}

    def _how_to_repeat(self, text: str) -> str:
        """A crash or a hang at import, with its clause, seed and command."""
        if not text.startswith(("CRASH", "HANG")):
            return text
        return f"{text}\nclause CS-PROBE-01 (a backend says whether it can run here), seed {self.seed}; {self._again()}"

    def _again(self, test: str = "") -> str:
        what = f"{PACKAGE}.{test}" if test else PACKAGE
        return f"repeat: pytest --pyargs {what} --hwbackend {self.backend} --device {self.device} --seed {self.seed}"

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One item per case and point of the claims."""
        if self._kit is None or not metafunc.module.__name__.startswith(f"{PACKAGE}."):
            return
        found = items(metafunc.function, self._kit.claims, self.seed)
        metafunc.fixturenames.append("item")
        marks = [() if item.quick else (pytest.mark.full,) for item in found]
        values = [
            pytest.param(*i.arguments.values(), i, id=i.id or "once", marks=m)
            for i, m in zip(found, marks, strict=True)
        ]
        metafunc.parametrize([*found[0].arguments, "item"], values)

    def pytest_report_header(self) -> str:
        """Name the backend in pytest's header."""
        return f"hwbackends conformance: backend {self.backend}, device {self.device}"

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Take note of every test, then leave out what the quick lane leaves out."""
        self.collected = {test_id(item) for item in items if _is_kit(item)}
        self.whole = self._kit is not None and self.collected == wanted_ids(self._kit.claims, self.seed)
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
        """Run a test of the kit; hooks run in the backend's process."""
        if not _is_kit(pyfuncitem):
            return None
        assert self._kit is not None
        name, test = test_id(pyfuncitem), pyfuncitem.function
        declared = tuple(test.clauses)
        if getattr(test, FRESH_PROCESS, False):
            self.client.stop()
        item = cast(Item, pyfuncitem.callspec.params["item"])
        outcome = kits.run(self._kit, name, test, item, self.seed)
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
        """End the backend's process, and make a useless waiver an error of the run."""
        self.client.close()
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
        problems += self._reached()
        command = [f"--hwbackend {self.backend}", f"--device {self.device}"]
        command += [f"--seed {self.seed}"] if self.seed else []
        lanes = "quick" if self.config.option.quick else "full"
        return Report(
            self.info, list(self.results.values()), self.waivers, partial, problems, " ".join(command), lanes,
            self.seed, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )  # fmt: skip

    def _reached(self) -> list[str]:
        """Modules of the plugin that were imported into the judge's own process: nothing that it says counts then."""
        files = set(self.info.get("modules", {}).get("files", ()))
        own = str(Path(__file__).parents[1])
        found = [
            name
            for name, module in list(sys.modules.items())
            if (file := getattr(module, "__file__", None)) in files and not str(file).startswith(own)
        ]
        return [f"the judge's process imported {name} of the plugin: nothing can be certified" for name in found[:1]]

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
            for row in self.report.clauses():
                found = row["smallest"]
                if found:
                    text = f"{row['id']}: smallest input that fails: {found['input'][:1500]}\n  {found['repeat']}"
                    terminalreporter.write_line(text)
            terminalreporter.write_line(self.report.line, bold=True)


def _is_kit(item: pytest.Item) -> TypeGuard[pytest.Function]:
    return (
        isinstance(item, pytest.Function)
        and ".test_" in item.module.__name__
        and item.module.__name__.startswith(f"{PACKAGE}.")
    )


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
    shown = f"\ninput: {result.input}" if result.input else ""
    pytest.fail(f"{text}{shown}\nseed {result.seed}", pytrace=False)
