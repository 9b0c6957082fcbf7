"""Properties that hold for any mix: chunks, order, padding and speculation change no bit of an op's result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.lab import PAD, Lab, same_bits

DIM, SLOTS, DRAFTS = 5, 11, 3
SEEDS = st.integers(0, 2**31)


def filled(target: tuple[str, str], layout: str, seed: int, width: int, rows: dict[int, int], **extra: Any) -> Lab:
    """A lab with random weights; histories start empty."""
    it = Lab(*target, layout, dim=DIM, width=width, slots=SLOTS, drafts=DRAFTS, rows=rows, **extra)
    it.weight = numbers(seed, DIM, width).to(it.device)
    return it


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def split(lengths: Sequence[int], rows: torch.Tensor) -> list[torch.Tensor]:
    return list(rows.split(list(lengths)))


@given(seed=SEEDS, width=st.integers(2, 5), chunks=st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_chunks_give_the_bits_of_the_whole_prompt(
    target: tuple[str, str], layout: str, seed: int, width: int, chunks: list[int]
) -> None:
    x = numbers(seed, sum(chunks), DIM)
    whole, parts = (filled(target, layout, seed + 1, width, {5: 1}) for _ in range(2))
    y = whole.extend([5], [len(x)], x)
    pieces = [parts.extend([5], [len(piece)], piece) for piece in split(chunks, x)]
    assert torch.equal(torch.cat(pieces), y)
    if len(x):
        assert whole.seen(5) == parts.seen(5)
        ends = [it.window(1, len(x)) for it in (whole, parts)]
        live = torch.arange(len(x) - width + 1, len(x), device=whole.device) >= (0 if layout == "ring" else -width)
        assert torch.equal(ends[0][live], ends[1][live])


@given(seed=SEEDS, lengths=st.lists(st.integers(0, 5), min_size=2, max_size=4), data=st.data())
def test_the_order_of_the_batch_changes_no_bit(
    target: tuple[str, str], layout: str, seed: int, lengths: list[int], data: st.DataObject
) -> None:
    rows = {row: row + 2 for row in range(1, len(lengths) + 1)}
    order = data.draw(st.permutations(range(len(lengths))))
    x = split(lengths, numbers(seed, sum(lengths), DIM))
    plain, mixed = (filled(target, layout, seed + 1, 4, rows) for _ in range(2))
    names = list(rows)
    y = split(lengths, plain.extend(names, lengths, torch.cat(x)))
    shuffled = [lengths[i] for i in order]
    got = split(shuffled, mixed.extend([names[i] for i in order], shuffled, torch.cat([x[i] for i in order])))
    for place, request in enumerate(order):
        assert torch.equal(got[place], y[request])
    assert same_bits(plain.state.tensor, mixed.state.tensor)


@given(seed=SEEDS, count=st.integers(1, 3), pads=st.lists(st.integers(0, 3), max_size=3))
def test_padding_changes_no_bit(target: tuple[str, str], layout: str, seed: int, count: int, pads: list[int]) -> None:
    rows = {row: row + 2 for row in range(1, count + 1)}
    plain, padded = (filled(target, layout, seed + 1, 4, rows) for _ in range(2))
    for it in (plain, padded):
        it.extend(list(rows), [4] * count, numbers(seed + 2, 4 * count, DIM))
    order = list(rows)
    for place in pads:
        order.insert(min(place, len(order)), PAD)
    x = numbers(seed, count, DIM)
    spread = torch.full((len(order), DIM), float("nan"))
    live = [place for place, row in enumerate(order) if row != PAD]
    spread[live] = x
    y, got = plain.decode(list(rows), x), padded.decode(order, spread)
    assert torch.equal(got[live], y)
    assert not got[[place for place, row in enumerate(order) if row == PAD]].any()
    assert same_bits(plain.state.tensor, padded.state.tensor)


@given(seed=SEEDS, width=st.integers(2, 5), accepted=st.lists(st.integers(0, DRAFTS), min_size=1, max_size=5))
def test_speculation_gives_the_bits_of_plain_decoding(
    target: tuple[str, str], layout: str, seed: int, width: int, accepted: list[int]
) -> None:
    counts = [max(1, count) for count in accepted] if layout == "lazy" else accepted
    prompt, x = numbers(seed, 4, DIM), numbers(seed + 1, sum(counts), DIM)
    plain, drafted = (filled(target, layout, seed + 2, width, {5: 1}) for _ in range(2))
    for it in (plain, drafted):
        it.extend([5], [4], prompt)
    want = torch.cat([plain.decode([5], row[None]) for row in x] or [x.to(plain.device)])
    got = []
    for index, piece in enumerate(split(counts, x)):
        wrong = numbers(seed + 3 + index, DRAFTS - len(piece), DIM)
        got.append(drafted.verify([5], torch.cat([piece, wrong]))[: len(piece)])
        drafted.commit([5], [len(piece)])
    assert torch.equal(torch.cat(got), want)
    assert drafted.lengths == plain.lengths
    assert drafted.seen(5) == plain.seen(5)
    after = numbers(seed + 9, 1, DIM)
    assert torch.equal(plain.decode([5], after), drafted.decode([5], after))


@given(seed=SEEDS, accepted=st.lists(st.integers(0, DRAFTS), min_size=1, max_size=4))
def test_a_draft_extend_is_a_verify_and_its_commit(
    target: tuple[str, str], layout: str, seed: int, accepted: list[int]
) -> None:
    one, two = (filled(target, layout, seed + 1, 4, {5: 1}) for _ in range(2))
    for it in (one, two):
        it.extend([5], [4], numbers(seed, 4, DIM))
    for index, count in enumerate(max(1, c) if layout == "lazy" else c for c in accepted):
        x = numbers(seed + 2 + index, DRAFTS, DIM)
        y = one.verify([5], x)
        one.commit([5], [count])
        assert torch.equal(two.draft_extend([5], [count], x), y)
        assert one.seen(5) == two.seen(5)


@pytest.mark.parametrize("width", [2, 3, 4, 5])
@given(seed=SEEDS)
@settings(max_examples=20)
def test_the_residual_bias_and_activation_follow_the_formula(
    target: tuple[str, str], layout: str, seed: int, width: int
) -> None:
    it = filled(target, layout, seed, width, {5: 1}, dtype=torch.float64)
    it.weight = it.weight.double()
    x, bias = numbers(seed + 1, 7, DIM).double(), numbers(seed + 2, DIM).double().to(it.device)
    y = it.extend([5], [7], x, conv={"bias": bias, "activation": "silu", "residual": True})
    padded = torch.cat([torch.zeros(width - 1, DIM, dtype=torch.float64), x]).T[None]
    total = torch.nn.functional.conv1d(padded, it.weight.cpu()[:, None], bias.cpu(), groups=DIM)[0].T
    want = torch.nn.functional.silu(total) + x
    assert torch.allclose(y.cpu(), want, rtol=1e-13, atol=1e-13)
