"""The suite of a machine with a GPU, in one call with a bound on its time:

    python tools/gpu_suite.py --out DIR [--seconds N] [--backend cuda|rocm] [STAGE ...]

Stages run one after the other; `suite.md` in DIR says of each with which command it ran, how it ended and how long it
took, beside the device, the versions and the commit. It is written anew after every stage, and a stage that the bound
cuts off is told as such: a machine that is lent for minutes still gives a result."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PYTEST = "{python} -m pytest -q -p no:cacheprovider -p no:benchmark -m {backend}"
KIT = "{python} -m hwbackends conformance run {backend} --device cuda -q"
BENCH = "{python} -m hwbackends bench"
ALONE = "tests/cuda/test_graphs.py tests/cuda/test_dependent_launch.py"
STAGES: Mapping[str, str] = {
    "ssm-tests": f"{PYTEST} tests/cuda/test_ssm.py",
    "tests": f"{PYTEST} -n {{workers}} tests --deselect tests/cuda/test_ssm.py "
    + " ".join(f"--deselect {name}" for name in ALONE.split()),
    "graphs": f"{PYTEST} {ALONE}",
    "kit": f"{KIT} -n {{workers}} --report {{out}}/conformance.json",
    "bench": f"{BENCH} --quick {{peers}} --out {{out}}/bench",
    "bench-ssm": f"{BENCH} ssm {{peers}} --minutes 5 --out {{out}}/bench-ssm",
    "bench-serve": f"{BENCH} serve --device cuda --out {{out}}/bench-serve",
}
"""Commands by stage, those first whose answer is least known. Graphs and timings have the device to themselves."""


class Outcome(NamedTuple):
    """How one stage ended: its command, the exit status (None: cut off), its time, and what it said last."""

    stage: str
    command: str
    status: int | None
    seconds: float
    last: str

    @property
    def row(self) -> str:
        """A line of the page."""
        ended = "cut off" if self.status is None else "passed" if self.status == 0 else f"exit status {self.status}"
        return f"| {self.stage} | `{self.command}` | {ended} | {self.seconds:.0f} | {self.last.replace('|', ' ')} |"


def run(stage: str, command: str, out: Path, seconds: float) -> Outcome:
    """One stage, at most for so long; its output goes to `STAGE.log`."""
    log, start = out / f"{stage}.log", time.monotonic()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with log.open("w") as text:
        process = subprocess.Popen(
            command.split(), cwd=ROOT, env=environment, stdout=text, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, 9)
            process.wait()
    lines = [line.strip("= ") for line in log.read_text(errors="replace").splitlines() if line.strip("= ")]
    return Outcome(stage, _shown(command, out), status, time.monotonic() - start, lines[-1][:200] if lines else "")


def _shown(command: str, out: Path) -> str:
    """A command as anyone can give it."""
    return re.sub(r" -p no:\w+", "", command.replace(sys.executable, "python").replace(str(out), "OUT"))


def machine() -> str:
    """Device, driver and versions, in one line; what cannot be read is left out."""
    code = """
import platform, torch, triton
name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
print(f"{name}, torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}")
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        version = subprocess.run(driver, capture_output=True, text=True).stdout.split()
    except FileNotFoundError:
        version = []
    return found.stdout.strip() + (f", driver {version[0]}" if version else "")


def commit() -> str:
    """The commit of the tree, where it has one, and whether it was changed since."""
    found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "of unknown commit"


def page(outcomes: Sequence[Outcome], where: str, tree: str) -> str:
    """What ran, as Markdown."""
    head = f"# The suite of a GPU\n\n{where}; tree {tree}.\n\n| stage | command | ended | seconds | last line |\n"
    return head + "| --- | --- | --- | ---: | --- |\n" + "\n".join(outcome.row for outcome in outcomes) + "\n"


def suite(names: Sequence[str], out: Path, seconds: float, values: Mapping[str, object]) -> list[Outcome]:
    """Stages in turn until the time is up."""
    out.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    where, tree, end = machine(), commit(), time.monotonic() + seconds
    for name in names:
        command = STAGES[name].format(python=sys.executable, out=out, **values)
        outcomes.append(run(name, command, out, end - time.monotonic()))
        (out / "suite.md").write_text(page(outcomes, where, tree), encoding="utf-8")
        (out / "suite.json").write_text(json.dumps([outcome._asdict() for outcome in outcomes], indent=1))
        print(outcomes[-1].row, flush=True)
        if time.monotonic() >= end:
            break
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}; all without a name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--backend", default="cuda", choices=("cuda", "rocm"))
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--sglang", type=Path, help="folder of an unpacked SGLang wheel, the benchmarks' peer")
    given = parser.parse_args()
    unknown = sorted(set(given.stages) - STAGES.keys())
    if unknown:
        parser.error(f"no stage is called {', '.join(unknown)}; there are {', '.join(STAGES)}")
    peers = f"--sglang {given.sglang.resolve()}" if given.sglang else ""
    values = {"backend": given.backend, "workers": given.workers, "peers": peers}
    outcomes = suite(given.stages or list(STAGES), given.out.resolve(), given.seconds, values)
    return 0 if all(outcome.status == 0 for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
