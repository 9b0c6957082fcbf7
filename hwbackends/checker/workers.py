"""Processes for work that one core is too slow for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
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
    executor = ProcessPoolExecutor(jobs, mp_context=context, initializer=_start, initargs=(os.getpid(),))
    try:
        yield executor
    except BaseException:
        for process in list((executor._processes or {}).values()):
            process.terminate()
        executor.shutdown(wait=False, cancel_futures=True)
        raise
    executor.shutdown()


def _start(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """A parent that was killed can end nobody; without it a worker would wait for work forever."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
