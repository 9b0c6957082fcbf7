"""The example vendor as a third party installs it: two wheels in an environment that holds neither source tree."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

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
    (site / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def _run(python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(python), *arguments], cwd=folder, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_the_example_vendor_is_certified_from_its_wheel(bare: Path, tmp_path: Path) -> None:
    where = _run(
        bare, tmp_path, "-c", "import hwbackends, hwbackends_numpy as n; print(hwbackends.__file__, n.__file__)"
    )
    assert all(str(bare.parents[1]) in path for path in where.stdout.split()), where
    done = _run(bare, tmp_path, "-m", "hwbackends", "conformance", "run", "numpy", "--report", "out.json", "-q")
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["verdict"] == "certified"
    assert data["package"] == "hwbackends-numpy 0.1.0"
    counts = data["counts"]
    assert counts["passed"] == counts["claimed"] > 300
    reasons = {test["reason"] for test in data["tests"] if test["outcome"] == "not_claimed"}
    assert {"layout ring", "layout lazy", "dtype bfloat16", "graph capture"} <= reasons
