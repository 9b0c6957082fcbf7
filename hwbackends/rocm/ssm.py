"""The SSM hooks, over the launchers that GPU backends share."""

from __future__ import annotations

from torch import Tensor

from hwbackends.rocm.traits import traits_of
from hwbackends.ssm.state import SSMState
from hwbackends.step.metadata import StepMetadata
from hwbackends.step.pool import StatePool
from hwbackends.triton_ops import ssm, ssm_moves


def ssm_decode(
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
) -> Tensor:
    """One token per request; the state becomes S(n_b + 1). See `hookspecs.ssm.SsmDecode`."""
    given = (q, k, v, a, b, A_log, dt_bias, state, metadata, D, dt_limit, scale, lower_bound, use_qk_l2norm_in_kernel)
    return ssm.run("ssm_decode", traits_of, *given, None, out)


def ssm_extend(
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
) -> Tensor:
    """Packed requests of any length; the state becomes S(n_b + T_b). See `hookspecs.ssm.SsmExtend`."""
    given = (q, k, v, a, b, A_log, dt_bias, state, metadata, D, dt_limit, scale, lower_bound, use_qk_l2norm_in_kernel)
    return ssm.run("ssm_extend", traits_of, *given, None, out)


def ssm_target_verify(
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
) -> Tensor:
    """N drafts per request; the committed state stays. See `hookspecs.ssm.SsmTargetVerify`."""
    given = (q, k, v, a, b, A_log, dt_bias, state, metadata, D, dt_limit, scale, lower_bound, use_qk_l2norm_in_kernel)
    return ssm.run("ssm_target_verify", traits_of, *given, retrieve_parent_token, out)


def ssm_draft_extend(
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
) -> Tensor:
    """N drafts per request; the state becomes S(n_b + num_accept_tokens[b]). See `hookspecs.ssm.SsmDraftExtend`."""
    given = (q, k, v, a, b, A_log, dt_bias, state, metadata, D, dt_limit, scale, lower_bound, use_qk_l2norm_in_kernel)
    return ssm.run("ssm_draft_extend", traits_of, *given, None, out)


def materialize_slots(
    pool: StatePool, req_pool_indices: Tensor, computed_lens: Tensor, destination_indices: Tensor | None = None
) -> None:
    """The state of requests at a position into slots. See `hookspecs.ssm.MaterializeSlots`."""
    ssm_moves.materialize(traits_of, pool, req_pool_indices, computed_lens, destination_indices)
