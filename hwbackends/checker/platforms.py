"""Hardware names in paths, class names and conditions: which code can meet which at run time."""

from __future__ import annotations

import re
from functools import lru_cache

from .model import Expr

_ALIASES = {
    "npu": "npu", "ascend": "npu", "hip": "hip", "rocm": "hip", "amd": "hip", "xpu": "xpu", "intel": "xpu",
    "cpu": "cpu", "cuda": "cuda", "nvidia": "cuda", "musa": "musa", "mps": "mps", "mlx": "mps", "tpu": "tpu",
    "hpu": "hpu", "gaudi": "hpu", "habana": "hpu", "gcu": "gcu", "enflame": "gcu", "mlu": "mlu", "cambricon": "mlu",
    "maca": "maca", "metax": "maca", "dcu": "hip", "mthreads": "musa", "neuron": "neuron", "trainium": "neuron",
    "xla": "tpu", "kunlun": "kunlun", "corex": "corex", "iluvatar": "corex", "vulkan": "vulkan", "metal": "mps",
}  # fmt: skip
_FLAG = re.compile(
    rf"^_*(?:is|on|use|has|running_on|supports)?_*(?:torch_)?({'|'.join(sorted(_ALIASES, key=len, reverse=True))})"
    r"(?:_(?:available|platform|device|backend|alike|gpu|enabled|supported|installed))*$",
    re.I,
)
# What a library says about itself: ``torch.npu.is_available()``, ``torch.backends.mps.is_built()``.
_AVAILABLE = frozenset({"is_available", "is_built", "is_initialized", "available"})
# Words that stand in paths and class names for other things than hardware.
_PLAIN_WORDS = frozenset({"cuda", "xla", "metal", "vulkan", "neuron"})
_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


@lru_cache(maxsize=65536)
def of_definition(parts: tuple[str, ...], class_name: str) -> str | None:
    """The hardware that a definition is written for, from its folder, file and class name; None for shared code."""
    for part in reversed(parts[-6:]):
        for word in part.split("_"):
            # "cuda" names the code that other platforms inherit; "cpu" is a word of its own ("cpu_offload").
            if word in _ALIASES and word not in _PLAIN_WORDS and (word != "cpu" or part == "cpu"):
                return _ALIASES[word]
    for word in _WORD.findall(class_name.replace("_", " ")):
        name = word.lower()
        if name in _ALIASES and name != "cpu" and name not in _PLAIN_WORDS:
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
        if name in _AVAILABLE and test[0] == "a":
            name = str(test[1][-1])
        match = _FLAG.match(name)
        if match is None:
            return frozenset()
        found = {_ALIASES[match.group(1).lower()]}
        return frozenset(found | {"hip", "musa"} if name.lower().endswith("alike") else found)
    if test[0] == "V":
        parts = [of_condition(part) for part in test[1]]
        return frozenset().union(*parts) if all(parts) else frozenset()
    if test[0] == "=" and test[1] in ("Eq", "In"):
        named = test[3][1] if test[3][0] == "t" else (test[3],)
        texts = [item[1] if item is not None and item[0] == "s" else "" for item in named]
        return frozenset(_ALIASES[text] for text in texts) if all(text in _ALIASES for text in texts) else frozenset()
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
