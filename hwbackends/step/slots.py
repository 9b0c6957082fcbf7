"""Who owns which state slot. Host side only."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from hwbackends.errors import OutOfSlotsError, SlotError

RESERVED_SLOT = 0
"""Never allocated; where an engine's padded rows point."""


class SlotAllocator:
    """Who owns which slot: hands out slots 1..num_slots-1, lowest first. Host side only.

    A failed call changes nothing.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 2:
            raise SlotError("SlotAllocator", "num_slots", num_slots, "at least 2: slot 0 is reserved")
        self.num_slots = num_slots
        self.clear()

    def clear(self) -> None:
        """Make every slot free."""
        self._free = list(range(self.num_slots - 1, RESERVED_SLOT, -1))
        self._used: set[int] = set()

    @property
    def available(self) -> int:
        """Free slots."""
        return len(self._free)

    @property
    def used(self) -> frozenset[int]:
        """Slots that are handed out."""
        return frozenset(self._used)

    def alloc(self, count: int = 1) -> list[int]:
        """Hand out `count` slots.

        Raises:
            OutOfSlotsError: fewer are free; none was handed out.
        """
        if count < 0:
            raise SlotError("SlotAllocator.alloc", "count", count, "at least 0")
        if count > len(self._free):
            hint = "free finished requests first, or make the pool larger"
            raise OutOfSlotsError("SlotAllocator.alloc", "count", count, f"at most {len(self._free)} free slots", hint)
        taken = [self._free.pop() for _ in range(count)]
        self._used.update(taken)
        return taken

    def free(self, slots: Iterable[int] | Tensor) -> None:
        """Give slots back; a tensor [n] is read on the host.

        Raises:
            SlotError: a slot is not handed out (freed twice, foreign, reserved), or is named twice; none was freed.
        """
        given: list[int] = slots.tolist() if isinstance(slots, Tensor) else list(slots)
        if len(set(given)) != len(given):
            raise SlotError("SlotAllocator.free", "slots", given, "each slot once")
        for slot in given:
            if slot not in self._used:
                why = "not handed out" if RESERVED_SLOT < slot < self.num_slots else "not a slot of this pool"
                raise SlotError("SlotAllocator.free", "slots", f"{slot}, {why}", "slots that alloc() handed out")
        self._used.difference_update(given)
        self._free.extend(reversed(given))
