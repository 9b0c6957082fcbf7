"""The checker against published releases with known faults: found, missed and silent, and how much else it reports.

    python benchmarks/drift_corpus.py [--cases FILE] [--folder DIR] [--id ID ...] [--output FILE] [--resume]

Each case names a release that holds a fault (`bad`), the definition and the call, and where there is one the first
release without it (`good`). Wheels are fetched by pip and unpacked, never imported. `--resume` keeps the rows
that the output file has. The exit status is 1 when a fault is missed, a good release is not silent about it, or the
checker fails inside.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
PLATFORMS = ["any", "linux_x86_64", "manylinux1_x86_64", "manylinux2014_x86_64"]
PLATFORMS += [f"manylinux_2_{minor}_x86_64" for minor in (5, 12, 17, 24, 27, 28, 31, 34, 35, 36, 37, 38, 39)]


def unpacked(requirement: str, folder: Path) -> Path:
    """The Python files of one release, from its wheel."""
    package, version = requirement.split("==")
    target = folder / f"{package}-{version}"
    if target.is_dir():
        return target
    wheels = folder / f"wheels-{package}-{version}"
    options = [part for name in PLATFORMS for part in ("--platform", name)]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--python-version",
         "3.12", *options, "--dest", str(wheels), requirement],
        check=True,
    )  # fmt: skip
    partial = folder / f"partial-{package}-{version}"
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial, [name for name in archive.namelist() if name.endswith(".py")])
        wheel.unlink()
    wheels.rmdir()
    return partial.rename(target)


def finished(command: list[str]) -> subprocess.CompletedProcess[str]:
    """The end of a command; its output lies in files, and it ends with this process: nothing waits for a reader."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, text=True)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        try:
            status = process.wait()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # the checker ends its workers
                process.wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, status, out.read(), err.read())


def findings(trees: list[Path], cache: Path) -> list[dict[str, Any]]:
    """What the command reports with default settings."""
    command = [sys.executable, "-m", "hwbackends.checker", *map(str, trees), "--drift", "--format", "json"]
    result = finished([*command, "--cache-dir", str(cache)])
    if result.returncode not in (0, 1, 3):
        raise SystemExit(result.stderr or f"the checker ended with {result.returncode}")
    found: list[dict[str, Any]] = json.loads(result.stdout)["findings"]
    if result.returncode == 3:
        raise SystemExit("\n".join(f["message"] for f in found if f["rule"] == "HWB202"))
    return found


def matches(found: dict[str, Any], case: dict[str, Any]) -> bool:
    """Whether a finding is the case's fault, at its definition and its call."""
    definition, call = case["definition"], case["call"]
    return bool(
        found["definition"]
        and found["call"]
        and found["definition"]["file"].endswith(f"/{definition['file']}")
        and found["definition"]["line"] == definition["line"]
        and found["call"]["file"].endswith(f"/{call['file']}")
        and found["call"]["line"] == call["line"]
    )


def speaks_of(found: dict[str, Any], case: dict[str, Any]) -> bool:
    """Whether a finding in the good release is about the same definition."""
    definition = case["definition"]
    return bool(
        found["definition"]
        and found["definition"]["file"].endswith(f"/{definition['file']}")
        and found["definition"]["name"] == definition["name"]
        and found["call"]
        and found["call"]["file"].endswith(f"/{case['call']['file']}")
    )


class Corpus:
    """Runs each set of trees once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[tuple[str, ...], list[dict[str, Any]]] = {}

    def run(self, case: dict[str, Any], version: str) -> list[dict[str, Any]]:
        names = (f"{case['package']}=={version}", *([case["with"]] if "with" in case else []))
        if names not in self._known:
            trees = [unpacked(name, self.folder) for name in names]
            self._known[names] = findings(trees, self.folder / "cache")
        return self._known[names]

    def judge(self, case: dict[str, Any]) -> dict[str, Any]:
        bad = self.run(case, case["bad"])
        row: dict[str, Any] = {"id": case["id"], "bad": case["bad"], "found": any(matches(f, case) for f in bad)}
        row["findings"] = len(bad)
        if "good" in case:
            good = self.run(case, case["good"])
            row |= {
                "good": case["good"],
                "silent": not any(speaks_of(f, case) for f in good),
                "good_findings": len(good),
            }
        return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=HERE / "drift_cases.yaml")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/hwbackends/corpus")
    parser.add_argument("--id", action="append", default=[])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    corpus, rows = Corpus(arguments.folder), {}
    if arguments.resume and arguments.output and arguments.output.exists():
        rows = {row["id"]: row for row in json.loads(arguments.output.read_text(encoding="utf-8"))}
    for case in yaml.safe_load(arguments.cases.read_text(encoding="utf-8")):
        if case["id"] in rows or (arguments.id and case["id"] not in arguments.id):
            continue
        row = rows[case["id"]] = corpus.judge(case)
        verdict = "found " if row["found"] else "MISSED"
        silent = "" if "good" not in row else f"  {row['good']}: {'silent' if row['silent'] else 'NOT SILENT'}"
        print(f"{verdict} {row['id']:24} {row['bad']}: {row['findings']} findings{silent}", flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(list(rows.values()), indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["found"] and row.get("silent", True) for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
