"""Which requests run, where, and what each step gives them: request rows, state slots, shared prefixes, chunks of
prompts. Host side; the only tensors it touches are the map of rows to slots and the keys and values of prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hwbackends.errors import ArgumentError
from hwbackends.runner.packed import KeyValueStore
from hwbackends.runner.prefixes import PrefixCache
from hwbackends.runner.requests import Request, RequestState, token_ids, whole
from hwbackends.runner.settings import RunnerSettings
from hwbackends.step.metadata import PADDED
from hwbackends.step.pool import StatePool
from hwbackends.step.slots import SlotAllocator

Plan = list[tuple[Request, int]]
"""Requests of a mixed step, and how many tokens each one gets."""


class Scheduler:
    """Admits, places and releases requests.

    Args:
        settings: limits of the runner.
        pool: its `mamba_index_mapping` is kept up to date.
        store: keys and values by request row.
        vocab_size: tokens are below it.
        share_prefixes: whether new requests may start from prefixes of earlier ones.
        on_leave: called with each request that leaves, whatever its state.
    """

    def __init__(
        self,
        settings: RunnerSettings,
        pool: StatePool,
        store: KeyValueStore,
        vocab_size: int,
        share_prefixes: bool,
        on_leave: Callable[[Request], None],
    ) -> None:
        self._settings, self._pool, self._store = settings, pool, store
        self._vocab_size, self._share_prefixes, self._on_leave = vocab_size, share_prefixes, on_leave
        self.allocator = SlotAllocator(pool.num_slots)
        self.prefixes = PrefixCache(self.allocator, settings.prefix_slots if share_prefixes else 0)
        self.requests: list[Request] = []
        self.running: list[Request] = []
        self._waiting: list[Request] = []
        self._free_rows = list(range(settings.max_batch))
        self._closed = False

    # requests

    def add(self, prompt: Sequence[int], max_new_tokens: int, eos_token_ids: Sequence[int], arrival: int) -> Request:
        """Queue a request; arguments and errors are those of `PackedRunner.add`."""
        hook, vocab = "PackedRunner.add", self._vocab_size
        if self._closed:
            raise ArgumentError(hook, "prompt", "a request after close()", "none", "make another runner")
        tokens = token_ids(hook, "prompt", prompt, vocab)
        if not tokens:
            raise ArgumentError(hook, "prompt", "no token", "at least one", "begin with the model's bos token")
        length = whole(hook, "max_new_tokens", max_new_tokens, 1)
        ends = frozenset(token_ids(hook, "eos_token_ids", eos_token_ids, vocab))
        total, limit = len(tokens) + length, self._settings.max_len
        if total > limit:
            wanted = f"at most {limit} (max_len)"
            raise ArgumentError(hook, "prompt + max_new_tokens", total, wanted, "make max_len larger")
        request = Request(len(self.requests), tuple(tokens), length, ends, whole(hook, "arrival", arrival))
        self.requests.append(request)
        self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Take a request out at once, wherever it stands; one that is done stays as it is.

        Raises:
            ArgumentError: another runner's request, or none.
        """
        if not any(request is known for known in self.requests):
            got = type(request).__name__
            raise ArgumentError("PackedRunner.cancel", "request", f"a {got} that it does not know", "one of its own")
        if request in self._waiting:
            self._waiting.remove(request)
            request.state = RequestState.CANCELLED
        elif request.state is RequestState.RUNNING:
            self.leave(request, RequestState.CANCELLED)

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits."""
        return not self.running and not self._waiting

    def admit(self, step: int) -> None:
        """Let every request in that has arrived by this step, as far as rows reach."""
        for request in list(self._waiting):
            if not self._free_rows:
                return
            if request.arrival <= step:
                self._waiting.remove(request)
                self._join(request)

    def _join(self, request: Request) -> None:
        # the pool holds a slot for every row and every prefix
        [request.slot] = self.allocator.alloc()
        request.row = self._free_rows.pop()
        request.state = RequestState.RUNNING
        self._pool.mamba_index_mapping[request.row] = request.slot
        entry = self.prefixes.find(request.prompt)
        if entry is not None:
            entry.readers += 1
            request.source = entry
            request.computed = request.reused = len(entry.tokens)
            self._store.restore(request.row, entry.saved)
        self.running.append(request)

    def leave(self, request: Request, state: RequestState) -> None:
        """Take a running request out; its row and slot are free for the next step."""
        self.release_source(request)
        self.running.remove(request)
        self.allocator.free([request.slot])
        self._pool.mamba_index_mapping[request.row] = 0
        self._free_rows.append(request.row)
        request.row = request.slot = -1
        request.state = state
        self._on_leave(request)

    def close(self) -> None:
        """Cancel what runs or waits, forget every prefix, take no more: afterwards every slot is free."""
        self._closed = True
        for request in [*self.running, *self._waiting]:
            self.cancel(request)
        self.prefixes.clear()

    # steps

    def plan_extend(self) -> Plan:
        """Tokens of each request in a mixed step: one for those that decode, and chunks as far as the step reaches.

        A chunk that does not end its prompt ends on a chunk boundary, where snapshots are taken.
        """
        size = self._settings.chunk_size
        budget = self._settings.max_tokens - sum(not request.prefilling for request in self.running)
        plan: Plan = []
        for request in self.running:
            if not request.prefilling:
                plan.append((request, 1))
                continue
            need = len(request.prompt) - request.computed
            count = min(need, size - request.computed % size, budget)
            if not count or (count < need and (request.computed + count) % size):
                continue
            budget -= count
            plan.append((request, count))
        return plan

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
        if not self._share_prefixes or not self._settings.prefix_slots:
            return PADDED
        if request.span(0, boundary) in self.prefixes:
            return PADDED
        slot = self.prefixes.reserve()
        return PADDED if slot is None else slot

    def publish(self, request: Request, slot: int) -> None:
        """Offer a snapshot that the step just wrote; it stands at the last chunk boundary of the computed tokens.

        One that holds NaN or infinity is dropped: a request that overflowed may spoil those that share its steps, and
        a prefix would carry that on to others. The host waits for the device to know.
        """
        if slot > 0:
            boundary = request.computed // self._settings.chunk_size * self._settings.chunk_size
            saved = self._store.save(request.row, boundary)
            if bool(torch.stack([part.isfinite().all() for part in saved]).all()):
                self.prefixes.publish(slot, request.span(0, boundary), saved)
            else:
                self.prefixes.release(slot)
