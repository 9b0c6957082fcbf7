"""The outcome of a conformance run: counts by clause, the verdict with its scope, one line for the terminal, and the
JSON file, whose digest covers results, plugin files and kit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwbackends.conformance.digests import digest, importable, kit_digest, plugin_digests
from hwbackends.conformance.inventory import judged
from hwbackends.conformance.page import page
from hwbackends.conformance.waivers import Waiver
from hwbackends.contract.claims import DTYPES, LAYOUTS, SSM_KINDS, SSM_LAYOUTS, WIDTHS

if TYPE_CHECKING:
    from hwbackends.conformance.kit import Outcome
    from hwbackends.contract.model import Contracts

SCHEMA = 2
OUTCOMES = ("passed", "failed", "waived", "not_claimed")
GENERATED = frozenset(
    (
        "schema", "verdict", "scope", "line", "date", "counts", "certificate", "lanes", "partial", "problems",
        "options", "seed", "clauses", "waivers", "tests", "digest",
    )
)  # fmt: skip
"""Keys of a report that are not what the backend said of itself."""
SPEAKS_OF: Mapping[str, Sequence[str]] = {
    "CS-DECODE-04": ("ring",), "CS-COMMIT-06": ("ring", "lazy"), "CS-VERIFY-04": ("window", "ring"),
    **dict.fromkeys(("CS-SSM-10", "CS-SSM-11", "CS-SSM-DEC-02", "CS-SSM-COM-02"), ("ssm ring",)),
    "CS-SSM-COM-01": ("ssm intermediate",),
}  # fmt: skip
"""Clauses that say something of some layouts only."""
SCOPE: Mapping[str, Sequence[Any]] = {
    "layouts": LAYOUTS, "dtypes": DTYPES, "widths": WIDTHS, "index_dtypes": ("int32", "int64"),
    "activations": ("silu",), "ssm_kinds": SSM_KINDS, "ssm_layouts": SSM_LAYOUTS,
}  # fmt: skip
SIZES = {
    "channels": "1 to 8,193", "requests": "0 to 300 in a conv, 70,000 in an extend",
    "tokens": "0 to 5,003 of a request",
    "drafts": "1 to 9", "state tensors": "1 to 96", "slots": "to 2**16 + 5", "positions": "to 2**31 - 40",
    "element offsets": "past 2**31",
    "SSM heads and dims": "1 to 8 heads of 8 to 256 by 8 to 128", "rings": "6 to 32 rows",
}  # fmt: skip
"""What the full lane covers, where the claims do not bound it."""


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
    hooks: tuple[str, ...] = ()
    input: str = ""
    size: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, name: str, outcome: Outcome, declared: Sequence[str]) -> Result:
        """From what the worker said; `declared` are the clauses that the test names."""
        booked = {clause: "passed" if holds else "failed" for clause, holds in outcome.clauses.items()}
        if outcome.outcome == "not_claimed":
            booked = dict.fromkeys(declared, "not_claimed")
        worst = {clause: list(values) for clause, values in outcome.worst.items()}
        return cls(
            name, outcome.outcome, outcome.reason, outcome.details, booked, worst, outcome.seed, outcome.hooks,
            outcome.input, outcome.size,
        )  # fmt: skip

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
        return self.id.partition(".py")[0].replace("test_", "")


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
        lanes_run: full or quick.
        seed: base of the tests' seeds.
        date: when it ended, UTC.
    """

    info: Mapping[str, Any]
    results: list[Result]
    waivers: Sequence[Waiver] = ()
    partial: Sequence[str] = ()
    problems: Sequence[str] = ()
    options: str = ""
    lanes_run: str = "full"
    seed: int = 0
    date: str = ""

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
        required = [name for name, hook in self.contracts.hooks.items() if not hook.optional]
        return [name for name in required if name not in self.info.get("hooks_claimed", required)]

    @property
    def bare_clauses(self) -> list[str]:
        """Clauses of required hooks without a passed test, those apart that speak of unclaimed layouts only."""
        layouts = self.scope_values("layouts", LAYOUTS)
        passed = {c for result in self.results for c, booked in result.clauses.items() if booked == "passed"}
        layouts += [f"ssm {layout}" for layout in self.scope_values("ssm_layouts", SSM_LAYOUTS)]
        return [
            clause
            for clause, hook in self.contracts.clauses.items()
            if not hook.optional and clause not in passed and set(SPEAKS_OF.get(clause, layouts)) & set(layouts)
        ]

    @property
    def contracts(self) -> Contracts:
        """The contracts that the backend is judged by: those that its manifest names."""
        return judged(self.info.get("contracts"))

    def scope_values(self, key: str, everything: Sequence[Any]) -> list[Any]:
        """What `capabilities` claim of one dimension."""
        value = self.info.get("capabilities", {}).get(key, "all")
        return list(everything) if value == "all" else list(value)

    @property
    def scope(self) -> str:
        """What the verdict is for, where the claims leave something out: `window, int32`."""
        parts: list[str] = []
        for key, everything in SCOPE.items():
            claimed = self.scope_values(key, everything)
            if set(claimed) != set(everything):
                prefix = {"widths": "width ", "ssm_layouts": "SSM "}.get(key, "")
                parts += [prefix + str(value) for value in claimed] or [f"no {key}"]
        capabilities = self.info.get("capabilities", {})
        if capabilities.get("max_requests"):
            parts.append(f"{capabilities['max_requests']} requests")
        words = {"graphs": "no graphs", "asynchronous": "waits for the device", "mixed_dtypes": "one dtype at a time",
                 "large_offsets": "no offsets past 2**31"}  # fmt: skip
        return ", ".join([*parts, *(word for key, word in words.items() if capabilities.get(key, True) is False)])

    @property
    def verdict(self) -> str:
        """certified, failed, waived, partial, incomplete or nothing claimed.

        Certified: the whole kit, every required hook claimed, every clause of a required hook proved by a passed test,
        no failure, no waiver.
        """
        if self.count("failed") or self.problems:
            return "failed"
        if self.partial:
            return "partial"
        if not self.claimed:
            return "nothing claimed"
        if self.unclaimed_hooks or (self.bare_clauses and not self.count("waived")):
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
            missing = self.unclaimed_hooks
            verdict = f"incomplete: {len(missing)} required hooks not claimed"
            if not missing:
                verdict = f"incomplete: no passed test for {', '.join(self.bare_clauses[:4])}"
        if verdict in ("certified", "waived") and self.scope:
            verdict += f" for {self.scope}"
        return f"hwbackends conformance: {who}: {partial}{', '.join([numbers, *extras, *filter(None, [verdict])])}"

    def clauses(self) -> list[dict[str, Any]]:
        """Each clause of the contracts: its tests by outcome, worst error, status, smallest failing input."""
        table, contracts = [], self.contracts
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
            row["smallest"] = self._smallest(clause)
            table.append({**row, "status": _status(row)})
        return table

    def _smallest(self, clause: str) -> dict[str, str]:
        """The failing test of a clause with the smallest input, and how to run it again."""
        failed = [r for r in self.results if r.clauses.get(clause) == "failed" and r.outcome == "failed"]
        if not failed:
            return {}
        found = min(failed, key=lambda result: (not result.input, result.size, result.id))
        said = [line for line in found.details.splitlines() if line.startswith(f"{clause}:")]
        return {
            "test": found.id, "says": said[0] if said else found.reason, "input": found.input, "seed": str(found.seed),
            "repeat": reproduce(found.id, self.options),
        }  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """The JSON report, with a digest over all of it."""
        data = {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "scope": self.scope,
            "line": self.line,
            "date": self.date,
            "counts": {
                "total": len(self.results),
                "claimed": self.claimed,
                **{name: self.count(name) for name in OUTCOMES},
            },
            "certificate": self.certificate(),
            "lanes": self.lanes(),
            "partial": list(self.partial),
            "problems": list(self.problems),
            "options": self.options,
            "seed": self.seed,
            **_portable(self.info),
            "clauses": self.clauses(),
            "waivers": [{**dataclasses.asdict(w), "expires": str(w.expires)} for w in self.waivers],
            "tests": [_test(result) for result in sorted(self.results, key=lambda result: result.id)],
        }
        return {**data, "digest": digest(data)}

    def certificate(self) -> dict[str, Any]:
        """What was run, over what, and what stands behind it."""
        own = str(self.info.get("package", "")).partition(" ")[0]
        origins: Mapping[str, Mapping[str, str]] = self.info.get("origins", {})
        foreign = {hook: f"{o['module']} of {o['distribution']}" for hook, o in origins.items() if _foreign(own, o)}
        return {
            "kit": kit_digest(),
            "plugin": plugin_digests(self.info.get("modules", {}).get("files", ())),
            "lanes_run": self.lanes_run,
            "sizes": SIZES,
            "seed": self.seed,
            "waivers": len(self.waivers),
            "hooks_not_claimed": [h for h in self.contracts.hooks if h not in self.info.get("hooks_claimed", ())],
            "clauses_without_a_passed_test": self.bare_clauses,
            "emulated": bool(self.info.get("emulated")),
            "hooks_of_other_distributions": foreign,
            "modules_of_other_backends": list(self.info.get("modules", {}).get("borrowed", ())),
        }

    def lanes(self) -> dict[str, dict[str, float]]:
        """Tests by outcome and seconds per lane."""
        lanes: dict[str, dict[str, float]] = {}
        for result in self.results:
            row = lanes.setdefault(result.lane, {**dict.fromkeys(OUTCOMES, 0), "seconds": 0.0})
            row[result.outcome] += 1
            row["seconds"] = round(row["seconds"] + result.seconds, 3)
        return dict(sorted(lanes.items()))


