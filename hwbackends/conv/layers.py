"""The torch modules that an engine builds its models from: they hold weights, read the sidecar's handle of their layer
and run its conv. No state and no metadata lives here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hwbackends.errors import ArgumentError, ShapeError, WidthError

if TYPE_CHECKING:
    from hwbackends.step.sidecar import ConvStateSidecar


class ShortConvolution(nn.Module):
    """A causal depthwise conv over one conv stream of one layer.

    The weight is kept as [W, D] in memory order, so that channels lie side by side; hooks get its view [D, W]. With
    tensor parallelism each rank holds D = `hidden_size` / `tp_size` neighbouring channels.

    Args:
        hidden_size: channels over all ranks.
        width: W, at least 2; must be the state pool's width.
        layer_id: layer, as the state pool names it.
        stream: conv stream of the state pool, such as `k` or `attn`; a tuple names neighbouring streams run as one.
        bias: whether there is a bias [D].
        activation: None or `silu`, after the bias.
        residual: whether x is added after the activation.
        tp_rank: this rank, 0 .. `tp_size` - 1.
        tp_size: ranks that share the channels.
        dtype: dtype of the weights; may have more bits than the activations.
        device: device of the weights.

    Raises:
        ArgumentError: `hidden_size` is not a multiple of `tp_size`, or the rank is out of range.
        WidthError: width below 2.
    """

    def __init__(
        self,
        hidden_size: int,
        width: int,
        layer_id: int,
        stream: str | tuple[str, ...],
        *,
        bias: bool = False,
        activation: str | None = None,
        residual: bool = False,
        tp_rank: int = 0,
        tp_size: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if width < 2:
            raise WidthError("ShortConvolution", "width", width, "at least 2")
        if tp_size < 1 or not 0 <= tp_rank < tp_size:
            raise ArgumentError("ShortConvolution", "tp_rank", f"{tp_rank} of {tp_size}", "0 <= tp_rank < tp_size")
        if hidden_size % tp_size:
            raise ArgumentError("ShortConvolution", "hidden_size", hidden_size, f"a multiple of tp_size {tp_size}")
        self.hidden_size, self.width, self.layer_id, self.stream = hidden_size, width, layer_id, stream
        self.activation, self.residual = activation, residual
        self.tp_rank, self.tp_size = tp_rank, tp_size
        channels = hidden_size // tp_size
        self.weight = nn.Parameter(torch.zeros(width, channels, dtype=dtype, device=device), requires_grad=False)
        empty = torch.zeros(channels, dtype=dtype, device=device)
        self.bias = nn.Parameter(empty, requires_grad=False) if bias else None
        for parameter in self.parameters():
            # where the weight loaders of SGLang and vLLM look
            parameter.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    def weight_loader(self, parameter: nn.Parameter, loaded: Tensor) -> None:
        """Copy a checkpoint's tensor into a parameter, narrowed to this rank's channels.

        Args:
            parameter: `weight` or `bias` of this module; mutated.
            loaded: [D, 1, W] (as `nn.Conv1d` keeps it) or [D, W] for the weight, [D] for the bias, D over all ranks.

        Raises:
            ShapeError: another shape; nothing is copied.
        """
        if parameter is self.bias:
            wanted: tuple[int, ...] = (self.hidden_size,)
        else:
            loaded = loaded.squeeze(1) if loaded.dim() == 3 and loaded.shape[1] == 1 else loaded
            wanted = (self.hidden_size, self.width)
        if tuple(loaded.shape) != wanted:
            got = tuple(loaded.shape)
            raise ShapeError("ShortConvolution.weight_loader", "loaded", got, f"{wanted}, over all ranks")
        channels = self.hidden_size // self.tp_size
        own = loaded.narrow(0, self.tp_rank * channels, channels)
        with torch.no_grad():
            parameter.copy_(own if parameter is self.bias else own.t())

    def forward(self, x: Tensor, sidecar: ConvStateSidecar) -> Tensor:
        """The conv of the step's phase over x [T, D]; returns [T, D]. The slots change as the phase says."""
        handle = sidecar.conv_state_metadata(self.layer_id)
        return handle.conv(self.stream, x, self.weight.t(), self.bias, self.activation, self.residual)

    def forward_add_rmsnorm(
        self, x: Tensor, sidecar: ConvStateSidecar, residual_stream: Tensor, norm_weight: Tensor, eps: float
    ) -> Tensor:
        """Conv, add to `residual_stream` [T, D] in place, RMSNorm with `norm_weight` [D]; decode and verify only.

        Returns:
            [T, D], the normalised sum; 0 in padded rows.

        Raises:
            HookNotImplementedError: the backend, or the phase, has no fused hook.
        """
        handle = sidecar.conv_state_metadata(self.layer_id)
        return handle.fused(
            self.stream,
            x,
            self.weight.t(),
            self.bias,
            residual_stream,
            norm_weight,
            eps,
            self.activation,
            self.residual,
        )

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{self.hidden_size}, width={self.width}, layer={self.layer_id}, stream={self.stream!r}"
