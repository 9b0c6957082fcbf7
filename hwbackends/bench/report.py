"""Results as JSON, as a Markdown table and as a plot. Everything here works on plain numbers; nothing is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hwbackends.bench.sizes import TARGETS

Row = dict[str, Any]


def fastest_peer(row: Row) -> tuple[str, float] | None:
    """SGLang's fastest path of a row."""
    peers = {n: t["us"] for n, t in row["contenders"].items() if n.startswith("sglang") and "us" in t}
    if row["work"].startswith("verify step"):
        peers = {n: us for n, us in peers.items() if n == "sglang"}
    return min(peers.items(), key=lambda item: item[1]) if peers else None


def ratio(row: Row) -> float | None:
    """Ours over SGLang's fastest path."""
    peer, ours = fastest_peer(row), row["contenders"].get("ours", {}).get("us")
    return None if peer is None or ours is None else ours / peer[1]


def table(results: dict[str, Any]) -> str:
    """The comparison as a Markdown table."""
    lines = [
        f"{results['device']}, driver {results['driver']}, torch {results['torch']}, triton {results['triton']}, "
        f"commit {results['commit']}.",
        f"Copy {results['floor']['copy_bytes_per_s'] / 1e12:.2f} TB/s; empty launch in a graph "
        f"{results['floor']['empty_us']:.2f} us, dependent {results['floor']['empty_dependent_us']:.2f} us.",
        "",
        "| work | size | ours (us) | launches | floor (us) | SGLang (us) | its path | launches | ratio | target |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for row in results["rows"]:
        lines.append(_line(row))
    return "\n".join(lines) + "\n"


def eager(results: dict[str, Any]) -> str:
    """Host time of eager calls as a Markdown table."""
    lines = ["| eager call | size | ours (us) | SGLang (us) | ratio |", "| --- | ---: | ---: | ---: | ---: |"]
    for row in results["rows"]:
        times = {n: t["eager_host_us"] for n, t in row["contenders"].items() if "eager_host_us" in t}
        theirs = [us for name, us in times.items() if name.startswith("sglang")]
        if theirs:
            cells = (row["work"], row["size"], times["ours"], min(theirs), times["ours"] / min(theirs))
            lines.append("| {} | {} | {:.1f} | {:.1f} | {:.2f} |".format(*cells))
    return "\n".join(lines) + "\n"


def others(results: dict[str, Any]) -> str:
    """The peers beside SGLang as a Markdown table, one column each: time, and ours over it in brackets."""
    peers = dict.fromkeys(
        name for row in results["rows"] for name in row["contenders"] if name != "ours" and name[:6] != "sglang"
    )
    lines = [
        " | ".join(["| work", "size", "ours (us)", *(f"{name} (us)" for name in peers)]) + " |",
        "| --- |" + " ---: |" * (2 + len(peers)),
    ]
    for row in results["rows"]:
        if peers.keys() & row["contenders"].keys():
            cells = [_beside(row, name) for name in peers]
            ours = _number(row["contenders"].get("ours", {}).get("us"))
            lines.append(f"| {row['work']} | {row['size']} | {ours} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, *_notes(results)]) + "\n"


def _beside(row: Row, name: str) -> str:
    """A contender's time, and ours over it."""
    found, ours = row["contenders"].get(name, {}), row["contenders"].get("ours", {}).get("us")
    if "us" not in found:
        return "failed" if "error" in found else ""
    return f"{found['us']:.2f}" + (f" ({ours / found['us']:.2f})" if ours else "")


def _notes(results: dict[str, Any]) -> list[str]:
    """Versions of the peers, and what a peer's calls leave out."""
    told = [
        f"{name} {peer['version']}".strip() + (f" ({peer['note']})" if peer["note"] else "")
        for name, peer in results.get("peers", {}).items()
    ]
    return ["", "; ".join(told) + "."] if told else []


def slower(results: dict[str, Any]) -> str:
    """SGLang's slower paths as a Markdown table."""
    lines = ["| work | size | path | time (us) | ours / it |", "| --- | ---: | --- | ---: | ---: |"]
    for row in results["rows"]:
        fastest, ours = fastest_peer(row), row["contenders"].get("ours", {}).get("us")
        for name, found in row["contenders"].items():
            if name[:6] == "sglang" and ours and "us" in found and fastest and name != fastest[0]:
                path = name.removeprefix("sglang").strip()
                cells = (row["work"], row["size"], path, found["us"], ours / found["us"])
                lines.append("| {} | {} | {} | {:.2f} | {:.2f} |".format(*cells))
    return "\n".join(lines) + "\n"


def steps(results: dict[str, Any]) -> str:
    """Variants of whole steps as a Markdown table, in microseconds."""
    lines = ["| step | variant | time (us) |", "| --- | --- | ---: |"]
    for step, times in results["extra"].items():
        lines += [f"| {step} | {name} | {us:.0f} |" for name, us in times.items()]
    return "\n".join(lines) + "\n"


def document(results: dict[str, Any]) -> str:
    """Every table of a run."""
    parts = (
        table(results),
        "Host time of one call outside a graph, the device never waited for:\n\n" + eager(results),
        "Other peers, and in brackets ours over them:\n\n" + others(results),
        "SGLang's slower paths:\n\n" + slower(results),
        "Whole steps:\n\n" + steps(results),
    )
    return "\n".join(parts)


def _line(row: Row) -> str:
    ours = row["contenders"].get("ours", {})
    peer = fastest_peer(row)
    reached, wanted = ratio(row), TARGETS.get((row["work"], row["size"]))
    cells = [
        row["work"],
        str(row["size"]),
        _number(ours.get("us")),
        _number(ours.get("launches")),
        _number(row.get("floor_us")),
        _number(peer[1] if peer else None),
        peer[0].removeprefix("sglang").strip() if peer else "",
        _number(row["contenders"][peer[0]].get("launches") if peer else None),
        "" if reached is None else f"**{reached:.2f}**" if wanted and reached <= wanted + 5e-4 else f"{reached:.2f}",
        "" if wanted is None else f"{wanted:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"


PANELS = (
    ("decode ring", "Decode conv, D = 4096"),
    ("verify ring", "Verify conv, 4 drafts, D = 4096"),
    ("conv, add, RMSNorm", "Conv + add + RMSNorm, decode"),
    ("extend", "Prefill conv with snapshots (tokens)"),
)


def plot(results: dict[str, Any], path: Path) -> None:
    """Time against batch size, SGLang, ours and the floor, one panel per work."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = {work: [row for row in results["rows"] if row["work"] == work] for work, _ in PANELS}
    panels = [(work, title) for work, title in PANELS if measured[work]]
    if not panels:
        return
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.25 * len(panels), 4.2), squeeze=False)
    for axis, (work, title) in zip(axes[0], panels, strict=True):
        rows = measured[work]
        sizes = [row["size"] for row in rows]
        theirs = [peer[1] if (peer := fastest_peer(row)) else float("nan") for row in rows]
        ours = [row["contenders"].get("ours", {}).get("us", float("nan")) for row in rows]
        floors = [row.get("floor_us", float("nan")) for row in rows]
        if any(us == us for us in theirs):
            axis.plot(sizes, theirs, "o-", color="#c44e52", label="SGLang 0.5.23, fastest path")
        axis.plot(sizes, ours, "o-", color="#4c72b0", label="hwbackends (its share of SGLang's time written above)")
        axis.plot(sizes, floors, "--", color="#8c8c8c", label="floor: bytes / copy bandwidth, empty launch")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
        for size, us, row in zip(sizes, ours, rows, strict=True):
            if (reached := ratio(row)) is not None:
                axis.annotate(f"{reached:.2f}x", (size, us), (0, 8), textcoords="offset points", ha="center")
        axis.margins(x=0.09, y=0.12)
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("tokens" if work == "extend" else "requests")
        axis.grid(alpha=0.3, which="both")
    axes[0][0].set_ylabel("microseconds per call, in a graph")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=3, frameon=False)
    figure.suptitle(results["device"], fontsize=11)
    figure.tight_layout(rect=(0, 0.08, 1, 0.98))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
