"""Runs the conformance kit on the backends that a machine without a device can judge, and keeps a summary of each:
`python tools/certificates.py [NAME ...]`. With `--page` it runs nothing and writes the page of what is kept.

`benchmarks/results/certificates.md` says of each kept run whether it was made with the kit of this tree: a run of an
older kit still says what was proved then, and no more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from hwbackends.conformance.digests import kit_digest
from hwbackends.conformance.report import summary

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = RESULTS / "certificates.md"
BUILD = ROOT / "build" / "certificates"

HEAD = """\
# Kept certificates

Summaries of whole runs of the conformance kit. `make certificates` renews those that need no device; those of a device
are made there: `hwbackends conformance run cuda --device cuda --report out.json`, then
`hwbackends conformance summary out.json`.

| backend | device | verdict | passed | claimed | total | ended | made with |
| --- | --- | --- | ---: | ---: | ---: | --- | --- |
"""


class Judged(NamedTuple):
    """A backend, the device to judge it on, and a source tree to install it from, if it is not part of this one."""

    backend: str
    device: str
    tree: str = ""


HERE = {
    "reference": Judged("reference", "cpu"),
    "ascend-emulated": Judged("ascend", "npu"),
    "numpy-example": Judged("numpy", "cpu", "examples/numpy-backend"),
}


def judge(name: str) -> int:
    """One whole run; keeps its summary. Returns the run's exit status."""
    judged, report = HERE[name], BUILD / f"{name}.json"
    BUILD.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    if judged.tree:
        folder = BUILD / f"{name}-installed"
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--upgrade"]
        subprocess.run([*install, "--target", str(folder), str(ROOT / judged.tree)], check=True)
        environment["PYTHONPATH"] = str(folder)
    run = [sys.executable, "-m", "hwbackends", "conformance", "run", judged.backend, f"--device={judged.device}"]
    done = subprocess.run([*run, "--report", str(report), "-q"], cwd=BUILD, env=environment)
    kept = summary(json.loads(report.read_text(encoding="utf-8")))
    (RESULTS / f"conformance-{name}.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return done.returncode


def row(kept: dict[str, Any]) -> str:
    """A line of the page."""
    counts = kept["counts"]
    device = f"{kept['device_name']} ({kept['device']})"
    verdict = kept["verdict"] + (f" for {kept['scope']}" if kept.get("scope") else "")
    made = "this kit" if kept.get("certificate", {}).get("kit") == kit_digest() else "an older kit"
    numbers = " | ".join(str(counts[name]) for name in ("passed", "claimed", "total"))
    return f"| {kept['backend']} | {device} | {verdict} | {numbers} | {kept.get('date', '')[:10]} | {made} |"


def page() -> str:
    """The page of every kept run."""
    kept = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("conformance-*.json"))]
    return HEAD + "\n".join(row(data) for data in kept if "verdict" in data) + "\n"


def main() -> int:
    names = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    failed = 0
    if "--page" not in sys.argv[1:]:
        failed = sum(judge(name) != 0 for name in names or HERE)
    PAGE.write_text(page(), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
