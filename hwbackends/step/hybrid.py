"""Wrappers that put the conv sidecar beside an engine's attention backends, and refusals of what a conv state cannot
follow, raised when an engine sets up and not at its first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hwbackends.errors import TreeDraftsError, UnsupportedError
from hwbackends.step.batch import StepBatch
from hwbackends.step.handle import LayerHandle
from hwbackends.step.sidecar import ConvStateSidecar

MakeStepBatch = Callable[[Any], StepBatch]
"""An engine's batch to the sidecar's."""


class NotForwardedError(UnsupportedError, AttributeError):
    """A metadata hook of the attention backend that the wrapper does not know, so the sidecar would miss the step."""


class HybridAttentionBackend:
    """A full-attention backend and the conv sidecar, in the place of the attention backend.

    Metadata hooks reach both, the sidecar first, so that a refused step leaves the attention backend as it was.
    Everything else is the attention backend's: reading an attribute reads its, so capabilities stay visible; assigning
    one assigns its. Every layer's attention is full attention: convs are reached through `conv_state_metadata` only.

    Args:
        attention_backend: the engine's backend for softmax attention.
        sidecar: the sidecar of the same part of the model.
        make_step_batch: the engine's batch as a `StepBatch`; None: the engine passes `StepBatch` itself.

    Attributes:
        attention_backend: as given.
        sidecar: as given.
    """

    __slots__ = ("_make_step_batch", "attention_backend", "sidecar")

    attention_backend: Any
    sidecar: ConvStateSidecar

    def __init__(
        self, attention_backend: object, sidecar: ConvStateSidecar, make_step_batch: MakeStepBatch | None = None
    ) -> None:
        own = {"attention_backend": attention_backend, "sidecar": sidecar, "_make_step_batch": make_step_batch}
        for name, value in own.items():
            object.__setattr__(self, name, value)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare an eager step, in draft extend too: a draft with convs runs its own."""
        self.sidecar.init_forward_metadata(self._step_batch(forward_batch))
        self.attention_backend.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a capture or a replay: what cannot be recorded."""
        self.sidecar.init_forward_metadata_out_graph(self._step_batch(forward_batch), in_capture=in_capture)
        self.attention_backend.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Inside a capture: what is recorded."""
        self.sidecar.init_forward_metadata_in_graph(self._step_batch(forward_batch))
        self.attention_backend.init_forward_metadata_in_graph(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Graph limits, under the name that attention backends give the hook."""
        self.sidecar.init_graph_state(max_bs, max_num_tokens)
        self.attention_backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def conv_state_metadata(self, layer_id: int, forward_batch: object = None) -> LayerHandle:
        """The step as one layer sees it; the batch, which engines pass, is not needed."""
        return self.sidecar.conv_state_metadata(layer_id)

    def update_mamba_state_after_mtp_verify(
        self,
        req_pool_indices: Tensor | None = None,
        last_correct_step_indices: Tensor | None = None,
        mamba_track_indices: Tensor | None = None,
        mamba_steps_to_track: Tensor | None = None,
        computed_lens: Tensor | None = None,
        draft_indices: Tensor | None = None,
    ) -> None:
        """Commit the sidecar's part; see `ConvStateSidecar.update_mamba_state_after_mtp_verify`."""
        self.sidecar.update_mamba_state_after_mtp_verify(
            req_pool_indices,
            last_correct_step_indices,
            mamba_track_indices,
            mamba_steps_to_track,
            computed_lens,
            draft_indices,
        )

    def _step_batch(self, forward_batch: Any) -> StepBatch:
        make: MakeStepBatch | None = self._make_step_batch
        return forward_batch if make is None else make(forward_batch)

    def __getattr__(self, name: str) -> Any:
        if name in HybridAttentionBackend.__slots__ or name.startswith("__"):
            raise AttributeError(name)  # a copy or an unpickled object asks before its attributes exist
        value = getattr(self.attention_backend, name)
        if name.startswith("init_forward_metadata"):
            wanted = "init_forward_metadata, its _out_graph or its _in_graph form"
            raise NotForwardedError("HybridAttentionBackend", name, "a hook that would pass the sidecar by", wanted)
        return value

    def __setattr__(self, name: str, value: object) -> None:
        if name in HybridAttentionBackend.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.attention_backend, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.attention_backend, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.attention_backend)})


def wrap_attention_backend(
    attention_backend: Any, sidecar: ConvStateSidecar | None, make_step_batch: MakeStepBatch | None = None
) -> Any:
    """The backend that a model's forward uses; `attention_backend` itself for a model without conv state."""
    return attention_backend if sidecar is None else HybridAttentionBackend(attention_backend, sidecar, make_step_batch)


def wrap_draft_extend_backend(
    attention_backend: Any, draft_sidecar: ConvStateSidecar | None, make_step_batch: MakeStepBatch | None = None
) -> Any:
    """The backend of a draft model's extend steps; does nothing for a draft without conv state.

    Args:
        attention_backend: the draft's own attention backend, not the target's wrapper.
        draft_sidecar: sidecar of the draft's part of the pool.

    Raises:
        UnsupportedError: `attention_backend` is wrapped already: the other part's convs would run on this step.
    """
    if isinstance(attention_backend, HybridAttentionBackend) and draft_sidecar is not None:
        wanted = "the draft's own attention backend"
        raise UnsupportedError("wrap_draft_extend_backend", "attention_backend", "a wrapped backend", wanted)
    return wrap_attention_backend(attention_backend, draft_sidecar, make_step_batch)


def wrap_draft_decode_backend(container: Any, draft_sidecar: ConvStateSidecar | None) -> Any:
    """A multi-step draft-decode container, unchanged, for a draft without conv state.

    Such a container holds one attention backend per step and prepares all of them at once from one batch. A conv state
    moves one token further with each of these steps, which one preparation cannot describe.

    Raises:
        UnsupportedError: the draft has conv state.
    """
    if draft_sidecar is not None:
        got = f"{type(container).__name__} for a draft with conv state"
        hint = "draft with draft-extend steps, or with a draft that has no convs"
        raise UnsupportedError("wrap_draft_decode_backend", "container", got, "a draft without conv state", hint)
    return container


def refuse_tree_drafts(topk: int, sidecar: ConvStateSidecar | None) -> None:
    """Stop an engine at start-up that is set to draft trees for a model with conv state.

    Raises:
        TreeDraftsError: more than one draft per position.
    """
    if sidecar is not None and topk != 1:
        hint = "set the number of drafts per position to 1"
        raise TreeDraftsError("refuse_tree_drafts", "topk", topk, "1: a conv state follows one chain of tokens", hint)
