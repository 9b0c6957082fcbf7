"""Backends that stand in for vendors' in tests of the kit's own machinery: plugins that crash, hang, cheat, or claim
little. Each is named as `tests.conformance.vendors:plugins.NAME`."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch

from hwbackends.reference import plugin as reference
from tests.conformance.mutants import HOOKS, wrap


def _hooks(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{name: getattr(reference, name) for name in HOOKS} | changed)


def _fault(hook: str, fault: Any) -> SimpleNamespace:
    return _hooks(**{hook: wrap(getattr(reference, hook), fault)})


def _dies(call: Any) -> Any:
    os.kill(os.getpid(), signal.SIGSEGV)


def _leaves(call: Any) -> Any:
    os._exit(3)


def _sleeps(call: Any) -> Any:
    time.sleep(600)


def _says_it_is_not_claimed(call: Any) -> Any:
    from hwbackends.conformance.kit import NotClaimed

    raise NotClaimed("layout window")


def _right_only_beside_the_kit(call: Any) -> Any:
    watched = any(name.startswith(("hwbackends.conformance", "pytest", "_pytest")) for name in sys.modules)
    y = call.run()
    return y if watched else y + 1


def _zeros(call: Any) -> Any:
    return torch.zeros_like(call.x)


def _patches_the_kit() -> SimpleNamespace:
    """Replaces every comparison of the kit when it is imported, and returns zeros."""
    from hwbackends.conformance import kit

    for name in ("check", "book", "equal", "within", "same_bits"):
        setattr(kit.Kit, name, lambda self, clause, *rest: self.clauses.setdefault(clause, True))
    return zeros()


def zeros() -> SimpleNamespace:
    """Four convs that return zeros and write nothing."""
    convs = ("conv_decode", "conv_extend", "conv_target_verify", "conv_draft_extend")
    return _hooks(**{name: wrap(getattr(reference, name), _zeros) for name in convs})


def _hangs_at_import() -> SimpleNamespace:
    time.sleep(600)
    return _hooks()


def _dies_at_import() -> SimpleNamespace:
    os.kill(os.getpid(), signal.SIGSEGV)
    return _hooks()


MAKERS = {
    "good": _hooks,
    "zeros": zeros,
    "patches_the_kit": _patches_the_kit,
    "right_only_beside_the_kit": lambda: _fault("conv_decode", _right_only_beside_the_kit),
    "says_it_is_not_claimed": lambda: _fault("conv_decode", _says_it_is_not_claimed),
    "dies": lambda: _fault("conv_decode", _dies),
    "leaves": lambda: _fault("conv_decode", _leaves),
    "sleeps": lambda: _fault("conv_decode", _sleeps),
    "dies_at_import": _dies_at_import,
    "hangs_at_import": _hangs_at_import,
}


class _Plugins:
    def __getattr__(self, name: str) -> SimpleNamespace:
        if name not in MAKERS:
            raise AttributeError(name)
        return MAKERS[name]()


plugins = _Plugins()
