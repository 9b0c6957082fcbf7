"""One engine over a small model: greedy tokens and logprobs of prompts of 1 to 300 tokens, in batches below, at and
above the captured sizes, with chunked prefill; the same prompts again, longer, out of the prefix cache; and alone.

    serve.py NAME FOLDER     NAME is SIDE_MODEL_MODE_GRAPHS, such as ours_inkling_mtp_graph or stock_lfm2_plain_eager
"""

from __future__ import annotations

import glob
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

LENGTHS = [1, 2, 3, 5, 17, 64, 65, 90, 128, 200, 300]
NEW = 40
CAPTURED = 8
"""Largest captured batch; a batch of every prompt is above it."""


def prompts(lengths: list[int]) -> list[list[int]]:
    """Token ids of the vocabulary of 512, none of them the end."""
    return [[(7 * i + 3 * j + j * j) % 500 + 2 for j in range(n)] for i, n in enumerate(lengths)]


def options(name: str) -> dict[str, Any]:
    """Arguments of `sglang.Engine`: what a machine without every kernel package can run, the same on both sides."""
    _, model, mode, graphs = name.split("_")
    found: dict[str, Any] = {
        "model_path": os.path.join(os.environ["WORK"], "models", model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_prefill_cuda_graph": True,  # the triton attention backend fails in full prefill graphs, stock too
        "disable_decode_cuda_graph": graphs == "eager",
        "cuda_graph_max_bs_decode": CAPTURED,
        "chunked_prefill_size": 128,
        "max_running_requests": 12,
        "context_length": 2048,
        "random_seed": 1,
        "mem_fraction_static": 0.5,
        "max_mamba_cache_size": 120,
        "max_total_tokens": 32768,
        "skip_server_warmup": True,
        "log_level": "info",
    }
    if model == "lfm2":  # refused by the name of the one option; each phase's own backend is not
        del found["attention_backend"]
        found |= {"prefill_attention_backend": "triton", "decode_attention_backend": "triton"}
    if mode == "mtp":
        found |= {
            "speculative_algorithm": "NEXTN",
            "enable_multi_layer_eagle": True,
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 4,
        }
    return found


def generate(engine: Any, ids: list[list[int]], count: int) -> list[dict[str, Any]]:
    params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    answers = engine.generate(input_ids=ids, sampling_params=params, return_logprob=True)
    return [
        {
            "ids": a["output_ids"],
            "logprobs": [x[0] for x in a["meta_info"].get("output_token_logprobs") or []],
            "cached": a["meta_info"].get("cached_tokens"),
        }
        for a in answers
    ]


def probes(path: str) -> dict[str, Any]:
    """What the probe plugin wrote in every process of the engine."""
    total: dict[str, Any] = {"counts": {}, "accepted": {}}
    for file in glob.glob(f"{path}.*"):
        found = json.loads(Path(file).read_text())
        for part, sums in total.items():
            for key, value in found[part].items():
                sums[key] = sums.get(key, 0) + value
    return total


def main(name: str, out: Path) -> None:
    import sglang

    start = time.time()
    engine = sglang.Engine(**options(name))
    result: dict[str, Any] = {"name": name, "start_s": time.time() - start}
    every = prompts(LENGTHS)
    result["above"] = generate(engine, every, NEW)
    result["again"] = generate(engine, every, NEW)
    longer = [p + a["ids"] + [9, 11] for p, a in zip(every, result["above"], strict=True)]
    result["longer"] = generate(engine, longer, NEW)
    result["at"] = generate(engine, prompts([40 + i for i in range(CAPTURED)]), NEW)
    result["below"] = generate(engine, every[3:6], NEW)
    result["alone"] = [row for i in (0, 4, 10) for row in generate(engine, every[i : i + 1], NEW)]
    time.sleep(1)
    result |= probes(os.environ["PROBE"])
    (out / f"{name}.json").write_text(json.dumps(result))
    engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
