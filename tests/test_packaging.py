"""The wheel is whole: installed into an environment that has the base dependencies and nothing else, it finds its
contracts and manifests and its command works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import hwbackends
from hwbackends.contract.reader import contracts_folder

ROOT = Path(__file__).resolve().parent.parent
BASE = ("click", "packaging", "pluggy", "pyyaml", "rich", "markdown-it-py", "mdurl", "pygments")


def run(*command: str | Path, cwd: Path | None = None) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it would lend this checkout
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=cwd, env=env, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built with the build backend that is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="session")
def bare_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own with the wheel and its base dependencies, taken from this one, and no torch."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for name in BASE:
        for file in metadata.distribution(name).files or ():
            source = Path(str(file.locate()))
            if ".." not in file.parts and source.is_file():
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, site / file)
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel)
    return python


def test_the_wheel_holds_contracts_manifests_licence_and_types_but_no_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    contracts = {
        f"hwbackends/_contracts/{p.relative_to(ROOT / 'contracts')}" for p in (ROOT / "contracts").rglob("*.yaml")
    }
    manifests = {str(path.relative_to(ROOT)) for path in (ROOT / "hwbackends").rglob("manifest.yaml")}
    assert len(contracts) >= 1
    assert len(manifests) >= 3
    assert contracts | manifests | {"hwbackends/py.typed"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "contracts/"))]


def test_the_wheel_needs_no_torch_unless_an_extra_asks_for_it(wheel: Path) -> None:
    lines = zipfile.ZipFile(wheel).read(f"hwbackends-{hwbackends.__version__}.dist-info/METADATA").decode().splitlines()
    required = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    base = {line.partition(">")[0] for line in required if "extra ==" not in line}
    assert base == {"click", "packaging", "pluggy", "pyyaml", "rich"}
    extras = {line.partition(": ")[2] for line in lines if line.startswith("Provides-Extra: ")}
    assert {"reference", "cuda", "rocm", "ascend", "transformers", "sglang", "vllm", "test", "lint"} <= extras
    assert not [line for line in required if "==" in line.partition(";")[0]], "versions are pinned in constraints.txt"


def test_the_doctor_of_a_bare_installation_sees_every_backend(bare_python: Path, tmp_path: Path) -> None:
    doctor = bare_python.parent / "hwbackends"
    report = json.loads(run(doctor, "doctor", "--json", cwd=tmp_path))
    states = {item["name"]: item["state"] for item in report["backends"]}
    assert states == dict.fromkeys(("reference", "cuda", "rocm", "ascend"), "unavailable")
    assert report["packages"]["torch"] is None
    assert all(item["hint"] for item in report["backends"])
    run(doctor, "doctor", cwd=tmp_path)


def test_a_bare_installation_loads_its_own_contract(bare_python: Path, tmp_path: Path) -> None:
    code = "from hwbackends.contract.reader import installed as c; print(c()['step'].path, len(c().hooks), *c())"
    path, hooks, *names = run(bare_python, "-c", code, cwd=tmp_path).split()
    assert Path(path).is_relative_to(bare_python.parent.parent)
    assert (int(hooks), names) == (19, ["step", "conv", "ssm"])


def test_a_bare_installation_refuses_to_load_a_backend_by_name(bare_python: Path, tmp_path: Path) -> None:
    code = "import hwbackends\ntry: hwbackends.load('reference')\nexcept hwbackends.HwBackendsError as e: print(e)"
    assert "pip install 'hwbackends[reference]'" in run(bare_python, "-c", code, cwd=tmp_path)


def test_this_editable_installation_reads_the_checkouts_own_contracts() -> None:
    assert contracts_folder() == ROOT / "contracts"


def test_metadata_and_package_have_one_version() -> None:
    assert metadata.version("hwbackends") == hwbackends.__version__
