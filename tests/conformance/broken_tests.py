"""Functions that stand in for tests of the kit in its worker process: one passes, others crash, hang or misbehave."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from hwbackends.conformance.claims import NotClaimed
from hwbackends.conformance.marks import clauses


@clauses("CS-CONV-01")
def passes(kit: Any, value: int = 0) -> None:
    kit.check("CS-CONV-01", value == 0, f"got {value}")


@clauses("CS-CONV-01", "CS-CONV-02")
def fails_one_clause_of_two(kit: Any) -> None:
    kit.check("CS-CONV-01", True, "")
    kit.equal("CS-CONV-02", [1.0, 2.0], [1.0, 3.0], "numbers")


@clauses("CS-CONV-01")
def crashes(kit: Any) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


@clauses("CS-CONV-01")
def leaves(kit: Any) -> None:
    os._exit(3)


@clauses("CS-CONV-01")
def hangs(kit: Any) -> None:
    time.sleep(60)


@clauses("CS-CONV-01")
def raises(kit: Any) -> None:
    raise RuntimeError("out of registers")


@clauses("CS-CONV-01")
def needs_what_is_not_claimed(kit: Any) -> None:
    raise NotClaimed("layout ring")


@clauses("CS-CONV-01")
def proves_nothing(kit: Any) -> None:
    pass


@clauses("CS-CONV-01")
def checks_a_clause_it_does_not_name(kit: Any) -> None:
    kit.check("CS-CONV-02", True, "")
