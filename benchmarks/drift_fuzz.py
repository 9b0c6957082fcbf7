"""Drift mode over large packages of the field: it must come to an end, in order, without an error of its own.

    nice -n 10 python benchmarks/drift_fuzz.py [--folder DIR] [--output FILE] [--resume] [--reports DIR] [PACKAGE ...]

Wheels are fetched by pip and unpacked, never imported. Each row says how many files were read, how many could not be
(a syntax that the running Python does not know), how many findings there were, and how often the checker failed inside.
`--resume` keeps the rows that the output file has; `--reports` keeps each report for reading. The exit status is 1
where it failed anywhere.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from drift_corpus import PLATFORMS

PACKAGES = (
    "accelerate", "apache-airflow-core", "botocore", "celery", "dask", "datasets", "diffusers", "Django", "haystack-ai",
    "langchain-core", "lightning", "litellm", "llama-index-core", "matplotlib", "mlflow-skinny", "networkx", "nltk",
    "openai", "optuna", "peft", "pytorch-lightning", "ray", "scipy", "sentence-transformers", "setuptools", "sglang",
    "SQLAlchemy", "statsmodels", "sympy", "timm", "torch-geometric", "transformers", "trl", "twisted", "vllm",
)  # fmt: skip


def unpacked(package: str, folder: Path) -> Path:
    """The Python files of the newest wheel."""
    target = folder / package
    if target.is_dir():
        return target
    wheels = folder / f"wheels-{package}"
    options = [part for name in PLATFORMS for part in ("--platform", name)]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--python-version",
         "3.12", *options, "--dest", str(wheels), package],
        check=True,
    )  # fmt: skip
    partial = folder / f"partial-{package}"
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial, [name for name in archive.namelist() if name.endswith(".py")])
        wheel.unlink()
    wheels.rmdir()
    return partial.rename(target)


def row(package: str, tree: Path, reports: Path | None = None) -> dict[str, Any]:
    """What one run says of itself."""
    command = [sys.executable, "-m", "hwbackends.checker", str(tree), "--drift", "--no-cache", "--format", "json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    found: dict[str, Any] = {"package": package, "status": result.returncode}
    if result.returncode not in (0, 1, 3):
        return found | {"error": result.stderr[-500:]}
    report = json.loads(result.stdout)
    if reports is not None:
        (reports / f"{package}.json").write_text(result.stdout, encoding="utf-8")
    rules = report["summary"]["by_rule"]
    internal = [f["message"] for f in report["findings"] if f["rule"] == "HWB202"]
    return found | {
        "files": report["summary"]["files"], "unreadable": rules.get("HWB201", 0),
        "findings": report["summary"]["findings"] - rules.get("HWB201", 0) - len(internal), "internal": internal,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/hwbackends/fuzz")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--reports", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rows = {}
    if arguments.resume and arguments.output and arguments.output.exists():
        rows = {item["package"]: item for item in json.loads(arguments.output.read_text(encoding="utf-8"))}
    for package in arguments.packages:
        if package in rows:
            continue
        rows[package] = row(package, unpacked(package, arguments.folder), arguments.reports)
        print(json.dumps(rows[package]), flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(list(rows.values()), indent=1) + "\n", encoding="utf-8")
    return 0 if all(item["status"] in (0, 1) for item in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
