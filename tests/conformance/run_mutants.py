"""Runs the kit on every mutant and says which clauses turned red: `python -m tests.conformance.run_mutants`, all in
one process, so that torch is imported once. `make mutants` runs the whole kit and keeps the result in benchmarks/."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PLUGINS = "tests.conformance.mutants:plugins"


def run(name: str, quick: bool, folder: Path) -> dict[str, Any]:
    """One mutant through the kit, by the vendor's own command line."""
    report, settings = folder / f"{name}.json", folder / "pytest.ini"  # a vendor has other settings than this tree
    settings.write_text("[pytest]\n", encoding="utf-8")
    timeout = 6 if name == "hangs" else 60  # the others must not fail because a machine is busy
    arguments = [
        "--pyargs", "hwbackends.conformance", f"--hwbackend={PLUGINS}.{name}", f"--report={report}", "-q",
        "-c", str(settings), "-p", "no:cacheprovider", "-p", "no:warnings", f"--hang-timeout={timeout}",
        *(["--quick"] if quick else []),
    ]  # fmt: skip
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        status = pytest.main(arguments)
    data = json.loads(report.read_text(encoding="utf-8"))
    red = sorted(clause["id"] for clause in data["clauses"] if clause["status"] == "failed")
    failed = [test for test in data["tests"] if test["outcome"] == "failed"]
    return {
        "status": int(status),
        "red": red,
        "failed_tests": len(failed),
        "seconds": round(time.perf_counter() - start, 1),
        "first": f"{failed[0]['id']}: {failed[0]['reason']}".replace(f"{ROOT}/", "")[:300] if failed else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from tests.conformance import mutants

    table: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.names or mutants.MUTANTS:
            table[name] = run(name, options.quick, Path(folder))
            row = table[name]
            print(f"{name}: status {row['status']}, {row['seconds']} s, red: {' '.join(row['red'])}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
