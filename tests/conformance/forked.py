"""pytest in processes of its own without the price of imports: one process imports torch, pytest and the kit, and forks
for each run that is wanted. A fork knows no plugin and nothing of another run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Forks:
    """Runs of pytest, each in a fork of one process that has imported what all of them need."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.conformance.forked"], cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """pytest in `folder`: exit status and output."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(folder), arguments]), file=self._process.stdin, flush=True)
        status = json.loads(self._process.stdout.readline())
        said = [(folder / name).read_text(errors="replace") for name in ("stdout.txt", "stderr.txt")]
        return subprocess.CompletedProcess(list(arguments), status, *said)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def main() -> None:
    """Fork for each line that comes: a folder and pytest's arguments."""
    from hwbackends.conformance import session  # noqa: F401  # and with it torch
    from hwbackends.remote.zygote import zygote

    zygote()  # the process that forks for hooks serves every run
    for line in sys.stdin:
        folder, arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(folder, arguments)
        _, status = os.waitpid(pid, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


def _child(folder: str, arguments: list[str]) -> Any:
    """Run pytest and leave, without the parent's clean-up."""
    import pytest

    status = 70
    try:
        os.chdir(folder)
        for number, name in ((1, "stdout.txt"), (2, "stderr.txt")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdin = open(os.devnull)  # noqa: SIM115  # for the life of the process
        status = int(pytest.main(["-p", "no:cacheprovider", *arguments]))
    finally:
        with contextlib.suppress(Exception):  # whatever a test did to the streams, the status must come out
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
