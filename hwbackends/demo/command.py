"""The `demo` command: options, exit status, and a clean Ctrl-C. What it does is in `serve`, what it shows in `report`;
nothing heavy is imported before the options are read."""

from __future__ import annotations

from pathlib import Path

import click

SEEDS = click.IntRange(0, 2**32 - 1)


@click.command()
@click.option("--model", type=click.Choice(["inkling", "lfm2"]), default="inkling", show_default=True)
@click.option("--backend", default=None, help="Backend by name; default: the one that fits the device.")
@click.option("--device", default=None, help="cpu, cuda, npu, ...; default: the device of --backend, else cpu.")
@click.option("--layout", type=click.Choice(["window", "ring", "lazy"]), default="ring", show_default=True)
@click.option("--draft", type=click.IntRange(0, 15), default=3, show_default=True, help="Drafts per verify step.")
@click.option("--requests", type=click.IntRange(1, 256), default=10, show_default=True, help="Requests to serve.")
@click.option("--text", type=click.Path(path_type=Path), default=None, help="UTF-8 file to take the prompts from.")
@click.option("--seed", type=SEEDS, default=0, show_default=True, help="Seed of weights, prompts and drafts.")
@click.option("--emulate", is_flag=True, help="Emulate an npu device on the CPU; a host sync in the model fails.")
@click.option("--graphs/--no-graphs", default=True, help="Replay decode and verify steps from recorded graphs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
@click.pass_context
def demo(
    ctx: click.Context,
    model: str,
    backend: str | None,
    device: str | None,
    layout: str,
    draft: int,
    requests: int,
    text: Path | None,
    seed: int,
    emulate: bool,
    graphs: bool,
    as_json: bool,
) -> None:
    """Serve a small random model on real text and compare every token with the stock model.

    Requests join and leave at any step, prompts go in chunks beside decoding requests, shared prefixes are reused, and
    drafts are verified and rolled back. Decode and verify steps are replays of recorded forwards, on a CPU and on an
    NVIDIA GPU. Exit status 1 if any check fails.
    """
    try:
        from hwbackends.demo.report import show
        from hwbackends.demo.serve import DemoSettings, run_demo

        settings = DemoSettings(model, backend, device, layout, draft, requests, text, seed, emulate, graphs)  # type: ignore[arg-type]
        result = run_demo(settings, quiet=as_json)
    except KeyboardInterrupt:  # the imports take seconds too
        click.echo("interrupted", err=True)
        ctx.exit(130)
    show(result, as_json)
    if not result.passed:
        ctx.exit(1)
