"""What stays light: the package, the doctor and the checker's help import no torch, and work where there is none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hwbackends

HEAVY = {"torch", "triton", "numpy", "transformers", "torch_npu"}
LIGHT_COMMANDS = {
    "import": ["-c", "import hwbackends"],
    "version": ["-m", "hwbackends", "--version"],
    "help": ["-m", "hwbackends", "--help"],
    "doctor": ["-m", "hwbackends", "doctor"],
    "check --help": ["-m", "hwbackends", "check", "--help"],
}


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run this Python with `arguments`, outside the checkout's own folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HWBACKENDS_")}
    env = {**kept, "PYTHONPATH": str(Path(hwbackends.__file__).parent.parent), **environment}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, check=False)


@pytest.mark.parametrize("arguments", LIGHT_COMMANDS.values(), ids=LIGHT_COMMANDS.keys())
def test_a_light_command_imports_nothing_heavy(arguments: list[str]) -> None:
    done = run(["-X", "importtime", *arguments])
    assert done.returncode == 0, done.stderr[-2000:]
    imported = set(re.findall(r"\| +([\w.]+)$", done.stderr, flags=re.MULTILINE))
    assert "hwbackends" in imported
    assert not imported & HEAVY


@pytest.mark.parametrize("arguments", LIGHT_COMMANDS.values(), ids=LIGHT_COMMANDS.keys())
def test_a_light_command_works_where_nothing_heavy_is_installed(arguments: list[str], tmp_path: Path) -> None:
    done = run(["-c", hide_heavy(arguments)])
    assert done.returncode == 0, done.stderr[-2000:]


def hide_heavy(arguments: list[str]) -> str:
    """A program that runs `arguments` in an interpreter whose finders do not know the heavy packages."""
    if arguments[0] == "-c":
        body = arguments[1]
    else:
        body = f"import sys, runpy; sys.argv = {arguments[1:]!r}; runpy.run_module('hwbackends', run_name='__main__')"
    return f"""
import sys
HEAVY = {HEAVY!r}

class Hidden:
    def __init__(self, finder): self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HEAVY else self.finder.find_spec(name, path, target)
    def __getattr__(self, name): return getattr(self.finder, name)

sys.meta_path[:] = [Hidden(finder) for finder in sys.meta_path]
{body}
"""


def test_the_doctor_tells_that_torch_is_missing_and_what_to_install() -> None:
    done = run(["-c", hide_heavy(["-m", "hwbackends", "doctor", "--json"])])
    report = json.loads(done.stdout)
    states = {item["name"]: item for item in report["backends"]}
    assert states["reference"]["state"] == "unavailable"
    assert states["reference"]["reason"] == "torch is not installed"
    assert "hwbackends[reference]" in states["reference"]["hint"]


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_a_command_that_needs_torch_names_the_extra_that_brings_it(command: str) -> None:
    done = run(["-c", hide_heavy(["-m", "hwbackends", command])])
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert re.search(rf"error: hwbackends {command}: package '\w+' is not installed; install it with: pip", done.stderr)


def test_the_package_is_imported_in_less_than_a_tenth_of_a_second() -> None:
    """The best of five: a busy machine adds time, never takes any."""
    code = "import time; start = time.perf_counter(); import hwbackends; print(time.perf_counter() - start)"
    assert min(float(run(["-c", code]).stdout) for _ in range(5)) < 0.1


def test_public_names_are_there_and_no_others_are_promised() -> None:
    assert set(hwbackends.__all__) == {"Backend", "HwBackendsError", "__version__", "backends", "load"}
    for name in hwbackends.__all__:
        assert getattr(hwbackends, name) is not None
        assert name in dir(hwbackends)
    with pytest.raises(AttributeError, match="module 'hwbackends' has no attribute 'laod'"):
        _ = hwbackends.laod
