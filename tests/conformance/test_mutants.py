"""The kit against deliberately wrong backends: each turns its clauses red, and none outside its list. The faults that
the project was started for run here, in the quick lane; `make mutants` runs all of them and keeps the result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hwbackends.contract.reader import installed
from tests.conformance.mutants import HOOKS, MUTANTS

ROOT = Path(__file__).parents[2]
TABLE: dict[str, dict[str, list[str]]] = yaml.safe_load((Path(__file__).parent / "table.yaml").read_text())
KEPT = ROOT / "benchmarks" / "results" / "conformance-mutants.json"
EVERY_TIME = (
    ("reads_a_dirty_slot", "advances_state_in_preparation", "writes_for_a_negative_count", "multiplies_by_the_flag"),
    ("wraps_minus_one", "leaves_padded_outputs_unwritten", "drops_the_last_tap", "rounds_products_to_bfloat16"),
    ("detours_through_float16", "reads_after_writing", "overwrites_the_source_slot", "accepts_one_token_less"),
    ("commits_from_the_last_metadata", "swaps_axes", "leaks_across_requests", "ignores_strides"),
    ("has_32_bit_offsets", "allocates_in_a_graph", "synchronises", "bakes_warm_up_slots"),
    ("omits_parameters", "swallows_an_error"),
)
"""Four share a process, so that torch is imported once; more would not spread over two cores."""


def _judge(name: str, row: dict[str, Any]) -> None:
    """Hold what a mutant did against the table."""
    listed, red = TABLE[name], set(row["red"])
    assert row["status"] == 1, f"{name}: exit status {row['status']}"
    assert red >= set(listed["red"]), f"{name}: still green: {sorted(set(listed['red']) - red)}"
    allowed = {*listed["red"], *listed["may"]}
    assert red <= allowed, f"{name}: red outside its list: {sorted(red - allowed)}"


@pytest.mark.parametrize("names", EVERY_TIME, ids=lambda names: names[0])
def test_each_fault_turns_its_clauses_red_and_no_others(names: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    command = [sys.executable, "-m", "tests.conformance.run_mutants", "--quick", "--out", str(out), *names]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stderr
    for name, row in json.loads(out.read_text()).items():
        _judge(name, row)


def test_the_kept_result_of_all_mutants_holds_the_table() -> None:
    kept = json.loads(KEPT.read_text())
    assert set(kept) == set(MUTANTS) == set(TABLE), "run make mutants"
    for name, row in kept.items():
        _judge(name, row)


def test_every_clause_can_turn_red() -> None:
    seen = {clause for row in json.loads(KEPT.read_text()).values() for clause in row["red"]}
    assert set(installed().clauses) - seen == set()


def test_the_table_names_clauses_of_the_contract_once() -> None:
    for name, row in TABLE.items():
        ids = [*row["red"], *row["may"]]
        assert row["red"], name
        assert len(ids) == len(set(ids)), name
        assert set(ids) <= set(installed().clauses), name


def test_the_hooks_of_the_mutants_are_those_of_the_contract() -> None:
    assert set(HOOKS) == set(installed().hooks)
