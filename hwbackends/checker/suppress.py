"""What is left out of a report: rules that are not selected, low confidence, inline comments, a baseline."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from .failures import RULE as INTERNAL
from .findings import Finding, Place
from .rules import RULES, expand

_RENEW = "--update-baseline writes one; move this file away first"
UNIGNORABLE = frozenset({"HWB201", INTERNAL})
LEVELS = ("low", "medium", "high")


class BaselineError(ValueError):
    """A baseline that cannot be read."""


class Selection(NamedTuple):
    """Which findings to show."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    confidence: str = "medium"
    against: frozenset[str] = frozenset({"drift"})  # the contracts that the tree is held to, or "drift"

    def rules(self) -> frozenset[str]:
        chosen = expand(self.select) if self.select else frozenset(r for r, rule in RULES.items() if rule.default)
        return chosen - expand(self.ignore)


class Shown(NamedTuple):
    """Findings to show, and how many each filter took away."""

    findings: list[Finding]
    low_confidence: int
    ignored: int
    baselined: int
    unused_ignores: list[tuple[Place, tuple[str, ...]]] = []  # noqa: RUF012 (never changed)


def apply(
    findings: list[Finding],
    selection: Selection,
    ignores: dict[str, dict[int, tuple[str, ...]]],
    baseline: Counter[str],
) -> Shown:
    """Filter findings, in this order: rules, confidence, inline comments, baseline."""
    rules, ignores = selection.rules(), _meant(ignores, selection.against)
    wanted = [f for f in findings if f.rule in rules or f.rule == INTERNAL]
    enough = LEVELS.index(selection.confidence)
    sure = [f for f in wanted if LEVELS.index(f.confidence) >= enough]
    unignored = [f for f in sure if not _ignored(f, ignores)]
    left = Counter(baseline)
    fresh = []
    for finding in unignored:
        key = fingerprint(finding)
        if left[key] > 0 and finding.rule != INTERNAL:
            left[key] -= 1
        else:
            fresh.append(finding)
    counts = len(wanted) - len(sure), len(sure) - len(unignored), len(unignored) - len(fresh)
    return Shown(fresh, *counts, unused(findings, ignores))


def _meant(
    ignores: dict[str, dict[int, tuple[str, ...]]], against: frozenset[str]
) -> dict[str, dict[int, tuple[str, ...]]]:
    """The comments that speak of this run: ``ignore[sglang:HWB106]`` is for trees that are held to that contract.

    What another contract needs is neither obeyed here nor called unused.
    """
    found: dict[str, dict[int, tuple[str, ...]]] = {}
    for file, lines in ignores.items():
        for line, names in lines.items():
            kept = []
            for name in names:
                scope, _, rule = name.rpartition(":")
                if not scope or scope.strip() in against:
                    kept.append(rule.strip())
            if any(not name.startswith("^") for name in kept) or all(name.startswith("^") for name in names):
                found.setdefault(file, {})[line] = tuple(kept)
    return found


def _ignored(finding: Finding, ignores: dict[str, dict[int, tuple[str, ...]]]) -> bool:
    return finding.rule not in UNIGNORABLE and any(
        place is not None and _covers(ignores.get(place.file, {}).get(place.line), finding.rule)
        for place in (finding.definition, finding.call)
    )


def _covers(rules: tuple[str, ...] | None, rule: str) -> bool:
    named = [name for name in rules or () if not name.startswith("^")]
    return rules is not None and (not named or rule in named)


def unused(
    findings: list[Finding], ignores: dict[str, dict[int, tuple[str, ...]]]
) -> list[tuple[Place, tuple[str, ...]]]:
    """Comments that no finding meets, shown or not: what they excused is gone, or they name another rule."""
    met: set[tuple[str, int]] = set()
    for finding in findings:
        for place in (finding.definition, finding.call):
            rules = ignores.get(place.file, {}).get(place.line) if place is not None else None
            if place is not None and _covers(rules, finding.rule):
                met.add((place.file, _own_line(place.line, rules or ())))
    found = []
    for file, lines in ignores.items():
        for line, rules in lines.items():
            if _own_line(line, rules) == line and (file, line) not in met:
                found.append((Place(file, line), rules))
    return found


def _own_line(line: int, rules: tuple[str, ...]) -> int:
    """Where a comment stands: a comment of its own speaks for the next line."""
    return next((int(name[1:]) for name in rules if name.startswith("^")), line)


def fingerprint(finding: Finding) -> str:
    """What identifies a finding when lines move: rule, files, names."""

    def spot(place: Place | None) -> list[str]:
        return [relative(place.file), place.name] if place is not None else []

    return json.dumps([finding.rule, spot(finding.definition), spot(finding.call), list(finding.missing)])


def relative(path: str) -> str:
    """A path as seen from the working directory, with forward slashes, where it lies below it."""
    try:
        found = os.path.relpath(path)
    except ValueError:
        return path
    return path.replace(os.sep, "/") if found.startswith("..") else found.replace(os.sep, "/")


def read_baseline(path: str) -> Counter[str]:
    """Fingerprints of the findings that a project has accepted.

    Raises:
        BaselineError: the file is there and is no baseline.
    """
    file = Path(path)
    if not file.exists():
        return Counter()
    try:
        raw: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BaselineError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BaselineError(f"{path} is not a baseline: it is no JSON ({error}). {_RENEW}") from error
    listed = raw.get("findings") if isinstance(raw, dict) else None
    if not isinstance(listed, list):
        got = f"an object without it: {sorted(raw)[:5]}" if isinstance(raw, dict) else f"a {type(raw).__name__}"
        raise BaselineError(f"{path} is not a baseline: wants an object with a list 'findings', got {got}. {_RENEW}")
    return Counter(json.dumps(item) for item in listed)


def write_baseline(path: str, findings: list[Finding]) -> None:
    """Accept all of these findings."""
    accepted = [finding for finding in findings if finding.rule != INTERNAL]
    entries = sorted((json.loads(fingerprint(finding)) for finding in accepted), key=json.dumps)
    Path(path).write_text(json.dumps({"version": 1, "findings": entries}, indent=1) + "\n", encoding="utf-8")
