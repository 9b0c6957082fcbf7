"""Small random models of the two architectures, for the demo and the tests, and the stock answers to compare with.
Tokens are bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hwbackends.engines.transformers.models import check_version
from hwbackends.errors import UnsupportedError

TinyModel = Literal["inkling", "lfm2"]
TINY_MODELS: tuple[TinyModel, ...] = get_args(TinyModel)
BYTE_VOCABULARY = 256


def tiny_model(name: str, seed: int = 0, device: torch.device | str = "cpu", **changes: Any) -> Any:
    """A random float32 model in evaluation mode; the same weights for the same name, seed and changes.

    Args:
        name: `inkling` or `lfm2`.
        seed: seed of the weights.
        device: where the model goes after its weights were drawn on the CPU.
        changes: config fields to change.

    Raises:
        UnsupportedError: unknown name, or Transformers is not there or too old.
    """
    check_version()
    if name not in TINY_MODELS:
        raise UnsupportedError("tiny_model", "name", repr(name), f"one of {', '.join(TINY_MODELS)}")
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name == "inkling":
            from transformers.models.inkling.configuration_inkling import InklingTextConfig

            config: Any = InklingTextConfig(**{**_INKLING, **changes})
            # the default experts loop over experts on the host: one synchronisation per layer
            inkling: Any = transformers.InklingForCausalLM
            model: Any = inkling._from_config(config, experts_implementation="batched_mm")
        else:
            model = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**{**_LFM2, **changes}))
    return model.eval().to(device)


_INKLING: dict[str, Any] = {
    "vocab_size": BYTE_VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 1,
    "swa_head_dim": 16,
    "sliding_window_size": 24,
    "d_rel": 4,
    "rel_extent": 40,
    "log_scaling_n_floor": 32,
    "local_layer_ids": [0, 2],
    "conv_kernel_size": 4,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "logits_mup_width_multiplier": 1.0,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "num_mtp_layers": 2,
}
_LFM2: dict[str, Any] = {
    "vocab_size": BYTE_VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "conv_L_cache": 3,
    "conv_bias": True,
    "block_auto_adjust_ff_dim": False,
    # with a tied head a small random model soon repeats one token, which hides a wrong state
    "tie_word_embeddings": False,
    "full_attn_idxs": [1, 3],
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@dataclass(frozen=True, slots=True)
class StockAnswer:
    """What the stock model generates: tokens, and the logits [tokens, vocabulary] that each was taken from."""

    tokens: list[int]
    logits: Tensor

    def ties(self, margin: float) -> list[int]:
        """Steps whose two largest logits are closer than `margin`: there a rounding error may choose the token."""
        best = self.logits.topk(2, dim=-1).values
        return torch.nonzero(best[:, 0] - best[:, 1] < margin).flatten().tolist()


@torch.no_grad()
def stock_answer(model: Any, prompt: Sequence[int], max_new_tokens: int) -> StockAnswer:
    """Greedy `model.generate` of one prompt alone, with the cache that Transformers makes for it."""
    ids = torch.tensor([list(prompt)]).to(model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.stack([step[0] for step in output.logits]).float().cpu()
    return StockAnswer(output.sequences[0, len(prompt) :].tolist(), logits)
