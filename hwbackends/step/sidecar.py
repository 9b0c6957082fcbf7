"""What an engine holds for the conv state of one part of a model: `ConvStateSidecar` prepares a step's metadata once,
hands it to every conv module as a `LayerHandle`, and commits speculation. Which launches a graph records, and which
addresses it holds, is decided here and nowhere else; the numbers are a backend's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from hwbackends.contract.claims import WIDTHS, Claims
from hwbackends.contract.hookspecs.conv import ConvAddRmsnorm, ConvHooks
from hwbackends.contract.hookspecs.ssm import MaterializeSlots
from hwbackends.contract.hookspecs.step import (
    PrepareMetadata,
    StepHooks,
    UpdateMambaStateAfterMtpVerify,
)
from hwbackends.conv.layouts import history_rows
from hwbackends.errors import (
    ArgumentError,
    GraphError,
    GraphLimitError,
    HookNotImplementedError,
    MissingArgumentError,
    TreeDraftsError,
    UnsupportedError,
)
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.handle import HostMirrors, LayerHandle
from hwbackends.step.metadata import MetadataBuffers, MetadataLimits, StepMetadata
from hwbackends.step.pool import PoolParts, StatePool
from hwbackends.step.rules import RECORDED_MODES, TAIL_VALUES, hooks_by_family, hooks_by_mode
from hwbackends.step.translation import SlotTranslation, Translate
from hwbackends.switches import switched_on

PREPARE_HOOKS = hooks_by_mode("step", "prepare")
CONV_HOOKS = hooks_by_mode("conv", "compute")
FUSED_HOOKS = hooks_by_mode("conv", "fused")
COMPUTE_HOOKS = hooks_by_family("compute")


class ConvBackend(StepHooks, ConvHooks, Protocol):
    """What the sidecar calls: the hooks of the step and of the conv family, as a bound backend has them."""


class ConvStateSidecar:
    """Once-per-step preparation, graph rules and commit for one part of a model.

    An engine calls, for each step, one of: `init_forward_metadata` (eager); or, with graphs,
    `init_forward_metadata_out_graph` before every capture and every replay and `init_forward_metadata_in_graph` inside
    the capture. Conv modules call `conv_state_metadata` only.

    Args:
        backend: a bound backend: one plain function per hook of the contract, as attributes.
        pool: the state of this part, or the pools of all parts: then `part` names this sidecar's own, and clear and
            copy reach every one.
        max_batch: most requests of a captured step. The limits are given here because a prefill may be captured
            before an engine reports its decode limits.
        max_tokens: most tokens of a captured step.
        draft_tokens: most tokens per request in verify and draft extend.
        index_dtype: dtype of slot indices handed to kernels, torch.int32 or torch.int64.
        translate: virtual slots to physical ones, [n] to [n], for a translation that is Python code and cannot be
            recorded; gets no negative value. It runs out of graph into a buffer whose address stays. A table with a
            stable address goes into the pool (`mamba_v2p_table`) and costs nothing here.
        host_mirrors: fill `LayerHandle.host_mirrors` in extend steps; one synchronisation a step.
        part: name of this sidecar's pool in `PoolParts`.

    Attributes:
        resolutions: preparations launched from Python so far; a replay is not counted.
        reads: calls of `conv_state_metadata` so far.
    """

    def __init__(
        self,
        backend: ConvBackend,
        pool: StatePool | PoolParts,
        *,
        max_batch: int,
        max_tokens: int,
        draft_tokens: int = 1,
        index_dtype: torch.dtype = torch.int32,
        translate: Translate | None = None,
        host_mirrors: bool = False,
        part: str = "target",
    ) -> None:
        self.backend = backend
        self.parts = pool if isinstance(pool, PoolParts) else PoolParts({part: pool})
        self.part = part
        self.limits = _limits(max_batch, max_tokens, draft_tokens)
        own = _own_pool(self.parts, part)
        _check_draft_rows(own, draft_tokens)
        claims = getattr(backend, "claims", None)
        self._claims = claims if isinstance(claims, Claims) else None  # what only looks like a backend claims nothing
        _check_claims(backend, self._claims, own, index_dtype, max_batch)
        self._translation = SlotTranslation(own, translate, max_batch) if translate is not None else None
        self.pool = own if self._translation is None else self._translation.pool
        self._buffers = MetadataBuffers(self.limits, own.device, index_dtype)
        self._prepare: dict[ForwardMode, PrepareMetadata] = {
            mode: _hook(backend, name) for mode, name in PREPARE_HOOKS.items()
        }
        self._host_mirrors = host_mirrors
        self._checked = switched_on("HWBACKENDS_CHECKED")
        self._frozen: dict[str, int] | None = None  # addresses when the first graph was captured
        self._baked = MetadataLimits(0, 0)  # largest extents of captured prefills
        self._step: StepMetadata | None = None
        self.resolutions = 0
        self.reads = 0

    # once per step

    def init_forward_metadata(self, batch: StepBatch) -> None:
        """Prepare an eager step now. Larger steps than the limits grow the buffers, unless a graph holds them.

        Raises:
            GraphLimitError: the step is beyond the limits and a capture exists.
            TreeDraftsError: more than one draft per position.
        """
        _refuse_trees(batch, self.pool)
        self._make_room(batch)
        if self._translation is not None:
            self._translation.refresh(batch)
        self._resolve(batch, tracks=batch.mamba_track_mask is not None)

    def init_forward_metadata_out_graph(self, batch: StepBatch, in_capture: bool = False) -> None:
        """Before a capture or a replay: only what a graph cannot record.

        Decode, idle, verify and draft extend record all of it, so nothing is launched here and `conv_state_metadata`
        is only pointed at the buffers that the replay fills; unless slots are translated by Python code: then this
        refreshes the translation. Extend steps (full prefill graphs) are prepared here, into the same static buffers,
        up to the largest extent that a capture has baked.

        Args:
            batch: the step; in a replay its extents may be smaller than the captured ones.
            in_capture: the step is about to be captured.

        Raises:
            GraphLimitError: beyond the constructor's limits.
            TreeDraftsError: more than one draft per position.
        """
        _refuse_trees(batch, self.pool)
        if self._translation is not None:
            self._translation.refresh(batch)
        if self._checked:
            self._check_addresses()
        if batch.forward_mode in RECORDED_MODES:
            # no launch: convs that run from Python beside a recorded preparation read the replayed step
            self._step = self._view(batch, batch.padded_reqs, batch.num_tokens, batch.mamba_track_mask is not None)
            if self._checked and not in_capture:  # the recorded launch runs without the checks that read memory
                self._run_prepare(batch, self._step)
            return
        if in_capture:
            self._freeze()
            seen = self._baked
            self._baked = MetadataLimits(max(seen.max_batch, batch.padded_reqs), max(seen.max_tokens, batch.num_tokens))
        self._resolve_prefill(batch)

    def init_forward_metadata_in_graph(self, batch: StepBatch) -> None:
        """Inside a capture: the one launch that a graph records, over the graph-static tensors in `batch`.

        Nothing in extend steps, whose preparation `init_forward_metadata_out_graph` has done.

        Raises:
            GraphLimitError: beyond the constructor's limits.
            TreeDraftsError: more than one draft per position.
        """
        if batch.forward_mode not in RECORDED_MODES:
            return
        _refuse_trees(batch, self.pool)
        self._freeze()
        self._resolve(batch, tracks=batch.mamba_track_mask is not None)

    def init_graph_state(self, max_batch: int, max_tokens: int, draft_tokens: int = 1) -> None:
        """Check an engine's graph limits against the constructor's; nothing is allocated.

        Raises:
            GraphLimitError: a limit is beyond the constructor's, now and not at the first replay.
        """
        asked = MetadataLimits(max_batch, max_tokens, draft_tokens)
        for name in ("max_batch", "max_tokens", "draft_tokens"):
            _check_limit("init_graph_state", name, getattr(asked, name), getattr(self.limits, name))

    def conv_state_metadata(self, layer_id: int) -> LayerHandle:
        """The current step as one layer sees it: a pure read, the same object for the same step and layer.

        Raises:
            GraphError: no step was prepared.
            ArgumentError: the pool has no such layer.
        """
        self.reads += 1
        step = self._step
        if step is None:
            raise GraphError("conv_state_metadata: no step is prepared; call init_forward_metadata before the forward")
        handle = step.handles.get(layer_id)
        if handle is None:
            handle = step.handles[layer_id] = self._handle(step, layer_id)
        return handle

    # between steps

    def update_mamba_state_after_mtp_verify(
        self,
        req_pool_indices: Tensor | None = None,
        last_correct_step_indices: Tensor | None = None,
        mamba_track_indices: Tensor | None = None,
        mamba_steps_to_track: Tensor | None = None,
        computed_lens: Tensor | None = None,
        draft_indices: Tensor | None = None,
    ) -> None:
        """Commit each request at its last accepted draft, in every layer and stream of this part.

        Slots come from `req_pool_indices` through the map, never from the step's metadata, which a later step may have
        overwritten. The arguments are those of the contract's hook; the first two are required.

        Raises:
            MissingArgumentError: `req_pool_indices` or `last_correct_step_indices` is missing; nothing is changed.
        """
        name = "update_mamba_state_after_mtp_verify"
        if req_pool_indices is None:
            hint = "the step's metadata cannot stand in for it: a later step may have overwritten it"
            raise MissingArgumentError(name, "req_pool_indices", "nothing", "[B] request rows of the verify step", hint)
        if last_correct_step_indices is None:
            raise MissingArgumentError(name, "last_correct_step_indices", "nothing", "[B] last accepted draft, or -1")
        if self._translation is not None:
            self._translation.refresh_requests(req_pool_indices)
            mamba_track_indices = self._translation.physical(mamba_track_indices)
        commit: UpdateMambaStateAfterMtpVerify = _hook(self.backend, name)
        commit(
            self.pool,
            req_pool_indices,
            last_correct_step_indices,
            mamba_track_indices,
            mamba_steps_to_track,
            computed_lens,
            draft_indices,
        )

    def clear_slots(self, cache_indices: Tensor) -> None:
        """Zero physical slots [M] in every part and family."""
        for pool in self.parts:
            _hook(self.backend, "clear_slots")(pool, cache_indices)

    def copy_slots(self, source_indices: Tensor, destination_indices: Tensor) -> None:
        """Copy physical slots [M] onto others in every part and family."""
        for pool in self.parts:
            _hook(self.backend, "copy_slots")(pool, source_indices, destination_indices)

    def materialize_slots(
        self, req_pool_indices: Tensor, computed_lens: Tensor, destination_indices: Tensor | None = None
    ) -> None:
        """The states of request rows [B] at positions [B] into slots [B], or into their own: before a snapshot is
        published, a request finishes or is handed over. Conv streams are `copy_slots`' and not touched; nothing
        where the part has no state that is kept by position."""
        if not self.pool.states:
            return
        if self._translation is not None:
            self._translation.refresh_requests(req_pool_indices)
            destination_indices = self._translation.physical(destination_indices)
        materialize: MaterializeSlots = _hook(self.backend, "materialize_slots")
        materialize(self.pool, req_pool_indices, computed_lens, destination_indices)

    def addresses(self) -> dict[str, int]:
        """Address of every tensor that a captured graph holds: metadata, translated slots, state, map."""
        found = {f"metadata.{name}": address for name, address in self._buffers.addresses().items()}
        if self._translation is not None:
            found |= {f"translation.{name}": address for name, address in self._translation.addresses().items()}
        for part, pool in self.parts.parts.items():
            found |= {f"{part}.{name}": address for name, address in pool.addresses().items()}
        return found

    # inside

    def _resolve(self, batch: StepBatch, tracks: bool) -> None:
        if batch.tokens_per_req > self._buffers.limits.draft_tokens:
            _check_limit("StepBatch", "draft_token_num", batch.draft_token_num, self._buffers.limits.draft_tokens)
        step = self._view(batch, batch.padded_reqs, batch.num_tokens, tracks)
        self._launch(batch, step)
        self._mirror(step)
        self._step = step

    def _resolve_prefill(self, batch: StepBatch) -> None:
        """Fill the static buffers up to what captures have baked, and show the step its own extents."""
        step = self._view(batch, batch.padded_reqs, batch.num_tokens, tracks=True)
        tokens = max(batch.num_tokens, self._baked.max_tokens)
        wide = self._view(batch, batch.padded_reqs, tokens, tracks=True)
        self._launch(replace(batch, num_tokens=tokens), wide)
        if batch.padded_reqs < self._baked.max_batch:
            _pad_tail(self._view(batch, self._baked.max_batch, tokens, tracks=True), batch.padded_reqs)
        self._mirror(step)
        self._step = step

    def _view(self, batch: StepBatch, reqs: int, tokens: int, tracks: bool) -> StepMetadata:
        return self._buffers.view(batch.forward_mode, reqs, tokens, batch.tokens_per_req, tracks)

    def _launch(self, batch: StepBatch, step: StepMetadata) -> None:
        self.resolutions += 1
        self._run_prepare(batch, step)

    def _run_prepare(self, batch: StepBatch, step: StepMetadata) -> None:
        if self._translation is not None:
            batch = self._translation.physical_batch(batch)
        self._prepare[batch.forward_mode](batch, self.pool, step)

    def _mirror(self, step: StepMetadata) -> None:
        if self._host_mirrors and step.forward_mode is ForwardMode.EXTEND:
            slots, flags = step.cache_indices.tolist(), step.has_initial_state.tolist()
            step.host_mirrors = HostMirrors(slots, flags)

    def _handle(self, step: StepMetadata, layer_id: int) -> LayerHandle:
        self.pool.layer_index(layer_id)  # an unknown layer is refused here
        mode, backend = step.forward_mode, self.backend
        conv = _hook(backend, CONV_HOOKS[mode]) if self.pool.conv_streams else _no_convs

        def hooks(family: str) -> Any:
            return _hook(backend, COMPUTE_HOOKS[family][mode])

        return LayerHandle(layer_id, step, self.pool, conv, _fused_hook(backend, mode), hooks)

    def _make_room(self, batch: StepBatch) -> None:
        """Grow the buffers for an eager step, which only is right while no graph holds their addresses."""
        have = self._buffers.limits
        want = MetadataLimits(
            max(have.max_batch, batch.padded_reqs),
            max(have.max_tokens, batch.num_tokens),
            max(have.draft_tokens, batch.tokens_per_req),
        )
        if want == have:
            return
        if self._frozen is not None:
            hint = "a captured graph holds the buffers; construct the sidecar with limits that cover eager steps too"
            got = f"{batch.padded_reqs} requests, {batch.num_tokens} tokens, {batch.tokens_per_req} per request"
            raise GraphLimitError("init_forward_metadata", "batch", got, f"at most {have} once captured", hint)
        self._buffers = MetadataBuffers(want, self.pool.device, self._buffers.index_dtype)
        if self._translation is not None:
            self._translation.grow(want.max_batch)

    def _freeze(self) -> None:
        """From here on a graph holds the addresses.

        Raises:
            GraphError: the backend does not claim graphs.
        """
        if self._claims is not None and not self._claims.graphs:
            name = getattr(self.backend, "name", "?")
            raise GraphError(f"ConvStateSidecar: backend {name!r} does not claim graph capture; run its steps eagerly")
        if self._frozen is None:
            self._frozen = self.addresses()

    def _check_addresses(self) -> None:
        """Checked mode: an engine that gave a pool another tensor would replay on the old one."""
        if self._frozen is not None and self._frozen != (now := self.addresses()):
            moved = [name for name, address in self._frozen.items() if now.get(name) != address]
            raise GraphError(f"init_forward_metadata_out_graph: address moved after a capture: {', '.join(moved)}")


def _pad_tail(captured: StepMetadata, live: int) -> None:
    """Make rows `live` and up of a captured extent padded rows of length 0."""
    for name, value in TAIL_VALUES.items():
        getattr(captured, name)[live:].fill_(value)
    offsets = captured.query_start_loc
    offsets[live + 1 :].copy_(offsets[live : live + 1].expand(captured.num_reqs - live))


def _hook(backend: ConvBackend, name: str) -> Any:
    """The hook of a name; what it takes is the caller's to say."""
    function = getattr(backend, name, None)
    if not callable(function):
        raise HookNotImplementedError(f"{name}: backend {backend!r} does not have this hook")
    return function


