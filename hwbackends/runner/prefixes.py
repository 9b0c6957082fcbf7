"""Prefixes that later requests may share: a snapshot of the conv state in a track slot, and the keys and values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hwbackends.step.slots import SlotAllocator


@dataclass(slots=True, eq=False)
class PrefixEntry:
    """One shared prefix: its tokens, the track slot with its conv state, its keys and values, and its readers."""

    tokens: tuple[int, ...]
    slot: int
    saved: list[Tensor]
    readers: int = 0


class PrefixCache:
    """Chunk-aligned prefixes by their tokens, least recently used first out.

    Args:
        allocator: where track slots come from; shared with the requests.
        capacity: track slots that may be held at once; 0 turns the cache off.
    """

    def __init__(self, allocator: SlotAllocator, capacity: int) -> None:
        self._allocator = allocator
        self._capacity = capacity
        self._entries: OrderedDict[tuple[int, ...], PrefixEntry] = OrderedDict()
        self._reserved: set[int] = set()

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

    def reserve(self) -> int | None:
        """A track slot for a snapshot that the next step writes; None if every one is in use."""
        if len(self._entries) + len(self._reserved) >= self._capacity and not self.evict():
            return None
        if not self._allocator.available and not self.evict():
            return None
        [slot] = self._allocator.alloc()
        self._reserved.add(slot)
        return slot

    def publish(self, slot: int, tokens: Sequence[int], saved: list[Tensor]) -> None:
        """Offer a reserved slot, now written, as the state after `tokens`; a prefix known already frees the slot."""
        key = tuple(tokens)
        if key in self._entries:
            self.release(slot)
            return
        self._reserved.remove(slot)
        self._entries[key] = PrefixEntry(key, slot, saved)

    def release(self, slot: int) -> None:
        """Give a reserved slot back that is of no use."""
        self._reserved.remove(slot)
        self._allocator.free([slot])

    def abandon(self) -> None:
        """Give every reserved slot back: the step that was to write them has failed."""
        for slot in list(self._reserved):
            self.release(slot)

    def clear(self) -> None:
        """Forget every prefix and free its slot."""
        self._allocator.free([entry.slot for entry in self._entries.values()])
        self._entries.clear()

    def evict(self) -> bool:
        """Free the slot of the least recently used prefix that nobody reads; false if there is none."""
        for key, entry in self._entries.items():
            if not entry.readers:
                del self._entries[key]
                self._allocator.free([entry.slot])
                return True
        return False
