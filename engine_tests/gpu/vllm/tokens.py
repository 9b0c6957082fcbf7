"""vLLM over the tiny LFM2, stock and with the plugin: tokens against Transformers', logprobs against each other, and
whose convs ran. Every engine is a process of its own; all of them are up at once.

    python tokens.py FOLDER OUT.json [--graphs]      FOLDER: made by tiny_lfm2.py; --graphs: on a GPU
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from speed import Engine

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 7,
    "max_num_batched_tokens": 16,
    "enable_chunked_prefill": True,
    "count_convs": True,
}


def variants(graphs: bool) -> dict[str, dict[str, Any]]:
    """Engines to compare, by name; a name that begins with `plugin` has it on."""
    if not graphs:
        eager = OPTIONS | {"compilation_config": {"mode": 0}}
        return {"stock": eager, "plugin": eager, "plugin, n-gram drafts": eager | {"speculative_config": NGRAM}}
    base = OPTIONS | {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.05}
    base["kv_cache_memory_bytes"] = 1 << 28

    def captured(*sizes: int) -> dict[str, Any]:
        full = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list(sizes)}
        return base | {"compilation_config": full}

    return {
        "stock": captured(1, 2, 4, 7),
        "plugin": captured(1, 2, 4, 7),
        "plugin, batches above the captured sizes": captured(1, 2),
        "plugin, no graphs": base | {"enforce_eager": True},
        "plugin, n-gram drafts": captured(4, 8, 16, 28) | {"speculative_config": NGRAM},
        "plugin, n-gram drafts, no graphs": base | {"enforce_eager": True, "speculative_config": NGRAM},
        "plugin, vLLM's first model runner": captured(1, 2, 4, 7) | {"environment": {"VLLM_USE_V2_MODEL_RUNNER": "0"}},
    }


def main() -> None:
    """Run and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--graphs", action="store_true")
    given = parser.parse_args()
    expected = json.loads((given.folder / "expected.json").read_text())
    engines = []
    for at, (name, options) in enumerate(variants(given.graphs).items()):
        log = given.out.parent / f"tokens-{at}.log"
        engines.append(Engine(name, given.folder, options, log))
    found: dict[str, Any] = {}
    for engine in engines:
        try:
            engine.answer()
            answer = engine.ask(do="generate", prompts=expected["prompts"], new=len(expected["tokens"][0]))
            engine.ask(do="stop")
        except RuntimeError as error:  # the others are still worth knowing
            found[engine.name] = {"failed": str(error)[-1500:]}
            print(engine.name, "failed:", str(error)[-600:], flush=True)
            continue
        equal = sum(a == b for a, b in zip(answer["tokens"], expected["tokens"], strict=True))
        found[engine.name] = {"equal": equal, "of": len(expected["tokens"]), **answer}
        distance = ""
        if "logprobs" in found.get("stock", {}) and equal == len(expected["tokens"]):
            pairs = zip(answer["logprobs"], found["stock"]["logprobs"], strict=True)
            furthest = max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))
            found[engine.name]["furthest logprob from stock"] = furthest
            distance = f"; furthest logprob from stock's {furthest:.2g}"
        print(f"{engine.name}: {equal} of {len(expected['tokens'])} equal Transformers'{distance};", answer["calls"])
    given.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
