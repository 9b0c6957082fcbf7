"""The page of a report: one HTML file that any browser shows without a network. The verdict, then a screen per contract
with every clause, then what failed with its smallest input; what is long is folded away."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

OUTCOMES = ("passed", "failed", "waived", "not_claimed")
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 76rem; padding: 0 1rem; color: #1b1f24 }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1.5rem }
th, td { border-bottom: 1px solid #d8dee4; padding: .25rem .5rem; text-align: left; vertical-align: top }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
ul.clauses { columns: 15rem; list-style: none; margin: .3rem 0; padding: 0; font-size: 13px }
ul.clauses b { font-weight: 600 }
.passed, .certified { color: #116329 } .failed { color: #a40e26; font-weight: 600 }
.waived, .partial, .incomplete, .not { color: #7d4e00 }
code, pre { font: 13px/1.4 ui-monospace, monospace } pre { background: #f6f8fa; padding: .6rem; overflow-x: auto }
"""


def page(data: Mapping[str, Any]) -> str:
    """One HTML page with everything a reader asks first: verdict, certificate, clauses, failures, environment."""
    name = f"{data.get('backend', '?')} on {data.get('device', '?')}"
    parts = [
        f"<h1>hwbackends conformance: {_e(name)}</h1>",
        f'<p class="{_e(data["verdict"].partition(" ")[0])}"><strong>{_e(data["line"])}</strong></p>',
        "<p>Emulated: every op ran on the CPU; nothing is said of a device.</p>" if data.get("emulated") else "",
        *(f'<p class="failed">{_e(problem)}</p>' for problem in data["problems"]),
        _certificate(data), *_families(data), _failures(data), _waivers(data), _unclaimed(data),
        "<h2>Lanes</h2>", _lanes(data),
        _folded("Clauses with their tests and worst errors", _clauses(data)),
        _folded("Backend and environment", _environment(data)),
    ]  # fmt: skip
    head = f'<meta charset="utf-8"><title>{_e(name)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _e(value: object) -> str:
    return html.escape(str(value))


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{_e(title)}</summary>{content}</details>"


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


def _certificate(data: Mapping[str, Any]) -> str:
    """What was run, by which kit, over which plugin files."""
    made = data["certificate"]
    foreign = made["hooks_of_other_distributions"]
    rows = [
        ["date", data["date"]],
        ["scope", data["scope"] or "everything that the contracts have"],
        ["lanes, seed", f"{made['lanes_run']}, {made['seed']}"],
        ["sizes", "; ".join(f"{key}: {value}" for key, value in made["sizes"].items())],
        ["kit, report", f"{made['kit'][:16]}, {data['digest'][:16]}"],
        ["plugin files", ", ".join(f"{name} {value[:8]}" for name, value in made["plugin"].items())],
        ["hooks not claimed", ", ".join(made["hooks_not_claimed"]) or "none"],
        ["hooks of other distributions", ", ".join(f"{hook}: {where}" for hook, where in foreign.items()) or "none"],
        ["modules of other backends in use", ", ".join(made["modules_of_other_backends"]) or "none"],
        ["waivers", str(made["waivers"])],
    ]
    return _table(["certificate", ""], [[_e(key), _e(value)] for key, value in rows])


def _families(data: Mapping[str, Any]) -> list[str]:
    """A screen per contract: every clause with its status, in columns; the text shows under the pointer."""
    parts: list[str] = []
    for family in dict.fromkeys(row["contract"] for row in data["clauses"]):
        rows = [row for row in data["clauses"] if row["contract"] == family]
        cells = "\n".join(
            f'<li title="{_e(row["text"])}"><b>{_e(row["id"])}</b> '
            f'<span class="{_e(row["status"].partition(" ")[0])}">{_e(row["status"])}</span> {row["passed"]}</li>'
            for row in rows
        )
        passed = sum(row["status"] == "passed" for row in rows)
        heading = f"<h2>{_e(family)}: {passed} of {len(rows)} clauses passed</h2>"
        parts.append(f'{heading}<ul class="clauses">\n{cells}\n</ul>')
    return parts


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
    """Each failing clause with its smallest input; all failing tests below, folded."""
    parts = []
    for row in data["clauses"]:
        found = row["smallest"]
        if found:
            text = f"{found['says']}\ninput: {found['input']}\nseed {found['seed']}\n{found['repeat']}"
            parts.append(f"<h3><code>{_e(row['id'])}</code> {_e(found['test'])}</h3><pre>{_e(text)}</pre>")
    tests = [
        f"<h4><code>{_e(test['id'])}</code></h4><pre>{_e(test.get('details') or test['reason'])}</pre>"
        for test in data["tests"]
        if test["outcome"] in ("failed", "waived")
    ]
    if not tests:
        return ""
    return "".join(["<h2>Failures</h2>", *parts, _folded(f"All {len(tests)} failing tests", "".join(tests))])


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
