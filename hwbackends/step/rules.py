"""What the step's code takes from the contracts instead of writing it down again: which hook serves a phase, which
tensors a batch may bring and of which dtypes, and what a padded row of prepared metadata holds."""

from __future__ import annotations

import torch

from hwbackends.contract.model import Parameter
from hwbackends.contract.reader import installed
from hwbackends.step.batch import ForwardMode

_CONTRACTS = installed()


def hooks_by_mode(contract: str, role: str) -> dict[ForwardMode, str]:
    """The hook of a contract and a role, such as `prepare` or `compute`, that serves each phase."""
    return {ForwardMode(mode): hook.name for mode, hook in _CONTRACTS[contract].by_mode(role).items()}


def hooks_by_family(role: str) -> dict[str, dict[ForwardMode, str]]:
    """The same for every contract that has a hook of the role."""
    found = {name: hooks_by_mode(name, role) for name in _CONTRACTS}
    return {name: hooks for name, hooks in found.items() if hooks}


def _tensors(type_name: str, shape: tuple[str, ...]) -> list[Parameter]:
    return [p for p in _CONTRACTS.fields(type_name) if p.type == "Tensor" and p.shape == shape]


MODE_OF_HOOK = {
    hook.name: tuple(map(ForwardMode, hook.forward_modes)) for hook in _CONTRACTS.hooks.values() if hook.forward_modes
}
"""Forward modes that each hook serves."""

RECORDED_MODES = frozenset(
    ForwardMode(mode) for mode, hook in _CONTRACTS["step"].by_mode("prepare").items() if hook.recordable
)
"""Phases whose preparation a graph records. Full prefill graphs do not: their preparation runs before each replay."""

BATCH_TENSORS = {p.name: tuple(getattr(torch, name) for name in p.dtypes) for p in _tensors("StepBatch", ("B",))}
"""Dtypes of the tensors [B] that a batch may bring."""

METADATA_TENSORS = {
    p.name: (tuple(getattr(torch, name) for name in p.dtypes), p.shape[0])
    for p in _CONTRACTS.fields("StepMetadata")
    if p.type == "Tensor"
}
"""Dtypes and extent (`B`, `B + 1` or `T`) of the tensors of prepared metadata."""

TAIL_VALUES = {p.name: int(p.padding) for p in _tensors("StepMetadata", ("B",))}
"""What a padded row holds in each tensor [B] of prepared metadata."""
