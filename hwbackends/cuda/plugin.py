"""The plugin module of the `cuda` backend: its hooks under the contract's names. Hooks are imported when they are
first asked for, so that the backend can be probed where triton is not installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hwbackends.cuda import probe as device_probe
from hwbackends.hookspecs import ProbeResult, hookimpl

_HOMES = {
    "metadata": (
        "prepare_decode_metadata",
        "prepare_extend_metadata",
        "prepare_target_verify_metadata",
        "prepare_draft_extend_metadata",
    ),
    "conv": ("conv_decode", "conv_extend", "conv_target_verify", "conv_draft_extend"),
    "commit": ("update_mamba_state_after_mtp_verify", "clear_slots", "copy_slots"),
    "epilogue": ("fused_decode_add_rmsnorm", "fused_target_verify_add_rmsnorm"),
}


@hookimpl
def probe(device: str | None = None) -> ProbeResult:
    """See `hookspecs.probe`."""
    return device_probe.probe(device)


def __getattr__(name: str) -> Any:
    for home, hooks in _HOMES.items():
        if name in hooks:
            function = hookimpl(getattr(import_module(f"hwbackends.cuda.{home}"), name))
            globals()[name] = function
            return function
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
