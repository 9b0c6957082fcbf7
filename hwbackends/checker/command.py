"""The command ``hwbackends check``: options in, report out.

Exit status 0: clean, 1: findings, 2: could not run, 3: an error of the checker's own, 130: interrupted.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click

from hwbackends.errors import ContractError

from .failures import RULE as INTERNAL
from .failures import failure
from .findings import Finding
from .rules import DECLARATIONS, RULES, explain

FAILED, INTERRUPTED = 3, 130
_FORMATS = ("text", "json", "sarif", "github")


@click.command()
@click.argument("trees", nargs=-1, type=click.Path())
@click.option(
    "--contract", metavar="FILE", help="Check the hooks that this YAML file names. Default: our own contracts."
)
@click.option("--drift", is_flag=True, default=None, help="Check every call of the trees, without a contract.")
@click.option(
    "--with-package",
    is_flag=True,
    default=None,
    help="With --drift: read what TREES import from the package around.",
)
@click.option("--format", "format_", type=click.Choice(_FORMATS), help="How to print findings. Default: text.")
@click.option("--select", multiple=True, metavar="RULES", help="Only these rules (HWB101,HWB2 or ALL). Repeatable.")
@click.option("--ignore", multiple=True, metavar="RULES", help="All but these rules. Repeatable.")
@click.option("--confidence", type=click.Choice(["low", "medium", "high"]), help="Least confidence. Default: medium.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave out matching paths. Repeatable.")
@click.option("--baseline", metavar="FILE", help="Hide the findings that this file lists.")
@click.option("--update-baseline", is_flag=True, help="Write the findings of this run to the baseline; exit 0.")
@click.option("--no-cache", is_flag=True, help="Neither read nor write the cache.")
@click.option("--cache-dir", metavar="DIR", help="Where the cache lies. Default: the user's cache folder.")
@click.option("--jobs", type=click.IntRange(0), default=0, help="Processes. Default: one for each core.")
@click.option("--config", metavar="FILE", help="A pyproject.toml. Default: the nearest one.")
@click.option("--fix", is_flag=True, help="Add keywords that an override lacks and its base has with a plain default.")
@click.option("--diff", is_flag=True, help="With --fix: print the patch, write nothing.")
@click.option("--progress/--no-progress", default=None, help="Draw a bar on stderr. Default: on a terminal.")
@click.option("--explain", metavar="RULE", help="Print what a rule (or ALL) finds, with examples, and stop.")
def check(trees: tuple[str, ...], explain: str | None, **options: Any) -> None:
    """Find definitions and calls whose signatures drifted apart, from source alone.

    Nothing in TREES is imported or run. Several trees are checked together: an engine and a vendor's package.
    """
    if explain is not None:
        _explain(explain)
        return
    try:
        status = _run(list(trees), options)
    except (ContractError, ValueError, OSError) as error:
        click.echo(f"hwbackends check: {error}", err=True)
        status = 2
    except KeyboardInterrupt:
        click.echo("hwbackends check: interrupted", err=True)
        status = INTERRUPTED
    except Exception as error:  # a fault of ours must not read as "findings"
        click.echo(f"hwbackends check: {failure(os.getcwd(), 1, 'running', error).message}", err=True)
        status = FAILED
    sys.exit(status)


def _explain(name: str) -> None:
    if name.upper() == "ALL":
        click.echo("\n".join(explain(rule) for rule in RULES.values()))
        return
    rule = RULES.get(name.upper())
    if rule is None:
        click.echo(f"hwbackends check: no rule is called {name!r}; rules are {', '.join(RULES)}", err=True)
        sys.exit(2)
    click.echo(explain(rule))
    if rule.id.startswith("HWB1"):
        click.echo(DECLARATIONS)


def _run(trees: list[str], options: dict[str, Any]) -> int:
    from . import engine, suppress
    from .config import read_config
    from .findings import counted
    from .report import FORMATS

    config = read_config(Path.cwd(), options["config"])
    trees = trees or list(config.get("trees", ["."]))
    for tree in trees:
        if not os.path.lexists(tree):
            raise ValueError(f"{tree}: no such file or folder")
    selection = _selection(options, config)
    selection.rules()  # an unknown rule is an error before any work
    baseline_path: str = options["baseline"] or config.get("baseline") or ""
    if options["update_baseline"] and not baseline_path:
        raise ValueError("--update-baseline wants --baseline FILE")
    baseline: Counter[str] = suppress.read_baseline(baseline_path) if baseline_path else Counter()
    wanted = _engine_options(options, config)
    selection = selection._replace(against=frozenset(wanted.contract or {"drift"}))
    outcome = engine.run(trees, wanted)
    if options["update_baseline"]:
        shown = suppress.apply(outcome.findings, selection, outcome.ignores, Counter())
        suppress.write_baseline(baseline_path, shown.findings)
        click.echo(f"{counted(len(shown.findings), 'finding')} written to {baseline_path}", err=True)
        return 0
    shown = suppress.apply(outcome.findings, selection, outcome.ignores, baseline)
    if options["fix"]:
        return _fix(shown.findings, options["diff"])
    text = FORMATS[options["format_"] or config.get("format", "text")](shown, outcome)
    if text:
        click.echo(text.encode("utf-8", "backslashreplace").decode("utf-8"))
    if any(finding.rule == INTERNAL for finding in shown.findings):
        return FAILED
    return 1 if shown.findings else 0


def _fix(findings: list[Finding], only_diff: bool) -> int:
    """Make, or print, the safe changes; 1 where findings are left for somebody to read."""
    from .findings import counted
    from .fixes import Fixes

    fixes = Fixes(findings)
    safe = sum(fixes.safe(finding) for finding in findings)
    if only_diff:
        click.echo(fixes.diff(), nl=False)
    else:
        fixes.write()
    done = "would be changed" if only_diff else "changed"
    left = f"{counted(len(findings) - safe, 'finding')} left to read"
    click.echo(f"{counted(fixes.count, 'definition')} {done}; {left}", err=True)
    return 1 if len(findings) > safe or (only_diff and safe) else 0


def _selection(options: dict[str, Any], config: dict[str, Any]) -> Any:
    from .suppress import LEVELS, Selection

    confidence = options["confidence"] or config.get("confidence", "medium")
    if confidence not in LEVELS:
        raise ValueError(f"confidence is one of {', '.join(LEVELS)}, got {confidence!r}")
    select = _split(options["select"]) or tuple(config.get("select", ()))
    ignore = _split(options["ignore"]) or tuple(config.get("ignore", ()))
    return Selection(select, ignore, confidence)


def _split(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part.strip() for value in values for part in value.split(",") if part.strip())


def _engine_options(options: dict[str, Any], config: dict[str, Any]) -> Any:
    from hwbackends.contract.reader import installed, read

    from . import cache, engine

    if options["drift"] and options["contract"]:
        raise ValueError("--drift and --contract exclude each other")
    drift = options["drift"] or (config.get("drift", False) and not options["contract"])
    contract = None
    if not drift:
        path = options["contract"] or config.get("contract")
        contract = read(path) if path else installed()
    directory = options["cache_dir"] or config.get("cache-dir") or cache.default_directory()
    exclude = (*options["exclude"], *config.get("exclude", ()))
    package = bool(options["with_package"] or config.get("with-package", False))
    if options["diff"] and not options["fix"]:
        raise ValueError("--diff wants --fix")
    directory = None if options["no_cache"] else directory
    return engine.Options(contract, exclude, directory, options["jobs"], package, options["progress"])
