"""Keys and values in pages: the store of a model's attention layers, and who owns which page. Pages are counted, so
that requests which share a prefix share its pages; what nobody owns costs nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hwbackends.engines.transformers.models import ModelSpec

NOTHING = 0
"""Row of the store that stays 0: what is read in place of rows that hold nothing of a request. A masked row must be a
number: 0 times NaN is NaN."""
SCRATCH = 1
"""Row of the store that padded tokens write; nobody reads it."""
RESERVED = 1
"""Pages that nobody is given: page 0 holds `NOTHING` and `SCRATCH`."""


class PagePool:
    """Which pages are free, and how many owners each of the others has.

    Args:
        limit: pages that may be given out at once.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free: list[int] = []
        self._fresh = RESERVED
        self._owners: dict[int, int] = {}

    @property
    def available(self) -> int:
        """Pages that are free."""
        return self.limit - len(self._owners)

    @property
    def used(self) -> int:
        """Pages that somebody owns."""
        return len(self._owners)

    @property
    def extent(self) -> int:
        """Pages that the store must hold: the highest page that was ever given out, and those below it."""
        return self._fresh

    def alloc(self, count: int) -> list[int]:
        """`count` pages with one owner each; freed ones first. The caller looks at `available` before."""
        assert count <= self.available, "more pages than are free"
        pages = []
        for _ in range(count):
            if not self._free:
                self._free.append(self._fresh)
                self._fresh += 1
            pages.append(self._free.pop())
        self._owners.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, pages: Iterable[int]) -> list[int]:
        """One more owner for each page."""
        found = list(pages)
        for page in found:
            self._owners[page] += 1
        return found

    def free(self, pages: Iterable[int]) -> None:
        """One owner less for each page."""
        for page in pages:
            self._owners[page] -= 1
            if not self._owners[page]:
                del self._owners[page]
                self._free.append(page)


class PageStore:
    """Keys and values of every attention layer: [pages * page_size, kv_heads, head_dim], a page's rows side by side.

    Args:
        spec: the model's.
        pages: pages to begin with, the reserved one counted.
        page_size: tokens per page, at least 2.
    """

    def __init__(self, spec: ModelSpec, pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.page_size = page_size
        self.pages = pages
        self.dtype = dtype
        shapes = {layer: (shape.kv_heads, shape.head_dim) for layer, shape in spec.attention.items()}

        def part() -> dict[int, Tensor]:
            rows = pages * page_size
            return {layer: torch.zeros(rows, *shape, dtype=dtype, device=device) for layer, shape in shapes.items()}

        self.keys, self.values = part(), part()

    def tensors(self) -> list[Tensor]:
        """Keys of every layer, then values."""
        return [*self.keys.values(), *self.values.values()]

    def grow(self, pages: int) -> None:
        """Hold at least `pages` pages, at new addresses: twice as many as before if that is more."""
        pages = max(pages, 2 * self.pages)
        for part in (self.keys, self.values):
            for layer, old in part.items():
                new = old.new_zeros(pages * self.page_size, *old.shape[1:])
                new[: old.shape[0]] = old
                part[layer] = new
        self.pages = pages

    def rows(self, pages: Sequence[int], start: int, end: int) -> Tensor:
        """Rows of the positions start..end-1 of a request that owns `pages`, on the host."""
        position = torch.arange(start, end)
        table = torch.tensor(list(pages), dtype=torch.int64)
        return table[position // self.page_size] * self.page_size + position % self.page_size

    def copy_page(self, source: int, destination: int, rows: int) -> None:
        """The first keys and values of one page into another one."""
        first, other = source * self.page_size, destination * self.page_size
        for tensor in self.tensors():
            tensor[other : other + rows] = tensor[first : first + rows]

    def clear(self, pages: Sequence[int]) -> None:
        """Zeros: a kernel that reads whole pages may multiply what an earlier owner left by 0, and 0 times NaN is
        NaN."""
        size = self.page_size
        for tensor in self.tensors():
            for page in pages:
                tensor[page * size : (page + 1) * size] = 0

    def finite(self, pages: Sequence[int], start: int, end: int) -> bool:
        """Whether keys and values of the positions start..end-1 are numbers; waits for the device."""
        if start >= end:
            return True
        some = next(iter(self.keys.values()), None)
        if some is None:
            return True
        rows = self.rows(pages, start, end).to(some.device)
        return bool(torch.stack([tensor.index_select(0, rows).isfinite().all() for tensor in self.tensors()]).all())


def pages_of(tokens: int, page_size: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // page_size)
