"""The outcome of a conformance run: counts by clause, the verdict, one line for the terminal, a JSON file and a page
that any browser shows without a network."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hwbackends.conformance.waivers import Waiver
from hwbackends.conformance.workers import Outcome
from hwbackends.contract.reader import installed

SCHEMA = 1
OUTCOMES = ("passed", "failed", "waived", "not_claimed")


@dataclass(slots=True)
class Result:
    """One test: id, outcome (passed, failed, waived, not_claimed), what failed, its clauses and seed."""

    id: str
    outcome: str
    reason: str = ""
    details: str = ""
    clauses: dict[str, str] = field(default_factory=dict)
    worst: dict[str, list[float]] = field(default_factory=dict)
    seed: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, name: str, outcome: Outcome, declared: Sequence[str]) -> Result:
        """From what the worker said; `declared` are the clauses that the test names."""
        booked = {clause: "passed" if holds else "failed" for clause, holds in outcome.clauses.items()}
        if outcome.outcome == "not_claimed":
            booked = dict.fromkeys(declared, "not_claimed")
        worst = {clause: list(values) for clause, values in outcome.worst.items()}
        return cls(name, outcome.outcome, outcome.reason, outcome.details, booked, worst, outcome.seed)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], seconds: float) -> Result:
        """From `as_dict`, with the time that the test took."""
        return cls(**{**data, "seconds": round(seconds, 3)})

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as pytest-xdist can carry them."""
        return dataclasses.asdict(self)

    @property
    def lane(self) -> str:
        """`exact` of `test_exact.py::...`."""
        return self.id.partition(".py")[0].removeprefix("test_")


