"""Starts processes that serve hooks: one process imports torch and the shared types, and forks for each that is wanted,
so that a fresh one costs milliseconds. Nothing of the caller's arguments or environment is passed on but the path."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

_BOOT = "import sys; sys.path[:] = {path!r}; from hwbackends.remote.zygote import main; main(int(sys.argv[1]))"
_PRIVATE = ("PYTEST_", "COV_", "COVERAGE_", "_PYTEST")
"""Environment variables that tell a process who started it."""
START_S = 180.0
"""Seconds that importing torch may take."""


class Zygote:
    """The process that forks; `fork` gives a connection to a new child and its process id."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_PRIVATE)}
        command = [sys.executable, "-c", _BOOT.format(path=sys.path), str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=(theirs.fileno(),), env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        theirs.close()
        self._control.settimeout(START_S)
        if self._control.recv(16) != b"ready":
            raise EOFError("the process that imports torch did not start")

    def fork(self, log: Path) -> tuple[Connection, int]:
        """A child whose output goes to `log`."""
        mine, theirs = socket.socketpair()
        handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            socket.send_fds(self._control, [b"fork"], [theirs.fileno(), handle])
            pid = int(self._control.recv(32))
        finally:
            theirs.close()
            os.close(handle)
        return Connection(mine.detach()), pid

    def ended(self, pid: int, seconds: float) -> int | None:
        """Exit status of a child (negative: the signal), or None if it is alive after `seconds`."""
        self._control.sendall(f"wait {pid} {seconds}".encode())
        answer = self._control.recv(32).decode()
        return None if answer == "alive" else int(answer)

    def close(self) -> None:
        """End it, and every child that is left."""
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        self._process.wait()


@functools.cache
def zygote() -> Zygote:
    """The one of this process."""
    made = Zygote()
    atexit.register(made.close)
    return made


def main(control_fd: int) -> None:
    """The loop of the forking process."""
    import torch  # noqa: F401  # what every child needs, once

    from hwbackends.remote import plugin, serve  # noqa: F401

    gc.freeze()  # a collection in a child looks at what the child made
    sys.argv[:] = [""]
    control = socket.socket(fileno=control_fd)
    control.sendall(b"ready")
    children: set[int] = set()
    while True:
        message, fds, _, _ = socket.recv_fds(control, 64, 2)
        if not message:
            break
        if message == b"fork":
            pid = os.fork()
            if pid == 0:
                control.close()
                _child(*fds)
            children.add(pid)
            for fd in fds:
                os.close(fd)
            control.sendall(str(pid).encode())
        else:
            control.sendall(_wait(message.decode(), children))
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _wait(message: str, children: set[int]) -> bytes:
    _, pid, seconds = message.split()
    end = time.monotonic() + float(seconds)
    while True:
        if int(pid) not in children:
            return b"0"
        found, status = os.waitpid(int(pid), os.WNOHANG)
        if found:
            children.discard(found)
            return str(os.waitstatus_to_exitcode(status)).encode()
        if time.monotonic() >= end:
            return b"alive"
        time.sleep(0.002)


def _child(connection_fd: int, log_fd: int) -> None:
    """Serve until the connection closes, then leave without the parent's clean-up."""
    import faulthandler

    from hwbackends.remote.serve import serve

    status = 1
    try:
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        os.close(log_fd)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        faulthandler.enable(sys.stderr)
        serve(Connection(connection_fd))
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
