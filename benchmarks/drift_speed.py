"""How long the checker takes on SGLang 0.5.23: the whole wheel cold and warm, and contract mode on `srt`.

    python benchmarks/drift_speed.py [--folder DIR] [--repeats N] [--peers ty,pyrefly] [--output FILE]

Prints the median of the wall times and of the processor times of all processes, the load of the machine before each
row, and the peak resident memory of the largest process of ours. With ``--peers`` (names on PATH, or paths) each
repeat of the cold run is followed by one of each peer on the same tree, so that all meet the same machine; their
median and the ratio of ours to it are printed beside.
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


PEERS = {
    "ty": ["check", "{tree}", "--exit-zero", "--output-format", "concise"],
    "pyrefly": ["check", "{tree}/sglang", "--output-format", "min-text"],
}


def seconds(arguments: list[str]) -> tuple[float, float]:
    """Wall time and processor time of one run of the command."""
    return timed([sys.executable, "-m", "hwbackends.checker", *arguments, "--format", "json"])


def timed(command: list[str]) -> tuple[float, float]:
    """Wall time and processor time of one run of a checker that ends with 0 or 1."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    if result.returncode not in (0, 1):
        raise SystemExit(f"{command[0]} ended with {result.returncode}")
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def median(times: list[tuple[float, float]]) -> dict[str, float]:
    wall, processor = (round(statistics.median(column), 2) for column in zip(*times, strict=True))
    return {"median_s": wall, "processor_s": processor}


def in_turns(ours: list[str], peers: list[str], tree: str, repeats: int) -> dict[str, Any]:
    """Ours and each peer on the whole tree, one after the other in each repeat."""
    load, times = os.getloadavg()[0], dict[str, list[tuple[float, float]]]()
    for _ in range(repeats):
        times.setdefault("hwbackends", []).append(seconds(ours))
        for peer in peers:
            given = [part.format(tree=tree) for part in PEERS[Path(peer).name]]
            times.setdefault(Path(peer).name, []).append(timed([peer, *given]))
    rows: dict[str, Any] = {name: median(found) for name, found in times.items()}
    rows["load"] = round(load, 1)
    for peer in peers:
        name = Path(peer).name
        rows[name]["version"] = subprocess.check_output([peer, "--version"], text=True).split()[1]
        for kind in ("median_s", "processor_s"):
            rows[f"ours by {name}, {kind}"] = round(rows["hwbackends"][kind] / rows[name][kind], 2)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/hwbackends/corpus")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", default="", help="ty and pyrefly, by name or path, with commas between")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    wheel = str(unpacked("sglang==0.5.23", arguments.folder))
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        seconds([wheel, "--drift", "--cache-dir", cache])
        works = {
            "whole wheel, warm": [wheel, "--drift", "--cache-dir", cache],
            "srt, contract": [f"{wheel}/sglang/srt", "--contract", str(CONTRACT), "--no-cache"],
        }
        for name, options in works.items():
            load = os.getloadavg()[0]
            rows[name] = median([seconds(options) for _ in range(arguments.repeats)]) | {"load": round(load, 1)}
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    peers = [peer for peer in arguments.peers.split(",") if peer]
    cold = [wheel, "--drift", "--no-cache"]
    rows["whole wheel, cold"] = in_turns(cold, peers, wheel, arguments.repeats)
    rows["peak of the largest process, MB"] = peak
    rows["cores"] = len(os.sched_getaffinity(0))
    print(json.dumps(rows, indent=1))
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
