"""`hwbackends bench serve` runs where there is no GPU, on a tiny model: rows, files and floors are there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from hwbackends.bench import serve
from hwbackends.cli import main


def test_every_row_of_a_small_run_is_written(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["bench", "serve", "--device", "cpu", "--small", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "serve.json").read_text())
    found = [(row["work"], row["batch"], row["context"]) for row in rows]
    decode = [("decode", *sizes) for sizes in serve.QUICK.decode]
    assert found == [*decode, ("verify", 3, 24), ("prefill", 3, 24), ("stock generate", 3, 24)]
    assert all(row["ms"] > 0 and row["tokens_per_s"] > 0 for row in rows)
    assert "| verify | 3 | 24 |" in (tmp_path / "serve.md").read_text()


def test_a_floor_counts_weights_keys_and_state() -> None:
    work = serve.Serving(torch.device("cpu"), serve.QUICK, True, bandwidth=1e9)
    weights = sum(parameter.numel() for parameter in work.model.parameters()) * 4
    keys = 2 * 2 * 2 * 12 * 100 * 4
    state = 2 * 3 * 48 * 2 * 4
    assert work._floor_ms(7, 100) == pytest.approx((weights + 7 * (keys + state)) / 1e6)
