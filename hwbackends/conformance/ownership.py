"""Whose memory is whose: what each hook of the contract may write, what it must leave alone, and on which clause a
breach is booked. Read from a call's own arguments; the hook is not asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from hwbackends.contract.reader import installed

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
    return _pool(hook, given)


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


def _pool(hook: str, given: Mapping[str, Any]) -> Owned:
    keeps = {COMMIT: "CS-COMMIT-01", "clear_slots": "CS-CLEAR-01", "copy_slots": "CS-COPY-01"}.get(hook, "CS-PROBE-02")
    refusal = "CS-COMMIT-11" if hook == COMMIT else "CS-CLEAR-02"
    pool = given.get("pool")
    streams = getattr(pool, "conv_streams", None)
    writes = [*streams.values()] if isinstance(streams, dict) else []
    if isinstance(getattr(pool, "ssm_state", None), Tensor):
        writes.append(pool.ssm_state)  # type: ignore[union-attr]
    mine = {id(tensor) for tensor in writes}
    held = [entry for entry in _held("pool", pool, keeps) if id(entry[1]) not in mine]
    held += [(name, value, keeps) for name, value in given.items() if isinstance(value, Tensor)]
    return Owned(hook, tuple(writes), tuple(held), keeps, refusal)


def _held(name: str, owner: Any, clause: str) -> Iterator[tuple[str, Tensor, str]]:
    """Every tensor that an argument holds."""
    if owner is None:
        return
    names = [f.name for f in fields(owner)] if hasattr(owner, "__dataclass_fields__") else _POOL_FIELDS
    for key in names:
        value = getattr(owner, key, None)
        for part in value.values() if isinstance(value, dict) else [value]:
            if isinstance(part, Tensor) and part.device.type == "cpu":
                yield f"{name}.{key}", part, clause


_POOL_FIELDS = ("conv_streams", "draft_rows", "ssm_state", "intermediate_ssm", "mamba_index_mapping", "mamba_v2p_table")
