"""What every state family shares once per step: batch, metadata, pool, slots, translation, sidecar, argument checks.
The names below are for engines; importing this package alone imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwbackends.lazy import exports

if TYPE_CHECKING:
    from hwbackends.step.batch import ForwardMode as ForwardMode
    from hwbackends.step.batch import StepBatch as StepBatch
    from hwbackends.step.handle import LayerHandle as LayerHandle
    from hwbackends.step.metadata import MetadataBuffers as MetadataBuffers
    from hwbackends.step.metadata import MetadataLimits as MetadataLimits
    from hwbackends.step.metadata import StepMetadata as StepMetadata
    from hwbackends.step.pool import PoolParts as PoolParts
    from hwbackends.step.pool import StatePool as StatePool
    from hwbackends.step.sidecar import ConvStateSidecar as ConvStateSidecar
    from hwbackends.step.slots import SlotAllocator as SlotAllocator

_HOMES = {
    "ConvStateSidecar": "hwbackends.step.sidecar",
    "ForwardMode": "hwbackends.step.batch",
    "LayerHandle": "hwbackends.step.handle",
    "MetadataBuffers": "hwbackends.step.metadata",
    "MetadataLimits": "hwbackends.step.metadata",
    "PoolParts": "hwbackends.step.pool",
    "SlotAllocator": "hwbackends.step.slots",
    "StatePool": "hwbackends.step.pool",
    "StepBatch": "hwbackends.step.batch",
    "StepMetadata": "hwbackends.step.metadata",
}
__all__ = list(_HOMES)
__getattr__ = exports(__name__, _HOMES)
