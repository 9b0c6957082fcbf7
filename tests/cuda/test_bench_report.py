"""The benchmark's tables say what was measured: the fastest path is the peer's fastest, a target counts as met only
where it is, and the published results are those that the published table shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("triton", reason="triton ships for Linux only")

from hwbackends.bench import report, sizes
from hwbackends.bench.command import bench

PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"


def row(work: str, size: int, ours: float, **peers: float) -> dict[str, Any]:
    found = {name.replace("_", " "): {"us": us, "launches": 2} for name, us in peers.items()}
    return {"work": work, "size": size, "floor_us": 0.7, "contenders": {"ours": {"us": ours, "launches": 1}, **found}}


def test_the_ratio_is_to_the_peers_fastest_path() -> None:
    found = row("verify ring", 32, 2.0, sglang_cuda=8.0, sglang_triton=5.0)
    assert report.fastest_peer(found) == ("sglang triton", 5.0)
    assert report.ratio(found) == 0.4


def test_a_verify_step_is_set_against_the_peers_default_path() -> None:
    assert report.ratio(row("verify step, fused", 32, 6.0, sglang=10.0, sglang_triton=8.0)) == 0.6


def test_only_a_met_target_is_bold() -> None:
    met, missed = (report._line(row("decode ring", 1, us, sglang_cuda=10.0)) for us in (5.0, 5.2))
    assert "**0.50** | 0.50" in met
    assert "| 0.52 | 0.50" in missed


def test_a_row_without_a_peer_has_no_ratio() -> None:
    assert report.ratio(row("commit ring", 1, 0.0)) is None
    assert report._line(row("commit ring", 1, 0.0)).endswith("|  |  |  |  |  |")


def test_the_published_tables_are_those_of_the_published_numbers() -> None:
    results = json.loads((PUBLISHED / "results.json").read_text())
    assert (PUBLISHED / "tables.md").read_text() == report.document(results)
    page = (Path(__file__).parents[2] / "docs" / "cuda.md").read_text()
    rows = [line for line in report.table(results).splitlines() if line.startswith("| ")]
    assert [line for line in rows if line not in page] == []
    assert not results["failures"]


def test_every_target_was_measured() -> None:
    results = json.loads((PUBLISHED / "results.json").read_text())
    measured = {(found["work"], found["size"]) for found in results["rows"]}
    assert set(sizes.TARGETS) <= measured


def test_without_a_gpu_the_command_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = CliRunner().invoke(bench, [])
    assert done.exit_code == 1
    assert "no CUDA device" in done.output
