"""A contract as values: parameters, clauses, hooks, one contract, and the set of contracts that hold together. Plain
data that `reader` fills; whatever a rule can know of a contract is asked here. Nothing imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROLES = ("probe", "prepare", "compute", "fused", "commit", "slots")
"""What a hook does for a step: say whether it can run, resolve metadata, compute, compute with an epilogue, commit a
verify, move slots."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a hook, or one field of a type that hooks take.

    Attributes:
        name: field-standard name.
        type: `Tensor`, a Python type, or a name of the contract's `types`.
        optional: may be None.
        required: has no default.
        omittable: callers may leave it out.
        default: the default where there is one.
        since: contract version that added it.
        dtypes: allowed dtypes of a tensor, spelled out.
        shape: named dimensions of a tensor.
        strides: what memory layout is taken.
        unit: what one count of it is: tokens, rows, slots, bytes.
        padding: the value that marks a padded row, in words where it is more than one value.
        mutated: the hook writes to it.
        any_name: callers pass it by position alone, so that a definition may call it as it likes.
        doc: anything else.
    """

    name: str
    type: str = ""
    optional: bool = False
    required: bool = True
    omittable: bool = False
    default: Any = None
    since: str = "1.0"
    dtypes: tuple[str, ...] = ()
    shape: tuple[str, ...] = ()
    strides: str = ""
    unit: str = ""
    padding: Any = None
    mutated: bool = False
    any_name: bool = False
    doc: str = ""


@dataclass(frozen=True, slots=True)
class Clause:
    """One numbered sentence of a hook's meaning."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class Hook:
    """One hook: its parameters in order and what it may do.

    Attributes:
        name: the function's name.
        since: contract version that added it.
        optional: a backend may leave it out.
        role: one of `ROLES`.
        forward_modes: phases of a step that it serves; empty where it serves none in particular.
        summary: one sentence.
        recordable: may be called while a graph is captured.
        may_synchronise: may wait for the device.
        may_allocate: true, false, or `output` for the returned tensor alone.
        parameters: in positional order.
        returns: what it returns.
        clauses: what it means.
        closed: a definition has these parameters and defaults and no others; false in a description of somebody
            else's hooks, whose definitions need only accept what the callers pass.
    """

    name: str
    since: str = "1.0"
    optional: bool = True
    role: str = ""
    forward_modes: tuple[str, ...] = ()
    summary: str = ""
    recordable: bool = False
    may_synchronise: bool = False
    may_allocate: bool | str = False
    parameters: tuple[Parameter, ...] = ()
    returns: Mapping[str, Any] = field(default_factory=dict)
    clauses: tuple[Clause, ...] = ()
    closed: bool = True


@dataclass(frozen=True, slots=True)
class Contract:
    """One contract; `hooks` keeps the order of the file. What it imports is visible in its other tables.

    Attributes:
        name: its name, as a manifest says it.
        version: its version.
        path: the file.
        imports: names of the contracts that it builds on.
        hooks: its own hooks.
        types: fields by type name; a type of an imported contract holds the fields that this one adds to it, too.
        dtype_sets, dimensions, layouts, forward_modes: words of the contract and what they stand for.
    """

    name: str
    version: str
    path: Path
    imports: tuple[str, ...]
    hooks: Mapping[str, Hook]
    types: Mapping[str, tuple[Parameter, ...]]
    dtype_sets: Mapping[str, tuple[str, ...]]
    dimensions: Mapping[str, str]
    layouts: Mapping[str, str]
    forward_modes: Mapping[str, str]

    def by_mode(self, role: str) -> dict[str, Hook]:
        """Forward mode to the hook of a role that serves it."""
        return {mode: hook for hook in self.hooks.values() if hook.role == role for mode in hook.forward_modes}


class Contracts(Mapping[str, Contract]):
    """Contracts by name, each behind what it imports; iterating gives the names.

    Attributes:
        hooks: every hook, in the contracts' order.
        owners: the contract of each hook, by the hook's name.
        clauses: the hook of each clause id.
    """

    def __init__(self, contracts: Iterable[Contract]) -> None:
        self._contracts = {contract.name: contract for contract in contracts}
        every = self._contracts.values()
        self.hooks = {hook.name: hook for contract in every for hook in contract.hooks.values()}
        self.owners = {name: contract for contract in every for name in contract.hooks}
        self.clauses = {clause.id: hook for hook in self.hooks.values() for clause in hook.clauses}

    def __getitem__(self, name: str) -> Contract:
        return self._contracts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._contracts)

    def __len__(self) -> int:
        return len(self._contracts)

    def __repr__(self) -> str:
        return f"Contracts({list(self._contracts.values())})"

    def __str__(self) -> str:
        return ", ".join(f"{contract.name} {contract.version}" for contract in self.values())

    def only(self, names: Iterable[str]) -> Contracts:
        """The contracts of these names, without the others."""
        wanted = set(names)
        return Contracts(contract for contract in self.values() if contract.name in wanted)

    def fields(self, type_name: str) -> tuple[Parameter, ...]:
        """The fields of a type, with what every family adds to it."""
        found: dict[str, Parameter] = {}
        for contract in self.values():
            found |= {p.name: p for p in contract.types.get(type_name, ())}
        return tuple(found.values())

    def clause_text(self, clause_id: str) -> str:
        """The sentence of a clause."""
        return next(clause.text for clause in self.clauses[clause_id].clauses if clause.id == clause_id)
