"""vLLM's plugin: the entry point that vLLM calls in each of its processes. The rest is imported only if the plugin
takes part, because it imports vLLM."""

from __future__ import annotations

from hwbackends.engines.activation import activate as _activate
from hwbackends.engines.vllm.record import ENGINE


def activate() -> None:
    """Entry point `hwbackends` of the group `vllm.general_plugins`; may be called more than once in a process."""
    _activate(ENGINE, _install)


def _install() -> str:
    from hwbackends.engines.vllm.install import install

    return install()
