"""Runs the kit on every mutant and says which clauses turned red: `python -m tests.conformance.run_mutants`, all in
one process, which never imports them. A mutant is run on the tests that call one of the hooks that it changes; what
the reference did tells which. `make mutants` runs all of them and keeps the result in benchmarks/."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PLUGINS = "tests.conformance.mutants:plugins"


class Affected:
    """A pytest plugin that leaves out the tests that call none of some hooks."""

    def __init__(self, calls: dict[str, list[str]], hooks: list[str]) -> None:
        self.kept = {test for test, called in calls.items() if set(called) & set(hooks)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the affected ones."""
        from hwbackends.conformance.session import test_id

        out = [item for item in items if test_id(item) not in self.kept]  # type: ignore[arg-type]
        items[:] = [item for item in items if item not in set(out)]
        config.hook.pytest_deselected(items=out)


ONLY: list[str] = []
"""Files of the kit to run; all of them where empty."""


def judge(backend: str, folder: Path, quick: bool, timeout: int = 60, plugins: Any = ()) -> tuple[int, dict[str, Any]]:
    """A backend through the kit, by the vendor's own command line; exit status and report."""
    report, settings = folder / "out.json", folder / "pytest.ini"  # a vendor has other settings than this tree
    settings.write_text("[pytest]\n", encoding="utf-8")
    arguments = [
        "--pyargs", *([f"hwbackends.conformance.conv.test_{name}" for name in ONLY] or ["hwbackends.conformance"]),
        f"--hwbackend={backend}", f"--report={report}", "-q",
        "-c", str(settings), "-p", "no:cacheprovider", "-p", "no:warnings", "-p", "no:logging",
        f"--hang-timeout={timeout}", *(["--quick"] if quick else []),
    ]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        status = pytest.main(arguments, plugins=list(plugins))
    return int(status), json.loads(report.read_text(encoding="utf-8"))


def hooks_of_mutants() -> dict[str, list[str]]:
    """The hooks that each mutant changes, asked in a process of its own: this one is the judge's."""
    code = "import json; from tests.conformance.mutants import changed_hooks; print(json.dumps(changed_hooks()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def run(name: str, hooks: list[str], calls: dict[str, list[str]], quick: bool, folder: Path) -> dict[str, Any]:
    """One mutant, on the tests that its hooks affect."""
    timeout = 6 if name == "hangs" else 60  # the others must not fail because a machine is busy
    start = time.perf_counter()
    status, data = judge(f"{PLUGINS}.{name}", folder, quick, timeout, [Affected(calls, hooks)])
    red = sorted(clause["id"] for clause in data["clauses"] if clause["status"] == "failed")
    failed = [test for test in data["tests"] if test["outcome"] == "failed"]
    return {
        "status": status,
        "red": red,
        "failed_tests": len(failed),
        "seconds": round(time.perf_counter() - start, 1),
        "first": f"{failed[0]['id']}: {failed[0]['reason']}".replace(f"{ROOT}/", "")[:300] if failed else "",
    }


def judged_sources() -> str:
    """Digest of everything that a kept result depends on: kit, reference, contracts, mutants."""
    from hwbackends.conformance.digests import kit_digest, sources

    package = ROOT / "hwbackends"
    parts = [kit_digest(), *(sources(package / name) for name in ("torch_ops", "reference", "step", "contract"))]
    parts.append(sources(Path(__file__).parent, "mutants*.py"))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--full", action="store_true", help="the full lane; the quick one by default")
    parser.add_argument("--only", default="", help="files of the conv folder, such as sizes,memory")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ONLY[:] = [name for name in options.only.split(",") if name]
    table: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        status, data = judge("reference", Path(folder), not options.full)
        assert status == 0, data["line"]
        calls = {test["id"]: test["hooks"] for test in data["tests"]}
        hooks = hooks_of_mutants()
        for name in options.names or hooks:
            row = table[name] = run(name, hooks[name], calls, not options.full, Path(folder))
            print(f"{name}: status {row['status']}, {row['seconds']} s, red: {' '.join(row['red'])}", flush=True)
    if options.out:
        kept = {"lane": "full" if options.full else "quick", "sources": judged_sources(), "mutants": table}
        options.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
