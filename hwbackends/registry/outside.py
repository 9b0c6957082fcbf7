"""Asking a plugin of another distribution in a process of its own: its probe and its first import may raise, end the
process, crash it or never come back, and nothing of that may reach the caller. Run as a program it is that process."""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT = "HWBACKENDS_PROBE_TIMEOUT"
DEFAULT_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a plugin said, or how it failed.

    Attributes:
        state: value of `candidates.State`: available, unavailable or broken.
        reason, hint: as the probe gave them, or what happened instead.
        missing: hooks that the contracts require and the plugin does not have.
        cause: the error that it raised, as far as it can be told here.
    """

    state: str
    reason: str
    hint: str = ""
    missing: tuple[str, ...] = ()
    cause: Exception | None = None


_answers: dict[tuple[object, ...], Answer] = {}


def ask(name: str, value: str, manifest: Path, device: str | None) -> Answer:
    """The answer of one plugin; asked once per process, device and state of its manifest.

    Args:
        name, value: of its entry point.
        manifest: the manifest beside it.
        device: what the probe is asked for.
    """
    key = (name, value, manifest, manifest.stat().st_mtime_ns, device, os.environ.get(TIMEOUT))
    if key not in _answers:
        _answers[key] = _run(name, value, device)
    return _answers[key]


def _run(name: str, value: str, device: str | None) -> Answer:
    limit = float(os.environ.get(TIMEOUT) or DEFAULT_TIMEOUT)
    with tempfile.TemporaryDirectory(prefix="hwbackends-probe-") as folder:
        result = Path(folder) / "answer.json"
        given = json.dumps({"name": name, "value": value, "device": device, "path": sys.path, "result": str(result)})
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, given],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            _, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            _end(process)
            reason = f"cannot be imported: it did not answer within {limit:g} s"
            return Answer("broken", reason, f"repair or uninstall the package, or allow more time with {TIMEOUT}")
        if not result.is_file():
            return _dead(process.returncode, errors.decode(errors="replace"))
        return _read(json.loads(result.read_text(encoding="utf-8")))


_PROGRAM = """\
import json, sys
given = json.loads(sys.argv[1])
sys.path[:] = given["path"]
from hwbackends.registry.outside import answer
answer(given)
"""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it has started."""
    with contextlib.suppress(ProcessLookupError, AttributeError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.communicate()


def _dead(code: int, errors: str) -> Answer:
    """A process that ended without an answer."""
    last = errors.strip().splitlines()[-1:] or [""]
    how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    told = f" ({last[0]})" if last[0] else ""
    return Answer("broken", f"cannot be imported: it ended the process with {how}{told}", "uninstall the package")


def _read(found: dict[str, Any]) -> Answer:
    error = found.pop("error", None)
    kind = getattr(builtins, error[0], None) if error else None
    usable = isinstance(kind, type) and issubclass(kind, Exception)
    cause = None if not error else kind(error[1]) if usable else RuntimeError(f"{error[0]}: {error[1]}")  # type: ignore[misc]
    return Answer(found["state"], found["reason"], found["hint"], tuple(found["missing"]), cause)


def answer(given: dict[str, Any]) -> None:
    """In the process of its own: probe, import and inspect the plugin, and leave the answer in a file."""
    from hwbackends.registry import candidates

    found = candidates.question(given["name"], given["value"], given["device"])
    cause = found.cause
    while cause is not None and cause.__cause__ is not None and isinstance(cause.__cause__, Exception):
        cause = cause.__cause__
    told = {"state": str(found.state), "reason": found.reason, "hint": found.hint, "missing": list(found.missing)}
    if cause is not None:
        told["error"] = [type(cause).__name__, str(cause)]
    result = Path(given["result"])
    result.with_suffix(".part").write_text(json.dumps(told), encoding="utf-8")
    result.with_suffix(".part").rename(result)
    os._exit(0)  # what the plugin left running, or does at exit, is nobody's concern here
