"""SGLang's plugin: the entry point that SGLang calls in each of its processes. The rest is imported only if the plugin
takes part, because it imports SGLang."""

from __future__ import annotations

from hwbackends.engines.activation import activate as _activate
from hwbackends.engines.sglang.record import ENGINE


def activate() -> None:
    """Entry point `hwbackends` of the group `sglang.srt.plugins`."""
    _activate(ENGINE, _install)


def _install() -> str:
    from hwbackends.engines.sglang.install import install

    return install()
