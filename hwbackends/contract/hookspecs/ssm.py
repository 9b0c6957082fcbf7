"""The hooks of `contracts/ssm.yaml`: one callable protocol per hook, and `SsmHooks`, which has them all.

Words used below, beside those of `step`: H heads of q and k, HV heads of v and of the state; K and V their dims; C
rows per request of the ring; S(p) the state after the tokens at positions 0 .. p - 1. Mamba2's C, B, x and dt are q, k,
v and a.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from hwbackends.ssm.state import SSMState
    from hwbackends.step.metadata import StepMetadata
    from hwbackends.step.pool import StatePool


class Ssm(Protocol):
    """One state-space step of a packed batch. What the SSM of every phase but verify takes.

    Per token and head, in float32: S <- round(d * S + u (x) k), o = scale * S q (Mamba2 + D * v), with d and u by the
    state's kind, S rounded to its dtype after every token and o rounded once. Request b owns rows
    `query_start_loc[b] : query_start_loc[b + 1]` of the inputs; rows behind the last request give 0.

    Args:
        q, k: [T, H, K] of one dtype, a token's elements packed, any token stride.
        v: [T, HV, V], likewise.
        a: [T, HV], kda [T, HV, K]: what the gate is made of; Mamba2's dt.
        b: [T, HV], beta before its sigmoid; None for Mamba2.
        A_log: [HV].
        dt_bias: [HV], kda [HV, K] or [HV * K], or None.
        state: [mutated] the state in this layer.
        metadata: of a step of the hook's phase.
        D: [HV], Mamba2's skip, or None.
        dt_limit: bounds of Mamba2's dt, or None.
        scale: of the output; None: K ** -0.5, for Mamba2 1.
        lower_bound: kda's safe gate, or None.
        use_qk_l2norm_in_kernel: normalise q and k; gdn and kda.
        out: [mutated] [T, HV, V] of v's dtype, contiguous; allocated if None.

    Returns:
        [T, HV, V]: `out`, or a new tensor.

    Raises:
        ArgumentError: wrong shape, dtype, device, stride or kind; nothing was written.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor | None,
        A_log: Tensor,
        dt_bias: Tensor | None,
        state: SSMState,
        metadata: StepMetadata,
        D: Tensor | None = None,
        dt_limit: tuple[float, float] | None = None,
        scale: float | None = None,
        lower_bound: float | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        out: Tensor | None = None,
    ) -> Tensor: ...


class SsmDecode(Ssm, Protocol):
    """One token per request; the state becomes S(n_b + 1), and the track slot's too."""


class SsmExtend(Ssm, Protocol):
    """Any number of tokens per request; the state becomes S(n_b + T_b), the track slot S(n_b + k).

    The state is read from `source_indices` and written to `cache_indices`. An empty request changes nothing.
    """


class SsmTargetVerify(Protocol):
    """N drafts per request; the committed state does not change. Request b owns rows `b * N : (b + 1) * N`.

    Kept for the commit: `intermediate` saves the state after each draft by request row; `ring` writes (d, k, u) of
    draft t to row (n_b + t) mod C of the request row's ring.

    Args:
        retrieve_parent_token: [B, N] int32/int64, of each draft its parent among the drafts before it, negative: the
            committed state; `intermediate` only. None: a chain.

    The other arguments are those of `Ssm`.

    Raises:
        TreeDraftsError: a tree on `ring`.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor | None,
        A_log: Tensor,
        dt_bias: Tensor | None,
        state: SSMState,
        metadata: StepMetadata,
        D: Tensor | None = None,
        dt_limit: tuple[float, float] | None = None,
        scale: float | None = None,
        lower_bound: float | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        retrieve_parent_token: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor: ...


class SsmDraftExtend(Ssm, Protocol):
    """As verify, then the state becomes S(n_b + num_accept_tokens[b]), the track slot's
    S(n_b + mamba_track_tokens[b])."""


class MaterializeSlots(Protocol):
    """The state of requests at a position into slots, in every layer and state: one launch.

    Args:
        pool: [mutated] its SSM states.
        req_pool_indices: [B] int32/int64 request rows; padded: negative, or a row that maps to slot 0.
        computed_lens: [B] int32/int64 positions; negative: nothing.
        destination_indices: [B] int32/int64, in the name space of `mamba_index_mapping`'s values; not positive:
            nothing. None: each request's own slot, which then holds the state without its ring.

    Raises:
        ArgumentError: wrong shape, dtype or device; nothing was written.
    """

    def __call__(
        self,
        pool: StatePool,
        req_pool_indices: Tensor,
        computed_lens: Tensor,
        destination_indices: Tensor | None = None,
    ) -> None: ...


class SsmHooks(Protocol):
    """Every hook of `contracts/ssm.yaml`, as a bound backend has them."""

    ssm_decode: SsmDecode
    ssm_extend: SsmExtend
    ssm_target_verify: SsmTargetVerify
    ssm_draft_extend: SsmDraftExtend
    materialize_slots: MaterializeSlots
