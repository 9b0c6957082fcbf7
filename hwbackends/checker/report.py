"""Findings as text, JSON, SARIF 2.1.0 or GitHub workflow commands."""

from __future__ import annotations

import json
import linecache
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from .engine import Outcome
from .findings import Finding, Place, counted
from .rules import RULES
from .suppress import Shown, fingerprint, relative

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
    }


def as_json(shown: Shown, outcome: Outcome) -> str:
    findings = [finding.as_json() for finding in shown.findings]
    return json.dumps({"findings": findings, "summary": summary(shown, outcome)}, indent=2)


def as_github(shown: Shown, outcome: Outcome) -> str:
    """One workflow command per finding, which GitHub shows in the pull request."""
    lines = []
    for finding in shown.findings:
        level = "error" if finding.severity == "error" else "warning"
        place = finding.place
        where = f"file={_property(relative(place.file))},line={place.line}"
        title = _property(f"{finding.rule} {RULES[finding.rule].title}")
        lines.append(f"::{level} {where},title={title}::{_data(finding.message)}")
    return "\n".join(lines)


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
    return json.dumps({"$schema": schema, "version": "2.1.0", "runs": [run]}, indent=2)


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
    uri = relative(place.file)
    return {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": {"startLine": max(1, place.line)}}}


def as_text(shown: Shown, outcome: Outcome) -> str:
    """Readable findings with the source lines they are about; styled, the terminal decides what it keeps."""
    parts = [_text_finding(finding) for finding in shown.findings]
    counts = summary(shown, outcome)
    total = f"{counted(counts['findings'], 'finding')} in {counted(counts['files'], 'file')}"
    hidden = [f"{counts[key]} {label}" for key, label in _HIDDEN if counts[key]]
    parts.append(click.style(total + (f" (not shown: {', '.join(hidden)})" if hidden else ""), bold=True))
    return "\n".join(parts)


_HIDDEN = (("low_confidence", "of low confidence"), ("ignored", "ignored inline"), ("baselined", "in the baseline"))


def _text_finding(finding: Finding) -> str:
    colour = _COLOURS.get(finding.severity, "red")
    head = click.style(f"{finding.place.file}:{finding.place.line}", bold=True)
    lines = [f"{head}: {click.style(finding.rule, fg=colour)} {finding.message} [{finding.confidence}]"]
    for label, place in (("definition", finding.definition), ("call", finding.call)):
        if place is not None:
            # a finding may be about a pipe, which would never answer
            source = linecache.getline(place.file, place.line).strip() if Path(place.file).is_file() else ""
            if source:
                lines.append(click.style(f"    {label:<10} {place.line:>6} | ", fg="blue") + source)
    return "\n".join(lines)


FORMATS: dict[str, Callable[[Shown, Outcome], str]] = {
    "text": as_text, "json": as_json, "sarif": as_sarif, "github": as_github,
}  # fmt: skip
