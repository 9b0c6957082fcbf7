"""What a history of steps leaves behind is what decoding its accepted tokens one by one leaves behind, by bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ssm.lab import LAYER, NAN, Lab, Request

KINDS = ["gdn", "kda", "mamba2"]
LAYOUTS = ["ring", "intermediate"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def plain(
    kind: str, dtype: torch.dtype, seed: int, prompt: int, count: int, **more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and state of one request alone: a prompt, then one token after the other."""
    lab = Lab(kind, "intermediate", dtype, **more)
    request = lab.request(1, 1, seed)
    lab.extend([request], [prompt])
    while request.position < count:
        lab.decode([request])
    return request.output, lab.states([request])[0]


def same_as_plain(lab: Lab, kind: str, dtype: torch.dtype, requests: list[tuple[Request, int, int]]) -> None:
    found = lab.states([request for request, _, _ in requests])
    for (request, seed, prompt), state in zip(requests, found, strict=True):
        output, wanted = plain(kind, dtype, seed, prompt, request.position)
        assert torch.equal(request.output, output)
        assert torch.equal(state, wanted)


STEP = st.one_of(
    st.tuples(st.just("verify"), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.just("decode"), st.booleans(), st.booleans()),
    st.tuples(st.just("draft_extend"), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.just("extend"), st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.just("reuse"), st.just(0), st.just(0)),
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEP, min_size=3, max_size=7), rows=st.sampled_from([6, 8, 13]), dtype=st.sampled_from(DTYPES))
def test_any_history_equals_decoding_its_tokens(
    kind: str, layout: str, steps: list[Any], rows: int, dtype: torch.dtype
) -> None:
    lab = Lab(kind, layout, dtype, ring_rows=rows if layout == "ring" else None)
    one, two = lab.request(5, 2, 1), lab.request(3, 6, 2)
    seeds = {id(one): 1, id(two): 2}
    lab.extend([one, None, two], [5, 2, 3])
    prompts = {id(one): 5, id(two): 3}
    for number, (what, first, second) in enumerate(steps):
        order: list[Any] = [one, None, two] if number % 2 else [two, one]
        counts = [{id(one): first, id(two): second}.get(id(request), 0) for request in order]
        if what == "verify":
            lab.verify(order, counts, again=bool(number % 3))
        elif what == "decode":
            lab.decode(order, again=layout == "ring" and bool(first))
        elif what == "draft_extend":
            lab.draft_extend(order, [-1 if request is None else n for request, n in zip(order, counts, strict=True)])
        elif what == "extend":
            lab.extend(order, counts)
        else:  # `two` finishes; the next request gets its row and its slot with all that they hold
            two = lab.request(3, 6, 10 + number)
            seeds[id(two)], prompts[id(two)] = 10 + number, 4
            lab.extend([two], [4])
    same_as_plain(lab, kind, dtype, [(r, seeds[id(r)], prompts[id(r)]) for r in (one, two)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_the_ring_that_nobody_may_read_never_matter(layout: str) -> None:
    lab = Lab("kda", layout)
    request = lab.request(5, 2, 1)
    lab.extend([request], [5])
    lab.verify([request], [2])
    if layout == "ring":
        keep = {position % lab.storage.ring_u.shape[2] for position in range(5, request.position)}
        for row in set(range(lab.storage.ring_u.shape[2])) - keep:
            for tensor in (lab.storage.ring_k, lab.storage.ring_u, lab.storage.ring_d):
                tensor[:, :, row] = NAN
    lab.verify([request], [3])
    same_as_plain(lab, "kda", torch.float32, [(request, 1, 5)])


def test_a_commit_on_a_ring_writes_nothing_and_zero_accepted_leaves_nothing_behind() -> None:
    lab = Lab("gdn", "ring")
    request = lab.request(5, 2, 1)
    lab.extend([request], [5])
    before = lab.states([request])
    for _ in range(3):
        lab.verify([request], [0])
    held = lab.bytes()
    lab.commit([request], [3])
    assert all(map(torch.equal, held, lab.bytes()))
    assert torch.equal(lab.states([request]), before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_is_the_state_of_decoding_to_its_position(kind: str, layout: str) -> None:
    lab = Lab(kind, layout)
    request = lab.request(5, 2, 1)
    lab.extend([request], [5])
    lab.verify([request], [2], mamba_track_indices=torch.tensor([4]), mamba_steps_to_track=torch.tensor([0]))
    assert torch.equal(lab.storage.tensor[1, 4], plain(kind, torch.float32, 1, 5, 6)[1])
    again = lab.request(8, 4, 1)  # a recycled row, over the snapshot: it brings its own length
    again.position = 6
    lab.verify([again], [3])
    output, state = plain(kind, torch.float32, 1, 5, 9)
    assert torch.equal(again.output, output[6:])
    assert torch.equal(lab.states([again])[0], state)


def test_materialized_into_another_slot_leaves_the_request_as_it_was() -> None:
    lab = Lab("gdn", "ring")
    request = lab.request(5, 2, 1)
    lab.extend([request], [5])
    lab.verify([request], [3])
    before = lab.storage.tensor[LAYER, 2].clone()
    found = lab.states([request], [6])
    assert torch.equal(lab.storage.tensor[LAYER, 2], before)
    assert torch.equal(found[0], plain("gdn", torch.float32, 1, 5, 8)[1])


@pytest.mark.parametrize("kind", KINDS)
def test_any_split_of_a_prompt_gives_the_same_bits(kind: str) -> None:
    wanted, state = plain(kind, torch.bfloat16, 3, 11, 11)
    for split in ([1] * 11, [4, 7], [3, 0, 8]):
        lab = Lab(kind, "ring", torch.bfloat16)
        request = lab.request(1, 1, 3)
        for length in split:
            lab.extend([request], [length])
        assert torch.equal(request.output, wanted)
        assert torch.equal(lab.states([request])[0], state)
