"""An engine's plugin takes part when it was asked for and the engine's version is supported; else the engine goes on
with its own code and one log line says why."""

from __future__ import annotations

import logging
import subprocess
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from hwbackends.engines import activation
from hwbackends.engines.activation import Engine, PluginState, activate, decide, hold_overrides
from hwbackends.engines.sglang.record import ENGINE as SGLANG
from hwbackends.engines.vllm.record import ENGINE as VLLM
from hwbackends.errors import ArgumentError, UnsupportedError

ENGINES = pytest.mark.parametrize("engine", [SGLANG, VLLM], ids=lambda engine: engine.name)
SUPPORTED = {"sglang": "0.5.23", "vllm": "0.32.0"}


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in (SGLANG, VLLM):
        monkeypatch.delenv(engine.switch, raising=False)
        monkeypatch.delenv(engine.allowlist, raising=False)
    monkeypatch.setattr(activation, "_ACTIVATED", {})


def install_version(monkeypatch: pytest.MonkeyPatch, engine: Engine, version: str | None) -> None:
    """Make the engine look installed in this version, or not at all."""

    def found(name: str) -> str:
        if version is None or name != engine.distributions[-1]:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(activation.metadata, "version", found)


@ENGINES
def test_a_plugin_nobody_asked_for_is_off(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    install_version(monkeypatch, engine, SUPPORTED[engine.name])
    decision = decide(engine)
    assert decision.state is PluginState.OFF
    assert f"{engine.switch}=1" in decision.reason


@ENGINES
def test_without_the_engine_there_is_nothing_to_take_part_in(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    install_version(monkeypatch, engine, None)
    monkeypatch.setenv(engine.switch, "1")
    assert decide(engine).state is PluginState.NO_ENGINE


@ENGINES
def test_the_own_switch_and_the_engines_list_both_ask_for_the_plugin(
    monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    install_version(monkeypatch, engine, SUPPORTED[engine.name])
    monkeypatch.setenv(engine.switch, "1")
    assert decide(engine).state is PluginState.ACTIVE
    monkeypatch.delenv(engine.switch)
    monkeypatch.setenv(engine.allowlist, "other, hwbackends")
    assert decide(engine).state is PluginState.ACTIVE


@ENGINES
@pytest.mark.parametrize("value", ["0", "off", "False", "no"])
def test_the_own_switch_is_heard_before_the_engines_list(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, value: str
) -> None:
    install_version(monkeypatch, engine, SUPPORTED[engine.name])
    monkeypatch.setenv(engine.switch, value)
    monkeypatch.setenv(engine.allowlist, "hwbackends")
    assert decide(engine).state is PluginState.OFF


@ENGINES
def test_the_engines_list_can_leave_the_plugin_out(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    install_version(monkeypatch, engine, SUPPORTED[engine.name])
    monkeypatch.setenv(engine.switch, "1")
    monkeypatch.setenv(engine.allowlist, "other")
    decision = decide(engine)
    assert decision.state is PluginState.OFF
    assert engine.allowlist in decision.reason


@ENGINES
@pytest.mark.parametrize("version", ["0.1", "0.5.22", "0.33.0", "1.0", "2.0+cpu"])
def test_a_version_out_of_range_is_refused_with_the_range(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, version: str
) -> None:
    install_version(monkeypatch, engine, version)
    monkeypatch.setenv(engine.switch, "1")
    decision = decide(engine)
    assert decision.state is PluginState.REFUSED
    assert engine.supported in decision.reason
    assert version in decision.reason
    assert "keeps its own code" in decision.reason


@ENGINES
def test_a_build_tag_does_not_change_the_release(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    install_version(monkeypatch, engine, SUPPORTED[engine.name] + "+cpu.7")
    monkeypatch.setenv(engine.switch, "1")
    assert decide(engine).state is PluginState.ACTIVE


@ENGINES
@pytest.mark.parametrize("version", ["0.0.0", "0.5.24.dev3+g1234567", "0.32.0rc1", "main"])
@pytest.mark.parametrize("findings", [[], ["HWB101 m lacks x"]])
def test_a_version_that_names_no_release_has_its_tree_checked(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, version: str, findings: list[str]
) -> None:
    install_version(monkeypatch, engine, version)
    monkeypatch.setenv(engine.switch, "1")
    monkeypatch.setattr(activation, "contract_findings", lambda engine: findings)
    decision = decide(engine)
    assert decision.state is (PluginState.REFUSED if findings else PluginState.ACTIVE)
    assert all(finding in decision.reason for finding in findings)


def write_tree(engine: Engine, folder: Path, **sources: str) -> Path:
    """An engine's tree: every file that the plugin relies on, empty but for `sources`, by stem."""
    for name in engine.relies_on:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(sources.get(path.stem, ""))
    return folder


@ENGINES
def test_the_tree_of_an_engine_that_fits_has_no_findings(engine: Engine, tmp_path: Path) -> None:
    assert activation.contract_findings(engine, write_tree(engine, tmp_path)) == []


def test_a_drifted_hook_in_a_file_of_the_plugin_is_found(tmp_path: Path) -> None:
    drifted = (
        "class Base:\n    def update_mamba_state_after_mtp_verify(self, last_correct_step_indices): ...\n"
        "class Own(Base):\n    def update_mamba_state_after_mtp_verify(self, last_correct_step_indices): ...\n"
    )
    tree = write_tree(SGLANG, tmp_path, hybrid_linear_attn_backend=drifted)
    findings = activation.contract_findings(SGLANG, tree)
    assert any("req_pool_indices" in finding for finding in findings)


def test_a_drifted_hook_that_the_plugin_never_touches_is_not_held_against_the_engine(tmp_path: Path) -> None:
    tree = write_tree(SGLANG, tmp_path)
    source = "class Other:\n    def update_mamba_state_after_mtp_verify(self, last_correct_step_indices): ...\n"
    (tree / "elsewhere.py").write_text(source)
    assert activation.contract_findings(SGLANG, tree) == []


@ENGINES
def test_the_plugins_own_overrides_fit_the_engines_contract(engine: Engine) -> None:
    folder = Path(activation.__file__).parent / engine.name
    contract = activation.contracts_folder() / "engines" / f"{engine.name}.yaml"
    assert activation._run_checker([str(folder), "--contract", str(contract)]) == []


@ENGINES
def test_a_file_that_is_gone_is_a_finding(engine: Engine, tmp_path: Path) -> None:
    tree = write_tree(engine, tmp_path)
    (tree / engine.relies_on[0]).unlink()
    assert activation.contract_findings(engine, tree) == [f"{engine.relies_on[0]} is not there"]


def test_a_checker_that_cannot_run_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failed = SimpleNamespace(stdout="", stderr="no module named hwbackends", returncode=1)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    (finding,) = activation.contract_findings(VLLM, write_tree(VLLM, tmp_path))
    assert "no module named hwbackends" in finding


@ENGINES
def test_activation_says_in_one_line_what_is_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, engine: Engine
) -> None:
    install_version(monkeypatch, engine, SUPPORTED[engine.name])
    monkeypatch.setenv(engine.switch, "1")
    monkeypatch.setattr(activation, "_backend_name", lambda: "reference")
    with caplog.at_level(logging.INFO):
        assert activate(engine, lambda: "its short convs run on hwbackends")
    (record,) = caplog.records
    expected = f"hwbackends: {engine.title} {SUPPORTED[engine.name]}: its short convs run on hwbackends"
    assert record.getMessage() == f"{expected}, backend reference"
    assert activation.require_active(engine) == "its short convs run on hwbackends, backend reference"


@ENGINES
@pytest.mark.parametrize(
    "error", [ImportError("gone"), AttributeError("moved"), ArgumentError("a", "b", "c", "d"), AssertionError("taken")]
)
def test_a_plugin_that_fails_leaves_the_engine_its_own_code(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, engine: Engine, error: Exception
) -> None:
    install_version(monkeypatch, engine, SUPPORTED[engine.name])
    monkeypatch.setenv(engine.switch, "1")

    def fail() -> str:
        raise error

    assert not activate(engine, fail)
    (record,) = caplog.records
    assert "keeps its own code" in record.getMessage()
    assert str(error) in record.getMessage()
    with pytest.raises(UnsupportedError):
        activation.require_active(engine)


@ENGINES
def test_nothing_is_installed_when_the_plugin_is_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, engine: Engine
) -> None:
    install_version(monkeypatch, engine, "0.1")
    for value in ("0", "1"):
        monkeypatch.setenv(engine.switch, value)
        assert not activate(engine, lambda: pytest.fail("installed"))
    assert [record.levelname for record in caplog.records] == ["WARNING"], "off is no warning, refused is one"
    with pytest.raises(UnsupportedError, match="outside the supported range"):
        activation.require_active(engine)


@ENGINES
def test_the_doctor_has_an_entry_for_each_engine(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    install_version(monkeypatch, engine, "0.1")
    monkeypatch.setenv(engine.switch, "1")
    entry = next(item for item in activation.status() if item["engine"] == engine.name)
    assert entry["state"] == "refused"
    assert entry["version"] == "0.1"
    assert engine.supported in entry["reason"]


def test_the_doctor_says_when_the_engine_cannot_find_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation.metadata, "entry_points", lambda group: ())
    assert all("no entry point" in item["reason"] for item in activation.status())


class Base:
    """An engine's class."""

    def kept(self, x: int, y: int) -> int:
        return x + y

    def widened(self, x: int, z: int = 0) -> int:
        return x + z


def test_overrides_of_what_is_still_there_pass() -> None:
    class Own(Base):
        def kept(self, x: int, y: int) -> int:
            return x * y

        def widened(self, **kwargs: int) -> int:
            return len(kwargs)

        def extra(self) -> None: ...

    hold_overrides(Own, Base, own=("extra",))


def test_an_override_of_a_method_that_is_gone_is_refused() -> None:
    class Own(Base):
        def renamed(self) -> None: ...

    with pytest.raises(UnsupportedError, match=r"Base\.renamed"):
        hold_overrides(Own, Base)


def test_an_override_that_lacks_a_parameter_is_refused() -> None:
    class Own(Base):
        def widened(self, x: int) -> int:
            return x

    with pytest.raises(UnsupportedError, match="parameters \\['z'\\]"):
        hold_overrides(Own, Base)