@dataclass(slots=True)
class Report:
    """A whole run.

    Attributes:
        info: the backend, its claims, the environment.
        results: one per test.
        waivers: those that were handed in.
        partial: why the run is not the whole kit; empty if it is.
        problems: errors of the run itself, such as a waiver for an unknown test.
        options: options that repeat the run.
    """

    info: Mapping[str, Any]
    results: list[Result]
    waivers: Sequence[Waiver] = ()
    partial: Sequence[str] = ()
    problems: Sequence[str] = ()
    options: str = ""

    def count(self, outcome: str) -> int:
        """Tests of one outcome."""
        return sum(result.outcome == outcome for result in self.results)

    @property
    def claimed(self) -> int:
        """Tests that the claims cover."""
        return len(self.results) - self.count("not_claimed")

    @property
    def unclaimed_hooks(self) -> list[str]:
        """Hooks that every backend must have, and that this one does not claim."""
        required = [name for name, hook in installed().hooks.items() if not hook.optional]
        return [name for name in required if name not in self.info.get("hooks_claimed", required)]

    @property
    def verdict(self) -> str:
        """certified, failed, waived, partial, incomplete or nothing claimed.

        Certified: the whole kit, every required hook claimed, no failure, no waiver.
        """
        if self.count("failed") or self.problems:
            return "failed"
        if self.partial:
            return "partial"
        if not self.claimed:
            return "nothing claimed"
        if self.unclaimed_hooks:
            return "incomplete"
        return "waived" if self.waivers or self.count("waived") else "certified"

    @property
    def line(self) -> str:
        """The run in one line."""
        who = f"{self.info.get('backend', '?')} on {self.info.get('device', '?')}"
        who += " (emulated)" if self.info.get("emulated") else ""
        numbers = f"passed/claimed/total {self.count('passed')}/{self.claimed}/{len(self.results)}"
        extras = [f"{self.count(name)} {name}" for name in ("failed", "waived") if self.count(name)]
        partial = f"PARTIAL ({'; '.join(self.partial)}): " if self.partial else ""
        verdict = {"partial": ""}.get(self.verdict, self.verdict)
        if verdict == "incomplete":
            verdict = f"incomplete: {len(self.unclaimed_hooks)} required hooks not claimed"
        return f"hwbackends conformance: {who}: {partial}{', '.join([numbers, *extras, *filter(None, [verdict])])}"

    def clauses(self) -> list[dict[str, Any]]:
        """Each clause of the contract: its tests by outcome, worst error, status."""
        table, contracts = [], installed()
        for clause, hook in contracts.clauses.items():
            row: dict[str, Any] = {"id": clause, "hook": hook.name, "text": contracts.clause_text(clause)}
            row["contract"] = contracts.owners[hook.name].name
            row |= dict.fromkeys(OUTCOMES, 0)
            for result in self.results:
                booked = result.clauses.get(clause)
                if booked is not None:
                    row["waived" if booked == "failed" and result.outcome == "waived" else booked] += 1
            worst = [result.worst[clause] for result in self.results if clause in result.worst]
            row["worst_ulp"] = max((ulps for ulps, _ in worst), default=None)
            row["worst_share_of_bound"] = max((share for _, share in worst), default=None)
            table.append({**row, "status": _status(row)})
        return table

    def as_dict(self) -> dict[str, Any]:
        """The JSON report."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "line": self.line,
            "counts": {
                "total": len(self.results),
                "claimed": self.claimed,
                **{name: self.count(name) for name in OUTCOMES},
            },
            "lanes": self.lanes(),
            "partial": list(self.partial),
            "problems": list(self.problems),
            "options": self.options,
            **self.info,
            "clauses": self.clauses(),
            "waivers": [{**dataclasses.asdict(w), "expires": str(w.expires)} for w in self.waivers],
            "tests": [_test(result) for result in sorted(self.results, key=lambda result: result.id)],
        }

    def lanes(self) -> dict[str, dict[str, float]]:
        """Tests by outcome and seconds per lane."""
        lanes: dict[str, dict[str, float]] = {}
        for result in self.results:
            row = lanes.setdefault(result.lane, {**dict.fromkeys(OUTCOMES, 0), "seconds": 0.0})
            row[result.outcome] += 1
            row["seconds"] = round(row["seconds"] + result.seconds, 3)
        return dict(sorted(lanes.items()))


def _status(row: Mapping[str, Any]) -> str:
    if row["failed"]:
        return "failed"
    if row["waived"]:
        return "waived"
    if row["passed"]:
        return "passed"
    return "not claimed" if row["not_claimed"] else "not run"


def _test(result: Result) -> dict[str, Any]:
    data = {"id": result.id, "lane": result.lane, "outcome": result.outcome, "seconds": result.seconds}
    data |= {"seed": result.seed, "clauses": result.clauses}
    if result.outcome != "passed":
        data |= {"reason": result.reason, "details": result.details} if result.details else {"reason": result.reason}
    return data


def reproduce(test: str, options: str) -> str:
    """The command that runs one test again."""
    module, _, name = test.partition(".py::")
    return f'pytest --pyargs "hwbackends.conformance.{module}::{name}" {options}'


def write(report: Report, path: Path) -> None:
    """Write the JSON file, and the page beside it."""
    data = report.as_dict()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".html").write_text(page(data), encoding="utf-8")


# --- the page --------------------------------------------------------------------------------------------------------

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1b1f24 }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1.5rem }
th, td { border-bottom: 1px solid #d8dee4; padding: .3rem .5rem; text-align: left; vertical-align: top }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
.passed, .certified { color: #116329 } .failed { color: #a40e26; font-weight: 600 }
.waived, .partial, .incomplete { color: #7d4e00 }
code, pre { font: 13px/1.4 ui-monospace, monospace } pre { background: #f6f8fa; padding: .6rem; overflow-x: auto }
"""


