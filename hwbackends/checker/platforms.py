"""Hardware names in paths, class names and conditions: which code can meet which at run time."""

from __future__ import annotations

import re
from functools import lru_cache

from .model import Expr

_ALIASES = {
    "npu": "npu", "ascend": "npu", "hip": "hip", "rocm": "hip", "amd": "hip", "xpu": "xpu", "intel": "xpu",
    "cpu": "cpu", "cuda": "cuda", "nvidia": "cuda", "musa": "musa", "mps": "mps", "mlx": "mps", "tpu": "tpu",
    "hpu": "hpu", "gaudi": "hpu", "gcu": "gcu", "mlu": "mlu", "maca": "maca",
}  # fmt: skip
_FLAG = re.compile(
    r"^_*(?:is|on|use|has|running_on)?_*(npu|ascend|hip|rocm|amd|xpu|intel|cpu|cuda|nvidia|musa|mps|tpu|hpu|gaudi)"
    r"(?:_(?:available|platform|device|backend|alike|gpu))*$"
)
_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


@lru_cache(maxsize=65536)
def of_definition(parts: tuple[str, ...], class_name: str) -> str | None:
    """The hardware that a definition is written for, from its folder, file and class name; None for shared code."""
    for part in reversed(parts[-6:]):
        for word in part.split("_"):
            # "cuda" names the code that other platforms inherit; "cpu" is a word of its own ("cpu_offload").
            if word in _ALIASES and word != "cuda" and (word != "cpu" or part == "cpu"):
                return _ALIASES[word]
    for word in _WORD.findall(class_name.replace("_", " ")):
        name = word.lower()
        if name in _ALIASES and name not in ("cpu", "cuda"):
            return _ALIASES[name]
    return None


def of_method(name: str) -> str | None:
    """The hardware that a method is named after: ``forward_npu``; None for shared code."""
    return _ALIASES.get(name.removeprefix("forward_")) if name.startswith("forward_") else None


PLATFORM_METHODS = tuple(f"forward_{word}" for word in (*_ALIASES, "native"))


def of_condition(test: Expr | None) -> frozenset[str]:
    """The hardware that a test asks for, as ``is_npu()``, ``_is_hip`` or ``device == "xpu"``; empty for none."""
    if test is None:
        return frozenset()
    if test[0] == "c":
        return of_condition(test[1]) if not test[2] else frozenset()
    if test[0] in "na":
        name = str(test[1] if test[0] == "n" else test[2])
        match = _FLAG.match(name)
        if match is None:
            return frozenset()
        found = {_ALIASES[match.group(1)]}
        return frozenset(found | {"hip", "musa"} if name.endswith("alike") else found)
    if test[0] == "V":
        parts = [of_condition(part) for part in test[1]]
        return frozenset().union(*parts) if all(parts) else frozenset()
    if test[0] == "=" and test[1] == "Eq" and test[3][0] == "s":
        return frozenset({_ALIASES[test[3][1]]}) if test[3][1] in _ALIASES else frozenset()
    return frozenset()


def can_meet(platform: str | None, conditions: tuple[tuple[Expr | None, bool], ...]) -> bool:
    """Whether code of ``platform`` can run under these conditions."""
    if platform is None:
        return True
    for test, holds in conditions:
        asked = of_condition(test)
        if asked and (platform in asked) != holds:
            return False
    return True
