"""Crash isolation: one persistent worker process runs the tests that touch a vendor's code. A crash or a hang ends the
worker, is reported with the signal's name, and the next test gets a new one. Nothing here imports torch."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

START_S = 180.0
"""Seconds that a worker may take to import what it needs and to load the backend."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a worker must know: the backend's name, the device, and the base of all seeds."""

    backend: str
    device: str
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """One test, or with `function` empty the question what the backend is."""

    test_id: str
    module: str = ""
    function: str = ""
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """What became of one test.

    Attributes:
        outcome: passed, failed or not_claimed.
        reason: of a failure or a missing claim, in a few words.
        details: everything that failed, with values, ready to print.
        clauses: clause id to whether every check of it held.
        worst: largest error seen per clause, in units in the last place, and as share of its bound.
        seed: seed of the test's random numbers.
        info: answer of an empty job.
    """

    outcome: str
    reason: str = ""
    details: str = ""
    clauses: dict[str, bool] = field(default_factory=dict)
    worst: dict[str, tuple[float, float]] = field(default_factory=dict)
    seed: int = 0
    info: dict[str, Any] = field(default_factory=dict)


class Worker:
    """A process that runs jobs one after the other, and is replaced when it dies.

    Args:
        settings: handed to the process.
        timeout_s: a test without an answer after this time is a hang.
    """

    def __init__(self, settings: Settings, timeout_s: float = 120.0) -> None:
        self.settings, self.timeout_s = settings, timeout_s
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._log: Path | None = None
        self.started = 0

    def run(self, job: Job, timeout_s: float | None = None) -> Outcome:
        """Run one job; whatever happens to the process becomes an outcome."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        try:
            if self._process is None or not self._process.is_alive():
                self._start()
            assert self._pipe is not None
            self._pipe.send(job)
            if self._pipe.poll(limit):
                answer: Outcome = self._pipe.recv()
                return answer
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return self._crashed()
        return self._hung(limit)

    def _hung(self, limit: float) -> Outcome:
        self.stop()
        return Outcome("failed", f"HANG: no answer in {limit:g} s", self._tail())

    def _start(self) -> None:
        self.stop()
        context: Any = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
        if hasattr(os, "fork"):
            context.set_forkserver_preload(["hwbackends.conformance.kit"])
        if self._log is None:
            handle, name = tempfile.mkstemp(prefix="hwbackends-worker-", suffix=".log")
            os.close(handle)
            self._log = Path(name)
        self._log.write_bytes(b"")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self.settings, str(self._log)), daemon=True)
        self._process.start()
        theirs.close()
        self.started += 1
        if not self._pipe.poll(START_S):
            raise EOFError
        self._pipe.recv()  # ready: importing and loading are not the first test's time

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def finish(self) -> None:
        """Let the process end by itself, which it does when its pipe closes; `stop` is for one that hangs."""
        if self._pipe is not None and self._process is not None:
            self._pipe.close()
            self._process.join(5)
        self.stop()

    def close(self) -> None:
        """End the process and remove its log."""
        self.finish()
        if self._log is not None:
            self._log.unlink(missing_ok=True)
            self._log = None

    def _crashed(self) -> Outcome:
        assert self._process is not None
        self._process.join(1)
        if self._process.is_alive():
            return self._hung(START_S)
        code = self._process.exitcode
        tail = self._tail()
        self.stop()
        if code is not None and code < 0:
            return Outcome("failed", f"CRASH: the process died of {signal.Signals(-code).name}", tail)
        return Outcome("failed", f"CRASH: the process ended with status {code}", tail)

    def _tail(self) -> str:
        """The end of what the worker wrote, where a crash leaves its traces."""
        text = self._log.read_text(errors="replace") if self._log else ""
        return text[-2000:]


def _serve(pipe: Connection, settings: Settings, log: str) -> None:
    """The worker's main loop."""
    handle = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    faulthandler.enable(sys.stderr)
    answer = _runner(settings)
    pipe.send("ready")
    while True:
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            return
        pipe.send(answer(job))
        os.ftruncate(handle, 0)


def _runner(settings: Settings) -> Callable[[Job], Outcome]:
    from hwbackends.conformance.kit import Runner

    return Runner(settings).run
