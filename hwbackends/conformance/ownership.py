"""Whose memory is whose: what each hook of the contract may write, what it must leave alone, and on which clause a
breach is booked. Read from a call's own arguments; the hook is not asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from hwbackends.contract.reader import installed
from hwbackends.step.pool import WRAPPED, StatePool

ORDER: Mapping[str, tuple[str, ...]] = {
    name: tuple(parameter.name for parameter in hook.parameters) for name, hook in installed().hooks.items()
}
"""Parameter names of each hook, in order."""
COMMIT = "update_mamba_state_after_mtp_verify"


@dataclass(frozen=True, slots=True)
class Owned:
    """The rules of one call.

    Attributes:
        hook: its name.
        writes: tensors that the hook may write.
        inputs: name, tensor and clause of what it must leave alone.
        keeps: clause of everything else that must not change.
        refusal: clause of "refused before anything is written".
    """

    hook: str
    writes: tuple[Tensor, ...]
    inputs: tuple[tuple[str, Tensor, str], ...]
    keeps: str
    refusal: str


def owned(hook: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Owned:
    """The rules of a call, from its arguments."""
    given = {**dict(zip(ORDER.get(hook, ()), args, strict=False)), **kwargs}
    if hook.startswith("prepare_"):
        return _prepare(hook, given)
    if hook.startswith(("conv_", "fused_")):
        return _conv(hook, given)
    return _ssm(hook, given) if hook.startswith("ssm_") else _pool(hook, given)


def _prepare(hook: str, given: Mapping[str, Any]) -> Owned:
    inputs = [
        *_held("batch", given.get("batch"), "CS-PREP-03"),
        *_held("pool", given.get("pool"), "CS-PREP-03"),
    ]
    writes = tuple(tensor for _, tensor, _ in _held("out", given.get("out"), ""))
    return Owned(hook, writes, tuple(inputs), "CS-PREP-03", "CS-PREP-10")


def _conv(hook: str, given: Mapping[str, Any]) -> Owned:
    fused = hook.startswith("fused_")
    state = given.get("state")
    drafts = getattr(state, "draft_rows", None) if "verify" in hook or "draft" in hook else None
    writes = [t for t in (getattr(state, "tensor", None), drafts) if isinstance(t, Tensor)]
    writes += [t for t in (given.get("out"), given.get("residual_stream")) if isinstance(t, Tensor)]
    inputs = [*_held("metadata", given.get("metadata"), "CS-CONV-07")]
    for name in ("x", "weight", "bias", "norm_weight"):
        inputs += [(name, t, "CS-CONV-12") for t in [given.get(name)] if isinstance(t, Tensor)]
    return Owned(hook, tuple(writes), tuple(inputs), "CS-FUSED-02" if fused else "CS-CONV-07", "CS-CONV-11")


def _ssm(hook: str, given: Mapping[str, Any]) -> Owned:
    """The state with all that belongs to it, and `out`."""
    writes = [tensor for _, tensor, _ in _held("state", given.get("state"), "")]
    writes += [t for t in [given.get("out")] if isinstance(t, Tensor)]
    inputs = [*_held("metadata", given.get("metadata"), "CS-SSM-08")]
    inputs += [(n, t, "CS-SSM-08") for n, t in given.items() if isinstance(t, Tensor) and n != "out"]
    return Owned(hook, tuple(writes), tuple(inputs), "CS-SSM-08", "CS-SSM-14")


_POOL_CLAUSES = {
    COMMIT: ("CS-COMMIT-01", "CS-COMMIT-11"),
    "clear_slots": ("CS-CLEAR-01", "CS-CLEAR-02"),
    "copy_slots": ("CS-COPY-01", "CS-CLEAR-02"),
    "materialize_slots": ("CS-SSM-MAT-02", "CS-SSM-MAT-04"),
}
"""Of hooks that take a pool: the clause of what must not change, and of a refusal."""


def _pool(hook: str, given: Mapping[str, Any]) -> Owned:
    keeps, refusal = _POOL_CLAUSES.get(hook, ("CS-PROBE-02", "CS-CLEAR-02"))
    pool = given.get("pool")
    storages = pool.states.values() if isinstance(pool, StatePool) else ()
    writes = [tensor for storage in storages for tensor in storage.slot_tensors()]  # nobody writes a ring here
    if isinstance(pool, StatePool) and hook != "materialize_slots":
        writes += [*pool.conv_streams.values(), *([] if pool.ssm_state is None else [pool.ssm_state])]
    mine = {id(tensor) for tensor in writes}
    held = [entry for entry in _held("pool", pool, keeps) if id(entry[1]) not in mine]
    held += [(name, value, keeps) for name, value in given.items() if isinstance(value, Tensor)]
    return Owned(hook, tuple(writes), tuple(held), keeps, refusal)


def _held(name: str, owner: Any, clause: str) -> Iterator[tuple[str, Tensor, str]]:
    """Every tensor that an argument holds."""
    if owner is None:
        return
    for key in [f.name for f in fields(owner)] if is_dataclass(owner) else WRAPPED:
        value = getattr(owner, key, None)
        for part in value.values() if isinstance(value, dict) else [value]:
            if isinstance(part, Tensor) and part.device.type == "cpu":
                yield f"{name}.{key}", part, clause
            elif is_dataclass(part) and not isinstance(part, type) and key == "states":
                yield from _held(f"{name}.{key}", part, clause)
