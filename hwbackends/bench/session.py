"""One run of the benchmark: every case measured, one failure never hiding another, results as plain numbers."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from hwbackends.bench import floor, sizes, steps, timing, works
from hwbackends.bench.works import Case, Others, Peer
from hwbackends.registry.loading import load

Make = Callable[[], Case]


def cases(hooks: Any, peer: Peer, quick: bool = False, others: Others = ()) -> Iterator[tuple[str, Make]]:
    """Every case as a name and a function that makes it."""
    batches = sizes.BATCHES[:2] if quick else sizes.BATCHES
    for batch in (1, 32) if quick else (1, 32, 128, 512):
        yield f"metadata decode {batch}", partial(works.metadata_decode, hooks, peer, batch)
    for batch in batches:
        yield f"metadata verify {batch}", partial(works.metadata_verify, hooks, peer, batch)
    for batch in sizes.EXTEND_METADATA[: 2 if quick else None]:
        yield f"metadata extend {batch}", partial(works.metadata_extend, hooks, peer, batch)
    for layout in ("ring", "window"):
        for batch in sizes.DECODE[:2] if quick else sizes.DECODE:
            yield f"decode {layout} {batch}", partial(works.decode, hooks, peer, batch, layout, others)
    for batch in batches:
        yield f"kv {batch}", partial(works.decode_kv, hooks, peer, batch)
    for tokens in sizes.EXTEND[:1] if quick else sizes.EXTEND:
        yield f"extend {tokens}", partial(works.extend, hooks, peer, tokens, others)
    for layout in ("ring", "window"):
        for batch in batches:
            yield f"verify {layout} {batch}", partial(works.verify, hooks, peer, batch, layout)
    for layout in ("ring", "window"):
        for batch in batches:
            yield f"commit {layout} {batch}", partial(works.commit, hooks, peer, batch, layout)
    for batch in batches:
        yield f"draft extend {batch}", partial(works.draft_extend, hooks, peer, batch, "ring")
    for batch in batches:
        yield f"epilogue {batch}", partial(works.epilogue, hooks, peer, batch)


class Session:
    """Measures cases and keeps what came out.

    Args:
        peer: SGLang's kernels, or None.
        quick: small sizes alone.
        only: measure cases whose name holds one of these words.
        others: further peers, measured in decode and extend.
        save: gets the results so far after each case, so that a run that is stopped keeps what it measured.
    """

    def __init__(
        self,
        peer: Peer = None,
        quick: bool = False,
        only: tuple[str, ...] = (),
        others: Others = (),
        save: Callable[[dict[str, Any]], object] = lambda results: None,
    ) -> None:
        self.save = save
        self.hooks = load("cuda", "cuda")
        self.peer, self.quick, self.only, self.others = peer, quick, only, others
        self.floor = floor.measure()
        self.rows: list[dict[str, Any]] = []
        self.step_rows: list[dict[str, Any]] = []
        self.extra: dict[str, Any] = {}
        self.failures: dict[str, str] = {}

    def run(self) -> dict[str, Any]:
        """Measure everything that was asked for."""
        if self._wanted("step"):
            self._guarded("steps", self._steps)
        for name, make in cases(self.hooks, self.peer, self.quick, self.others):
            if self._wanted(name):
                self._guarded(name, lambda make=make: self._measure(make()))  # type: ignore[misc]
        return self.results()

    def _wanted(self, name: str) -> bool:
        return not self.only or any(word in name for word in self.only)

    def _guarded(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            self.failures[name] = traceback.format_exc()
            print(f"FAILED {name}: {sys.exc_info()[1]}", file=sys.stderr, flush=True)
        self.save(self.results())
        gc.collect()
        torch.cuda.empty_cache()

    def _measure(self, case: Case) -> None:
        row: dict[str, Any] = {"work": case.work, "size": case.size, "contenders": {}}
        row["floor_us"] = self.floor.of(case.floor_bytes)
        if case.work.startswith("commit ring"):
            row["floor_us"] = 0.0
        for contender in case.contenders:
            try:
                contender.setup()
                found = asdict(timing.in_graph(contender.work, contender.count))
                if not found["launches"]:
                    found["us"] = 0.0
                if case.eager:
                    found["eager_host_us"] = timing.eager_host(lambda i, c=contender: c.work(i % c.count))  # type: ignore[misc]
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"}
                self.failures[f"{case.work} {case.size} {contender.name}"] = traceback.format_exc()
            row["contenders"][contender.name] = found
        self.rows.append(row)
        told = {n: round(t["us"], 2) if "us" in t else t for n, t in row["contenders"].items()}
        print(f"{case.work} {case.size}: {told}", flush=True)

    def _steps(self) -> None:
        weights = steps.products()
        for batch in sizes.BATCHES[:1] if self.quick else sizes.BATCHES:
            for verify in (False, True):
                found = steps.step_times(self.hooks, self.peer, weights, batch, verify)
                self._step_rows("verify step" if verify else "decode step", batch, found)
            self.save(self.results())
            self.extra[f"decode step, metadata in and out of graph, B = {batch}"] = steps.out_of_graph(
                self.hooks, self.peer, weights, batch
            )

    def _step_rows(self, name: str, batch: int, found: dict[str, float]) -> None:
        print(f"{name} {batch}: { {n: round(us, 1) for n, us in found.items()} }", flush=True)
        theirs = {n: {"us": us} for n, us in found.items() if n.startswith("sglang")}
        for label, ours in (("", "ours"), (", fused", "ours, fused")):
            if ours in found:
                row = {"work": name + label, "size": batch, "floor_us": found["products alone"]}
                self.step_rows.append(row | {"contenders": {"ours": {"us": found[ours]}, **theirs}})
        self.extra[f"{name}, B = {batch}"] = found

    def results(self) -> dict[str, Any]:
        """Everything measured, with device, versions and commit."""
        return {
            "device": torch.cuda.get_device_name(),
            "driver": _told("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "commit": os.environ.get("HWBACKENDS_COMMIT") or _told("git", "rev-parse", "--short", "HEAD"),
            "peers": self._peers(),
            "floor": asdict(self.floor),
            "rows": self.rows + self.step_rows,
            "extra": self.extra,
            "failures": self.failures,
        }

    def _peers(self) -> dict[str, dict[str, str]]:
        """Version of each peer, and what its calls leave out."""
        found = {other.name: {"version": other.version, "note": other.note} for other in self.others}
        return ({"sglang": {"version": self.peer.version, "note": ""}} if self.peer else {}) | found


@functools.cache
def _told(*command: str) -> str:
    """First line that a program prints; empty where it is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip().partition("\n")[0]
