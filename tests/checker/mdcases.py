"""Cases as Markdown: a heading, a sentence, a small tree, and what must be found as comments in its lines.

A file of the tree is a line with its name in backquotes and a colon, then a `python` block; a block alone is
`module.py`.
`# HWB101: name, other` on a line says that this rule reports there with these names, at any shown confidence;
`# high HWB101: name` fixes the confidence, and `# low HWB101: name` is not shown by default. A line without such a
comment must not be reported. A body of `...` stands for one that does something.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hwbackends.checker.engine import Options, run
from hwbackends.checker.findings import Finding

_EXPECTED = re.compile(r"#\s*(?:(low|medium|high)\s+)?(HWB\d+):\s*([^#\n]*?)\s*(?=#|$)")
_FILE = re.compile(r"^`([^`]+)`:\s*$")


class Wanted(NamedTuple):
    """One expected finding; ``level`` is empty where any shown confidence will do."""

    file: str
    line: int
    rule: str
    names: str
    level: str


class Case(NamedTuple):
    """One heading with its tree."""

    title: str
    files: dict[str, str]

    def wanted(self) -> list[Wanted]:
        return [
            Wanted(name, number, rule, names, level or "")
            for name, text in self.files.items()
            for number, line in enumerate(text.splitlines(), start=1)
            for level, rule, names in _EXPECTED.findall(line)
        ]

    def write(self, folder: Path) -> Path:
        for name, text in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(re.sub(r":\s*\.\.\.(?=\s*(#|$))", ": return locals()", text, flags=re.M), encoding="utf-8")
        return folder


def cases(text: str) -> Iterator[Case]:
    """All cases of one page, in order."""
    title, files, name, block = "", {}, "module.py", None
    for line in [*text.splitlines(), "## "]:
        if block is not None:
            if line.strip() == "```":
                files[name] = "\n".join(block) + "\n"
                name, block = "module.py", None
            else:
                block.append(line)
        elif line.startswith("## "):
            if files:
                yield Case(title, files)
            title, files = line[3:].strip(), {}
        elif match := _FILE.match(line):
            name = match.group(1)
        elif line.strip() == "```python":
            block = []


def differences(case: Case, folder: Path) -> list[str]:
    """What is found and not wanted, and the other way round, as lines to read."""
    case.write(folder)
    wanted = case.wanted()
    outcome = run([str(folder)], Options(jobs=1))
    levels = {"high", "medium"} | ({"low"} if any(w.level == "low" for w in wanted) else set())
    found = [finding for finding in outcome.findings if finding.confidence in levels]
    left = list(wanted)
    said = []
    for finding in found:
        match = next((w for w in left if _is(finding, w, folder)), None)
        if match is None:
            said.append(
                f"not wanted: {finding.place.file}:{finding.place.line} {finding.message} [{finding.confidence}]"
            )
        else:
            left.remove(match)
    return said + [f"not found: {w.file}:{w.line} {w.level} {w.rule}: {w.names}" for w in left]


def _is(finding: Finding, wanted: Wanted, folder: Path) -> bool:
    place = finding.place
    return (
        (finding.rule, place.line, Path(place.file)) == (wanted.rule, wanted.line, folder / wanted.file)
        and set(finding.missing) == {name.strip() for name in wanted.names.split(",") if name.strip()}
        and wanted.level in ("", finding.confidence)
    )
