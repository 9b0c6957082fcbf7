"""A vendor's crash or hang is a failure with a name, and the run goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hwbackends.conformance.workers import Job, Outcome, Settings, Worker

MODULE = "tests.conformance.broken_tests"


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker(Settings("reference", "cpu"), timeout_s=30)
    yield made
    made.close()


def _run(worker: Worker, function: str, **params: int) -> Outcome:
    return worker.run(Job(f"broken_tests.py::{function}", MODULE, function, params))


def test_a_check_that_holds_passes(worker: Worker) -> None:
    outcome = _run(worker, "passes")
    assert (outcome.outcome, outcome.clauses) == ("passed", {"CS-CONV-01": True})


def test_a_failure_names_the_values_and_the_seed(worker: Worker) -> None:
    outcome = _run(worker, "passes", value=7)
    assert outcome.outcome == "failed"
    assert "got 7" in outcome.reason
    assert outcome.seed != 0


def test_only_the_clause_that_fails_turns_red(worker: Worker) -> None:
    outcome = _run(worker, "fails_one_clause_of_two")
    assert outcome.clauses == {"CS-CONV-01": True, "CS-CONV-02": False}
    assert "[1]: 2.0 instead of 3.0" in outcome.reason


def test_a_crash_is_reported_by_the_signals_name_and_the_next_test_runs(worker: Worker) -> None:
    crash, after = _run(worker, "crashes"), _run(worker, "passes")
    assert crash.outcome == "failed"
    assert crash.reason == "CRASH: the process died of SIGSEGV"
    assert "Segmentation fault" in crash.details  # the worker's own trace
    assert after.outcome == "passed"


def test_a_process_that_leaves_is_a_crash_too(worker: Worker) -> None:
    assert _run(worker, "leaves").reason == "CRASH: the process ended with status 3"
    assert _run(worker, "passes").outcome == "passed"


def test_a_hang_is_a_failure_and_the_next_test_runs(worker: Worker) -> None:
    _run(worker, "passes")  # the time to start a process is not the test's
    hang = worker.run(Job("broken_tests.py::hangs", MODULE, "hangs"), timeout_s=0.5)
    assert hang.outcome == "failed"
    assert hang.reason == "HANG: no answer in 0.5 s"
    assert _run(worker, "passes").outcome == "passed"


def test_an_exception_turns_every_named_clause_red(worker: Worker) -> None:
    outcome = _run(worker, "raises")
    assert outcome.clauses == {"CS-CONV-01": False}
    assert "RuntimeError: out of registers" in outcome.reason
    assert "Traceback" in outcome.details


def test_a_missing_claim_is_neither_passed_nor_failed(worker: Worker) -> None:
    outcome = _run(worker, "needs_what_is_not_claimed")
    assert (outcome.outcome, outcome.reason) == ("not_claimed", "layout ring")


@pytest.mark.parametrize(
    ("function", "message"),
    [("proves_nothing", "made no check"), ("checks_a_clause_it_does_not_name", "CS-CONV-02, which it does not name")],
)
def test_a_test_of_the_kit_that_says_nothing_fails(worker: Worker, function: str, message: str) -> None:
    assert message in _run(worker, function).reason


def test_one_process_serves_many_tests() -> None:
    worker = Worker(Settings("reference", "cpu"), timeout_s=30)
    try:
        for _ in range(3):
            assert _run(worker, "passes").outcome == "passed"
        assert worker.started == 1
    finally:
        worker.close()


def test_a_backend_that_does_not_load_answers_every_job_with_the_reason() -> None:
    worker = Worker(Settings("nowhere", "cpu"), timeout_s=30)
    try:
        assert "no backend is called 'nowhere'" in worker.run(Job("backend")).reason
    finally:
        worker.close()
