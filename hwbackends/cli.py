"""The `hwbackends` command: a group whose subcommands are imported when they are run, so that `hwbackends doctor` and
`hwbackends check` work, and start quickly, where torch is not installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click

from hwbackends import __version__
from hwbackends.errors import HwBackendsError, MissingPackageError


@dataclass(frozen=True, slots=True)
class Lazy:
    """Where a subcommand lies, its line in the list of commands, and the extra that brings what it imports."""

    target: str
    summary: str
    extra: str = ""


COMMANDS = {
    "bench": Lazy("hwbackends.bench.command:bench", "Measure the cuda backend on your own GPU.", "cuda"),
    "check": Lazy("hwbackends.checker.command:check", "Find hook signatures that drifted, from source alone."),
    "conformance": Lazy(
        "hwbackends.conformance.command:conformance", "Prove a backend against the contract.", "reference,test"
    ),
    "demo": Lazy("hwbackends.demo.command:demo", "Serve a real hybrid model and compare every token.", "transformers"),
    "doctor": Lazy("hwbackends.doctor:command", "Show every backend, its state, and which one is chosen."),
    "new-backend": Lazy("hwbackends.registry.scaffold:new_backend", "Write a new backend's plugin package."),
}


class LazyGroup(click.Group):
    """A group that lists its commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].target.partition(":")
        with named_imports(cmd_name):
            command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].summary) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> Any:
        """Run a subcommand; a named error is a message and status 2, not a traceback."""
        try:
            with named_imports(lambda: ctx.invoked_subcommand):
                return super().invoke(ctx)
        except HwBackendsError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(2)
        except KeyboardInterrupt:  # click would end with 1, which says "findings"
            click.echo("interrupted", err=True)
            ctx.exit(130)


@contextmanager
def named_imports(command: str | Callable[[], str | None]) -> Iterator[None]:
    """Inside, a package that is not installed is an error that names the subcommand and the extra that brings it.

    Raises:
        MissingPackageError: a package that the subcommand needs is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = command if isinstance(command, str) else command()
        package = (error.name or "").partition(".")[0]
        if package in ("", "hwbackends") or name not in COMMANDS:
            raise
        raise MissingPackageError(f"hwbackends {name}", package, COMMANDS[name].extra) from error


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hwbackends")
def main() -> None:
    """Hardware backends for the per-request state of hybrid models."""
