"""Values of the reference against float64 sentences of the contract, the faults of the field, trees, and what is
refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hwbackends
from hwbackends.errors import (
    ArgumentError,
    DtypeError,
    MissingArgumentError,
    OverlapError,
    ShapeError,
    TreeDraftsError,
    UnsupportedError,
)
from hwbackends.ssm import SSMStream
from hwbackends.step import ForwardMode, StatePool, StepBatch
from tests.ssm import oracle
from tests.ssm.lab import LAYER, Lab, Request

BOUND = 4e-6
"""Largest difference from float64, in units of the largest number compared; the largest seen was 4e-7."""
KINDS = ["gdn", "kda", "mamba2"]
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("gdn", {}),
    ("gdn", {"use_qk_l2norm_in_kernel": False, "scale": 0.5}),
    ("kda", {}),
    ("kda", {"lower_bound": -5.0}),
    ("mamba2", {}),
    ("mamba2", {"dt_limit": (0.5, 1.5), "scale": 0.25}),
]


def expected(lab: Lab, request: Request, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and states of the request's first tokens, from the oracle."""
    tokens = {name: value[:count].double().numpy() for name, value in request.inputs.items()}
    given = {name: value for name, value in lab.options.items() if name != "D"}
    weights = {name: value.double().numpy() for name, value in lab.weights.items()}
    if "D" in lab.options:
        weights["D"] = lab.options["D"].double().numpy()
    _, many, width, dim = lab.heads
    start = np.zeros((many, dim, width))
    l2norm = given.pop("use_qk_l2norm_in_kernel", False)
    outputs, states = oracle.run(lab.kind, start, tokens, weights, l2norm=l2norm, **given)
    return outputs, states


def close(found: Tensor, wanted: np.ndarray, bound: float = BOUND) -> bool:
    return bool(np.abs(found.double().numpy() - wanted).max() <= bound * max(1.0, np.abs(wanted).max()))


@pytest.mark.parametrize(("kind", "options"), OPTIONS)
@pytest.mark.parametrize("layout", ["ring", "intermediate"])
def test_states_and_outputs_are_those_of_the_sentences_in_float64(
    kind: str, layout: str, options: dict[str, Any]
) -> None:
    lab = Lab(kind, layout, **options)
    request = lab.request(5, 2, 1)
    lab.extend([request], [4])
    lab.decode([request])
    lab.verify([request], [2])
    outputs, states = expected(lab, request, request.position)
    assert close(lab.states([request])[0], states[-1])
    assert close(request.output.float(), outputs, bound=2**-8)  # the output is rounded to bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_head_dims_of_real_models_and_beyond(kind: str) -> None:
    heads = (1, 2, 256, 64) if kind == "mamba2" else (1, 2, 128, 128)
    lab = Lab(kind, heads=heads)
    request = lab.request(5, 2, 1)
    lab.extend([request], [3])
    lab.verify([request], [3])
    assert close(lab.states([request])[0], expected(lab, request, 6)[1][-1])


def test_beta_is_not_rounded_in_any_phase() -> None:
    """One engine rounds beta to bfloat16 in decode and not in verify: its own two paths differ by 1e-3."""
    found = []
    for verified in (False, True):
        lab = Lab("gdn")
        request = lab.request(5, 2, 1)
        lab.extend([request], [3])
        if verified:
            lab.verify([request], [3])
        else:
            for _ in range(3):
                lab.decode([request])
        found.append(lab.states([request])[0])
        assert close(found[-1], expected(lab, request, 6)[1][-1])
    assert torch.equal(*found)


def test_a_commit_reaches_the_requests_behind_one_that_accepted_nothing() -> None:
    lab = Lab("gdn", "intermediate")
    requests = [lab.request(row, slot, row) for row, slot in ((5, 2), (3, 6), (1, 4))]
    lab.extend(list(requests), [2, 3, 4])
    lab.verify(list(requests), [3, 0, 2])
    for request, state in zip(requests, lab.states(requests), strict=True):
        assert close(state, expected(lab, request, request.position)[1][-1])


def test_a_commit_without_intermediate_states_is_refused_and_writes_nothing() -> None:
    stream = SSMStream("s", "gdn", 2, 4, 12, 11, layout="intermediate")
    pool = StatePool([], num_slots=4, states=[stream], layers=1, draft_token_num=0, request_rows=4)
    pool.mamba_index_mapping[1] = 1
    storage: Any = pool.states["s"]
    storage.tensor.fill_(3.0)
    backend = hwbackends.load("reference")
    with pytest.raises((MissingArgumentError, ArgumentError), match=r"update_mamba_state_after_mtp_verify: .*draft"):
        backend.update_mamba_state_after_mtp_verify(pool, torch.tensor([1]), torch.tensor([0]))
    assert (storage.tensor == 3.0).all()


# trees


