"""SSM hooks of a GPU backend, in triton's interpreter or on its device. Not collected by itself: see
test_ssm_interpreter.py and test_ssm.py."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from hwbackends.registry.loading import load
from tests.cuda.ssm_lab import START, Lab

DEVICE = os.environ.get("SSM_DEVICE", "cpu")
BACKEND = os.environ.get("INTERPRETED_BACKEND", "cuda")
HOOKS: Any = load(BACKEND, None if DEVICE == "cpu" else DEVICE)
DEFERS = f"hwbackends.{BACKEND}.tuning." + ("Tuning.ssm_defers" if BACKEND == "rocm" else "ssm_defers")
"""What decides whether a decode on a ring keeps its token there."""
KINDS = [("gdn", torch.float32), ("kda", torch.bfloat16), ("mamba2", torch.float16)]


def lab(kind: Any, layout: Any = "ring", **given: Any) -> Lab:
    return Lab(HOOKS, kind, layout, device=DEVICE, **given)


def decoded(kind: Any, count: int, layout: Any = "ring", **given: Any) -> tuple[Lab, list[Tensor], list[Tensor]]:
    """A lab behind `count` decodes of request 0, and the outputs and states behind each."""
    made = lab(kind, layout, **given)
    outputs, states = [], []
    for t in range(count):
        outputs.append(made.run("ssm_decode", [t], [1], padded=0)[0])
        if layout == "ring":
            made.materialize([t + 1])
        states.append(made.state.tensor[2].clone())
    return made, outputs, states


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_verify_equals_decodes_by_bits_with_every_accepted_count_and_twice(kind: Any, dtype: torch.dtype) -> None:
    heads = (1, 2) if kind == "mamba2" else (1, 1)
    _, outputs, states = decoded(kind, 4, dtype=dtype, heads=heads)
    drafted = lab(kind, dtype=dtype, heads=heads)
    done = 0
    for accepted in (1, 0, 2):
        for _ in range(2):
            (y,) = drafted.run("ssm_target_verify", [done], [2], padded=0)[:1]
            assert torch.equal(y, torch.cat(outputs[done : done + 2])), (accepted, done)
        done += accepted
    drafted.materialize([done])
    assert torch.equal(drafted.state.tensor[2], states[done - 1])
    assert (drafted.state.state_lens[2] == START + done).all()


@pytest.mark.parametrize("kind", ["gdn", "kda", "mamba2"])
def test_extend_equals_decodes_by_bits_and_both_lie_within_a_bound_of_float64(kind: Any) -> None:
    truth, states = lab(kind).oracle(0, 3)
    _, outputs, _ = decoded(kind, 3)
    y = torch.cat(outputs)
    assert (y.double().cpu() - truth).abs().max() < 4e-6
    packed = lab(kind)
    track = {"mamba_track_indices": [5], "mamba_track_tokens": [2]}
    first, rest = packed.run("ssm_extend", [0], [3], padded=0, tail=2, **track)
    assert torch.equal(first, y)
    assert not rest.any()
    for slot, count in ((2, 3), (5, 2)):
        assert (packed.state.tensor[slot].double().cpu() - states[count - 1]).abs().max() < 4e-6
        assert (packed.state.state_lens[slot] == START + count).all()


@pytest.mark.parametrize("kind", ["gdn", pytest.param("mamba2", marks=pytest.mark.slow)])
def test_a_deferred_decode_a_written_one_and_one_that_runs_twice_give_the_same_bits(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, outputs, states = decoded(kind, 3, heads=(1, 1))
    monkeypatch.setattr(DEFERS, lambda *given: True)
    late = lab(kind, heads=(1, 1))
    for t in range(3):
        y = late.run("ssm_decode", [t], [1])[0]
        assert torch.equal(y, outputs[t])
    late.materialize([3])
    assert torch.equal(late.state.tensor[2], states[2])
    monkeypatch.setattr(DEFERS, lambda *given: False)
    twice = lab(kind, heads=(1, 1))
    for _ in range(2):
        assert torch.equal(twice.run("ssm_decode", [0], [1], padded=0)[0], outputs[0])
    assert torch.equal(twice.state.tensor[2], states[0])


def test_padded_rows_give_zero_and_write_nothing_and_the_reference_agrees() -> None:
    ours, theirs = lab("gdn", inputs=torch.bfloat16), lab("gdn", inputs=torch.bfloat16)
    before = ours.state.tensor.clone()
    mine = ours.run("ssm_target_verify", [0, 0], [2, 2])
    reference = theirs.run("ssm_target_verify", [0, 0], [2, 2], hooks=load("reference", DEVICE))
    assert not mine[2].any()
    for a, b in zip(mine, reference, strict=True):
        assert torch.allclose(a.float(), b.float(), atol=1e-2)
    assert torch.equal(ours.state.tensor[[0, 1, 3, 5]], before[[0, 1, 3, 5]])
    for name in ("ring_k", "ring_u", "ring_d"):
        a, b = getattr(ours.state, name), getattr(theirs.state, name)
        assert torch.equal(a.isnan(), b.isnan()), name
        assert (a - b).nan_to_num().abs().max() < 1e-5, name


@pytest.mark.parametrize("hook", ["ssm_target_verify", "ssm_extend"])
def test_a_first_step_reads_neither_state_nor_lengths_nor_ring(hook: str) -> None:
    clean, dirty = lab("kda"), lab("kda")
    clean.state.tensor.zero_()
    dirty.state.tensor.fill_(math.nan)
    dirty.state.state_lens.fill_(99)
    for made in (clean, dirty):
        made.result = made.run(hook, [0], [2], padded=0, start=0)[0]  # type: ignore[attr-defined]
    assert torch.equal(clean.result, dirty.result)  # type: ignore[attr-defined]
    assert torch.equal(clean.state.tensor[2], dirty.state.tensor[2])
    assert torch.equal(clean.state.state_lens[2], dirty.state.state_lens[2])


def test_intermediate_states_are_those_of_decodes_and_the_commit_takes_one() -> None:
    _, outputs, states = decoded("gdn", 3, "intermediate")
    made = lab("gdn", "intermediate", drafts=3)
    (y,) = made.run("ssm_target_verify", [0], [3], padded=0)[:1]
    assert torch.equal(y, torch.cat(outputs))
    assert torch.equal(made.state.intermediate[3], torch.stack(states))
    rows = torch.tensor([3, -1], dtype=torch.int32, device=DEVICE)
    steps = torch.tensor([1, 1], dtype=torch.int32, device=DEVICE)
    track = torch.tensor([5, 5], dtype=torch.int32, device=DEVICE)
    HOOKS.update_mamba_state_after_mtp_verify(made.pool, rows, steps, track, steps - 1)
    assert torch.equal(made.state.tensor[2], states[1])
    assert torch.equal(made.state.tensor[5], states[0])


def test_a_tree_follows_its_parents() -> None:
    """Drafts 0 -> 1 and 0 -> 2: draft 2 starts behind draft 0."""
    made, branch = lab("gdn", "intermediate", drafts=3), lab("gdn", "intermediate", drafts=3)
    parents = torch.tensor([[-1, 0, 0]], dtype=torch.int32, device=DEVICE)
    made.run("ssm_target_verify", [0], [3], padded=0, parents=parents)
    branch.stream[0, 1], branch.gates[0][0, 1] = branch.stream[0, 2].clone(), branch.gates[0][0, 2].clone()
    branch.gates[1][0, 1] = branch.gates[1][0, 2].clone()
    branch.run("ssm_target_verify", [0], [2], padded=0)
    assert torch.equal(made.state.intermediate[3, 2], branch.state.intermediate[3, 1])


@pytest.mark.parametrize("layout", ["ring", "intermediate"])
def test_a_draft_extend_keeps_the_accepted_tokens_and_tracks(layout: Any) -> None:
    _, outputs, states = decoded("gdn", 2, layout)
    made = lab("gdn", layout)
    track = {"mamba_track_indices": [5, -1], "mamba_track_tokens": [2, -1], "num_accept_tokens": [1, -1]}
    y = made.run("ssm_draft_extend", [0], [2], **track)
    assert torch.equal(y[0], torch.cat(outputs))
    assert not y[1].any()
    assert torch.equal(made.state.tensor[5], states[1])
    if layout == "ring":
        made.materialize([1])
    assert torch.equal(made.state.tensor[2], states[0])


def test_a_snapshot_of_a_commit_is_the_state_of_decodes_at_that_position() -> None:
    _, _, states = decoded("mamba2", 2)
    made = lab("mamba2")
    made.run("ssm_target_verify", [0], [2], padded=0)
    rows, steps, track, lens = (torch.tensor([x], dtype=torch.int32, device=DEVICE) for x in (3, 0, 5, START))
    HOOKS.update_mamba_state_after_mtp_verify(made.pool, rows, steps, track, steps + 1, computed_lens=lens)
    assert torch.equal(made.state.tensor[5], states[1])
    assert (made.state.state_lens[5] == START + 2).all()
    assert (made.state.state_lens[2] == START).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gdn", "kda", "mamba2"])
@pytest.mark.parametrize("dims", [(24, 12), (80, 64)])
def test_dims_that_no_tile_divides(kind: Any, dims: tuple[int, int]) -> None:
    truth, _ = lab(kind, dims=dims, heads=(1, 1)).oracle(0, 2)
    _, outputs, _ = decoded(kind, 2, dims=dims, heads=(1, 1))
    assert (torch.cat(outputs).double().cpu() - truth).abs().max() < 2e-5
    drafted = lab(kind, dims=dims, heads=(1, 1))
    assert torch.equal(drafted.run("ssm_target_verify", [0], [2], padded=0)[0], torch.cat(outputs))
