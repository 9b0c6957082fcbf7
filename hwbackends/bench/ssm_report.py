"""What the SSM benchmark found, as tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]


def digest_lines(found: Iterable[Row]) -> list[str]:
    """For each size, dtype: one digest, or who differs."""
    groups: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in found:
        by = groups.setdefault((row["size"], row["dtype"]), {})
        by.setdefault(row["digest"], []).append(f"{row['work']} C={row['ring']} {row['shape']}")
    lines = []
    for (size, dtype), by in groups.items():
        count = sum(map(len, by.values()))
        lines.append(f"{size} {dtype}: {count} runs, {len(by)} digest{'s' if len(by) > 1 else ''}")
        if len(by) > 1:
            most = max(by.values(), key=len)
            lines += [f"  differs: {name}" for names in by.values() if names is not most for name in names]
    return lines


def tables(results: Row) -> str:
    """Markdown: numbers, time per layer against the peers and the floor, every shape, memory."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in results["ours"]:
        if row.get("us") is None:
            continue
        key = (row["size"], row["dtype"], row["batch"], row["work"])
        if key not in best or row["us"] < best[key]["us"]:
            best[key] = row
    lines = ["## Bits", *digest_lines(results["digests"]), "", "## Time per layer, us", _HEAD, _RULE]
    lines += [_line(key, row, best, results) for key, row in sorted(best.items()) if key[3] != "deferred"]
    lines += ["", "## Every launch shape, us (floor)", *_every(results["ours"])]
    lines += ["", "## MiB per request and layer"]
    lines += [
        " ".join(f"{k}: {v if isinstance(v, str) else f'{v:.3f}'};" for k, v in m.items()) for m in results["memory"]
    ]
    if results.get("failures"):
        lines += ["", "## Failures", *results["failures"]]
    lines += ["", f"not measured for lack of time: {results.get('left', 0)}"]
    return "\n".join(lines) + "\n"


_HEAD = "| size | state | B | work | SGLang | its replay | ours | shape | ratio | to its replay | floor |"
_RULE = "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"


def _line(key: tuple[Any, ...], row: Row, best: dict[tuple[Any, ...], Row], results: Row) -> str:
    size, dtype, batch, work = key
    name = "verify" if work == "verify" else "decode"
    deferred = best.get((size, dtype, batch, "deferred"))
    if name == "decode" and deferred is not None and deferred["us"] < row["us"]:
        row = deferred
    peers = {
        p["peer"]: p["us"]
        for p in results["peers"]
        if (p["size"], p["dtype"], p["batch"], p["work"]) == (size, dtype, batch, name)
    }
    theirs, replay = peers.get("default"), peers.get("replay")
    shape = f"{row['work']} C={row['ring']} {row['shape']}"
    ratios = [f"{row['us'] / t:.2f}" if t else "-" for t in (theirs, replay)]
    cells = [size, dtype, batch, name, _us(theirs), _us(replay), _us(row["us"]), shape, *ratios, _us(row["floor_us"])]
    return "| " + " | ".join(map(str, cells)) + " |"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _every(rows: Iterable[Row]) -> list[str]:
    groups: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        key = (row["size"], row["dtype"], row["batch"], row["work"], row["ring"])
        groups.setdefault(key, []).append(f"{row['shape']}: {_us(row.get('us'))} ({_us(row.get('floor_us'))})")
    return [f"{' '.join(map(str, key))} | " + ", ".join(cells) for key, cells in groups.items()]