def tree_call(lab: Lab, request: Request, parents: Tensor) -> Tensor:
    count = lab.drafts
    batch = StepBatch(ForwardMode.TARGET_VERIFY, torch.tensor([request.row]), 1, count, draft_token_num=count,
                      computed_lens=torch.tensor([request.position]))  # fmt: skip
    lab.sidecar.init_forward_metadata(batch)
    given = {name: value[request.position : request.position + count] for name, value in request.inputs.items()}
    found: Tensor = lab.sidecar.conv_state_metadata(LAYER).run(
        "s", given["q"], given["k"], given["v"], given["a"], given.get("b"), lab.weights["A_log"],
        lab.weights["dt_bias"], retrieve_parent_token=parents, **lab.options,
    )  # fmt: skip
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_of_a_tree_starts_from_its_parent(kind: str) -> None:
    lab, alone = Lab(kind, "intermediate"), Lab(kind, "intermediate")
    request, chain = lab.request(5, 2, 1), alone.request(5, 2, 1)
    for one, it in ((lab, request), (alone, chain)):
        one.extend([it], [4])
    y = tree_call(lab, request, torch.tensor([[-1, 0, 0]]))
    kept = [4, 6]  # draft 0 and draft 2, whose parent it is
    chain.inputs = {name: torch.cat([v[:4], v[kept], v[4:]]) for name, v in chain.inputs.items()}
    alone.decode([chain])
    alone.decode([chain])
    assert torch.equal(y[[0, 2]], chain.output[4:])


def test_a_tree_on_a_ring_is_refused() -> None:
    lab = Lab("gdn", "ring")
    request = lab.request(5, 2, 1)
    lab.extend([request], [4])
    before = lab.bytes()
    with pytest.raises(TreeDraftsError, match=r"ssm_target_verify.*a ring follows one chain"):
        tree_call(lab, request, torch.tensor([[-1, 0, 0]]))
    assert all(map(torch.equal, before, lab.bytes()))


# slots


@pytest.mark.parametrize("layout", ["ring", "intermediate"])
def test_slots_are_cleared_and_copied_with_their_lengths(layout: str) -> None:
    lab = Lab("kda", layout)
    request = lab.request(5, 2, 1)
    lab.extend([request], [4])
    lab.sidecar.copy_slots(torch.tensor([2]), torch.tensor([6]))
    assert torch.equal(lab.storage.tensor[:, 6].nan_to_num(7), lab.storage.tensor[:, 2].nan_to_num(7))
    heir = lab.request(8, 6, 1)
    heir.position = 4
    heir.outputs = [request.outputs[0]]
    lab.decode([heir])
    lab.decode([request])
    assert torch.equal(heir.output, request.output)
    lab.sidecar.clear_slots(torch.tensor([6]))
    assert not lab.storage.tensor[:, 6].any()
    if layout == "ring":
        assert torch.equal(lab.storage.state_lens[:, 6], torch.zeros_like(lab.storage.state_lens[:, 6]))


# refusals


def call_of(lab: Lab, request: Request) -> dict[str, Any]:
    """The arguments of a decode call, as a sidecar would give them."""
    batch = StepBatch(ForwardMode.DECODE, torch.tensor([request.row]), 1, 1,
                      computed_lens=torch.tensor([request.position]))  # fmt: skip
    lab.sidecar.init_forward_metadata(batch)
    given: dict[str, Any] = {name: value[:1] for name, value in request.inputs.items()}
    metadata = lab.sidecar.conv_state_metadata(LAYER).metadata
    where = {"state": lab.storage.layer(LAYER), "metadata": metadata}
    return {"b": None, **given, **lab.weights, **where, **lab.options}


BAD: list[tuple[str, str, Any, type[Exception], str]] = [
    ("gdn", "v", lambda call: call["v"][:, :3], ShapeError, "v"),
    ("gdn", "q", lambda call: call["q"].float(), DtypeError, "q"),
    ("gdn", "k", lambda call: None, ArgumentError, "k"),
    ("kda", "a", lambda call: call["a"][..., 0], ShapeError, "a"),
    ("gdn", "b", lambda call: None, MissingArgumentError, "b"),
    ("gdn", "A_log", lambda call: call["A_log"][:2], ShapeError, "A_log"),
    ("gdn", "lower_bound", lambda call: -1.0, UnsupportedError, "lower_bound"),
    ("kda", "lower_bound", lambda call: 1.0, ArgumentError, "lower_bound"),
    ("gdn", "D", lambda call: torch.ones(4), UnsupportedError, "D"),
    ("mamba2", "dt_limit", lambda call: (2.0, 1.0), ArgumentError, "dt_limit"),
    ("mamba2", "use_qk_l2norm_in_kernel", lambda call: True, UnsupportedError, "use_qk_l2norm_in_kernel"),
    ("gdn", "scale", lambda call: "1", ArgumentError, "scale"),
    ("gdn", "out", lambda call: torch.empty(1, 4, 12, dtype=torch.bfloat16), ShapeError, "out"),
    ("gdn", "out", lambda call: call["v"], OverlapError, "out"),
    ("gdn", "state", lambda call: None, ArgumentError, "state"),
    (
        "gdn",
        "metadata",
        lambda call: replace(call["metadata"], forward_mode=ForwardMode.EXTEND),
        ArgumentError,
        "metadata",
    ),
]


@pytest.mark.parametrize(("kind", "name", "value", "error", "named"), BAD)
def test_a_bad_argument_is_refused_by_name_and_nothing_is_written(
    kind: str, name: str, value: Any, error: type[Exception], named: str
) -> None:
    lab = Lab(kind)
    request = lab.request(5, 2, 1)
    lab.extend([request], [4])
    call = call_of(lab, request)
    call[name] = value(call)
    before = lab.bytes()
    with pytest.raises(error, match=f"ssm_decode.*{named}"):
        hwbackends.load("reference").ssm_decode(**call)
    assert all(map(torch.equal, before, lab.bytes()))
