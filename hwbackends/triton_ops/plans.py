"""Launches over the tensors of a pool, kept from call to call, and what tells that the pool still has these tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from hwbackends.step.pool import StatePool
from hwbackends.triton_ops.launch import Launch, capturing


def changed(launch: Launch) -> None:
    """Tell convs of the same capture that a launch wrote metadata or state."""
    if launch.traits.dependents is not None and capturing():
        launch.traits.dependents.note_change()


Launches = list[tuple[Launch, tuple[Tensor, ...]]]


@dataclass(frozen=True, slots=True)
class Plans:
    """Launches over the tensors of a pool, and what tells that the pool still has these tensors.

    Attributes:
        held: of the pool that they were made for.
        launches: each with the tensors that it begins with.
        moves: launches of `ssm_moves`, which take other arguments.
    """

    held: tuple[object, ...]
    launches: Launches
    moves: Launches = field(default_factory=list)


_NOTHING = Plans((), [])


def planned(pool: StatePool, key: object) -> Plans:
    """What was kept under a key."""
    found = pool.cache.get(key)
    return found if isinstance(found, Plans) else _NOTHING


def held(pool: StatePool) -> tuple[object, ...]:
    """Addresses and extents of what a pool holds: an engine may have replaced any of it."""
    tensors = [*pool.storages(), *pool.draft_storages(), pool.ssm_state, pool.intermediate_ssm, pool.mamba_v2p_table]
    tensors += [tensor for storage in pool.states.values() for tensor in storage.tensors().values()]
    told = tuple(None if t is None else (t.data_ptr(), t.shape, t.stride()) for t in tensors)
    return (pool.mamba_index_mapping.shape, pool.mamba_index_mapping.dtype, *told)
