"""The hooks of a backend as readable Python, one function per hook of `contracts/conv_state.yaml`, and nothing else.
A plugin module implements them as plain functions marked with `hookimpl`; a test holds the signatures here equal to
the contract. Nothing in this module imports torch.

Words used below: B requests of the step and T tokens, padded ones counted; D channels; W width of the conv,
S = W - 1; N = draft_token_num; n_b rows consumed before the step; v_b = S rows of history ++ the step's rows x_b;
win_b(k) = v_b[k : k + S]. A row is padded when its slot is <= 0: its output is exactly 0 and nothing is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pluggy

if TYPE_CHECKING:
    from torch import Tensor

    from hwbackends.step.metadata import StepBatch, StepMetadata
    from hwbackends.step.pool import ConvState, StatePool

PROJECT = "hwbackends"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class ProbeResult(NamedTuple):
    """Whether a backend can run here: yes or no, why in one sentence, and what the user can do about a no."""

    available: bool
    reason: str
    hint: str = ""


@hookspec
def probe(device: str | None = None) -> ProbeResult:  # type: ignore[empty-body]
    """Say whether the backend can run here, on `device` if one is named.

    Must not allocate, create a device context, or import a package whose import can break the process.
    """


@hookspec
def prepare_decode_metadata(batch: StepBatch, pool: StatePool, out: StepMetadata) -> None:
    """Resolve a decode or idle step: slots, lengths, padding and track slots. One launch, recordable.

    Args:
        batch: the engine's step; `seq_lens` or `computed_lens` is needed on the `ring` layout.
        pool: read for `mamba_index_mapping`, `mamba_v2p_table` and layout; its state is not touched.
        out: [mutated] buffers of the step's extents. Written: every tensor but `seq_idx` and `num_accept_tokens`.

    Raises:
        ArgumentError: a tensor that the step needs is missing, or has the wrong shape, dtype or device.
    """


@hookspec
def prepare_extend_metadata(batch: StepBatch, pool: StatePool, out: StepMetadata) -> None:
    """Resolve a prefill, chunked prefill or mixed step: offsets, owners of tokens, prefix flags, track windows.

    Track windows: k = floor((mamba_track_seqlens - n_b) / track_interval) * track_interval, -1 where the mask is
    false, the length negative, or k outside [0, T_b].

    Args:
        batch: needs `extend_seq_lens` and `extend_prefix_lens` (or `computed_lens`).
        pool: read only.
        out: [mutated] every tensor but `num_accept_tokens`.

    Raises:
        ArgumentError: as in `prepare_decode_metadata`.
    """


@hookspec
def prepare_target_verify_metadata(batch: StepBatch, pool: StatePool, out: StepMetadata) -> None:
    """Resolve a verify step of `draft_token_num` tokens per request. One launch, recordable.

    Args:
        batch: needs `draft_token_num`, and `seq_lens` or `computed_lens` on the `ring` layout.
        pool: read only.
        out: [mutated] every tensor but `seq_idx` and `num_accept_tokens`.

    Raises:
        TreeDraftsError: `batch.topk` is not 1.
        ArgumentError: as in `prepare_decode_metadata`.
    """


@hookspec
def prepare_draft_extend_metadata(batch: StepBatch, pool: StatePool, out: StepMetadata) -> None:
    """Resolve a draft-extend step: as verify, and accepted counts and track windows. One launch, recordable.

    Track windows at interval I, with post = n_b + num_accept_tokens: where floor(n_b / I) != floor(post / I),
    k = floor(post / I) * I - n_b; else -1. A negative count marks a padded row.

    Args:
        batch: needs `num_accept_tokens` and `draft_token_num`; lengths on the `ring` layout and for tracking.
        pool: read only.
        out: [mutated] every tensor but `seq_idx`.

    Raises:
        TreeDraftsError: `batch.topk` is not 1.
        ArgumentError: as in `prepare_decode_metadata`.
    """


@hookspec
def conv_decode(  # type: ignore[empty-body]
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ConvState,
    metadata: StepMetadata,
    activation: str | None = None,
    residual: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Depthwise causal conv of one token per request; the slot becomes win_b(1), and the track slot too.

    y_b = act(bias + sum_{i<W} weight[:, i] * v_b[i]) + (x_b if residual), in float32 (float64 for float64 x),
    rounded once at the store.

    Args:
        x: [T, D], last dimension contiguous; row b is request b's token.
        weight: [D, W], any strides; `weight[:, W - 1]` multiplies the newest row.
        bias: [D] or None.
        state: [mutated] the stream's state in this layer.
        metadata: of a decode step.
        activation: None or "silu".
        residual: add x after the activation.
        out: [mutated] [T, D] of x's dtype; allocated if None.

    Returns:
        [T, D]: `out`, or a new tensor.

    Raises:
        ArgumentError: wrong shape, dtype, device, stride or width; nothing was written.
    """


