"""Writes the tables of docs/rocm.md from what they are about: `python tools/compile/page.py [--check]`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from hwbackends.rocm.architectures import KNOWN, SHOWN  # noqa: E402

PAGE, TABLE = ROOT / "docs" / "rocm.md", Path(__file__).with_name("registers.json")
OWN = ("probe.py", "tuning.py", "traits.py", "architectures.py", "manifest.yaml", "__init__.py")
TWINS = ("plugin.py", "conv.py", "epilogue.py", "commit.py", "metadata.py", "ssm.py")


def registers() -> str:
    """The hot convs' registers: vector and scalar ones, and LDS where there is any."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    lines = [f"| hook | layout | {' | '.join(SHOWN)} |", f"| --- | --- |{' ---: |' * len(SHOWN)}"]
    for key in table["kernels"][SHOWN[0]]:
        scene, _, kernel = key.partition(": ")
        if kernel.startswith("prepare"):
            continue
        rows = [dict(zip(table["columns"], table["kernels"][chip][key], strict=True)) for chip in SHOWN]
        lds = [f", {row['lds']}" if row["lds"] else "" for row in rows]
        cells = [f"{row['vectors']} / {row['scalars']}{more}" for row, more in zip(rows, lds, strict=True)]
        hook, layout, *rest = scene.split()
        name = f"{hook} {rest[0]}" if hook.startswith("ssm_") else hook
        lines.append(f"| {name} | {layout} | {' | '.join(cells)} |")
    return "\n".join(lines)


def faults() -> str:
    """How many kernels the table holds, and what of them spills."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    rows = [row for chip in table["kernels"].values() for row in chip.values()]
    counts = [sum(row[table["columns"].index(name)] > 0 for row in rows) for name in ("spills", "scalar_spills")]
    scratch = sum(row[table["columns"].index("scratch")] > 0 for row in rows)
    return (
        f"triton {table['triton']}: {len(rows)} kernels of the hot hooks, of which {counts[0]} spill vector registers, "
        f"{counts[1]} spill scalar registers and {scratch} use scratch."
    )


def releases() -> str:
    """What each release of triton compiles for."""
    lines = ["| triton | architectures |", "| --- | --- |"]
    lines += [f"| {release} | {', '.join(sorted(names, key=_number))} |" for release, names in KNOWN.items()]
    return "\n".join(lines)


def _number(name: str) -> tuple[int, str]:
    return len(name), name


def cost() -> str:
    """Lines of the second vendor, as `wc -l` counts them."""
    folder = ROOT / "hwbackends" / "rocm"
    lines = {
        path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in folder.iterdir() if path.is_file()
    }
    twins, own = sum(lines[name] for name in TWINS), sum(lines[name] for name in OWN)
    parts = ", ".join(f"{name} {lines[name]}" for name in OWN)
    return (
        "| lines | where |\n| ---: | --- |\n| 0 | kernels; engines; registry; kit; runner |\n"
        f"| {twins} | `rocm/`: plugin and hooks, the same as `cuda`'s but for the name (a test holds them equal) |\n"
        f"| {own} | `rocm/`: {parts} |\n| 1 | entry point |\n\nCounted by `wc -l hwbackends/rocm/*`: {twins + own}."
    )


MADE = {"registers": registers, "faults": faults, "releases": releases, "cost": cost}


def rendered(text: str) -> str:
    """The page with fresh tables between its marks.

    Raises:
        ValueError: the page lost a pair of marks.
    """
    for name, make in MADE.items():
        mark = rf"(<!-- {name}: made by tools/compile/page.py -->\n).*?(\n<!-- {name}: end -->)"
        text, count = re.subn(mark, rf"\g<1>{make()}\g<2>", text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{PAGE.name}: {count} pairs of marks of {name}, wanted 1")
    return text


def main() -> int:
    """Write the tables, or with --check say whether they are stale."""
    text = PAGE.read_text(encoding="utf-8")
    fresh = rendered(text)
    if "--check" in sys.argv[1:]:
        return int(fresh != text)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
