"""The hooks of a backend as readable Python: one module per contract (`step`, `conv`), in which the hook `conv_decode`
is the callable protocol `ConvDecode`, and here the mark that makes a plugin's function a hook's implementation. Tests
hold each module equal to its YAML file. Nothing imports torch."""

from __future__ import annotations

from typing import NamedTuple

import pluggy

PROJECT = "hwbackends"
hookimpl = pluggy.HookimplMarker(PROJECT)


class ProbeResult(NamedTuple):
    """Whether a backend can run here: yes or no, why in one sentence, and what the user can do about a no."""

    available: bool
    reason: str
    hint: str = ""


def protocol_name(hook: str) -> str:
    """The name of a hook's callable protocol: `ConvDecode` of `conv_decode`."""
    return "".join(word.capitalize() for word in hook.split("_"))
