"""What the drafters propose, and what the host side keeps about requests and prefixes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwbackends.errors import ArgumentError
from hwbackends.runner.drafters import NGramDrafter, SeededDrafter, missing_counts
from hwbackends.runner.graphs import buckets
from hwbackends.runner.prefixes import PrefixCache
from hwbackends.runner.requests import Request
from hwbackends.step.slots import SlotAllocator


def request(prompt: bytes, generated: bytes = b"", room: int = 50, request_id: int = 0) -> Request:
    made = Request(request_id, tuple(prompt), room)
    made.generated.extend(generated)
    return made


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        (b"abcXabc", b"Xabc"),  # what followed the last three tokens
        (b"bcXbcYbc", b"Ybc"),  # the newest occurrence wins
        (b"zcXabc", b"Xabc"),  # a shorter run, where the longer one is new
        (b"abcd", b""),
        (b"a", b""),
        (b"aa", b"a"),
    ],
)
def test_n_grams_propose_what_followed_last_time(text: bytes, drafts: bytes) -> None:
    [proposed] = NGramDrafter().propose([request(text[:2], text[2:])], 4)
    assert bytes(proposed) == drafts


def test_n_grams_propose_no_more_than_asked() -> None:
    [proposed] = NGramDrafter().propose([request(b"abcdefabc")], 2)
    assert bytes(proposed) == b"de"


def test_n_grams_of_impossible_size_are_refused() -> None:
    for shortest, longest in ((0, 3), (4, 3)):
        with pytest.raises(ArgumentError, match="1 <= shortest <= longest"):
            NGramDrafter(longest, shortest)


@given(st.integers(1, 6), st.integers(0, 99))
def test_the_seeded_drafter_is_right_for_every_count_before_any_count_comes_again(count: int, seed: int) -> None:
    answer = list(range(100, 160))
    drafter = SeededDrafter({0: answer}, 256, seed)
    open_ended = request(b"x", room=60)
    right: Counter[int] = Counter()
    for _ in range(2 * (count + 1)):
        [drafts] = drafter.propose([open_ended], count)
        assert len(drafts) == count
        pairs = zip(drafts, answer, strict=False)
        right[next((i for i, (got, want) in enumerate(pairs) if got != want), count)] += 1
    assert right == Counter(dict.fromkeys(range(count + 1), 2))


def test_the_seeded_drafter_never_promises_more_than_may_be_generated() -> None:
    answer = list(range(7))
    drafter = SeededDrafter({0: answer}, 256, seed=1)
    near_the_end = request(b"x", bytes(answer[:5]), room=7)
    for _ in range(20):
        [drafts] = drafter.propose([near_the_end], 4)
        assert sum(got == want for got, want in zip(drafts, answer[5:], strict=False)) <= 1


def test_missing_counts_are_found() -> None:
    served = request(b"x")
    served.accepted.update([0, 2, 2])
    assert missing_counts([served], 3) == [1, 3]
    assert missing_counts([served, request(b"y")], 0) == []


def test_a_request_takes_no_token_behind_its_end() -> None:
    made = Request(0, (1, 2), 3, frozenset({9}))
    assert made.extend([4, 9, 5], None) == 2
    assert made.done
    assert made.extend([6], None) == 0
    assert made.tokens == (1, 2, 4, 9)
    assert made.span(1, 4) == [2, 4, 9]
    assert made.length == 4


@pytest.mark.parametrize(("largest", "sizes"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (16, [1, 2, 4, 8, 16])])
def test_recorded_batch_sizes_reach_the_largest(largest: int, sizes: list[int]) -> None:
    assert buckets(largest) == sizes


def test_the_longest_prefix_that_leaves_a_token_is_found() -> None:
    cache = PrefixCache(SlotAllocator(9), capacity=3)
    for tokens in (b"ab", b"abcd", b"xy"):
        slot = cache.reserve()
        assert slot is not None
        cache.publish(slot, tuple(tokens), [])
    found = {text: cache.find(tuple(text)) for text in (b"abcde", b"abcd", b"ab", b"abX", b"q")}
    lengths = {text: 0 if entry is None else len(entry.tokens) for text, entry in found.items()}
    assert lengths == {b"abcde": 4, b"abcd": 2, b"ab": 0, b"abX": 2, b"q": 0}


def test_the_least_recently_used_prefix_gives_way_unless_it_is_read() -> None:
    allocator = SlotAllocator(9)
    cache = PrefixCache(allocator, capacity=2)
    for tokens in (b"ab", b"cd"):
        slot = cache.reserve()
        assert slot is not None
        cache.publish(slot, tuple(tokens), [])
    used = cache.find(tuple(b"abc"))
    assert used is not None
    assert cache.reserve() is not None
    assert (tuple(b"ab") in cache, tuple(b"cd") in cache) == (True, False)
    used.readers += 1
    assert cache.reserve() is None, "one slot is reserved and the other prefix is being read"
    assert not cache.evict()


def test_a_prefix_known_already_frees_its_second_slot() -> None:
    allocator = SlotAllocator(5)
    cache = PrefixCache(allocator, capacity=3)
    slots = [cache.reserve(), cache.reserve()]
    assert None not in slots
    cache.publish(slots[0], (1, 2), [])  # type: ignore[arg-type]
    cache.publish(slots[1], (1, 2), [])  # type: ignore[arg-type]
    assert allocator.used == {slots[0]}
    cache.clear()
    assert not allocator.used


def test_a_full_pool_reserves_nothing() -> None:
    allocator = SlotAllocator(2)
    cache = PrefixCache(allocator, capacity=4)
    allocator.alloc()
    assert cache.reserve() is None
