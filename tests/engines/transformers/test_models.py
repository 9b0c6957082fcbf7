"""Which models the adapter serves, which it refuses by name, and how it puts its convs into them."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from hwbackends.conv.state import ConvStream
from hwbackends.engines import transformers as adapter
from hwbackends.engines.transformers import models, patches
from hwbackends.engines.transformers.tiny import stock_answer, tiny_model
from hwbackends.errors import DeviceError, UnsupportedError
from tests.engines.transformers.scenes import PROMPTS, answer, make_runner
from tests.engines.transformers.scenes import models as both_models


def test_public_names_are_imported_on_first_use() -> None:
    code = (
        "import sys, hwbackends.engines.transformers as t; light = not {'torch', 'transformers'} & set(sys.modules); "
        "print(light, all(hasattr(t, name) for name in t.__all__), hasattr(t, 'nothing'))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "False"]
    assert adapter.PackedRunner.__name__ == "PackedRunner"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        adapter.nothing  # noqa: B018


def test_inkling_has_four_streams_per_layer_and_two_sizes_of_k_and_v() -> None:
    spec = models.describe(tiny_model("inkling"))
    assert spec.streams == (
        ConvStream("k", 24),
        ConvStream("v", 24),
        ConvStream("swa_k", 16),
        ConvStream("swa_v", 16),
        ConvStream("attn", 48),
        ConvStream("mlp", 48),
    )
    assert [spec.stream_names[0, index] for index in range(4)] == ["swa_k", "swa_v", "attn", "mlp"]
    assert [spec.stream_names[1, index] for index in range(4)] == ["k", "v", "attn", "mlp"]
    assert spec.attention[0] == models.AttentionShape(1, 16, 24)
    assert spec.attention[1] == models.AttentionShape(2, 12, None)
    assert (spec.width, spec.conv_layers) == (4, (0, 1, 2))


def test_inkling_with_one_size_of_k_and_v_has_one_stream_each() -> None:
    spec = models.describe(tiny_model("inkling", swa_num_key_value_heads=2, swa_head_dim=12))
    assert [stream.name for stream in spec.streams] == ["k", "v", "attn", "mlp"]


def test_lfm2_has_one_stream_in_its_conv_layers() -> None:
    spec = models.describe(tiny_model("lfm2"))
    assert spec.streams == (ConvStream("conv", 48),)
    assert (spec.width, spec.conv_layers, sorted(spec.attention)) == (3, (0, 2, 4), [1, 3])


def test_state_has_the_dtype_of_the_activations_not_of_the_conv_weights() -> None:
    model = tiny_model("inkling").to(torch.bfloat16)
    for layer in model.model.layers:
        layer.attn_sconv.float()
    assert {stream.dtype for stream in models.describe(model).streams} == {torch.bfloat16}


def test_other_models_are_refused_by_name() -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with pytest.raises(
        UnsupportedError, match="got LlamaForCausalLM, wanted one of InklingForCausalLM, Lfm2ForCausalLM"
    ):
        models.describe(transformers.LlamaForCausalLM(config))
    with pytest.raises(UnsupportedError, match="patch_model"):
        patches.patch_model(nn.Linear(3, 5))


def test_a_model_without_convs_is_refused() -> None:
    model = tiny_model("lfm2", full_attn_idxs=[0, 1, 2, 3, 4])
    with pytest.raises(UnsupportedError, match="no conv layer"):
        models.describe(model)


@pytest.mark.parametrize("version", ["5.16.1", "4.57.6", "6.0.0"])
def test_other_releases_of_transformers_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.metadata, "version", lambda name: version)
    with pytest.raises(UnsupportedError, match=f"got {version}, wanted transformers >= 5.17, < 6"):
        models.check_version()


def test_a_missing_transformers_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(models.metadata, "version", missing)
    with pytest.raises(UnsupportedError, match=r"not installed.*pip install 'hwbackends\[transformers\]'"):
        models.check_version()


def test_older_releases_name_the_cache_otherwise() -> None:
    class Older(nn.Module):
        def forward(self, input_ids: Any, past_key_values: Any = None) -> None: ...

    assert models.cache_argument(Older()) == "past_key_values"
    assert models.cache_argument(tiny_model("lfm2")) == "cache"


@both_models
def test_a_patched_model_is_the_stock_model_for_a_stock_cache(name: str) -> None:
    model = tiny_model(name, seed=3)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    count = patches.patch_model(model)
    assert count == {"inkling": 12, "lfm2": 3}[name]
    assert patches.patch_model(model) == count, "patching twice changes nothing"
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    prompt = PROMPTS[5]
    assert stock_answer(model, prompt, 9).tokens == answer(name, prompt).tokens[:9]


@both_models
def test_a_patched_conv_accepts_the_older_name_of_the_cache(name: str) -> None:
    model = tiny_model(name, seed=3)
    patches.patch_model(model)

    class Owner:
        def conv(
            self, layer: int, index: int, x: torch.Tensor, w: torch.Tensor, b: Any, residual: bool
        ) -> torch.Tensor:
            return x + 1

    conv = model.model.layers[0].mlp_sconv if name == "inkling" else model.model.layers[0].conv
    x = torch.zeros(1, 5, 48)
    assert torch.equal(conv(x, past_key_values=Owner()), conv(x, cache=Owner()))


@both_models
def test_a_patched_model_is_saved_copied_and_pickled(name: str, tmp_path: Path) -> None:
    model = tiny_model(name, seed=3)
    patches.patch_model(model)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert other is not model
        assert stock_answer(other, PROMPTS[5], 5).tokens == answer(name, PROMPTS[5]).tokens[:5]
        runner = make_runner(name, model=other, recorded=False)
        assert runner.add(PROMPTS[5], 9).result() == answer(name, PROMPTS[5]).tokens[:9]


@both_models
def test_modules_with_accelerate_hooks_are_served_and_offloaded_ones_refused(name: str) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = tiny_model(name, seed=3)
    for module in list(model.modules()):
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu"))
    runner = make_runner(name, model=model, recorded=False)
    assert runner.add(PROMPTS[5], 9).result() == answer(name, PROMPTS[5]).tokens[:9]
    accelerate = pytest.importorskip("accelerate")
    offloaded = accelerate.cpu_offload(tiny_model(name, seed=3), execution_device=torch.device("cpu"))
    with pytest.raises(DeviceError, match=r"offloads, wanted a model that lies whole on one device; load it without"):
        make_runner(name, model=offloaded, recorded=False)


def test_forms_of_a_model_say_what_to_pass_instead() -> None:
    model = tiny_model("lfm2")
    held = [
        (torch.compile(model), r"OptimizedModule, .*pass model\._orig_mod"),
        (nn.DataParallel(model), r"DataParallel, .*pass model\.module"),
        (model.model, "Lfm2Model, .*pass the Lfm2ForCausalLM that holds it"),
    ]
    for given, message in held:
        with pytest.raises(UnsupportedError, match=message):
            models.describe(given)
    model.model.layers[1].compile()
    with pytest.raises(UnsupportedError, match=r"a compiled model\.layers\.1, wanted none"):
        models.describe(model)


def test_weights_that_lie_elsewhere_are_refused() -> None:
    model = tiny_model("lfm2")
    model.lm_head.to("meta")
    with pytest.raises(DeviceError, match="weights that are not loaded"):
        models.describe(model)


def test_a_multimodal_model_gives_its_language_model() -> None:
    text = tiny_model("lfm2", seed=3)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Lfm2VlConfig(text_config=text.config.to_dict(), vision_config=vision)
    outer = transformers.Lfm2VlForConditionalGeneration(config).eval()
    outer.model.language_model, outer.lm_head = text.model, text.lm_head
    with pytest.raises(UnsupportedError, match=r"pass text_model\(model\)"):
        models.describe(outer)
    runner = make_runner("lfm2", model=adapter.text_model(outer), recorded=False)
    assert runner.add(PROMPTS[5], 9).result() == answer("lfm2", PROMPTS[5]).tokens[:9]
    with pytest.raises(UnsupportedError, match="text_model: model: got Lfm2ForCausalLM"):
        adapter.text_model(text)


@both_models
def test_from_pretrained_builds_our_convs_while_they_are_registered(name: str, tmp_path: Path) -> None:
    stock = tiny_model(name, seed=3)
    stock.save_pretrained(tmp_path)
    patches.register()
    try:
        loaded = type(stock).from_pretrained(tmp_path).eval()
    finally:
        patches.unregister()
    ours = set(patches.patched_classes().values())
    kinds = [type(module) for module in loaded.modules() if type(module).__name__.endswith(("Attention", "ShortConv"))]
    assert kinds
    assert set(kinds) <= ours
    assert stock_answer(loaded, PROMPTS[4], 5).tokens == answer(name, PROMPTS[4]).tokens[:5]
    again = type(stock).from_pretrained(tmp_path)
    assert not any(type(module) in ours for module in again.modules())


def test_a_release_without_patching_says_what_to_do_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.monkey_patching", None)
    monkeypatch.delattr(transformers, "monkey_patching", raising=False)
    with pytest.raises(UnsupportedError, match="call patch_model"):
        patches.register()


def test_an_unknown_tiny_model_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="got 'gpt', wanted one of inkling, lfm2"):
        tiny_model("gpt")