def _fused_hook(backend: ConvBackend, mode: ForwardMode) -> ConvAddRmsnorm:
    """The fused hook of a phase, or a function that says why there is none."""
    name = FUSED_HOOKS.get(mode)
    if name is not None and callable(getattr(backend, name, None)):
        found: ConvAddRmsnorm = _hook(backend, name)
        return found
    why = f"backend {backend!r} does not have {name}" if name else f"the contract has no fused hook for {mode.value}"

    def missing(*args: object, **kwargs: object) -> Tensor:
        raise HookNotImplementedError(f"LayerHandle.fused: {why}; call conv, add and normalise instead")

    return missing


def _no_convs(*args: object, **kwargs: object) -> Tensor:
    raise ArgumentError("LayerHandle.conv", "stream", "a conv", "one of the pool's states: it has no conv stream")


def _refuse_trees(batch: StepBatch, pool: StatePool) -> None:
    if batch.topk != 1 and pool.one_chain:
        hint = "set the number of drafts per position to 1"
        raise TreeDraftsError("ConvStateSidecar", "topk", batch.topk, "1: the state follows one chain", hint)


def _limits(max_batch: int, max_tokens: int, draft_tokens: int) -> MetadataLimits:
    for name, value in (("max_batch", max_batch), ("max_tokens", max_tokens), ("draft_tokens", draft_tokens)):
        if value < 1:
            raise ArgumentError("ConvStateSidecar", name, value, "at least 1")
    return MetadataLimits(max_batch, max(max_tokens, max_batch * draft_tokens), draft_tokens)


