"""Whether a report is what a run of the kit wrote: its digest, and everything in it that can be computed again, from
the results that it lists, from the kit and from the plugin that are installed here. The plugin is not imported."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from hwbackends.conformance.digests import digest, installed_file, kit_digest
from hwbackends.conformance.report import GENERATED, SCHEMA, Report, Result
from hwbackends.conformance.waivers import Waiver


def doubts(data: Mapping[str, Any]) -> list[str]:
    """What speaks against a report, a sentence each; empty if nothing does."""
    if data.get("schema") != SCHEMA:
        return [f"schema {data.get('schema')}, this kit writes {SCHEMA}: run the kit again"]
    if digest(data) != data.get("digest"):
        return ["the digest is not that of the content: the report was edited"]
    return [*_recomputed(data), *_seeds(data), *_kit(data), *_plugin(data)]


def _recomputed(data: Mapping[str, Any]) -> Iterator[str]:
    """Verdict, counts, clauses and line follow from the results."""
    again = _report(data).as_dict()
    for key in ("verdict", "scope", "line", "counts"):
        if again[key] != data[key]:
            yield f"{key}: the report says {data[key]!r}, its results give {again[key]!r}"
    said = {row["id"]: row["status"] for row in data["clauses"]}
    for row in again["clauses"]:
        if said.get(row["id"]) != row["status"]:
            yield f"{row['id']}: the report says {said.get(row['id'])}, its results give {row['status']}"


def _report(data: Mapping[str, Any]) -> Report:
    results = [
        Result(
            test["id"], test["outcome"], test.get("reason", ""), test.get("details", ""), test["clauses"],
            test.get("worst", {}), test["seed"], tuple(test.get("hooks", ())), test.get("input", ""),
            test.get("size", 0), test["seconds"],
        )
        for test in data["tests"]
    ]  # fmt: skip
    waivers = [Waiver(w["id"], w["clause"], w["reason"], w["url"], w["expires"]) for w in data["waivers"]]
    info = {key: value for key, value in data.items() if key not in GENERATED}
    return Report(info, results, waivers, data["partial"], data["problems"], data["options"],
                  data["certificate"]["lanes_run"], data["seed"], data["date"])  # fmt: skip


def _seeds(data: Mapping[str, Any]) -> Iterator[str]:
    """A test's seed follows from its id and the run's seed; a certified run has every test that its claims ask for."""
    wrong = [t["id"] for t in data["tests"] if t["seed"] != zlib.crc32(t["id"].encode()) ^ data["seed"]]
    if wrong:
        yield f"{wrong[0]}: its seed does not follow from seed {data['seed']} of the run"
    if data["verdict"] == "certified" and data["certificate"]["kit"] == kit_digest():
        wanted = _wanted(data)
        missing = wanted - {test["id"] for test in data["tests"]}
        if missing:
            yield f"{len(missing)} tests that the claims ask for are not in it, {min(missing)} for one"


def _wanted(data: Mapping[str, Any]) -> set[str]:
    from hwbackends.conformance.wanted import wanted_ids
    from hwbackends.contract.claims import read_claims
    from hwbackends.contract.reader import installed

    contracts = installed().only(data.get("contracts", installed()))
    return wanted_ids(read_claims(data["capabilities"], contracts, tuple(data["hooks_present"])), data["seed"])


def _kit(data: Mapping[str, Any]) -> Iterator[str]:
    if data["certificate"]["kit"] != kit_digest():
        yield "it was made with another kit than the one that is installed here: run this one"


def _plugin(data: Mapping[str, Any]) -> Iterator[str]:
    for name, said in data["certificate"]["plugin"].items():
        path = installed_file(name)
        if path is None:
            yield f"{name} of the plugin is not installed here: its digest cannot be compared"
        elif hashlib.sha256(path.read_bytes()).hexdigest() != said:
            yield f"{name} of the plugin is not the file that was judged"
