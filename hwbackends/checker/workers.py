"""Processes for work that one core is too slow for."""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor


def can_fork() -> bool:
    """Whether workers start as copies of this process, with everything that it has read."""
    return sys.platform == "linux" and "fork" in multiprocessing.get_all_start_methods()


def pool(jobs: int) -> ProcessPoolExecutor:
    """A pool of forked workers where the system can; they start at once and share what is imported."""
    return ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork" if can_fork() else "spawn"))
