"""Prefixes that later requests may share: a snapshot of the conv state in a track slot, and the pages of the keys and
values; which places of a text are worth a snapshot, and which snapshot gives way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hwbackends.step.slots import SlotAllocator

REMEMBERED = 8192
"""Chunks of recent prompts that are remembered, without any state, to see where texts part."""


@dataclass(slots=True, eq=False)
class PrefixEntry:
    """One shared prefix: its tokens, the track slot with its conv state, its pages, and who uses it.

    Attributes:
        kept: whether it stands where texts part or where a prompt or an answer ends, and not merely on the way there.
        readers: requests that have joined and not yet read its slot.
        hits: requests that started from it.
    """

    tokens: tuple[int, ...]
    slot: int
    pages: list[int]
    kept: bool = False
    readers: int = 0
    hits: int = 0


class PrefixCache:
    """Chunk-aligned prefixes by their tokens. Snapshots on the way give way first, then those that nobody has used,
    then the least recently used.

    Attributes:
        evictions: prefixes that gave way so far.

    Args:
        allocator: where track slots come from; shared with the requests.
        capacity: track slots that may be held at once; 0 turns the cache off.
        free_pages: gives the pages of a prefix back.
    """

    def __init__(
        self,
        allocator: SlotAllocator,
        capacity: int,
        free_pages: Callable[[list[int]], None] = lambda pages: None,
    ) -> None:
        self._allocator = allocator
        self._capacity = capacity
        self._free_pages = free_pages
        self._entries: OrderedDict[tuple[int, ...], PrefixEntry] = OrderedDict()
        self._reserved: set[int] = set()
        self._seen: OrderedDict[int, None] = OrderedDict()
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, tokens: Sequence[int]) -> bool:
        return tuple(tokens) in self._entries

    def find(self, prompt: Sequence[int]) -> PrefixEntry | None:
        """The longest prefix of `prompt` that leaves at least one token to compute."""
        best: PrefixEntry | None = None
        for tokens, entry in self._entries.items():
            length = len(tokens)
            longer = best is None or length > len(best.tokens)
            if longer and length < len(prompt) and tuple(prompt[:length]) == tokens:
                best = entry
        if best is not None:
            self._entries.move_to_end(best.tokens)
        return best

    def meet(self, keys: Sequence[int]) -> int:
        """Remember a prompt by the keys of its chunks; returns how many of its chunks earlier prompts began with."""
        known = 0
        for index, key in enumerate(keys):
            if key in self._seen and known == index:
                known = index + 1
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return known

    def keep(self, tokens: Sequence[int]) -> None:
        """A prefix turned out to stand where texts part."""
        if (entry := self._entries.get(tuple(tokens))) is not None:
            entry.kept = True

    def reserve(self, kept: bool = True) -> int | None:
        """A track slot for a snapshot that the next step writes; None if every one is in use. One on the way (`kept`
        false) takes the place of its like only."""
        if len(self._entries) + len(self._reserved) >= self._capacity and not self.evict(kept):
            return None
        if not self._allocator.available and not self.evict(kept):
            return None
        [slot] = self._allocator.alloc()
        self._reserved.add(slot)
        return slot

    def publish(self, slot: int, tokens: Sequence[int], pages: list[int], kept: bool = False) -> bool:
        """Offer a reserved slot, now written, as the state after `tokens`, with pages that are the prefix's own from
        now on. A prefix known already frees the slot; false: the pages stay the caller's."""
        key = tuple(tokens)
        if key in self._entries:
            self._entries[key].kept |= kept
            self.release(slot)
            return False
        self._reserved.remove(slot)
        self._entries[key] = PrefixEntry(key, slot, pages, kept)
        return True

    def release(self, slot: int) -> None:
        """Give a reserved slot back that is of no use."""
        if slot in self._reserved:
            self._reserved.remove(slot)
            self._allocator.free([slot])

    def abandon(self) -> None:
        """Give every reserved slot back: the step that was to write them has failed."""
        for slot in list(self._reserved):
            self.release(slot)

    def clear(self) -> None:
        """Forget every prefix that nobody is about to read, and every prompt."""
        self._seen.clear()
        for entry in list(self._entries.values()):
            if not entry.readers:
                self._drop(entry)

    def evict(self, kept: bool = True) -> bool:
        """Give up the prefix that is worth least and that nobody reads; false if there is none, or where `kept` is
        false none but those that are worth keeping."""
        free = [entry for entry in self._entries.values() if not entry.readers]
        free = [entry for entry in free if kept or not (entry.kept or entry.hits)]
        if not free:
            return False
        # entries stand in the order of their last use, and min takes the first of equals
        self._drop(min(free, key=lambda entry: (entry.kept or entry.hits > 0, entry.hits > 0)))
        self.evictions += 1
        return True

    def _drop(self, entry: PrefixEntry) -> None:
        del self._entries[entry.tokens]
        self._allocator.free([entry.slot])
        self._free_pages(entry.pages)


def chunk_keys(tokens: Sequence[int], size: int) -> tuple[int, ...]:
    """A key for each whole chunk of a text that names the text up to its end."""
    keys: list[int] = []
    key = 0
    for end in range(size, len(tokens) + 1, size):
        key = hash((key, tuple(tokens[end - size : end])))
        keys.append(key)
    return tuple(keys)
