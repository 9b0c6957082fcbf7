"""The hooks of `contracts/step.yaml`: one callable protocol per hook, and `StepHooks`, which has them all. A plugin
implements each as a plain function of the hook's name, marked with `hookimpl`.

Words used below: B requests of the step and T tokens, padded ones counted; N = draft_token_num; n_b tokens consumed
before the step; win_b(k) the family's state of request b after k tokens of the step. A row is padded when its slot is
<= 0: its output is exactly 0 and nothing is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hwbackends.contract.hookspecs import ProbeResult

if TYPE_CHECKING:
    from torch import Tensor

    from hwbackends.step.batch import StepBatch
    from hwbackends.step.metadata import StepMetadata
    from hwbackends.step.pool import StatePool


class Probe(Protocol):
    """Say whether the backend can run here, on `device` if one is named.

    Must not allocate, create a device context, or import a package whose import can break the process.
    """

    def __call__(self, device: str | None = None) -> ProbeResult: ...


class PrepareMetadata(Protocol):
    """Resolve one step: slots, lengths, padding, track slots. What every preparation takes.

    Args:
        batch: the engine's step.
        pool: read for `mamba_index_mapping`, `mamba_v2p_table` and layout; its state is not touched.
        out: [mutated] buffers of the step's extents.

    Raises:
        ArgumentError: a tensor that the step needs is missing, or has the wrong shape, dtype or device.
    """

    def __call__(self, batch: StepBatch, pool: StatePool, out: StepMetadata) -> None: ...


class PrepareDecodeMetadata(PrepareMetadata, Protocol):
    """Resolve a decode or idle step: slots, lengths, padding and track slots. One launch, recordable.

    `batch` needs `seq_lens` or `computed_lens` on the `ring` layout. Written in `out`: every tensor but `seq_idx` and
    `num_accept_tokens`.
    """


class PrepareExtendMetadata(PrepareMetadata, Protocol):
    """Resolve a prefill, chunked prefill or mixed step: offsets, owners of tokens, prefix flags, track windows.

    Track windows: k = floor((mamba_track_seqlens - n_b) / track_interval) * track_interval, -1 where the mask is
    false, the length negative, or k outside [0, T_b].

    `batch` needs `extend_seq_lens` and `extend_prefix_lens` (or `computed_lens`). Written in `out`: every tensor but
    `num_accept_tokens`.
    """


class PrepareTargetVerifyMetadata(PrepareMetadata, Protocol):
    """Resolve a verify step of `draft_token_num` tokens per request. One launch, recordable.

    `batch` needs `draft_token_num`, and `seq_lens` or `computed_lens` on the `ring` layout. Written in `out`: every
    tensor but `seq_idx` and `num_accept_tokens`.

    Raises:
        TreeDraftsError: `batch.topk` is not 1.
    """


class PrepareDraftExtendMetadata(PrepareMetadata, Protocol):
    """Resolve a draft-extend step: as verify, and accepted counts and track windows. One launch, recordable.

    Track windows at interval I, with post = n_b + num_accept_tokens: where floor(n_b / I) != floor(post / I),
    k = floor(post / I) * I - n_b; else -1. A negative count marks a padded row.

    `batch` needs `num_accept_tokens` and `draft_token_num`; lengths on the `ring` layout and for tracking. Written in
    `out`: every tensor but `seq_idx`.

    Raises:
        TreeDraftsError: `batch.topk` is not 1.
    """


class UpdateMambaStateAfterMtpVerify(Protocol):
    """Commit a verify step: the slot becomes win_b(j + 1) with j = last_correct_step_indices[b], in every layer.

    Runs after the forward is over: slots come from `req_pool_indices` through the pool's map, never from the last
    step's metadata. The SSM state becomes `intermediate_ssm` of step j. j < 0 changes nothing. On `ring` and `lazy`
    the conv commit is nothing: the engine's own lengths (or accepted counts) are the commit.

    Args:
        pool: [mutated] the part's pool.
        req_pool_indices: [B] int32/int64, request rows; padded: negative, or a row that maps to slot 0.
        last_correct_step_indices: [B] int32/int64, index of the last accepted draft; negative: none.
        mamba_track_indices: [B] int32/int64, track slots, in the name space of the map's values.
        mamba_steps_to_track: [B] int32/int64, step whose window and SSM state go to the track slot; negative: none.
        computed_lens: [B] int32/int64, n_b before the verify; needed on `ring` when steps are tracked.
        draft_indices: [B] int32/int64, rows of `draft_rows` and `intermediate_ssm`; None: the request rows.

    Raises:
        ArgumentError: a shape, dtype or device that does not fit, or `computed_lens` missing where needed.
    """

    def __call__(
        self,
        pool: StatePool,
        req_pool_indices: Tensor,
        last_correct_step_indices: Tensor,
        mamba_track_indices: Tensor | None = None,
        mamba_steps_to_track: Tensor | None = None,
        computed_lens: Tensor | None = None,
        draft_indices: Tensor | None = None,
    ) -> None: ...


class ClearSlots(Protocol):
    """Zero slots in every layer and stream, SSM state included.

    Args:
        pool: [mutated].
        cache_indices: [M] int32/int64, physical slots; values <= 0 are left out.
    """

    def __call__(self, pool: StatePool, cache_indices: Tensor) -> None: ...


class CopySlots(Protocol):
    """Copy slots onto others in every layer and stream, SSM state included; rows keep their row numbers.

    Args:
        pool: [mutated].
        source_indices: [M] int32/int64, physical slots.
        destination_indices: [M] int32/int64, physical slots, none of them a source. A pair with a value <= 0 on
            either side is left out.
    """

    def __call__(self, pool: StatePool, source_indices: Tensor, destination_indices: Tensor) -> None: ...


class StepHooks(Protocol):
    """Every hook of `contracts/step.yaml`, as a bound backend has them."""

    probe: Probe
    prepare_decode_metadata: PrepareDecodeMetadata
    prepare_extend_metadata: PrepareExtendMetadata
    prepare_target_verify_metadata: PrepareTargetVerifyMetadata
    prepare_draft_extend_metadata: PrepareDraftExtendMetadata
    update_mamba_state_after_mtp_verify: UpdateMambaStateAfterMtpVerify
    clear_slots: ClearSlots
    copy_slots: CopySlots
