"""Whether the `reference` backend can run here; asked before the plugin, which imports torch, is imported."""

from __future__ import annotations

from importlib.util import find_spec

from hwbackends.hookspecs import ProbeResult


def probe(device: str | None = None) -> ProbeResult:
    """Pure torch runs wherever torch runs."""
    if find_spec("torch") is None:
        return ProbeResult(False, "torch is not installed", "pip install 'hwbackends[reference]'")
    return ProbeResult(True, "pure torch, any device")
