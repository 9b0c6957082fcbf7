"""`hwbackends conformance run|report|verify|summary|show-skips|coverage`: the kit from the command line. `run` is
pytest with the kit's own options; the others read a report or the shipped tests and need neither pytest nor torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from hwbackends.conformance.inventory import coverage as find_coverage


@click.group()
def conformance() -> None:
    """Prove a backend against the contract."""


@conformance.command(context_settings={"ignore_unknown_options": True})
@click.argument("backend")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda, npu (emulated without torch_npu).")
@click.option("--waivers", type=click.Path(dir_okay=False, exists=True), help="YAML list of accepted failures.")
@click.option("--report", type=click.Path(dir_okay=False), help="Write this JSON file, and a page beside it.")
@click.option("--quick", is_flag=True, help="A small subset; the run is PARTIAL.")
@click.option("--seed", type=int, default=0, show_default=True, help="Base of every test's seed.")
@click.argument("pytest_args", nargs=-1, type=click.UNPROCESSED)
def run(
    backend: str,
    device: str,
    waivers: str | None,
    report: str | None,
    quick: bool,
    seed: int,
    pytest_args: tuple[str, ...],
) -> None:
    """Judge BACKEND, an installed plugin's name; further arguments go to pytest."""
    import pytest

    arguments = ["--pyargs", "hwbackends.conformance", f"--hwbackend={backend}", f"--device={device}", f"--seed={seed}"]
    arguments += [f"--waivers={waivers}"] if waivers else []
    arguments += [f"--report={report}"] if report else []
    arguments += ["--quick"] if quick else []
    sys.exit(pytest.main([*arguments, *pytest_args]))


def _read(path: str) -> dict[str, Any]:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise click.ClickException(f"{path}: not a conformance report: {error}") from error
    if not isinstance(data, dict) or "clauses" not in data:
        raise click.ClickException(f"{path}: not a conformance report")
    if "tests" not in data:
        raise click.ClickException(f"{path}: a summary; give the report that it was made from")
    return data


_FILE = click.argument("file", type=click.Path(dir_okay=False, exists=True))


@conformance.command()
@_FILE
@click.option("--html", "page_path", type=click.Path(dir_okay=False), help="Write the page to this file.")
def report(file: str, page_path: str | None) -> None:
    """Show a report by clause; exit status 1 unless it is certified."""
    data = _read(file)
    for row in data["clauses"]:
        counts = f"{row['passed']:>4} passed {row['failed']:>3} failed {row['not_claimed']:>4} not claimed"
        click.echo(f"{row['id']:<16} {row['status']:<12} {counts}")
    for test in data["tests"]:
        if test["outcome"] == "failed":
            click.echo(f"FAILED {test['id']}: {test['reason']}")
    click.echo(data["line"])
    if page_path:
        from hwbackends.conformance.page import page

        Path(page_path).write_text(page(data), encoding="utf-8")
    sys.exit(0 if data["verdict"] == "certified" else 1)


@conformance.command()
@_FILE
def verify(file: str) -> None:
    """Check that a report is what a run wrote, and compute again what can be; exit status 1 unless it holds."""
    from hwbackends.conformance.verify import doubts

    data = _read(file)
    found = doubts(data)
    for sentence in found:
        click.echo(sentence)
    click.echo(f"{file}: {'does not hold' if found else 'holds'}: {data['line']}")
    sys.exit(1 if found else 0)


@conformance.command("summary")
@_FILE
def show_summary(file: str) -> None:
    """Print what is worth keeping of a report: everything but the list of its tests."""
    from hwbackends.conformance.report import summary

    click.echo(json.dumps(summary(_read(file)), indent=1))


@conformance.command("show-skips")
@_FILE
def show_skips(file: str) -> None:
    """List what a report counts as not claimed, with the claim that is missing."""
    data = _read(file)
    skipped = [test for test in data["tests"] if test["outcome"] == "not_claimed"]
    for test in skipped:
        click.echo(f"{test['id']}: {test['reason']}")
    click.echo(f"{len(skipped)} of {len(data['tests'])} tests are not claimed")


@conformance.command()
@click.option("--fail-on-unknown", is_flag=True, help="Exit status 1 unless clauses and tests match, both ways.")
def coverage(fail_on_unknown: bool) -> None:
    """Show the number of tests of each clause of the contract."""
    found = find_coverage()
    for clause, tests in found.tests.items():
        click.echo(f"{clause:<16} {len(tests):>3} {', '.join(tests[:2])}{', ...' if len(tests) > 2 else ''}")
    for clause in found.untested:
        click.echo(f"no test names {clause}")
    for test, ids in found.unknown.items():
        click.echo(f"{test} names {', '.join(ids)}, which the contract does not have")
    for test in found.silent:
        click.echo(f"{test} names no clause")
    click.echo(f"{len(found.tests)} clauses, {len(found.untested)} without a test")
    sys.exit(1 if fail_on_unknown and not found.complete else 0)
