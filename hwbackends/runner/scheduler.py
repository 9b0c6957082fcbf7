"""Which requests run, where, and what each step gives them: request rows, state slots, pages, shared prefixes, chunks
of prompts, and who makes room for whom. Host side; the only tensors it touches are the map of rows to slots and the
pages of prefixes. Not safe for threads: the thread that steps calls it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hwbackends.runner.pages import PagePool, PageStore, pages_of
from hwbackends.runner.prefixes import PrefixCache, chunk_keys
from hwbackends.runner.requests import Request, RequestState
from hwbackends.runner.settings import RunnerSettings
from hwbackends.step.metadata import PADDED
from hwbackends.step.pool import StatePool
from hwbackends.step.slots import SlotAllocator

Plan = list[tuple[Request, int]]
"""Requests of a mixed step, and how many tokens each one gets."""


@dataclass(slots=True)
class SchedulerCounters:
    """Counts over a scheduler's life.

    Attributes:
        joined: times that a request was given a row.
        reused_tokens: tokens that joining requests took from prefixes.
        computed_prompt_tokens: tokens of prompts that joining requests had to compute.
        preemptions: times that a request lost its place to another one.
        recomputed: times that a request starts over after a failed step or a change of the model.
        queue_seconds: time that requests waited before they joined first, all together.
        longest_queue_seconds: the longest of these.
    """

    joined: int = 0
    reused_tokens: int = 0
    computed_prompt_tokens: int = 0
    preemptions: int = 0
    recomputed: int = 0
    queue_seconds: float = 0.0
    longest_queue_seconds: float = 0.0


class Scheduler:
    """Admits, places and releases requests.

    Attributes:
        counters: what it did.
        prefixes: snapshots that requests may start from.
        running: requests with a row, in the order in which they joined.

    Args:
        settings: limits of the runner.
        pool: its `mamba_index_mapping` is kept up to date.
        store: keys and values by page.
        pages: who owns which page.
        share_prefixes: whether new requests may start from prefixes of earlier ones.
        clear_pages: whether pages are cleared before somebody gets them.
        on_leave: called with each request that leaves its row, whatever its state.
    """

    def __init__(
        self,
        settings: RunnerSettings,
        pool: StatePool,
        store: PageStore,
        pages: PagePool,
        share_prefixes: bool,
        clear_pages: bool,
        on_leave: Callable[[Request], None],
    ) -> None:
        self._settings, self._pool, self._store, self.pages = settings, pool, store, pages
        self._share = share_prefixes and settings.prefix_slots > 0
        self._clear_pages, self._on_leave = clear_pages, on_leave
        self.allocator = SlotAllocator(pool.num_slots)
        self.prefixes = PrefixCache(self.allocator, settings.prefix_slots if self._share else 0, pages.free)
        self.counters = SchedulerCounters()
        self.running: list[Request] = []
        self._waiting: list[Request] = []
        self._ended: deque[Request] = deque(maxlen=settings.keep_finished)
        self._free_rows = list(range(settings.max_batch))

    # requests

    @property
    def requests(self) -> list[Request]:
        """Requests that run or wait, and the newest that have ended, in the order in which they were added."""
        return sorted([*self._ended, *self.running, *self._waiting], key=lambda request: request.request_id)

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits."""
        return not self.running and not self._waiting

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request."""
        request.keys = chunk_keys(request.prompt, self._settings.chunk_size) if self._share else ()
        self._waiting.append(request)

    def end(self, request: Request, state: RequestState, error: BaseException | None = None) -> None:
        """Take a request out, wherever it stands; one that has ended stays as it is."""
        if request.ended:
            return
        if request.state is RequestState.RUNNING:
            if state is RequestState.FINISHED and self._share:
                size = self._settings.chunk_size
                self.prefixes.keep(request.span(0, request.computed // size * size))
            self._leave(request)
        else:
            self._waiting.remove(request)
        request.end(state, error)
        self._ended.append(request)

    def requeue(self, request: Request) -> None:
        """A running request loses what it holds and waits; it computes again what it knew, and goes on from there."""
        self._leave(request)
        request.state = RequestState.WAITING
        request.computed = request.checked = 0
        request.target = request.length
        self._waiting.append(request)

    def close(self) -> None:
        """Cancel what runs or waits and forget every prefix: afterwards every slot and page is free."""
        for request in [*self.running, *self._waiting]:
            self.end(request, RequestState.CANCELLED)
        self.prefixes.clear()

    # places

    def admit(self, step: int) -> None:
        """Let requests in that have arrived by this step, the highest priority first, as far as rows and pages reach;
        one of a higher priority takes the place of a lower one."""
        order = sorted(self._waiting, key=lambda request: (-request.priority, request.request_id))
        for request in order:
            if request.arrival > step or self._waits_for_prefix(request):
                continue
            if not self._free_rows and not self._preempt(request):
                return
            if not self._join(request):
                return

    def _preempt(self, wanted: Request | None) -> bool:
        """Requeue the least request that runs, if it is less than `wanted`."""
        least = min(self.running, key=lambda request: (request.priority, -request.request_id), default=None)
        if least is None or (wanted is not None and least.priority >= wanted.priority):
            return False
        self.counters.preemptions += 1
        least.preempted += 1
        self.requeue(least)
        return True

    def _waits_for_prefix(self, request: Request) -> bool:
        """Whether a prompt that is being computed will soon give a longer prefix than there is now."""
        if not self._share or request.generated:
            return False
        entry = self.prefixes.find(request.prompt)
        have = 0 if entry is None else len(entry.tokens)
        for donor in self.running:
            shared = self._shared(donor, request)
            if donor.prefilling and donor.computed < shared and shared > have:
                donor.boundaries.add(shared)
                return True
        return False

    def _shared(self, donor: Request, request: Request) -> int:
        """Tokens in whole chunks that two prompts have in common, one token less than the second at most."""
        chunks = 0
        for one, other in zip(donor.keys, request.keys, strict=False):
            if one != other:
                break
            chunks += 1
        return self._floor(request, chunks * self._settings.chunk_size)

    def _floor(self, request: Request, length: int) -> int:
        """`length`, or the last chunk boundary that leaves a token of the prompt."""
        size = self._settings.chunk_size
        return min(length, (len(request.prompt) - 1) // size * size)

    def _join(self, request: Request) -> bool:
        entry = self.prefixes.find(request.tokens) if self._share else None
        if entry is not None:
            entry.readers += 1  # nobody evicts it meanwhile
        size = self._store.page_size
        whole = 0 if entry is None else len(entry.tokens) // size
        first = (0 if entry is None else len(entry.tokens)) + 1
        if not self._make_room(pages_of(first, size) - whole):
            if entry is not None:
                entry.readers -= 1
            return False
        self._waiting.remove(request)
        [request.slot] = self.allocator.alloc()
        request.row = self._free_rows.pop()
        request.state = RequestState.RUNNING
        self._pool.mamba_index_mapping[request.row] = request.slot
        request.computed = request.reused = request.checked = request.target = 0
        if entry is not None:
            self._start_from(request, entry.tokens, entry.pages)
            entry.hits += 1
            request.source = entry
        request.target, request.kept_tokens = request.length, 1
        self.running.append(request)
        self._note_join(request)
        return True

    def _start_from(self, request: Request, tokens: tuple[int, ...], pages: list[int]) -> None:
        """Share the whole pages of a prefix; the last one, which others may write behind it, is copied."""
        whole, rest = divmod(len(tokens), self._store.page_size)
        request.pages = self.pages.share(pages[:whole])
        if rest:
            [page] = self._take(1)
            self._store.copy_page(pages[whole], page, rest)
            request.pages.append(page)
        request.computed = request.reused = request.checked = len(tokens)

    def _note_join(self, request: Request) -> None:
        counters = self.counters
        counters.joined += 1
        counters.reused_tokens += request.reused
        counters.computed_prompt_tokens += request.target - request.reused
        if request.times.started is None:
            request.times.started = time.monotonic()
            counters.queue_seconds += request.times.queue_seconds
            counters.longest_queue_seconds = max(counters.longest_queue_seconds, request.times.queue_seconds)
        if self._share:
            size = self._settings.chunk_size
            request.boundaries.add(self._floor(request, len(request.prompt)))
            request.boundaries.add(self._floor(request, self.prefixes.meet(request.keys) * size))

    def _leave(self, request: Request) -> None:
        """Take a running request's row, slot and pages; they are free for the next step."""
        self.release_source(request)
        self.running.remove(request)
        self.allocator.free([request.slot])
        self.pages.free(request.pages)
        self._pool.mamba_index_mapping[request.row] = 0
        self._free_rows.append(request.row)
        request.row = request.slot = -1
        request.pages = []
        self._on_leave(request)

    # pages

    def _take(self, count: int) -> list[int]:
        pages = self.pages.alloc(count)
        if self.pages.extent > self._store.pages:
            self._store.grow(min(self.pages.extent, 1 + self.pages.limit))
        if self._clear_pages:
            self._store.clear(pages)
        return pages

    def _make_room(self, count: int) -> bool:
        """Whether `count` pages are free, after prefixes gave way where they must."""
        while self.pages.available < count:
            if not self.prefixes.evict():
                return False
        return True

    def reach(self, request: Request, tokens: int) -> bool:
        """Give a running request pages for so many tokens. Prefixes give way, then other requests of lower or equal
        priority, the youngest first; false: it lost its own place."""
        count = pages_of(tokens, self._store.page_size) - len(request.pages)
        while count > 0 and not self._make_room(count):
            self._preempt(None)
            if request.state is not RequestState.RUNNING:
                return False
        if count > 0:
            request.pages += self._take(count)
        return True

    # steps

    def plan_extend(self) -> Plan:
        """Tokens of each request in a mixed step: one for those that decode, and chunks as far as the step reaches.

        A chunk that does not end its prompt ends on a chunk boundary, where snapshots are taken.
        """
        size = self._settings.chunk_size
        budget = self._settings.max_tokens - sum(not request.prefilling for request in self.running)
        plan: Plan = []
        for request in list(self.running):
            if request.state is not RequestState.RUNNING:
                continue
            count, need = 1, request.target - request.computed
            if request.prefilling:
                count = min(need, size - request.computed % size, budget)
                if not count or (count < need and (request.computed + count) % size):
                    continue
                budget -= count
            if self.reach(request, request.computed + count):
                plan.append((request, count))
        return [(request, count) for request, count in plan if request.state is RequestState.RUNNING]

    # prefixes

    @staticmethod
    def release_source(request: Request) -> None:
        """The request has read its prefix's slot; from now on its own holds its state."""
        if request.source is not None:
            request.source.readers -= 1
            request.source = None

    def reserve_track(self, request: Request, count: int) -> int:
        """A track slot if the next `count` tokens end exactly on a chunk boundary, else the padding value."""
        end = request.computed + count
        return self.reserve_boundary(request, end) if end % self._settings.chunk_size == 0 else PADDED

    def reserve_boundary(self, request: Request, boundary: int) -> int:
        """A track slot for the state after `boundary` tokens; the padding value if none is free or wanted."""
        if not self._share or request.span(0, boundary) in self.prefixes:
            return PADDED
        slot = self.prefixes.reserve(boundary in request.boundaries)
        return PADDED if slot is None else slot

    def publish(self, request: Request, slot: int) -> None:
        """Offer a snapshot that the step just wrote; it stands at the last chunk boundary of the computed tokens.

        One that holds NaN or infinity is dropped, and so is one of a request that has left meanwhile. The host waits
        for the device to know.
        """
        if slot <= 0:
            return
        boundary = request.computed // self._settings.chunk_size * self._settings.chunk_size
        if request.state is not RequestState.RUNNING or not self._finite(request, boundary):
            self.prefixes.release(slot)
            return
        pages = request.pages[: pages_of(boundary, self._store.page_size)]
        if self.prefixes.publish(slot, request.span(0, boundary), pages, boundary in request.boundaries):
            self.pages.share(pages)

    def _finite(self, request: Request, boundary: int) -> bool:
        """What the request itself computed up to `boundary` and was not looked at before."""
        if request.checked < 0 or not self._store.finite(request.pages, request.checked, boundary):
            request.checked = -1
            return False
        request.checked = max(request.checked, boundary)
        return True
