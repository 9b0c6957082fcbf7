"""Writes the models of the runs: configurations, and a tokenizer of one word per token. models.py FOLDER"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

VOCAB = 512
INKLING: dict[str, Any] = {
    "architectures": ["InklingForConditionalGeneration"],
    "model_type": "inkling_mm_model",
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "inkling_model",
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "intermediate_size": 256,
        "dense_intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "d_rel": 16,
        "rel_extent": 1024,
        "local_layer_ids": [1, 3],
        "sliding_window_size": 128,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 64,
        "use_sconv": True,
        "sconv_kernel_size": 4,
        "dense_mlp_idx": 4,
        "use_embed_norm": True,
        "max_position_embeddings": 8192,
        "num_nextn_predict_layers": 3,
    },
    "audio_config": {"model_type": "inkling_audio_model", "decoder_dmodel": 256},
    "vision_config": {"model_type": "inkling_vision_model", "decoder_dmodel": 256},
    "mtp_config": {"n_layers": 3, "chain_hidden_post_norm": True},
    "eos_token_id": VOCAB - 1,
    "bos_token_id": 1,
    "max_position_embeddings": 8192,
}
LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "block_auto_adjust_ff_dim": False,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "conv_L_cache": 3,
    "conv_bias": False,
    "layer_types": ["full_attention", "conv", "conv", "conv"],  # the triton attention backend asks layer 0
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "eos_token_id": VOCAB - 1,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


def published(layers: int) -> dict[str, Any]:
    """Inkling's published layer sizes, with dense MLPs in every layer and a small vocabulary."""
    config = json.loads(json.dumps(INKLING))
    config["text_config"] |= {
        "hidden_size": 6144,
        "intermediate_size": 3072,
        "dense_intermediate_size": 24576,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "local_layer_ids": [i for i in range(layers) if i % 6 != 5],
        "sliding_window_size": 512,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 16,
        "swa_head_dim": 128,
        "dense_mlp_idx": layers,
    }
    return dict(config)


def tokenizer(folder: Path) -> None:
    """Word t17 is token 17."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token=f"t{VOCAB - 1}").save_pretrained(folder)


def main(folder: Path) -> None:
    for name, config in (("inkling", INKLING), ("lfm2", LFM2), ("published", published(6))):
        where = folder / name
        where.mkdir(parents=True, exist_ok=True)
        (where / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        tokenizer(where)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