@hookspec
def conv_extend(  # type: ignore[empty-body]
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ConvState,
    metadata: StepMetadata,
    activation: str | None = None,
    residual: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Depthwise causal conv of a packed batch; the slot becomes win_b(T_b), the track slot win_b(k).

    Args and formula as in `conv_decode`, with y_b[t] over v_b[t : t + W]. Request b owns rows
    `query_start_loc[b] : query_start_loc[b + 1]` of x; rows behind the last request give 0. History is read from
    `source_indices`, the window is written to `cache_indices`. An empty request changes nothing.
    """


@hookspec
def conv_target_verify(  # type: ignore[empty-body]
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ConvState,
    metadata: StepMetadata,
    activation: str | None = None,
    residual: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Depthwise causal conv of N drafts per request; the committed state does not change.

    Args and formula as in `conv_extend`; request b owns rows `b * N : (b + 1) * N` of x. Kept for the commit:
    `window` writes v_b to `state.draft_rows[draft_indices[b]]`; `ring` writes row (n_b + t) mod C of the slot;
    `lazy` leaves v_b[1 : S + N] in the slot.
    """


@hookspec
def conv_draft_extend(  # type: ignore[empty-body]
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ConvState,
    metadata: StepMetadata,
    activation: str | None = None,
    residual: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """As verify, then the slot becomes win_b(num_accept_tokens[b]) and the track slot win_b(mamba_track_tokens[b])."""


@hookspec
def update_mamba_state_after_mtp_verify(
    pool: StatePool,
    req_pool_indices: Tensor,
    last_correct_step_indices: Tensor,
    mamba_track_indices: Tensor | None = None,
    mamba_steps_to_track: Tensor | None = None,
    computed_lens: Tensor | None = None,
    draft_indices: Tensor | None = None,
) -> None:
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


@hookspec
def clear_slots(pool: StatePool, cache_indices: Tensor) -> None:
    """Zero slots in every layer and stream, SSM state included.

    Args:
        pool: [mutated].
        cache_indices: [M] int32/int64, physical slots; values <= 0 are left out.
    """


@hookspec
def copy_slots(pool: StatePool, source_indices: Tensor, destination_indices: Tensor) -> None:
    """Copy slots onto others in every layer and stream, SSM state included; rows keep their row numbers.

    Args:
        pool: [mutated].
        source_indices: [M] int32/int64, physical slots.
        destination_indices: [M] int32/int64, physical slots, none of them a source. A pair with a value <= 0 on
            either side is left out.
    """


@hookspec
def fused_decode_add_rmsnorm(  # type: ignore[empty-body]
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ConvState,
    metadata: StepMetadata,
    residual_stream: Tensor,
    norm_weight: Tensor,
    eps: float,
    activation: str | None = None,
    residual: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Optional: decode conv, add to the residual stream, RMSNorm.

    y = conv rounded to x's dtype; h = residual_stream + y in float32; residual_stream <- h rounded;
    out = h * rsqrt(mean(h * h) + eps) * norm_weight rounded. Padded rows: out 0, residual_stream untouched.

    Args:
        residual_stream: [mutated] [T, D] of x's dtype, last dimension contiguous.
        norm_weight: [D].
        eps: added to the mean square.

    The other arguments are those of `conv_decode`.
    """


@hookspec
def fused_target_verify_add_rmsnorm(  # type: ignore[empty-body]
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ConvState,
    metadata: StepMetadata,
    residual_stream: Tensor,
    norm_weight: Tensor,
    eps: float,
    activation: str | None = None,
    residual: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Optional: verify conv, add to the residual stream, RMSNorm; see `fused_decode_add_rmsnorm`."""
