"""The command line: lazily loaded subcommands, named errors without tracebacks, exit statuses."""

from __future__ import annotations

import sys
import types
from importlib.util import find_spec

import click
import pytest
from click.testing import CliRunner

from hwbackends import __version__, cli
from hwbackends.errors import HwBackendsError, MissingPackageError


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module whose attribute `run` is the subcommand `made`."""
    module = types.ModuleType("made_command")
    monkeypatch.setitem(sys.modules, "made_command", module)
    monkeypatch.setitem(cli.COMMANDS, "made", cli.Lazy("made_command:run", "Made for a test.", "transformers"))
    return module


def test_help_lists_every_command_without_importing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "import_module", lambda name: pytest.fail(f"imported {name}"))
    result = CliRunner().invoke(cli.main, ["--help"])
    assert result.exit_code == 0
    for name, lazy in cli.COMMANDS.items():
        assert name in result.output
        assert lazy.summary.split()[0] in result.output


def test_version_is_the_packages() -> None:
    assert CliRunner().invoke(cli.main, ["--version"]).output == f"hwbackends, version {__version__}\n"


def test_an_unknown_command_is_a_usage_error() -> None:
    result = CliRunner().invoke(cli.main, ["dmo"])
    assert result.exit_code == 2
    assert "No such command 'dmo'" in result.output


def test_a_named_error_is_a_message_and_status_two(command: types.ModuleType) -> None:
    @click.command()
    def run() -> None:
        raise HwBackendsError("no such thing; do that")

    command.run = run
    result = CliRunner().invoke(cli.main, ["made"])
    assert result.exit_code == 2
    assert result.stderr == "error: no such thing; do that\n"


def test_an_error_that_has_no_name_is_not_hidden(command: types.ModuleType) -> None:
    @click.command()
    def run() -> None:
        raise ZeroDivisionError

    command.run = run
    assert isinstance(CliRunner().invoke(cli.main, ["made"]).exception, ZeroDivisionError)


@pytest.mark.parametrize("missing", ["torch", "torch.nn.functional"])
def test_a_package_that_a_command_misses_is_named_with_the_extra(command: types.ModuleType, missing: str) -> None:
    @click.command()
    def run() -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    command.run = run
    result = CliRunner().invoke(cli.main, ["made"])
    assert result.exit_code == 2
    wanted = (
        "hwbackends made: package 'torch' is not installed; install it with: pip install 'hwbackends[transformers]'"
    )
    assert result.stderr == f"error: {wanted}\n"


def test_a_module_of_our_own_that_is_missing_is_a_bug_and_shows_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "made", cli.Lazy("hwbackends.no_such_module:run", ""))
    assert isinstance(CliRunner().invoke(cli.main, ["made"]).exception, ModuleNotFoundError)


def test_without_an_extra_the_package_itself_is_named() -> None:
    assert str(MissingPackageError("this", "that")) == (
        "this: package 'that' is not installed; install it with: pip install that"
    )


def test_ctrl_c_leaves_no_traceback(command: types.ModuleType) -> None:
    @click.command()
    def run() -> None:
        raise KeyboardInterrupt

    command.run = run
    result = CliRunner().invoke(cli.main, ["made"])
    assert result.exit_code == 130, "1 says that there are findings"
    assert "interrupted" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_a_module_and_its_own_help(name: str) -> None:
    assert find_spec(cli.COMMANDS[name].target.partition(":")[0]) is not None
    result = CliRunner().invoke(cli.main, [name, "--help"])
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: main {name}")
