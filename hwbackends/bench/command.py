"""`hwbackends bench`: measures this machine's GPU and writes JSON, a Markdown table and a plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hwbackends.bench.peers.common import Peer

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group(invoke_without_command=True)
@click.option("--sglang", type=_FOLDER, help="Folder of an unpacked SGLang wheel.")
@click.option("--vllm", type=_FOLDER, help="Folder of an unpacked vLLM wheel.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-results"), show_default=True)
@click.option("--quick", is_flag=True, help="Small sizes alone.")
@click.option("--only", multiple=True, help="Cases whose name holds this word; may be given more than once.")
@click.pass_context
def bench(
    ctx: click.Context, sglang: Path | None, vllm: Path | None, out: Path, quick: bool, only: tuple[str, ...]
) -> None:
    """Measure the cuda backend on this device, against its floor, plain torch, flash-linear-attention where it is
    installed and, with --sglang and --vllm, against the kernels of SGLang and vLLM."""
    if ctx.invoked_subcommand is not None:
        return
    import torch

    if not torch.cuda.is_available():
        raise click.ClickException("torch sees no CUDA device; the benchmark measures GPUs")
    from hwbackends.bench import report
    from hwbackends.bench.session import Session

    peer = None
    if sglang is not None:
        from hwbackends.bench.peers.sglang import Sglang

        peer = Sglang(sglang)
    out.mkdir(parents=True, exist_ok=True)

    def save(results: dict[str, Any]) -> None:
        (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")

    results = Session(peer, quick, only, _others(vllm), save).run()
    save(results)
    (out / "tables.md").write_text(report.document(results))
    try:
        report.plot(results, out / "plot.png")
    except ModuleNotFoundError:
        click.echo("matplotlib is not installed: no plot", err=True)
    click.echo(report.table(results))
    for name in results["failures"]:
        click.echo(f"failed: {name}", err=True)


@bench.command()
@click.option("--device", default="cuda", show_default=True, help="Where the model lies.")
@click.option("--small", is_flag=True, help="A tiny model and few sizes: shows that the benchmark runs.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-results"), show_default=True)
def serve(device: str, small: bool, out: Path) -> None:
    """Measure the packed runner on an LFM2 of 1.2 B: decode, verify and prefill, against stock generate and the bytes
    that a step must read."""
    import torch
    from rich.progress import Progress

    from hwbackends.bench import serve as serving

    where = torch.device(device)
    bandwidth = None
    if where.type == "cuda":
        from hwbackends.bench import floor

        bandwidth = floor.measure().copy_bytes_per_s
    plan = serving.QUICK if small else serving.FULL
    work = serving.Serving(where, plan, small, bandwidth)
    rows: list[serving.Row] = []
    with Progress(transient=True) as bar:
        task = bar.add_task("serving", total=plan.rows)
        for row in work.rows():
            rows.append(row)
            bar.update(task, advance=1, description=f"{row.work} {row.batch} x {row.context}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "serve.json").write_text(json.dumps(serving.as_json(rows), indent=1) + "\n")
    text = serving.document(rows, f"Serving on {where}, attention by {work.attention}")
    (out / "serve.md").write_text(text)
    try:
        serving.plot(rows, out / "serve.png")
    except ModuleNotFoundError:
        click.echo("matplotlib is not installed: no plot", err=True)
    click.echo(text)


@bench.command()
@click.option("--sglang", type=_FOLDER, help="Folder of an unpacked SGLang wheel.")
@click.option("--device", default="cuda", show_default=True, help="cpu: in triton's interpreter, to show that it runs.")
@click.option("--small", is_flag=True, help="Tiny sizes and few shapes.")
@click.option("--only", multiple=True, help="Sizes whose name holds this word; may be given more than once.")
@click.option("--minutes", default=7.0, show_default=True, help="Stop measuring after this time.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-results"), show_default=True)
def ssm(
    sglang: Path | None, device: str, small: bool, only: tuple[str, ...], minutes: float, out: Path
) -> None:  # fmt: skip
    """Measure SSM verify and decode in every launch shape, against SGLang's kernels and the floor, and hold all of them
    to the same bits."""
    from hwbackends.bench import ssm as work
    from hwbackends.bench import ssm_report

    peer = None
    if sglang is not None:
        from hwbackends.bench.peers.sglang_ssm import SglangSsm

        peer = SglangSsm(sglang)
    out.mkdir(parents=True, exist_ok=True)

    def save(results: dict[str, Any]) -> None:
        (out / "ssm.json").write_text(json.dumps(results, indent=1) + "\n")
        (out / "ssm.md").write_text(ssm_report.tables(results))

    click.echo(ssm_report.tables(work.Session(peer, device, small, only, minutes, save).run()))


def _others(vllm: Path | None) -> list[Peer]:
    """Every peer beside SGLang that is here."""
    from hwbackends.bench.peers import fla
    from hwbackends.bench.peers.torch_native import TorchNative
    from hwbackends.bench.peers.vllm import Vllm

    found: list[Peer] = [] if vllm is None else [Vllm(vllm)]
    if fla.installed():
        found.append(fla.Fla())
    return [*found, TorchNative()]
