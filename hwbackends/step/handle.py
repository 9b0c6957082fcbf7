"""What a layer's modules get of a step: the shared metadata, the layer's state and the hooks of the step's phase."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hwbackends.contract.hookspecs.conv import Conv, ConvAddRmsnorm
from hwbackends.conv.state import ConvState
from hwbackends.step.metadata import StepMetadata
from hwbackends.step.pool import StatePool


@dataclass(frozen=True, slots=True)
class HostMirrors:
    """Host copies for a model whose extend loops over requests in Python. Each costs one synchronisation a step."""

    cache_indices: list[int]
    has_initial_state: list[bool]


class LayerHandle:
    """One layer's view of the step: the shared metadata, this layer's states, and the hooks of the step's phase.

    Attributes:
        layer_id: the layer.
        metadata: metadata of the step, the same object for every layer.
    """

    __slots__ = ("_conv", "_fused", "_hooks", "_pool", "_states", "layer_id", "metadata")

    def __init__(
        self,
        layer_id: int,
        metadata: StepMetadata,
        pool: StatePool,
        conv: Conv,
        fused: ConvAddRmsnorm,
        hooks: Callable[[str], Callable[..., Any]],
    ) -> None:
        self.layer_id, self.metadata = layer_id, metadata
        self._pool, self._conv, self._fused, self._hooks = pool, conv, fused, hooks
        self._states: dict[str | tuple[str, ...], ConvState] = {}

    def state(self, stream: str | tuple[str, ...]) -> ConvState:
        """State of one conv stream, or of neighbouring streams as one, in this layer."""
        found = self._states.get(stream)
        if found is None:
            found = self._states[stream] = self._pool.conv_state(stream, self.layer_id)
        return found

    def run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The hook of the step's phase over one of the pool's `states`, by its name.

        The hook's parameters `state` and `metadata` are filled in; all others are the hook's, by position up to `state`
        and by keyword behind `metadata`.
        """
        state = self._pool.state(name, self.layer_id)
        return self._hooks(self._pool.states[name].family)(*args, state, self.metadata, **kwargs)

    @property
    def host_mirrors(self) -> HostMirrors | None:
        """Host copies of slots and prefix flags: in extend steps of a sidecar made with `host_mirrors=True`."""
        return self.metadata.host_mirrors

    def conv(
        self,
        stream: str | tuple[str, ...],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        residual: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """The conv of the step's phase over x [T, D] with weight [D, W]; the slots change as the phase says.

        Returns:
            `out`, or a new [T, D] tensor of x's dtype; padded rows are 0.
        """
        return self._conv(x, weight, bias, self.state(stream), self.metadata, activation, residual, out)

    def fused(
        self,
        stream: str | tuple[str, ...],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual_stream: Tensor,
        norm_weight: Tensor,
        eps: float,
        activation: str | None = None,
        residual: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Conv, add to `residual_stream` [T, D] in place, RMSNorm; decode and verify steps only.

        Raises:
            HookNotImplementedError: the backend, or the contract for this phase, has no fused hook.
        """
        state = self.state(stream)
        return self._fused(
            x, weight, bias, state, self.metadata, residual_stream, norm_weight, eps, activation, residual, out
        )
