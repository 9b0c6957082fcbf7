"""Writes the README's table of hooks from the contract: `python tools/hook_table.py [--check]`."""

from __future__ import annotations

import sys
from pathlib import Path

from hwbackends.contract.reader import installed

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- hooks: begin, made by tools/hook_table.py -->", "<!-- hooks: end -->"


def table() -> str:
    """One row per hook: contract, name, what it does, parameters (optional ones in brackets), graph rules."""
    lines = ["| hook | what it does | parameters | in a graph | clauses |", "| --- | --- | --- | --- | --- |"]
    for contract in installed(ROOT / "contracts").values():
        lines.append(f"| **{contract.name} {contract.version}** | | | | |")
        for hook in contract.hooks.values():
            names = [p.name if p.required else f"[{p.name}]" for p in hook.parameters]
            name = f"`{hook.name}`" + (" (optional)" if hook.optional else "")
            graph = "records" if hook.recordable else "-"
            lines.append(f"| {name} | {hook.summary} | {', '.join(names)} | {graph} | {len(hook.clauses)} |")
    return "\n".join(lines)


def rendered(text: str) -> str:
    """The README with a fresh table between its marks."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


def main() -> int:
    """Write the table, or with --check say whether it is stale."""
    text = README.read_text()
    fresh = rendered(text)
    if "--check" in sys.argv[1:]:
        return int(fresh != text)
    README.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
