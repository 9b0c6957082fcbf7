"""The kit against deliberately wrong backends. Each has a proof in `proofs.json`, found by `tests.conformance.proofs`:
a call whose input the contract allows, whose result differs from the reference's, and the clauses that turn red
over it in the kit. All of them run here again. `make mutants` runs the kit itself on each, in processes, and keeps the
table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hwbackends.conformance.inventory import judged
from hwbackends.conformance.kit import Outcome
from tests.conformance import proofs
from tests.conformance.mutants import HOOKS, all_mutants

ROOT = Path(__file__).parents[2]
PROOFS: dict[str, dict[str, Any]] = json.loads(proofs.KEPT.read_text())
KEPT = ROOT / "benchmarks" / "results" / "conformance-mutants.json"
Known = dict[str, tuple[Outcome, list[tuple[str, str]]]]


@pytest.fixture(scope="module")
def cases() -> dict[str, proofs.Case]:
    """The kit's cases by id, as far as proofs look."""
    return {case.id: case for case in proofs.kit_cases()}


@pytest.fixture(scope="module")
def known() -> Known:
    """What the reference does, by case."""
    return {}


@pytest.mark.parametrize("name", sorted(PROOFS))
def test_the_kit_sees_each_fault_where_its_proof_says(name: str, cases: dict[str, proofs.Case], known: Known) -> None:
    proof = PROOFS[name]
    assert proof["test"] in cases, f"run python -m tests.conformance.proofs {name}"
    case = cases[proof["test"]]
    if case.id not in known:
        if "grow" in case.id:  # what this process builds up at its first calls is no leak
            case.run({})
        known[case.id] = case.run({}, True)
    right, straight = known[case.id]
    assert right.outcome == "passed", "the reference itself fails there"
    outcome, trace = case.run(all_mutants()[name](), True)
    assert sorted(clause for clause, holds in outcome.clauses.items() if not holds) == proof["red"], outcome.reason
    call = proofs.first_difference(trace, straight)
    assert call == proof["call"], "the reference and the mutant differ in another call than they did"


def test_proofs_are_of_mutants_that_there_are() -> None:
    assert set(PROOFS) <= set(all_mutants()) - set(proofs.OTHERS)
    assert len(all_mutants()) >= 160
    assert [name for name, proof in PROOFS.items() if not proof["red"]] == []


def test_every_mutant_has_a_proof() -> None:
    assert set(PROOFS) == set(all_mutants()) - set(proofs.OTHERS), "run python -m tests.conformance.proofs"


def test_a_proof_names_clauses_of_the_contract() -> None:
    for name, proof in PROOFS.items():
        assert set(proof["red"]) <= set(judged().clauses), name


def test_the_hooks_of_the_mutants_are_those_of_the_contract() -> None:
    assert set(HOOKS) == set(judged().hooks)


@pytest.mark.parametrize(
    "names",
    [
        ("drops_channels_past_256", "crashes"),
        pytest.param(("keeps_a_copy_of_the_weights", "hangs"), marks=pytest.mark.slow),
    ],
)
def test_the_kit_in_processes_of_its_own_sees_them_too(names: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    command = [
        sys.executable,
        "-m",
        "tests.conformance.run_mutants",
        "--only",
        "sizes,memory,commit",
        "--out",
        str(out),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *names], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    for name, row in json.loads(out.read_text())["mutants"].items():
        assert row["status"] == 1, name
        assert row["red"], name


@pytest.mark.slow
def test_the_kept_table_of_the_whole_kit_is_of_these_sources() -> None:
    from tests.conformance.run_mutants import judged_sources

    kept = json.loads(KEPT.read_text())
    assert kept["sources"] == judged_sources(), "stale: run make mutants"
    assert set(kept["mutants"]) == set(all_mutants())
    for name, row in kept["mutants"].items():
        assert row["status"] == 1, name
        assert set(PROOFS.get(name, {"red": []})["red"]) <= set(row["red"]), name
    seen = {clause for row in kept["mutants"].values() for clause in row["red"]}
    assert set(judged().clauses) - seen == set()
