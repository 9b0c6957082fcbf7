"""Checked mode on SSM hooks: what lies in device memory and cannot be right is refused by name; nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import hwbackends
from hwbackends.errors import ArgumentError, SlotError
from hwbackends.step import ForwardMode, StepBatch
from hwbackends.step.metadata import StepMetadata
from tests.ssm.lab import LAYER, Lab, Request

VERIFY = "ssm_target_verify"


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWBACKENDS_CHECKED", "1")


def served(layout: str = "ring") -> tuple[Lab, list[Request]]:
    """Two requests behind a prompt and a verify."""
    lab = Lab("gdn", layout, poison=False)  # its other layer has run no step
    requests = [lab.request(5, 2, 1), lab.request(3, 6, 2)]
    lab.extend(list(requests), [5, 4])
    lab.verify(list(requests), [2, 1])
    return lab, requests


def prepared(lab: Lab, requests: list[Request], mode: ForwardMode = ForwardMode.TARGET_VERIFY) -> StepMetadata:
    count = 1 if mode is ForwardMode.DECODE else lab.drafts
    more = {"num_accept_tokens": torch.tensor([1, 2])} if mode is ForwardMode.DRAFT_EXTEND else {}
    batch = StepBatch(mode, torch.tensor([r.row for r in requests]), 2, 2 * count, draft_token_num=count,
                      computed_lens=torch.tensor([r.position for r in requests]), **more)  # fmt: skip
    lab.sidecar.init_forward_metadata(batch)
    found: StepMetadata = lab.sidecar.conv_state_metadata(LAYER).metadata
    return replace(found, **{name: tensor.clone() for name, tensor in found.tensors().items()})


def call(
    lab: Lab, requests: list[Request], metadata: StepMetadata, hook: str = "ssm_target_verify", **more: Any
) -> Any:
    tokens = metadata.num_tokens // 2
    given = {n: torch.cat([r.inputs[n][:tokens] for r in requests]) for n in requests[0].inputs}
    backend = hwbackends.load("reference")
    state = more.pop("state", lab.storage.layer(LAYER))
    return getattr(backend, hook)(**given, **lab.weights, state=state, metadata=metadata, **lab.options, **more)


def refused(lab: Lab, error: type[Exception], match: str, run: Callable[[], Any]) -> None:
    before = lab.bytes()
    with pytest.raises(error, match=match):
        run()
    assert all(map(torch.equal, before, lab.bytes()))


CHANGES: list[tuple[str, list[int], type[Exception], str]] = [
    ("cache_indices", [2, 2], SlotError, "slot 2 in two live rows"),
    ("cache_indices", [2, 7], SlotError, "slot 7"),
    ("source_indices", [2, 2], ArgumentError, "source_indices"),
    ("draft_indices", [5, 9], SlotError, "draft_indices.*slot 9"),
    ("draft_indices", [5, 5], SlotError, "request row 5 in two live rows"),
    ("computed_lens", [-1, 5], ArgumentError, "computed_lens"),
    ("query_start_loc", [0, 2, 6], ArgumentError, "query_start_loc"),
]


@pytest.mark.parametrize(("name", "values", "error", "match"), CHANGES)
def test_metadata_that_cannot_be_right_is_refused(
    name: str, values: list[int], error: type[Exception], match: str
) -> None:
    lab, requests = served()
    metadata = prepared(lab, requests)
    getattr(metadata, name).copy_(torch.tensor(values))
    refused(lab, error, f"ssm_target_verify.*{match}", lambda: call(lab, requests, metadata))


def test_more_accepted_than_drafted_is_refused() -> None:
    lab, requests = served()
    metadata = prepared(lab, requests, ForwardMode.DRAFT_EXTEND)
    metadata.num_accept_tokens[1] = 4
    refused(lab, ArgumentError, "num_accept_tokens", lambda: call(lab, requests, metadata, "ssm_draft_extend"))


@pytest.mark.parametrize(("length", "why"), [(8, "ahead of the request"), (-10, "behind what the ring holds")])
def test_a_checkpoint_that_the_ring_does_not_reach_from_is_refused(length: int, why: str) -> None:
    lab, requests = served()
    metadata = prepared(lab, requests)
    lab.storage.state_lens[LAYER, 2, 1, 0] = length
    match = r"state_lens.*materialize a request"
    refused(lab, ArgumentError, match, lambda: call(lab, requests, metadata))


def test_a_parent_behind_its_draft_is_refused() -> None:
    lab, requests = served("intermediate")
    metadata = prepared(lab, requests)
    tree: Tensor = torch.tensor([[-1, 0, 1], [-1, 1, 0]])
    run = lambda: call(lab, requests, metadata, retrieve_parent_token=tree)  # noqa: E731
    refused(lab, ArgumentError, "draft 1 as the parent of draft 1", run)


MATERIALIZE: list[tuple[list[int], list[int], list[int] | None, str]] = [
    ([5, 9], [7, 5], None, "request row 9"),
    ([5, 3], [7, 5], [1, 1], "slot 1 in two live rows"),
    ([5, 3], [7, 5], [1, 7], "slot 7"),
    ([5, 3], [7, 5], [6, 1], "from which another row's state is made"),
    ([5, 3], [7, 2], None, "checkpoint at"),
    ([5, 3], [70, 5], None, "checkpoint at"),
]


@pytest.mark.parametrize(("rows", "lens", "goals", "match"), MATERIALIZE)
def test_a_materialization_that_cannot_be_right_is_refused(
    rows: list[int], lens: list[int], goals: list[int] | None, match: str
) -> None:
    lab, _ = served()
    given = [torch.tensor(value) if value is not None else None for value in (rows, lens, goals)]
    run = lambda: hwbackends.load("reference").materialize_slots(lab.pool, *given)  # noqa: E731
    refused(lab, ArgumentError, f"materialize_slots.*{match}", run)


def test_padded_rows_of_a_materialization_may_hold_anything() -> None:
    lab, _ = served()
    given = torch.tensor([5, -3, 99]), torch.tensor([7, 5, -1]), torch.tensor([1, 99, 99])
    hwbackends.load("reference").materialize_slots(lab.pool, *given)


def test_a_commit_of_a_request_row_without_saved_states_is_refused() -> None:
    lab, _ = served("intermediate")
    backend, rows = hwbackends.load("reference"), torch.tensor([5])
    run = lambda: backend.update_mamba_state_after_mtp_verify(  # noqa: E731
        lab.pool, rows, torch.tensor([1]), draft_indices=torch.tensor([9])
    )
    refused(lab, SlotError, "draft_indices.*slot 9", run)


def test_right_steps_pass() -> None:
    for layout in ("ring", "intermediate"):
        lab, requests = served(layout)
        lab.decode([requests[0], None, requests[1]], again=layout == "ring")
        lab.draft_extend([requests[1], None, requests[0]], [2, -1, 0])
        lab.extend(list(requests), [0, 3])
        lab.states(requests)
