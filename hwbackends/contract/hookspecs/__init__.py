"""The hooks of a backend as readable Python: one module per contract (`step`, `conv`, `ssm`), in which the hook
`conv_decode` is the callable protocol `ConvDecode`, and here the mark that makes a plugin's function a hook's
implementation. Tests hold each module equal to its YAML file. Nothing imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import pluggy

PROJECT = "hwbackends"
hookimpl = pluggy.HookimplMarker(PROJECT)
_UNWRITTEN = f"{PROJECT}_unwritten"
_Function = TypeVar("_Function", bound=Callable[..., Any])


def unwritten(function: _Function) -> _Function:
    """Mark a hook that has its signature and nothing else yet: it counts as missing wherever hooks are counted."""
    setattr(function, _UNWRITTEN, True)
    return function


def is_unwritten(value: object) -> bool:
    """Whether a function carries the mark of `unwritten`."""
    return getattr(value, _UNWRITTEN, False) is True


class ProbeResult(NamedTuple):
    """Whether a backend can run here: yes or no, why in one sentence, and what the user can do about a no."""

    available: bool
    reason: str
    hint: str = ""


def protocol_name(hook: str) -> str:
    """The name of a hook's callable protocol: `ConvDecode` of `conv_decode`."""
    return "".join(word.capitalize() for word in hook.split("_"))
