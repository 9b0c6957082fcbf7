"""Serve a checkpoint with vLLM in a process of its own and print what it generated, as one line of JSON. Run as a
program: `python serve.py FOLDER OPTIONS`, OPTIONS being JSON: `engine`, arguments of `vllm.LLM`; `staggered`, whether a
request joins at every other step instead of all at once."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def accepted_counts() -> Counter[int]:
    """Counts what each verify step of each request kept of the step before, where the plugin runs in this process."""
    from hwbackends.engines.vllm import steps

    counts: Counter[int] = Counter()
    prepare = steps.Steps.prepare

    def counting(self: steps.Steps, metadata: Any, recorded: bool = False) -> steps.VllmStep:
        if metadata.num_decodes and metadata.num_accepted_tokens is not None:
            counts.update(metadata.num_accepted_tokens[: metadata.num_decodes].tolist())
        return prepare(self, metadata, recorded)

    steps.Steps.prepare = counting  # type: ignore[method-assign]
    return counts


def generate(engine: Any, requests: list[list[int]], sampling: Any, staggered: bool) -> list[list[int]]:
    """Tokens of every request; all requests share the engine's steps."""
    waiting, done, step = list(enumerate(requests)), dict[int, list[int]](), 0
    while waiting or engine.has_unfinished_requests():
        while waiting and (not staggered or step % 2 == 0):
            index, prompt = waiting.pop(0)
            engine.add_request(str(index), {"prompt_token_ids": prompt}, sampling)
            if staggered:
                break
        for output in engine.step():
            if output.finished:
                done[int(output.request_id)] = list(output.outputs[0].token_ids)
        step += 1
    return [done[index] for index in range(len(requests))]


def main(folder: Path, options: dict[str, Any]) -> None:
    """Serve every prompt of `expected.json`."""
    from vllm import LLM, SamplingParams

    expected = json.loads((folder / "expected.json").read_text())
    counts = accepted_counts()
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=7,
        gpu_memory_utilization=0.1,
        enable_prefix_caching=False,
        **options["engine"],
    )
    new = len(expected["tokens"][0])
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    tokens = generate(llm.llm_engine, expected["prompts"], sampling, options["staggered"])
    print("RESULT " + json.dumps({"tokens": tokens, "accepted": sorted(counts.items())}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
