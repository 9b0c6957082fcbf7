"""SGLang's plugin: the entry point that SGLang calls in each of its processes. The rest is imported only if the plugin
takes part, because it imports SGLang."""

from __future__ import annotations

from hwbackends.engines.activation import SGLANG
from hwbackends.engines.activation import activate as _activate


def activate() -> None:
    """Entry point `hwbackends` of the group `sglang.srt.plugins`."""
    _activate(SGLANG, _install)


def _install() -> str:
    from hwbackends.engines.sglang.install import install

    return install()
