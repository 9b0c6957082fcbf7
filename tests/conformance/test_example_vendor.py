"""The example vendor as a third party installs it: two wheels in an environment that holds neither source tree."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the two wheels; torch and pytest are lent by this one, our packages are not."""
    folder = tmp_path_factory.mktemp("vendor")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    for tree in (ROOT, ROOT / "examples" / "numpy-backend"):
        subprocess.run([*build, str(tree)], check=True, timeout=300)
    venv.create(folder / "env", with_pip=False, symlinks=True)
    python = folder / "env" / "bin" / "python"
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    wheels = [str(path) for path in folder.glob("*.whl")]
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*install, *wheels], check=True, timeout=300)
    # A path in a .pth file comes behind the environment's own packages, and .pth files inside it are not read: an
    # editable install of this tree stays invisible.
    lent = {str(Path(module.__file__).parents[1]) for module in (torch, pytest)}
    (site / "lent.pth").write_text("\n".join(sorted(lent)) + "\n")
    return python


def _run(python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(python), *arguments], cwd=folder, capture_output=True, text=True, timeout=590)


def _judge(python: Path, folder: Path, *options: str) -> dict[str, Any]:
    """The report of a run, in which everything that is claimed passed; its digests are those of what is installed."""
    kit = ("-m", "hwbackends", "conformance")
    done = _run(python, folder, *kit, "run", "numpy", "--report", "out.json", "-q", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    data: dict[str, Any] = json.loads((folder / "out.json").read_text())
    assert data["package"] == "hwbackends-numpy 0.1.0"
    assert data["certificate"]["hooks_of_other_distributions"] == {}
    assert data["counts"]["passed"] == data["counts"]["claimed"] > 200
    verified = _run(python, folder, *kit, "verify", "out.json")
    assert verified.returncode == 0, verified.stdout
    return data


@pytest.mark.slow
def test_neither_source_tree_is_seen(bare: Path, tmp_path: Path) -> None:
    code = "import hwbackends, hwbackends_numpy as n; print(hwbackends.__file__, n.__file__)"
    where = _run(bare, tmp_path, "-c", code)
    assert where.stdout.split(), where
    assert all(str(bare.parents[1]) in path for path in where.stdout.split()), where


@pytest.mark.slow
def test_the_example_vendor_passes_the_quick_lane_from_its_wheel(bare: Path, tmp_path: Path) -> None:
    data = _judge(bare, tmp_path, "--quick")
    assert [reason.split()[1] for reason in data["partial"]] == ["deselected"]


@pytest.mark.slow
def test_the_example_vendor_is_certified_from_its_wheel(bare: Path, tmp_path: Path) -> None:
    data = _judge(bare, tmp_path)
    assert data["verdict"] == "certified"
    assert data["scope"].startswith("window, ")
    reasons = {test["reason"] for test in data["tests"] if test["outcome"] == "not_claimed"}
    assert {"layout ring", "layout lazy", "dtype bfloat16", "graph capture"} <= reasons
