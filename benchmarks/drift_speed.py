"""How long the checker takes on SGLang 0.5.23: the whole wheel cold and warm, and contract mode on `srt`.

    python benchmarks/drift_speed.py [--folder DIR] [--repeats N] [--output FILE]

Prints the median of the wall times and of the processor times of all processes, the load of the machine before each
row, and the peak resident memory of the largest process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from drift_corpus import unpacked

CONTRACT = Path(__file__).resolve().parents[1] / "contracts/engines/sglang.yaml"


def seconds(arguments: list[str]) -> tuple[float, float]:
    """Wall time and processor time of one run of the command."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "hwbackends.checker", *arguments, "--format", "json"]
    result = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if result.returncode == 2:
        raise SystemExit(2)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/hwbackends/corpus")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    wheel = str(unpacked("sglang==0.5.23", arguments.folder))
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        seconds([wheel, "--drift", "--cache-dir", cache])
        works = {
            "whole wheel, cold": [wheel, "--drift", "--no-cache"],
            "whole wheel, warm": [wheel, "--drift", "--cache-dir", cache],
            "srt, contract": [f"{wheel}/sglang/srt", "--contract", str(CONTRACT), "--no-cache"],
        }
        for name, options in works.items():
            load = os.getloadavg()[0]
            times = [seconds(options) for _ in range(arguments.repeats)]
            wall, processor = (round(statistics.median(column), 2) for column in zip(*times, strict=True))
            rows[name] = {"median_s": wall, "processor_s": processor, "load": round(load, 1)}
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    rows["peak of the largest process, MB"] = peak
    rows["cores"] = len(os.sched_getaffinity(0))
    print(json.dumps(rows, indent=1))
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
