"""The hooks of `contracts/conv.yaml`: one callable protocol per hook, and `ConvHooks`, which has them all.

Words used below, beside those of `step`: D channels; W width of the conv, S = W - 1; v_b = S rows of history ++ the
step's rows x_b; win_b(k) = v_b[k : k + S].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from hwbackends.conv.state import ConvState
    from hwbackends.step.metadata import StepMetadata


class Conv(Protocol):
    """Depthwise causal conv of a packed batch. What the conv of every phase takes.

    y_b[t] = act(bias + sum_{i<W} weight[:, i] * v_b[t + i]) + (x_b[t] if residual), in float32 (float64 for float64
    x), rounded once at the store. Request b owns rows `query_start_loc[b] : query_start_loc[b + 1]` of x; rows behind
    the last request give 0.

    Args:
        x: [T, D], last dimension contiguous.
        weight: [D, W], any strides; `weight[:, W - 1]` multiplies the newest row.
        bias: [D] or None.
        state: [mutated] the stream's state in this layer.
        metadata: of a step of the hook's phase.
        activation: None or "silu".
        residual: add x after the activation.
        out: [mutated] [T, D] of x's dtype; allocated if None.

    Returns:
        [T, D]: `out`, or a new tensor.

    Raises:
        ArgumentError: wrong shape, dtype, device, stride or width; nothing was written.
    """

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: ConvState,
        metadata: StepMetadata,
        activation: str | None = None,
        residual: bool = False,
        out: Tensor | None = None,
    ) -> Tensor: ...


class ConvDecode(Conv, Protocol):
    """One token per request; row b of x is request b's token. The slot becomes win_b(1), and the track slot too."""


class ConvExtend(Conv, Protocol):
    """Any number of tokens per request; the slot becomes win_b(T_b), the track slot win_b(k).

    History is read from `source_indices`, the window is written to `cache_indices`. An empty request changes nothing.
    """


class ConvTargetVerify(Conv, Protocol):
    """N drafts per request; the committed state does not change. Request b owns rows `b * N : (b + 1) * N` of x.

    Kept for the commit: `window` writes v_b to `state.draft_rows[draft_indices[b]]`; `ring` writes row
    (n_b + t) mod C of the slot; `lazy` leaves v_b[1 : S + N] in the slot.
    """


class ConvDraftExtend(Conv, Protocol):
    """As verify, then the slot becomes win_b(num_accept_tokens[b]) and the track slot win_b(mamba_track_tokens[b])."""


class ConvAddRmsnorm(Protocol):
    """A conv, added to the residual stream, and RMSNorm. What both fused hooks take.

    y = conv rounded to x's dtype; h = residual_stream + y in float32; residual_stream <- h rounded;
    out = h * rsqrt(mean(h * h) + eps) * norm_weight rounded. Padded rows: out 0, residual_stream untouched.

    Args:
        residual_stream: [mutated] [T, D] of x's dtype, last dimension contiguous.
        norm_weight: [D].
        eps: added to the mean square.

    The other arguments are those of `Conv`.
    """

    def __call__(
        self,
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
    ) -> Tensor: ...


class FusedDecodeAddRmsnorm(ConvAddRmsnorm, Protocol):
    """Optional: decode conv, add to the residual stream, RMSNorm."""


class FusedTargetVerifyAddRmsnorm(ConvAddRmsnorm, Protocol):
    """Optional: verify conv, add to the residual stream, RMSNorm."""


class ConvHooks(Protocol):
    """Every hook of `contracts/conv.yaml`, as a bound backend has them."""

    conv_decode: ConvDecode
    conv_extend: ConvExtend
    conv_target_verify: ConvTargetVerify
    conv_draft_extend: ConvDraftExtend
    fused_decode_add_rmsnorm: FusedDecodeAddRmsnorm
    fused_target_verify_add_rmsnorm: FusedTargetVerifyAddRmsnorm
