"""Random steps for the tests of the cuda backend: a pool and batch of odd sizes with padded rows, the same inputs for
two backends, and the oracle's word on the outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hwbackends.conformance import oracle
from hwbackends.conv.state import ConvStream
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.metadata import MetadataBuffers, MetadataLimits, StepMetadata
from hwbackends.step.pool import StatePool

PHASE = {
    ForwardMode.DECODE: "decode",
    ForwardMode.EXTEND: "extend",
    ForwardMode.TARGET_VERIFY: "target_verify",
    ForwardMode.DRAFT_EXTEND: "draft_extend",
}
DRAFTS = 3
LENGTHS = (0, 1, 2, 3, 5, 17, 0, 8, 33)


@dataclass
class Setting:
    """One combination under test."""

    layout: str = "window"
    width: int = 4
    dim: int = 37
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype | None = None
    activation: str | None = None
    residual: bool = False
    bias: bool = False
    requests: int = 9
    track: bool = True
    seed: int = 0
    eighths: bool = False
    """Inputs and state in steps of 1/8, which every dtype holds: a state row is always a cast input."""


class Case:
    """One pool and one batch of each phase, made from a seed; `clone()` gives an equal one of its own memory."""

    def __init__(self, setting: Setting, device: str) -> None:
        self.setting, self.device = setting, device
        generator = torch.Generator().manual_seed(setting.seed)

        def noise(*shape: int) -> Tensor:
            found = torch.randn(*shape, generator=generator)
            return (found * 8).round() / 8 if setting.eighths else found

        count = setting.requests
        state_dtype = setting.state_dtype or setting.dtype
        self.pool = StatePool(
            [ConvStream("k", setting.dim, state_dtype)],
            num_slots=2 * count + 3,
            width=setting.width,
            layout=setting.layout,  # type: ignore[arg-type]
            draft_token_num=DRAFTS,
            request_rows=count + 5,
            device=device,
            track_interval=4,
        )
        self.state = self.pool.conv_state("k", 0)
        for tensor in (*self.pool.storages(), *self.pool.draft_storages()):
            tensor.copy_(noise(*tensor.shape).to(state_dtype))
        slots = torch.randperm(count, generator=generator) + 1
        self.pool.mamba_index_mapping[2 : 2 + count].copy_(slots)
        self.rows = torch.arange(2, 2 + count)
        self.rows[3] = -1
        self.lengths = torch.randint(0, 23, (count,), generator=generator)
        self.tracks = torch.arange(count + 1, 2 * count + 1)
        self.mask = torch.rand(count, generator=generator) < 0.7
        self.weight = torch.randn(setting.width, setting.dim, generator=generator).to(setting.dtype).to(device).t()
        self.bias = None
        if setting.bias:
            self.bias = torch.randn(setting.dim, generator=generator).to(setting.dtype).to(device)
        self.noise = noise(400, setting.dim).to(setting.dtype)

    def batch(self, mode: ForwardMode) -> StepBatch:
        count, on = self.setting.requests, self.device
        tokens = count * (DRAFTS if mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND) else 1)
        given: dict[str, Any] = {"num_reqs": count - 1, "num_tokens": tokens}
        if self.setting.layout == "lazy":
            given["num_accepted_tokens"] = (torch.arange(count) % DRAFTS + 1).to(on)
        if mode is ForwardMode.EXTEND:
            lengths = torch.tensor([LENGTHS[i % len(LENGTHS)] for i in range(count)])
            lengths[3] = 0
            given |= {"extend_seq_lens": lengths.to(on), "extend_prefix_lens": self.lengths.to(on)}
            given["num_tokens"] = int(lengths[: count - 1].sum()) + 5
            given["mamba_track_seqlens"] = (self.lengths + lengths).to(on)
        else:
            given["computed_lens"] = self.lengths.to(on)
        if mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND):
            given["draft_token_num"] = DRAFTS
        if mode is ForwardMode.DRAFT_EXTEND:
            given["num_accept_tokens"] = (torch.arange(count) % (DRAFTS + 1)).to(on)
            given["num_accept_tokens"][5] = -1
            given["has_initial_state"] = (torch.arange(count) % 3 > 0).to(on)
        if self.setting.track and mode is not ForwardMode.TARGET_VERIFY:
            given |= {"mamba_track_mask": self.mask.to(on), "mamba_track_indices": self.tracks.to(on)}
        return StepBatch(mode, self.rows.to(on), **given)

    def prepare(self, hooks: Any, batch: StepBatch) -> StepMetadata:
        buffers = MetadataBuffers(MetadataLimits(64, 512, DRAFTS), self.device, torch.int32)
        tracks = batch.mamba_track_mask is not None
        view = buffers.view(batch.forward_mode, batch.padded_reqs, batch.num_tokens, batch.tokens_per_req, tracks)
        getattr(hooks, f"prepare_{PHASE[batch.forward_mode]}_metadata")(batch, self.pool, view)
        return view

    def inputs(self, batch: StepBatch, spare: int = 0) -> Tensor:
        return self.noise[: batch.num_tokens + spare].to(self.device)

    def run(self, hooks: Any, mode: ForwardMode, **extra: Any) -> tuple[StepMetadata, Tensor]:
        """Prepare and run one step; returns metadata and outputs."""
        batch = self.batch(mode)
        view = self.prepare(hooks, batch)
        setting = self.setting
        given: dict[str, Any] = {"activation": setting.activation, "residual": setting.residual} | extra
        x = given.pop("x", self.inputs(batch))
        y = getattr(hooks, f"conv_{PHASE[mode]}")(x, self.weight, self.bias, self.state, view, **given)
        return view, y

    def allowed(self, mode: ForwardMode) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Exact outputs of the step and the largest error of each element, from the state as it is now."""
        batch, pool = self.batch(mode), self.pool
        facts = oracle.PoolFacts(
            pool.layout, pool.width, pool.rows, pool.mamba_index_mapping.tolist(), None, pool.track_interval
        )
        plain = {
            name: value.tolist() if isinstance(value := getattr(batch, name), Tensor) else value
            for name in oracle.Batch.__dataclass_fields__
            if name != "mode"
        }
        rows = oracle.prepare(oracle.Batch(mode=PHASE[mode], **plain), facts)
        weight = self.weight.double().cpu().numpy()
        bias = None if self.bias is None else self.bias.double().cpu().numpy()
        dtype = str(self.setting.dtype).removeprefix("torch.")
        x, tensor = self.inputs(batch).double().cpu().numpy(), self.state.tensor.double().cpu().numpy()
        found = oracle.step(
            PHASE[mode], rows, x, weight, tensor, pool.layout, bias, self.setting.activation, self.setting.residual,
            dtype,
        )  # fmt: skip
        return found.y, found.bound
