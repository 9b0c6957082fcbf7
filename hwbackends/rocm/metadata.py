"""The prepare hooks, over the launchers that GPU backends share."""

from __future__ import annotations

from hwbackends.rocm.traits import traits_of
from hwbackends.step.batch import StepBatch
from hwbackends.step.metadata import StepMetadata
from hwbackends.step.pool import StatePool
from hwbackends.triton_ops.metadata import prepare


def prepare_decode_metadata(batch: StepBatch, pool: StatePool, out: StepMetadata) -> None:
    """Slots, lengths and track slots of a decode step. See `hookspecs.prepare_decode_metadata`."""
    prepare("prepare_decode_metadata", traits_of, batch, pool, out)


def prepare_extend_metadata(batch: StepBatch, pool: StatePool, out: StepMetadata) -> None:
    """Offsets, owners, prefix flags and track windows of an extend step. See `hookspecs.prepare_extend_metadata`."""
    prepare("prepare_extend_metadata", traits_of, batch, pool, out)


def prepare_target_verify_metadata(batch: StepBatch, pool: StatePool, out: StepMetadata) -> None:
    """Slots, request rows and lengths of a verify step. See `hookspecs.prepare_target_verify_metadata`."""
    prepare("prepare_target_verify_metadata", traits_of, batch, pool, out)


def prepare_draft_extend_metadata(batch: StepBatch, pool: StatePool, out: StepMetadata) -> None:
    """As verify, with accepted counts and track windows. See `hookspecs.prepare_draft_extend_metadata`."""
    prepare("prepare_draft_extend_metadata", traits_of, batch, pool, out)
