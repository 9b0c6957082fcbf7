"""Findings as text, JSON, SARIF 2.1.0 or GitHub workflow commands."""

from __future__ import annotations

import json
import linecache
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from .engine import Outcome
from .findings import Finding, Place, counted
from .fixes import Fixes
from .rules import RULES
from .suppress import UNIGNORABLE, Shown, fingerprint, relative

_LONGEST = 160  # of a source line in a text report
_COLOURS = {"error": "red", "warning": "yellow"}


def summary(shown: Shown, outcome: Outcome) -> dict[str, Any]:
    """Counts of one run."""
    return {
        "files": outcome.files,
        "findings": len(shown.findings),
        "by_rule": dict(sorted(Counter(f.rule for f in shown.findings).items())),
        "low_confidence": shown.low_confidence,
        "ignored": shown.ignored,
        "baselined": shown.baselined,
        "unused_ignores": [{"file": place.file, "line": place.line} for place, _ in shown.unused_ignores],
    }


def as_json(shown: Shown, outcome: Outcome) -> str:
    fixes = Fixes(())
    findings = [finding.as_json() | {"ways": _ways(finding, fixes)} for finding in shown.findings]
    return json.dumps({"findings": findings, "summary": summary(shown, outcome)}, indent=2)


def _ways(finding: Finding, fixes: Fixes) -> list[dict[str, Any]]:
    """Each change that ends a finding, the smallest first; ``patch`` where ``--fix`` makes it."""
    name = finding.definition.name if finding.definition is not None else "the definition"
    found: list[dict[str, Any]] = [
        {"where": way.where, "text": way.text, "patch": way.where == "definition" and fixes.safe(finding)}
        for way in RULES[finding.rule].ways(finding.missing, name)
    ]
    if finding.rule not in UNIGNORABLE:
        comment = f"# hwbackends: ignore[{finding.rule}]"
        found.append({"where": "ignore", "text": f"{comment} on line {finding.place.line}", "patch": False})
    return found


def as_github(shown: Shown, outcome: Outcome) -> str:
    """One workflow command per finding, which GitHub shows in the pull request."""
    lines = []
    for finding in shown.findings:
        level = "error" if finding.severity == "error" else "warning"
        place = finding.place
        where = f"file={_property(relative(place.file))},line={place.line}"
        title = _property(f"{finding.rule} {RULES[finding.rule].title}")
        lines.append(f"::{level} {where},title={title}::{_data(finding.message)}")
    for place, rules in shown.unused_ignores:
        where = f"file={_property(relative(place.file))},line={place.line}"
        lines.append(f"::notice {where},title=unused ignore::{_data(_unused(rules))}")
    return "\n".join(lines)


def _unused(rules: tuple[str, ...]) -> str:
    listed = f" of {', '.join(rules)}" if rules else ""
    return f"this ignore{listed} matches nothing in this run; delete it, or name the rule that it is about"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def as_sarif(shown: Shown, outcome: Outcome) -> str:
    rules = [
        {
            "id": rule.id, "name": "".join(word.capitalize() for word in rule.title.split()),
            "shortDescription": {"text": rule.title}, "fullDescription": {"text": rule.text},
            "defaultConfiguration": {"level": rule.severity, "enabled": rule.default},
        }
        for rule in RULES.values()
    ]  # fmt: skip
    order = list(RULES)
    results = [_sarif_result(finding, order) for finding in shown.findings]
    driver = {"name": "hwbackends check", "rules": rules}
    run = {"tool": {"driver": driver}, "results": results, "columnKind": "unicodeCodePoints"}
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return json.dumps(_printable({"$schema": schema, "version": "2.1.0", "runs": [run]}), indent=2)


def _printable(value: Any) -> Any:
    """The same without halves of surrogate pairs, which names of files can hold and JSON readers refuse."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {key: _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list) else value


def uri(path: str) -> str:
    """A path as a URI reference: relative to the working directory where it lies below it, percent-encoded."""
    shown = relative(path)
    quoted = quote(os.fsencode(shown), safe="/~")
    if os.path.isabs(shown):
        return f"file://{quoted if quoted.startswith('/') else '/' + quoted}"
    # a colon in the first part would read as a scheme; quote() has encoded it, and ./ keeps an empty first part away
    return f"./{quoted}" if quoted.startswith("/") else quoted


def _sarif_result(finding: Finding, order: list[str]) -> dict[str, Any]:
    others = [p for p in (finding.definition, finding.call, *finding.also) if p is not None and p != finding.place]
    result: dict[str, Any] = {
        "ruleId": finding.rule, "ruleIndex": order.index(finding.rule), "level": finding.severity,
        "message": {"text": finding.message}, "locations": [_location(finding.place)],
        "partialFingerprints": {"hwbackends/v1": fingerprint(finding)},
        "properties": {"confidence": finding.confidence, "missing": list(finding.missing)},
    }  # fmt: skip
    if others:
        result["relatedLocations"] = [_location(p) | {"id": number} for number, p in enumerate(others)]
    return result


def _location(place: Place) -> dict[str, Any]:
    region = {"startLine": max(1, place.line)}
    return {"physicalLocation": {"artifactLocation": {"uri": uri(place.file)}, "region": region}}


def as_text(shown: Shown, outcome: Outcome) -> str:
    """Readable findings with the source lines they are about; styled, the terminal decides what it keeps."""
    fixes = Fixes(())
    parts = [_text_finding(finding, fixes) for finding in shown.findings]
    parts += [_readable(f"{place.file}:{place.line}: {_unused(rules)}") for place, rules in shown.unused_ignores]
    counts = summary(shown, outcome)
    total = f"{counted(counts['findings'], 'finding')} in {counted(counts['files'], 'file')}"
    hidden = [f"{counts[key]} {label}" for key, label in _HIDDEN if counts[key]]
    parts.append(click.style(total + (f" (not shown: {', '.join(hidden)})" if hidden else ""), bold=True))
    return "\n".join(parts)


_HIDDEN = (("low_confidence", "of low confidence"), ("ignored", "ignored inline"), ("baselined", "in the baseline"))


def _text_finding(finding: Finding, fixes: Fixes) -> str:
    colour = _COLOURS.get(finding.severity, "red")
    head = click.style(_readable(f"{finding.place.file}:{finding.place.line}"), bold=True)
    message = _readable(finding.message)
    lines = [f"{head}: {click.style(finding.rule, fg=colour)} {message} [{finding.confidence}]"]
    for label, place in (("definition", finding.definition), ("call", finding.call)):
        if place is not None:
            source = _source_line(place)
            if source:
                lines.append(click.style(f"    {label:<10} {place.line:>6} | ", fg="blue") + _cut(_readable(source)))
    if fixes.safe(finding):
        lines.append(click.style(f"    {'patch':<10}        | ", fg="blue") + "--fix --diff shows it, --fix makes it")
    return "\n".join(lines)


def _source_line(place: Place) -> str:
    """The line of a place; empty where nobody can read it."""
    if not Path(place.file).is_file():
        return ""  # a pipe would never answer
    try:
        return linecache.getline(place.file, place.line).strip()
    except (LookupError, ValueError):  # a coding line that names no text encoding
        return ""


def _cut(source: str) -> str:
    return source if len(source) <= _LONGEST else f"{source[: _LONGEST - 4]} ..."


def _readable(text: str) -> str:
    """Without characters that move the cursor or end the line: a file may be called anything."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


FORMATS: dict[str, Callable[[Shown, Outcome], str]] = {
    "text": as_text, "json": as_json, "sarif": as_sarif, "github": as_github,
}  # fmt: skip