def page(data: Mapping[str, Any]) -> str:
    """One HTML page with everything a reader asks first: verdict, lanes, clauses, failures, environment."""
    name = f"{data.get('backend', '?')} on {data.get('device', '?')}"
    parts = [
        f"<h1>hwbackends conformance: {_e(name)}</h1>",
        f'<p class="{_e(data["verdict"].partition(" ")[0])}"><strong>{_e(data["line"])}</strong></p>',
        "<p>Emulated: every op ran on the CPU; nothing is said of a device.</p>" if data.get("emulated") else "",
        *(f'<p class="failed">{_e(problem)}</p>' for problem in data["problems"]),
        "<h2>Lanes</h2>", _lanes(data), "<h2>Clauses</h2>", _clauses(data), _failures(data), _unclaimed(data),
        _waivers(data), "<h2>Backend and environment</h2>", _environment(data),
    ]  # fmt: skip
    head = f'<meta charset="utf-8"><title>{_e(name)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _e(value: object) -> str:
    return html.escape(str(value))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> str:
    """The last `numbers` columns are numbers; cells are HTML already."""
    first = len(heads) - numbers

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f'<{tag} class="number">{cell}</{tag}>' if i >= first else f"<{tag}>{cell}</{tag}>"
            for i, cell in enumerate(row)
        )

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{cells('th', heads)}</tr>\n{body}\n</table>"


def _lanes(data: Mapping[str, Any]) -> str:
    heads = ["lane", *(name.replace("_", " ") for name in OUTCOMES), "seconds"]
    rows = [[_e(lane), *(_e(row[n]) for n in OUTCOMES), f"{row['seconds']:.1f}"] for lane, row in data["lanes"].items()]
    return _table(heads, rows, numbers=5)


def _clauses(data: Mapping[str, Any]) -> str:
    heads = ["clause", "meaning", "status", *(n.replace("_", " ") for n in OUTCOMES), "worst ulp", "of bound"]
    rows = [
        [
            f"<code>{_e(row['id'])}</code>", _e(row["text"]),
            f'<span class="{_e(row["status"].partition(" ")[0])}">{_e(row["status"])}</span>',
            *(_e(row[name]) for name in OUTCOMES), _figure(row["worst_ulp"]), _figure(row["worst_share_of_bound"]),
        ]
        for row in data["clauses"]
    ]  # fmt: skip
    return _table(heads, rows, numbers=6)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _failures(data: Mapping[str, Any]) -> str:
    parts = [
        f"<h3><code>{_e(test['id'])}</code></h3><pre>{_e(test.get('details') or test['reason'])}</pre>"
        f"<p>seed {test['seed']}; <code>{_e(reproduce(test['id'], data['options']))}</code></p>"
        for test in data["tests"]
        if test["outcome"] in ("failed", "waived")
    ]
    return "".join(["<h2>Failures</h2>", *parts]) if parts else ""


def _unclaimed(data: Mapping[str, Any]) -> str:
    reasons: dict[str, int] = {}
    for test in data["tests"]:
        if test["outcome"] == "not_claimed":
            reasons[test["reason"]] = reasons.get(test["reason"], 0) + 1
    rows = [[_e(reason), str(count)] for reason, count in sorted(reasons.items())]
    return f"<h2>Not claimed</h2>{_table(['what', 'tests'], rows, numbers=1)}" if rows else ""


def _waivers(data: Mapping[str, Any]) -> str:
    keys = ("id", "clause", "reason", "url", "expires")
    rows = [[_e(waiver[key]) for key in keys] for waiver in data["waivers"]]
    return f"<h2>Waivers</h2>{_table(keys, rows)}" if rows else ""


def _environment(data: Mapping[str, Any]) -> str:
    keys = ("backend", "package", "contracts", "device", "device_name", "emulated", "probe", "options")
    rows = [[_e(key), _e(data.get(key, ""))] for key in keys]
    rows += [[_e(key), _e(value)] for key, value in data.get("environment", {}).items()]
    rows += [["hooks claimed", _e(", ".join(data.get("hooks_claimed", [])))]]
    rows += [["capabilities", f"<code>{_e(json.dumps(data.get('capabilities', {})))}</code>"]]
    return _table(["what", "value"], rows)
