"""Runs the convs of patched modules through the sidecar's handle of their layer."""

from __future__ import annotations

from torch import Tensor

from hwbackends.engines.transformers.models import ModelSpec
from hwbackends.step.sidecar import ConvStateSidecar


class SidecarConvs:
    """The convs of one part of a model.

    Attributes:
        calls: convs run so far; each asks the sidecar once.
    """

    def __init__(self, sidecar: ConvStateSidecar, spec: ModelSpec) -> None:
        self._sidecar, self._spec = sidecar, spec
        self.calls = 0

    def conv(
        self, layer_idx: int, conv_idx: int, x: Tensor, weight: Tensor, bias: Tensor | None, residual: bool
    ) -> Tensor:
        """The conv of one module over x [T, D] with weight [D, W]; returns [T, D]."""
        self.calls += 1
        handle = self._sidecar.conv_state_metadata(layer_idx)
        stream = self._spec.stream_names[layer_idx, conv_idx]
        return handle.conv(stream, x, weight, bias, activation=None, residual=residual)
