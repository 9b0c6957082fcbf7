"""Guards around one hook call in the process that serves it: host synchronisation, allocations that outlive the call,
torch ops. What they find is noted for the caller."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from hwbackends.testing.guards import EagerMode, no_alloc, no_sync

Notes = dict[str, Any]


@contextlib.contextmanager
def _sync(emulated: bool, notes: Notes) -> Iterator[Callable[[Any], None]]:
    with contextlib.ExitStack() as stack:
        if emulated:
            from hwbackends.testing.emulated_npu import forbid_host_syncs

            stack.enter_context(forbid_host_syncs())
        stack.enter_context(no_sync())
        yield lambda result: None


@contextlib.contextmanager
def _alloc(emulated: bool, notes: Notes) -> Iterator[Callable[[Any], None]]:
    with no_alloc() as allocations:
        yield allocations.allow


class _Ops(EagerMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _count(emulated: bool, notes: Notes) -> Iterator[Callable[[Any], None]]:
    with _Ops() as ops:
        yield lambda result: None
    if ops.names:
        notes["ops"] = ", ".join(ops.names[:8])


GUARDS: dict[str, Any] = {"sync": _sync, "alloc": _alloc, "ops": _count}
