"""Holds the runs of serve.py, or of speed.py, against each other: compare.py FOLDER SUMMARY. Fails where they differ.

- plugin against stock: every token list equal, logprobs of equal tokens within BOUND;
- graphs against eager, MTP against plain, each on the plugin's side: every token list equal;
- the plugin's hooks ran, stock short-conv code did not; every accepted count 0..3 occurred.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PARTS = ("above", "again", "longer", "at", "below", "alone")
BOUND = 0.0625
"""Largest difference of two logprobs: a few roundings of a bfloat16 logit of about 4."""
OURS = ("hwbackends.LayerHandle.conv",)


def rows(one: dict[str, Any], two: dict[str, Any]) -> tuple[int, int, float]:
    """Equal token lists, all of them, largest difference of logprobs before the first unequal token."""
    equal, total, worst = 0, 0, 0.0
    for part in PARTS:
        for a, b in zip(one[part], two[part], strict=True):
            pairs = zip(a["ids"], b["ids"], strict=False)
            same = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a["ids"]), len(b["ids"])))
            equal += a["ids"] == b["ids"]
            total += 1
            apart = zip(a["logprobs"][:same], b["logprobs"][:same], strict=False)
            worst = max([worst, *(abs(x - y) for x, y in apart)])
    return equal, total, worst


def counted(run: dict[str, Any]) -> list[str]:
    """What is wrong with a run's counters."""
    ours = run["name"].startswith("ours")
    stock = {k: n for k, n in run["counts"].items() if k.startswith("sglang.")}
    missing = [k for k in OURS if not run["counts"].get(k)]
    found = []
    if ours and stock:
        found.append(f"{run['name']}: stock short-conv code ran: {stock}")
    if ours and missing:
        found.append(f"{run['name']}: hooks that never ran: {missing}")
    if not ours and not stock:
        found.append(f"{run['name']}: no stock short-conv code was counted")
    if "_mtp_graph" in run["name"] and not {"0", "1", "2", "3"} <= set(run["accepted"]):
        found.append(f"{run['name']}: accepted counts {sorted(run['accepted'])}")
    return found


def pairs(names: set[str]) -> list[tuple[str, str]]:
    found = [(n, n.replace("ours_", "stock_")) for n in sorted(names) if n.startswith("ours_")]
    found += [(n, n.replace("_eager", "_graph")) for n in sorted(names) if n.startswith("ours_") and "_eager" in n]
    found += [(n, n.replace("_mtp_", "_plain_")) for n in sorted(names) if n.startswith("ours_") and "_mtp_" in n]
    return [(a, b) for a, b in found if a in names and b in names]


def speeds(folder: Path) -> dict[str, Any]:
    """Milliseconds of a step, stock and plugin, and the host's microseconds per call of the hooks around it."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("speed_*.json")):
        run = json.loads(path.read_text())
        host = {k: 1e6 * s / run["counts"][k] for k, s in run["seconds"].items() if "out_graph" in k or "commit" in k}
        found[run["name"]] = {"step_ms": run["step_ms"], "host_us_per_call": host}
    for name, run in found.items():
        stock = found.get(name.replace("ours_", "stock_"))
        if name.startswith("ours_") and stock:
            run["plugin_over_stock"] = {b: ms / stock["step_ms"][b] for b, ms in run["step_ms"].items()}
            print(name, {b: round(r, 3) for b, r in run["plugin_over_stock"].items()})
    return found


def main(folder: Path, out: Path) -> int:
    if out.stem.endswith("speed"):
        found = speeds(folder)
        out.write_text(json.dumps(found, indent=1) + "\n")
        slower = [n for n, run in found.items() if any(r > 1 for r in run.get("plugin_over_stock", {}).values())]
        return 1 if slower or not found else 0
    runs = {p.stem: json.loads(p.read_text()) for p in sorted(folder.glob("*_*_*_*.json"))}
    problems = [text for run in runs.values() for text in counted(run)]
    summary: dict[str, Any] = {"runs": {}, "pairs": []}
    for name, run in runs.items():
        if not any(x < -0.01 for part in PARTS for row in run[part] for x in row["logprobs"]):
            problems.append(f"{name}: every logprob is 0, which compares nothing")
        cached = sum(row["cached"] or 0 for part in ("again", "longer") for row in run[part])
        summary["runs"][name] = {"counts": run["counts"], "accepted": run["accepted"], "cached_tokens": cached}
        if not cached:
            problems.append(f"{name}: the prefix cache served nothing")
    for a, b in pairs(set(runs)):
        equal, total, worst = rows(runs[a], runs[b])
        summary["pairs"].append(
            {"one": a, "two": b, "equal": equal, "total": total, "largest_logprob_difference": worst}
        )
        print(f"{a} / {b}: {equal} of {total} token lists equal, largest logprob difference {worst:.4f}")
        if equal != total or (worst > BOUND and a.startswith("ours") and b.startswith("stock")):
            problems.append(f"{a} / {b}: {equal} of {total} equal, logprobs {worst:.4f} apart")
    summary["problems"] = problems
    out.write_text(json.dumps(summary, indent=1) + "\n")
    print(f"{len(runs)} runs;", "problems:" if problems else "no problem", *problems, sep="\n  " if problems else " ")
    return 1 if problems or not runs else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
