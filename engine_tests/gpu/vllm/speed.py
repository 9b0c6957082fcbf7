"""vLLM's decode step and prefill, stock against plugin, on one GPU: an LFM2 with the published layer sizes of LFM2-1.2B
and random weights, CUDA graphs for decode. Both engines are up at once and are measured in turns, so that a drift of
the machine meets both.

    python speed.py OUT.json [--profile FOLDER] [--only stock,plugin] [--steps N] [--rounds N]
        [--batches 1,8,32,128] [--small]

`--small` takes a tiny model and few steps, to try the program on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SHAPES = ((1, 256), (8, 256), (32, 512), (128, 512))


def write_config(folder: Path, small: bool) -> None:
    """The configuration of LFM2-1.2B as published, or a tiny one; weights are drawn by vLLM."""
    from transformers import Lfm2Config

    kinds = ["conv", "conv", "full_attention"] * 2 + ["conv", "conv"] + ["full_attention", "conv"] * 4
    hidden, layers = (128, 3) if small else (2048, 16)
    config = Lfm2Config(
        vocab_size=65536,
        hidden_size=hidden,
        intermediate_size=256 if small else 12288,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=2 if small else 8,
        max_position_embeddings=128000,
        layer_types=kinds[:layers],
        conv_L_cache=3,
    )
    # vLLM reads names of the first releases beside Transformers' own
    config.conv_dim = config.conv_dim_out = config.block_dim = hidden
    config.conv_use_xavier_init = False
    config.architectures = ["Lfm2ForCausalLM"]
    config.torch_dtype = "bfloat16"
    config.save_pretrained(folder)


class Engine:
    """`engine.py` in a process of its own."""

    def __init__(self, name: str, folder: Path, options: dict[str, Any], log: Path) -> None:
        options = dict(options)
        environment = {**os.environ, "HWBACKENDS_VLLM": "1" if name.startswith("plugin") else "0"}
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | options.pop("environment", {})
        command = [sys.executable, str(HERE / "engine.py"), str(folder), json.dumps(options)]
        self.name, self._log = name, log
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), env=environment, text=True
        )

    def answer(self) -> dict[str, Any]:
        """Wait for its next line of results."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
                return found
        raise RuntimeError(f"{self.name} stopped:\n{self._log.read_text()[-3000:]}")

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request, one answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return {} if request["do"] == "stop" else self.answer()


COLUMNS = {
    "decode_ms": ("decode step, median, ms", ".3f"),
    "mean_ms": ("mean", ".3f"),
    "fastest_ms": ("fastest turn", ".3f"),
    "host_ms": ("host", ".3f"),
    "builder_ms": ("conv's builder", ".3f"),
    "collector_ms": ("Python's collector", ".3f"),
    "prefill_tokens_per_s": ("prefill, tokens/s", ",.0f"),
}


def table(rows: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The figures as Markdown; plugin / stock below 1 is the plugin's gain, for prefill above 1."""
    lines = ["| B (prompt) | engine | " + " | ".join(title for title, _ in COLUMNS.values()) + " |"]
    lines.append("| --- " * (len(COLUMNS) + 2) + "|")
    for at, first in enumerate(next(iter(rows.values()))):
        batch, prompt = first["batch"], first["prompt"]
        for name, found in rows.items():
            figures = [format(found[at][key], form) for key, (_, form) in COLUMNS.items()]
            lines.append(f"| {batch} ({prompt}) | {name} | " + " | ".join(figures) + " |")
        if {"stock", "plugin"} <= rows.keys():
            pairs = [(rows["plugin"][at][key], rows["stock"][at][key]) for key in COLUMNS]
            ratios = [f"{plugin / stock:.3f}" if stock else "-" for plugin, stock in pairs]
            lines.append(f"| {batch} ({prompt}) | plugin / stock | " + " | ".join(ratios) + " |")
    return lines


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--only", default="stock,plugin")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batches", default=",".join(str(batch) for batch, _ in SHAPES))
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    write_config(folder, given.small)
    options: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 8192,
    }
    if given.small:
        options["compilation_config"] = {"mode": 0}
    else:
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 32, 128]}
        options |= {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 12 << 30}
        options |= {"attention_backend": "TRITON_ATTN", "compilation_config": graphs}
    logs = given.out.parent
    logs.mkdir(parents=True, exist_ok=True)
    if given.profile is not None:
        given.profile.mkdir(parents=True, exist_ok=True)
    engines = [Engine(name, folder, options, logs / f"{name}.log") for name in given.only.split(",")]
    rows: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in engines}
    profiles: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in engines}
    for engine in engines:
        print(engine.name, engine.answer(), flush=True)
    for batch, prompt in (shape for shape in SHAPES if str(shape[0]) in given.batches.split(",")):
        rounds: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in engines}
        for turn in range(given.rounds + 1):
            for engine in engines if turn % 2 else engines[::-1]:
                steps = given.steps if turn else 8
                found = engine.ask(do="measure", batch=batch, prompt=prompt, steps=steps)
                if turn:  # the first compiles
                    rounds[engine.name].append(found)
        for engine in engines:
            rows[engine.name].append(merged(rounds[engine.name]))
            shown = {k: v for k, v in rows[engine.name][-1].items() if k != "turns"}
            print(engine.name, json.dumps(shown), flush=True)
        if given.profile is not None:
            for engine in engines:
                for prefill in (False, True) if batch == 32 else (False,):
                    at = given.profile / f"{engine.name}-{batch}{'-prefill' if prefill else ''}.txt"
                    asked = {"batch": batch, "prompt": prompt, "steps": 10, "prefill": prefill, "trace": str(at)}
                    profiles[engine.name].append(engine.ask(do="profile", **asked))
                    print(engine.name, "profile", json.dumps(profiles[engine.name][-1]), flush=True)
    for engine in engines:
        engine.ask(do="stop")
    print("\n".join(table(rows)))
    given.out.write_text(json.dumps({"rows": rows, "profiles": profiles}, indent=1))


def merged(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of every figure over an engine's turns, the fastest decode, the best prefill; and every turn."""
    out: dict[str, Any] = {"batch": turns[0]["batch"], "prompt": turns[0]["prompt"]}
    for key in ("decode_ms", "mean_ms", "host_ms", "builder_ms", "collector_ms"):
        out[key] = statistics.median(t[key] for t in turns)
    out["fastest_ms"] = min(t["decode_ms"] for t in turns)
    out["prefill_tokens_per_s"] = max(t["prefill_tokens_per_s"] for t in turns)
    out["turns"] = turns
    return out


if __name__ == "__main__":
    main()
