"""What `hwbackends new-backend` writes: a package that fits the contract, passes its own lint, and claims nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from hwbackends.cli import main
from hwbackends.contract.claims import read_claims
from hwbackends.contract.reader import installed
from hwbackends.errors import HookNotImplementedError
from hwbackends.registry.binding import inspect_plugin
from hwbackends.registry.manifest import read_manifest
from hwbackends.registry.origins import hook_origins
from hwbackends.registry.scaffold import files


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a backend called acme."""
    folder = tmp_path_factory.mktemp("made") / "hwbackends-acme"
    done = CliRunner().invoke(main, ["new-backend", "acme", "--folder", str(folder)])
    assert done.exit_code == 0, done.output
    assert f"pip install -e {folder}" in done.output
    return folder


def _plugin(package: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(package))
    spec = spec_from_file_location("hwbackends_acme.plugin", package / "hwbackends_acme" / "plugin.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_hook_has_a_stub_that_fits_the_contract(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _plugin(package, monkeypatch)
    for hook in installed().hooks.values():
        assert list(signature(getattr(made, hook.name)).parameters) == [p.name for p in hook.parameters]


def test_a_stub_counts_as_missing_until_it_is_written(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = inspect_plugin(_plugin(package, monkeypatch), installed())
    assert found.drifts == ()
    assert set(found.missing) == set(installed().hooks) - {"probe"}
    origins = hook_origins("hwbackends_acme.plugin", installed().hooks)
    assert [name for name, origin in origins.items() if origin] == ["probe"]


def test_a_stub_raises_an_error_that_names_hook_and_backend(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _plugin(package, monkeypatch)
    for name in installed().hooks:
        if name != "probe":
            arguments = [None] * sum(p.required for p in installed().hooks[name].parameters)
            with pytest.raises(HookNotImplementedError, match=f"{name}: backend 'acme' does not have this hook yet"):
                getattr(made, name)(*arguments)


def test_its_manifest_claims_no_hook_and_reads_clean(package: Path) -> None:
    manifest = read_manifest(package / "hwbackends_acme" / "manifest.yaml")
    claims = read_claims(manifest.capabilities, installed(), tuple(installed().hooks))
    assert manifest.contracts == dict.fromkeys(installed(), ">=1.0,<2.0")
    assert claims.hooks == ()


def test_its_ci_file_runs_lint_check_and_kit(package: Path) -> None:
    workflow = yaml.safe_load((package / ".github" / "workflows" / "ci.yml").read_text())
    commands = "\n".join(step.get("run", "") for step in workflow["jobs"]["conformance"]["steps"])
    for part in ("ruff check", "hwbackends check hwbackends_acme", "hwbackends conformance run acme --device cpu"):
        assert part in commands


@pytest.mark.skipif(find_spec("ruff") is None, reason="ruff comes with the lint extra")
def test_it_passes_its_own_lint(package: Path) -> None:
    for command in (["format", "--check", "."], ["check", "--no-cache", "."]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command], cwd=package, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_it_passes_its_own_signature_check(package: Path) -> None:
    done = CliRunner().invoke(main, ["check", str(package / "hwbackends_acme"), "--no-cache"])
    assert done.exit_code == 0, done.output


def test_its_kit_run_counts_everything_as_not_claimed(package: Path, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [
        sys.executable, "-m", "pytest", "--pyargs", "hwbackends.conformance", "--hwbackend=hwbackends_acme.plugin",
        "--report=out.json", "-q", "-p", "no:cacheprovider",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(package)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    data = json.loads((tmp_path / "out.json").read_text())
    assert done.returncode == 0, done.stdout
    assert data["verdict"] == "nothing claimed"
    assert data["counts"]["not_claimed"] == data["counts"]["total"]
    assert {row["status"] for row in data["clauses"]} == {"not claimed"}


@pytest.mark.parametrize("name", ["Acme", "acme-2", "2acme", "a.b", ""])
def test_a_name_that_is_no_package_name_is_refused(name: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["new-backend", name, "--folder", str(tmp_path / "made")])
    assert done.exit_code == 2
    assert "small letters" in done.output
    assert not (tmp_path / "made").exists()


def test_a_folder_that_is_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    done = CliRunner().invoke(main, ["new-backend", "acme", "--folder", str(tmp_path)])
    assert done.exit_code == 1
    assert "is not empty" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("device", ["cuda:0", "bad dev", 'x"y', ""])
def test_a_device_that_is_no_type_is_refused(device: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["new-backend", "acme", "--device", device, "--folder", str(tmp_path / "made")])
    assert done.exit_code == 2
    assert "wanted a device type" in done.output
    assert not (tmp_path / "made").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    done = CliRunner().invoke(main, ["new-backend", "acme", "--folder", str(tmp_path / "file" / "made")])
    assert done.exit_code == 1
    assert "name another folder with --folder" in done.output


def test_the_device_and_the_name_reach_every_file() -> None:
    made = files("my_chip", "npu", installed())
    assert "my_chip" in made["pyproject.toml"]
    assert "devices: [npu]" in made["hwbackends_my_chip/manifest.yaml"]
    assert not [path for path, text in made.items() if "@name@" in text or "@package@" in text]
