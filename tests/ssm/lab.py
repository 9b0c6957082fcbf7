"""Requests over one SSM state, served by a backend through the sidecar: what an engine does, in a few words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hwbackends
from hwbackends.ssm import SSMStream
from hwbackends.step import ConvStateSidecar, ForwardMode, StatePool, StepBatch

LAYER = 1
NAN = float("nan")


class Request:
    """One request: its row, its slot, its tokens to come and what it got so far."""

    def __init__(self, lab: Lab, row: int, slot: int, seed: int, tokens: int = 64) -> None:
        self.row, self.slot, self.position = row, slot, 0
        self.inputs = lab.make(seed, tokens)
        self.outputs: list[Tensor] = []

    @property
    def output(self) -> Tensor:
        return torch.cat(self.outputs)


class Lab:
    """A pool of 7 slots and 9 request rows with one state, poisoned with NaN wherever nobody has written."""

    def __init__(
        self,
        kind: str = "gdn",
        layout: str = "ring",
        dtype: torch.dtype = torch.float32,
        *,
        drafts: int = 3,
        ring_rows: int | None = None,
        heads: tuple[int, int, int, int] = (2, 4, 12, 11),
        poison: bool = True,
        **options: Any,
    ) -> None:
        self.kind, self.layout, self.heads, self.drafts = kind, layout, heads, drafts
        stream = SSMStream("s", kind, *heads, dtype, layout, ring_rows)  # type: ignore[arg-type]
        self.pool = StatePool([], num_slots=7, states=[stream], layers=2, draft_token_num=drafts, request_rows=9)
        self.storage: Any = self.pool.states["s"]
        if poison:
            for name, tensor in self.storage.tensors().items():
                tensor.fill_(77 if name == "state_lens" else NAN)
        self.sidecar = ConvStateSidecar(
            hwbackends.load("reference"), self.pool, max_batch=5, max_tokens=128, draft_tokens=drafts
        )
        made = torch.Generator().manual_seed(7)
        shape = (heads[1], heads[2]) if kind == "kda" else (heads[1],)
        self.weights: dict[str, Any] = {
            "A_log": torch.rand(heads[1], generator=made),
            "dt_bias": torch.rand(shape, generator=made),
        }
        own: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}
        if kind == "mamba2":
            own = {"D": torch.rand(heads[1], generator=made)}
        self.options = own | options

    def make(self, seed: int, tokens: int) -> dict[str, Tensor]:
        made = torch.Generator().manual_seed(seed)
        few, many, width, dim = self.heads

        def draw(*shape: int) -> Tensor:
            return torch.randn(tokens, *shape, generator=made).bfloat16()

        a = draw(many, width) if self.kind == "kda" else draw(many)
        found = {"q": draw(few, width), "k": draw(few, width), "v": draw(many, dim), "a": a}
        return found if self.kind == "mamba2" else found | {"b": draw(many)}

    def request(self, row: int, slot: int, seed: int) -> Request:
        self.pool.mamba_index_mapping[row] = slot
        return Request(self, row, slot, seed)

    # steps; None stands for a padded row

    def extend(self, requests: list[Request | None], lengths: list[int], **more: Any) -> None:
        prefixes = [0 if r is None else r.position for r in requests]
        batch = self._batch(ForwardMode.EXTEND, requests, sum(lengths), extend_seq_lens=torch.tensor(lengths),
                            extend_prefix_lens=torch.tensor(prefixes), **more)  # fmt: skip
        for request, y, count in zip(requests, self._run(batch, requests, lengths), lengths, strict=True):
            _keep(request, y, count)

    def decode(self, requests: list[Request | None], again: bool = False, **more: Any) -> None:
        lengths = [1] * len(requests)
        batch = self._batch(ForwardMode.DECODE, requests, len(requests), computed_lens=_positions(requests), **more)
        found = self._run(batch, requests, lengths)
        if again:
            assert torch.equal(torch.cat(found), torch.cat(self._run(batch, requests, lengths)))
        for request, y in zip(requests, found, strict=True):
            _keep(request, y, 1)

    def verify(self, requests: list[Request | None], accepted: list[int], again: bool = False, **more: Any) -> None:
        count = self.drafts
        batch = self._batch(ForwardMode.TARGET_VERIFY, requests, count * len(requests), draft_token_num=count,
                            computed_lens=_positions(requests))  # fmt: skip
        lengths = [count] * len(requests)
        found = self._run(batch, requests, lengths)
        if again:
            assert torch.equal(torch.cat(found), torch.cat(self._run(batch, requests, lengths)))
        self.commit(requests, accepted, **more)
        for request, y, kept in zip(requests, found, accepted, strict=True):
            _keep(request, y, kept)

    def commit(self, requests: list[Request | None], accepted: list[int], **more: Any) -> None:
        steps = torch.tensor([kept - 1 for kept in accepted])
        self.sidecar.update_mamba_state_after_mtp_verify(
            _rows(requests), steps, computed_lens=_positions(requests), **more
        )

    def draft_extend(self, requests: list[Request | None], accepted: list[int], **more: Any) -> None:
        count = self.drafts
        batch = self._batch(ForwardMode.DRAFT_EXTEND, requests, count * len(requests), draft_token_num=count,
                            computed_lens=_positions(requests), num_accept_tokens=torch.tensor(accepted),
                            **more)  # fmt: skip
        for request, y, kept in zip(
            requests, self._run(batch, requests, [count] * len(requests)), accepted, strict=True
        ):
            _keep(request, y, max(0, kept))

    def states(self, requests: list[Request], destinations: list[int] | None = None) -> Tensor:
        """The states of requests at their positions, materialized."""
        given = None if destinations is None else torch.tensor(destinations)
        self.sidecar.materialize_slots(_rows(requests), _positions(requests), given)
        return self.storage.tensor[LAYER, destinations or [request.slot for request in requests]].clone()

    def bytes(self) -> list[Tensor]:
        """Every tensor of both layers, as integers, so that NaN equals itself."""
        return [t.contiguous().view(torch.uint8).clone() for t in self.storage.tensors().values()]

    def _batch(self, mode: ForwardMode, requests: list[Request | None], tokens: int, **more: Any) -> StepBatch:
        return StepBatch(mode, _rows(requests), len(requests), tokens, **more)

    def _run(self, batch: StepBatch, requests: list[Request | None], lengths: list[int]) -> list[Tensor]:
        self.sidecar.init_forward_metadata(batch)
        spare = next(request for request in requests if request is not None)
        parts = []
        for request, count in zip(requests, lengths, strict=True):
            at = slice(0, count) if request is None else slice(request.position, request.position + count)
            parts.append({name: value[at] for name, value in (request or spare).inputs.items()})
        given = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        y = self.sidecar.conv_state_metadata(LAYER).run(
            "s", given["q"], given["k"], given["v"], given["a"], given.get("b"), self.weights["A_log"],
            self.weights["dt_bias"], **self.options,
        )  # fmt: skip
        return list(y.split(lengths))


def _keep(request: Request | None, y: Tensor, count: int) -> None:
    if request is None:
        assert not y.any(), "a padded row's output is 0"
        return
    assert not y.isnan().any()
    request.outputs.append(y[:count])
    request.position += count


def _rows(requests: list[Request | None] | list[Request]) -> Tensor:
    return torch.tensor([-1 if request is None else request.row for request in requests])


def _positions(requests: list[Request | None] | list[Request]) -> Tensor:
    return torch.tensor([0 if request is None else request.position for request in requests])
