"""The SSM hooks of a GPU backend, made for its devices' traits, so that no backend repeats their signatures."""

from __future__ import annotations

from torch import Tensor

from hwbackends.contract.hookspecs.ssm import MaterializeSlots, Ssm, SsmTargetVerify
from hwbackends.ssm.state import SSMState
from hwbackends.step.metadata import StepMetadata
from hwbackends.step.pool import StatePool
from hwbackends.triton_ops import ssm, ssm_moves
from hwbackends.triton_ops.traits import TraitsOf


def of_phase(hook: str, traits_of: TraitsOf) -> Ssm:
    """`ssm_decode`, `ssm_extend` or `ssm_draft_extend`, whose parameters are the same."""

    def call(
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
        """An SSM hook over Triton kernels. See `hookspecs.ssm.Ssm`."""
        given = (q, k, v, a, b, A_log, dt_bias, state, metadata, D, dt_limit, scale, lower_bound)
        return ssm.run(hook, traits_of, *given, use_qk_l2norm_in_kernel, None, out)

    call.__name__ = call.__qualname__ = hook
    return call


def of_verify(traits_of: TraitsOf) -> SsmTargetVerify:
    """`ssm_target_verify`, which may follow a tree."""

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
        given = (q, k, v, a, b, A_log, dt_bias, state, metadata, D, dt_limit, scale, lower_bound)
        return ssm.run("ssm_target_verify", traits_of, *given, use_qk_l2norm_in_kernel, retrieve_parent_token, out)

    return ssm_target_verify


def of_moves(traits_of: TraitsOf) -> MaterializeSlots:
    """`materialize_slots`."""

    def materialize_slots(
        pool: StatePool, req_pool_indices: Tensor, computed_lens: Tensor, destination_indices: Tensor | None = None
    ) -> None:
        """The state of requests at a position into slots. See `hookspecs.ssm.MaterializeSlots`."""
        ssm_moves.materialize(traits_of, pool, req_pool_indices, computed_lens, destination_indices)

    return materialize_slots
