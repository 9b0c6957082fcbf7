"""Processes for work that one core is too slow for."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


def can_fork() -> bool:
    """Whether workers start as copies of this process, with everything that it has read."""
    return sys.platform == "linux" and "fork" in multiprocessing.get_all_start_methods()


@contextmanager
def pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of forked workers where the system can; they start at once and share what is imported.

    Ctrl-C is the parent's business: it ends the workers, which would each print a traceback of their own.
    """
    context = multiprocessing.get_context("fork" if can_fork() else "spawn")
    executor = ProcessPoolExecutor(jobs, mp_context=context, initializer=_leave_interrupts)
    try:
        yield executor
    except BaseException:
        for process in list((executor._processes or {}).values()):
            process.terminate()
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()


def _leave_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
