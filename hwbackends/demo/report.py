"""What the demo shows: a table per request, the checks, the ties; or one JSON document."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from hwbackends.demo.serve import TIE_MARGIN, DemoResult
from hwbackends.runner.requests import Request


def mean_accepted(request: Request) -> float | None:
    """Accepted drafts per verify step; None without one."""
    steps = sum(request.accepted.values())
    return sum(count * times for count, times in request.accepted.items()) / steps if steps else None


def histogram(request: Request, draft: int) -> list[int]:
    """How many verify steps accepted 0, 1, ..., `draft` drafts."""
    return [request.accepted[count] for count in range(draft + 1)]


def as_document(result: DemoResult) -> dict[str, Any]:
    """The result as plain data."""
    settings = result.settings
    return {
        "model": settings.model,
        "backend": result.backend,
        "device": result.device,
        "emulated": settings.emulate,
        "layout": settings.layout,
        "draft": settings.draft,
        "seed": settings.seed,
        "seconds": round(result.seconds, 3),
        "steps": result.steps,
        "graphs": result.graphs,
        "step_ms": result.step_ms,
        "requests": [
            {
                "request": request.request_id,
                "prompt_tokens": len(request.prompt),
                "reused_tokens": request.reused,
                "new_tokens": len(request.generated),
                "steps": request.steps,
                "mean_accepted": mean_accepted(request),
                "accepted_histogram": histogram(request, settings.draft),
            }
            for request in result.requests
        ],
        "checks": [{"name": c.name, "passed": c.passed, "detail": c.detail} for c in result.checks],
        "ties": [{"request": request, "step": step} for request, step in result.ties],
        "passed": result.passed,
    }


def show(result: DemoResult, as_json: bool) -> None:
    """Print the result to standard output."""
    if as_json:
        print(json.dumps(as_document(result), indent=2))
        return
    console = Console()
    settings = result.settings
    place = f"{result.device}, emulated" if settings.emulate else result.device
    console.print(
        f"\n{settings.model} (random weights, bytes as tokens) through backend {result.backend} on {place}, "
        f"layout {settings.layout}, {settings.draft} drafts, {result.seconds:.1f} s"
    )
    console.print(_request_table(result))
    console.print(_check_table(result))
    console.print("median step: " + ", ".join(f"{mode} {ms:.2f} ms" for mode, ms in result.step_ms.items()))
    if result.ties:
        listed = ", ".join(f"request {request} step {step}" for request, step in result.ties)
        console.print(f"ties (the stock model's two largest logits are closer than {TIE_MARGIN:g}): {listed}")
    else:
        console.print(f"ties: none (no stock step has its two largest logits closer than {TIE_MARGIN:g})")


def _request_table(result: DemoResult) -> Table:
    draft = result.settings.draft
    table = Table(title="requests")
    names = ["request", "prompt", "reused", "new", "steps"]
    if draft:
        names += ["mean accepted", *(f"={count}" for count in range(draft + 1))]
    for name in names:
        table.add_column(name, justify="right")
    for request in result.requests:
        numbers = [request.request_id, len(request.prompt), request.reused, len(request.generated), request.steps]
        row = [str(number) for number in numbers]
        if draft:
            mean = mean_accepted(request)
            row += ["-" if mean is None else f"{mean:.2f}", *map(str, histogram(request, draft))]
        table.add_row(*row)
    return table


def _check_table(result: DemoResult) -> Table:
    table = Table(title="checks")
    for name in ("check", "holds", "figures"):
        table.add_column(name)
    for check in result.checks:
        table.add_row(check.name, "yes" if check.passed else "[bold red]NO[/]", check.detail)
    return table
