"""vLLM on a CPU serves a tiny LFM2 with the tokens of Transformers, with the plugin; and where it does not without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from figures import FIGURES
from programs import answer_of

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
CHUNKED = {"max_num_batched_tokens": 16, "enable_chunked_prefill": True}
LOG_LINE = "hwbackends: vLLM"


def serve(checkpoint: Path, *, plugin: bool, staggered: bool = False, **engine: Any) -> tuple[dict[str, Any], str]:
    """What vLLM answered, and its log."""
    options = json.dumps({"engine": engine, "staggered": staggered})
    workers = engine.get("tensor_parallel_size", 1)
    return answer_of("serve.py", str(checkpoint), options, plugin=plugin, workers=workers)


def test_a_batch_with_chunked_prefill_gives_the_tokens_of_transformers(
    checkpoint: Path, expected: list[list[int]]
) -> None:
    answer, log = serve(checkpoint, plugin=True, staggered=True, **CHUNKED)
    assert answer["tokens"] == expected
    assert LOG_LINE in log


def test_speculative_decoding_gives_the_tokens_of_transformers_for_every_accepted_count(
    checkpoint: Path, expected: list[list[int]]
) -> None:
    answer, log = serve(checkpoint, plugin=True, staggered=True, speculative_config=NGRAM)
    assert answer["tokens"] == expected
    assert {kept for kept, _ in answer["accepted"]} == {1, 2, 3, 4}
    FIGURES.append(f"verify steps by kept tokens, the target's own counted: {dict(answer['accepted'])}")
    assert LOG_LINE in log


def test_tensor_parallelism_over_two_workers_gives_the_tokens_of_transformers(
    checkpoint: Path, expected: list[list[int]]
) -> None:
    answer, log = serve(checkpoint, plugin=True, tensor_parallel_size=2, speculative_config=NGRAM)
    assert answer["tokens"] == expected
    assert log.count(LOG_LINE) >= 2, "every worker says that the plugin serves it"


def test_stock_vllm_serves_the_same_batch_without_speculation(checkpoint: Path, expected: list[list[int]]) -> None:
    answer, log = serve(checkpoint, plugin=False, **CHUNKED)
    assert answer["tokens"] == expected
    assert LOG_LINE not in log


def test_stock_vllm_on_a_cpu_loses_the_conv_state_of_rejected_drafts(
    checkpoint: Path, expected: list[list[int]]
) -> None:
    """The fault that the plugin repairs; once vLLM has repaired it, this fails and the page about it must change."""
    answer, _ = serve(checkpoint, plugin=False, staggered=True, speculative_config=NGRAM)
    wrong = [index for index, tokens in enumerate(answer["tokens"]) if tokens != expected[index]]
    FIGURES.append(f"stock vLLM, n-gram drafts: {len(wrong)} of {len(expected)} requests differ from Transformers")
    assert wrong