def summary(data: Mapping[str, Any]) -> dict[str, Any]:
    """A report to keep: all of it but the texts of clauses, the list of tests and where each hook lies. `digest`
    stays that of the whole report."""
    left_out = ("tests", "origins", "modules", "hooks_present", "hooks_claimed")
    clauses = {row["id"]: {name: row[name] for name in OUTCOMES if row.get(name)} for row in data["clauses"]}
    return {**{key: value for key, value in data.items() if key not in left_out}, "clauses": clauses}


def _portable(info: Mapping[str, Any]) -> dict[str, Any]:
    """What the backend said of itself, files named from their package on: a report is read on other machines."""
    origins, modules = info.get("origins", {}), info.get("modules", {})
    return {
        **info,
        "origins": {hook: {**o, "location": _within_package(o["location"])} for hook, o in origins.items()},
        "modules": {**modules, "files": [_within_package(name) for name in modules.get("files", ())]},
    }


def _within_package(place: str) -> str:
    """`package/module.py:12` of a file and line, `package/module.py` of a file."""
    return importable(Path(place)) if Path(place).is_absolute() else place


def _foreign(own: str, origin: Mapping[str, str]) -> bool:
    """A hook that lies in another distribution than the plugin; one named by import path has no distribution."""
    distribution = origin.get("distribution", "")
    return bool(own and distribution) and own not in ("unknown",) and distribution != own


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
    data |= {"seed": result.seed, "clauses": result.clauses, "hooks": list(result.hooks)}
    if result.worst:
        data["worst"] = result.worst
    if result.outcome != "passed":
        data |= {"reason": result.reason, "details": result.details} if result.details else {"reason": result.reason}
        data |= {"input": result.input, "size": result.size} if result.input else {}
    return data


def reproduce(test: str, options: str) -> str:
    """The command that runs one test again."""
    module, _, name = test.partition(".py::")
    return f'pytest --pyargs "hwbackends.conformance.{module.replace("/", ".")}::{name}" {options}'


def write(report: Report, path: Path) -> None:
    """Write the JSON file, and the page beside it."""
    data = report.as_dict()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".html").write_text(page(data), encoding="utf-8")