def _own_pool(parts: PoolParts, part: str) -> StatePool:
    if part not in parts.parts:
        raise ArgumentError("ConvStateSidecar", "part", repr(part), f"one of {', '.join(parts.parts)}")
    return parts[part]


def _check_draft_rows(pool: StatePool, draft_tokens: int) -> None:
    """Verify must have room for `draft_tokens` rows per request, in the convs and in every other state."""
    for name, storage in pool.states.items():
        if draft_tokens > max(1, storage.drafts):
            hint = f"make the StatePool with draft_token_num={draft_tokens}, and states[{name!r}] with room for them"
            wanted = f"at most {max(1, storage.drafts)}"
            raise GraphLimitError("ConvStateSidecar", "draft_tokens", draft_tokens, wanted, hint)
    if not pool.conv_streams:
        return
    room = {"window": pool.draft_token_num, "ring": pool.rows - history_rows(pool.width)}
    held = room.get(pool.layout, pool.rows - history_rows(pool.width) + 1)
    if draft_tokens > max(1, held):
        hint = f"make the StatePool with draft_token_num={draft_tokens}"
        raise GraphLimitError("ConvStateSidecar", "draft_tokens", draft_tokens, f"at most {max(1, held)}", hint)


def _check_claims(
    backend: ConvBackend, claims: Claims | None, pool: StatePool, index_dtype: torch.dtype, max_batch: int
) -> None:
    """What the backend does not claim is refused before the first step, by its name."""
    if claims is None:
        return
    needs: dict[str, Any] = {"index_dtype": index_dtype, "requests": max_batch}
    if pool.conv_streams:
        needs |= {"layout": pool.layout}
        needs |= {} if claims.widths == WIDTHS else {"width": pool.width}  # all: the kit tests these, others may work
    lacking = claims.missing(**needs)
    for stream in pool.conv_streams.values():
        lacking = lacking or claims.missing(dtype=stream.dtype)
    if lacking:
        name = getattr(backend, "name", "?")
        hint = "make the pool and the sidecar within its claims, or load(needs=...) a backend that claims it"
        raise UnsupportedError(
            "ConvStateSidecar", "backend", f"{name!r}, which does not claim {lacking}", "one that does", hint
        )


def _check_limit(hook: str, name: str, got: int, limit: int) -> None:
    if got > limit:
        hint = f"construct the sidecar with {name} >= {got}"
        raise GraphLimitError(hook, name, got, f"at most {limit}, the constructor's", hint)
