"""What is known of SGLang without importing it: versions, switches, and the files that the plugin builds on."""

from __future__ import annotations

from hwbackends.engines.activation import Engine

ENGINE = Engine(
    name="sglang",
    title="SGLang",
    package="sglang",
    distributions=("sglang",),
    supported=">=0.5.23,<0.5.24",
    switch="HWBACKENDS_SGLANG",
    allowlist="SGLANG_PLUGINS",
    group="sglang.srt.plugins",
    relies_on=(
        "srt/layers/attention/attention_registry.py",
        "srt/layers/attention/hybrid_linear_attn_backend.py",
        "srt/layers/attention/linear/inkling_sconv_backend.py",
        "srt/layers/attention/linear/short_conv_backend.py",
        "srt/models/inkling_common/sconv.py",
        "srt/models/lfm2.py",
        "srt/models/lfm2_moe.py",
        "srt/plugins/hook_registry.py",
    ),
)
