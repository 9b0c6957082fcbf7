"""Serve a checkpoint with vLLM and watch, from its own model runner's calls, how the plugin's builder and convs go
through each step. Run as a program: `python walk.py FOLDER`; prints one line of JSON.

- Every step of decodes alone is also described by vLLM's own builder, over the same `CommonAttentionMetadata`; what
  both say is compared.
- How often a step is prepared, and how often before its first conv has run.
- Recorded steps: metadata made by the model runner's own method, padded to a captured size as for a full graph,
  recorded once with `hwbackends.testing` and replayed in later steps, when other requests have come and others gone;
  the same step is then run from Python over the same caches.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from serve import generate
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadataBuilder
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from hwbackends.engines.vllm.short_conv import HwBackendsShortConvBuilder, HwBackendsShortConvMetadata
from hwbackends.testing.recorder import CpuGraph

CAPTURED = 7
COUNTS = ("num_prefills", "num_prefill_tokens", "num_decodes", "num_decode_tokens", "num_reqs")
seen: Counter[str] = Counter()


def same_as_stock(builder: HwBackendsShortConvBuilder, common: Any, kwargs: Any, ours: Any) -> bool:
    """Whether vLLM's own builder says the same of a step of decodes."""
    stock = ShortConvAttentionMetadataBuilder.build(builder, 0, common, **kwargs)
    blocks = torch.equal(stock.state_indices_tensor_d[:, :1], ours.state_indices_tensor_d[:, :1])
    prefills = stock.state_indices_tensor_p is None or not stock.state_indices_tensor_p.numel()
    return blocks and prefills and all(getattr(stock, name) == getattr(ours, name) for name in COUNTS)


def watch_builder() -> None:
    """Compare and count what the builder makes."""
    build = HwBackendsShortConvBuilder.build

    def watched(self: Any, prefix: int, common: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.steps.resolutions
        ours = build(self, prefix, common, *args, **kwargs)
        seen["built"] += 1
        seen["prepared by the builder"] += self.steps.resolutions - before
        if not ours.num_prefills:
            seen["decodes"] += 1
            seen["decodes from the table"] += (
                ours.state_indices_tensor_d.data_ptr() == common.block_table_tensor.data_ptr()
            )
            seen["decodes as stock"] += same_as_stock(self, common, kwargs, ours)
        return ours

    HwBackendsShortConvBuilder.build = watched  # type: ignore[method-assign]
    prepared = HwBackendsShortConvBuilder.prepared

    def counted(self: Any, metadata: Any) -> Any:
        before = self.steps.resolutions
        step = prepared(self, metadata)
        seen["prepared"] += 1
        seen["launches"] += self.steps.resolutions - before
        seen["halves"] += len(step.halves)
        return step

    HwBackendsShortConvBuilder.prepared = counted  # type: ignore[method-assign]


class Recorded:
    """The convs of one cache group at the captured size, recorded over vLLM's own tensors."""

    def __init__(self, metadata: HwBackendsShortConvMetadata) -> None:
        group: Any = metadata.group
        self.layers = {name: group._layers[name] for name in group._names}
        self.x = torch.zeros(CAPTURED, next(iter(self.layers.values())).conv_dim)
        self.answers: dict[str, Tensor] = {}
        self.run(metadata)  # as vLLM warms up before it captures
        metadata.step = None
        self._graph = CpuGraph()
        with self._graph.capture():
            self.answers = self.run(metadata)

    def run(self, metadata: HwBackendsShortConvMetadata) -> dict[str, Tensor]:
        """The convs of every layer, the first of which prepares the step."""
        answers = {}
        for name, layer in self.layers.items():
            group: Any = metadata.group
            step = metadata.step or group.prepared(metadata)
            weight = layer.conv.weight.view(layer.conv.weight.size(0), layer.conv.weight.size(2))
            answers[name] = step.conv(name, self.x, weight, layer.conv.bias)
        return answers

    def caches(self) -> list[Tensor]:
        """The layers' states, copied."""
        return [layer.state_rows().clone() for layer in self.layers.values()]

    def restore(self, caches: list[Tensor]) -> None:
        """Put copied states back."""
        for layer, cache in zip(self.layers.values(), caches, strict=True):
            layer.state_rows().copy_(cache)

    def compare(self, metadata: HwBackendsShortConvMetadata, live: int) -> Counter[str]:
        """Replay this step, run it from Python over the same states, and leave everything as it was."""
        before = self.caches()
        self.x[:live] = torch.randn(live, self.x.shape[1])
        self._graph.replay()
        answers, after = {n: y.clone() for n, y in self.answers.items()}, self.caches()
        self.restore(before)
        expected = self.run(metadata)
        expected_after = self.caches()
        self.restore(before)
        metadata.step = None
        found: Counter[str] = Counter()
        found["replays"] = 1
        found["replayed answers"] = all(torch.equal(answers[n][:live], expected[n][:live]) for n in answers)
        found["replayed padding"] = not any(answers[n][live:].any() for n in answers)
        found["replayed states"] = all(torch.equal(a, b) for a, b in zip(after, expected_after, strict=True))
        found["states moved"] = any(not torch.equal(a, b) for a, b in zip(after, before, strict=True))
        return found


def watch_runner() -> None:
    """In every step of one token per request, let the model runner make the metadata of a full graph too, and replay a
    recorded one; new prompts of one token are such steps, too."""
    build = GPUModelRunner._build_attention_metadata
    recorded: list[Recorded] = []
    tables: set[str] = set()

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        made, live = build(self, *args, **kwargs), kwargs["num_reqs"]
        if kwargs["max_query_len"] != 1 or live > CAPTURED:
            return made
        counts = seen.copy()
        groups = own_metadata(made)
        if not recorded and not groups[0].num_prefills:
            padded = kwargs | {"num_reqs_padded": CAPTURED, "num_tokens_padded": CAPTURED}
            recorded.extend(map(Recorded, own_metadata(build(self, *args, **padded, for_cudagraph_capture=True))))
        for graph, metadata in zip(recorded, groups, strict=False):
            tables.add(str(metadata.state_indices_tensor_d[:, 0].tolist()))
            # as the runner does before it replays a graph that is larger than the step
            build(self, *args, **kwargs | {"num_reqs_padded": CAPTURED, "num_tokens_padded": CAPTURED})
            found = graph.compare(metadata, live)
            counts.update(found)
            counts["new prompts replayed"] += metadata.num_prefills > 0
        seen.clear()
        seen.update(counts)
        seen["tables"] = len(tables)
        return made

    GPUModelRunner._build_attention_metadata = watched  # type: ignore[method-assign]


def own_metadata(made: Any) -> list[HwBackendsShortConvMetadata]:
    """The plugin's metadata in what the runner made, one per cache group."""
    found = {id(m): m for m in made[0].values() if isinstance(m, HwBackendsShortConvMetadata)}
    return list(found.values())


def main(folder: Path) -> None:
    """Serve every prompt of `expected.json`, and one more, while watching."""
    expected = json.loads((folder / "expected.json").read_text())
    watch_builder()
    watch_runner()
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=CAPTURED,
        enable_prefix_caching=False,
        compilation_config={"mode": 0},
        max_num_batched_tokens=16,
    )
    seen.clear()
    sampling = SamplingParams(temperature=0, max_tokens=len(expected["tokens"][0]), ignore_eos=True, detokenize=False)
    late = [[9]]  # joins when all the others decode
    generate(llm.llm_engine, expected["prompts"] + late, sampling, staggered=True)
    print("RESULT " + json.dumps({"seen": dict(seen)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
