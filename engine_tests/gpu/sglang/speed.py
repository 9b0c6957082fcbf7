"""Time of a step of one engine over an Inkling stack with the published layer sizes: decode, or MTP verify with its
draft extends, at B = 1, 32 and 128, and the host's share of the metadata hooks. speed.py NAME FOLDER, as serve.py."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from serve import options, probes

BATCHES = (1, 32, 128)
PROMPT, SHORT, LONG, REPEATS = 64, 16, 144, 3


def timed(engine: Any, batch: int, new: int) -> tuple[float, int]:
    """Seconds of one batch, and its verify steps (0 without speculation)."""
    params = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    ids = [[(i * 31 + j * 7) % 500 + 2 for j in range(PROMPT)] for i in range(batch)]
    start = time.perf_counter()
    answers = engine.generate(input_ids=ids, sampling_params=params)
    took = time.perf_counter() - start
    steps = max(int(a["meta_info"].get("spec_verify_ct") or 0) for a in answers)
    return took, steps


def step_ms(engine: Any, batch: int) -> float:
    """A step's milliseconds: what the longer of two runs takes more, over what it has more steps."""
    found = []
    for _ in range(REPEATS):
        engine.flush_cache()
        short, few = timed(engine, batch, SHORT)
        engine.flush_cache()
        long, many = timed(engine, batch, LONG)
        steps = many - few if many else LONG - SHORT
        found.append(1e3 * (long - short) / max(1, steps))
    return statistics.median(found)


def main(name: str, out: Path) -> None:
    import sglang

    given = options(name) | {
        "model_path": os.path.join(os.environ["WORK"], "models", "published"),
        "cuda_graph_max_bs_decode": None,
        "cuda_graph_bs_decode": list(BATCHES),
        "chunked_prefill_size": 8192,
        "max_running_requests": max(BATCHES),
        "mem_fraction_static": 0.7,
        "max_mamba_cache_size": 640,
        "max_total_tokens": 65536,
    }
    engine = sglang.Engine(**given)
    timed(engine, max(BATCHES), SHORT)
    steps = {str(b): step_ms(engine, b) for b in BATCHES}
    time.sleep(1)
    seen = probes(os.environ["PROBE"])
    (out / f"speed_{name}.json").write_text(json.dumps({"name": name, "step_ms": steps, **seen}) + "\n")
    print(name, {b: round(ms, 3) for b, ms in steps.items()}, flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
