"""Graphs for tests: `CpuGraph` records torch ops with the storages that they touched and replays them, so that the
rules for captured graphs are tested without a GPU; `CudaGraph` and `NpuGraph` are the same interface over the devices'
own graphs."""

# torch's dispatch modes and storages are not annotated
# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hwbackends.errors import GraphError, SyncError
from hwbackends.step.capturing import RECORDERS
from hwbackends.testing.guards import UNSEEN_FUNCTIONS, EagerMode, decomposed, storages, sync_reason, tensors

POISON_BYTE = 0xFF
"""Fills what a capture computed: NaN in every floating dtype, -1 in every signed integer."""


class Graph(Protocol):
    """Capture once, replay often. As on a GPU, a capture runs nothing that can be seen: results come with a replay."""

    def capture(self) -> contextlib.AbstractContextManager[object]:
        """Record what the block does."""
        ...

    def replay(self) -> None:
        """Do it again, over the same addresses."""
        ...


@dataclass(frozen=True, slots=True)
class _Call:
    """One recorded op. `fresh` are the results that it allocated, by their place among its results, at the addresses
    that every replay fills."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fresh: tuple[tuple[int, Tensor], ...]

    def run(self) -> None:
        result = self.func(*self.args, **self.kwargs)
        results = [result] if isinstance(result, Tensor) else tensors(result)
        for position, tensor in self.fresh:
            tensor.copy_(results[position])


class CpuGraph:
    """Records ops on real storages and replays them, as a captured graph does.

    Tensors are held by address: what Python does to a name after the capture (another tensor in its place, a moved
    buffer, another host number) does not reach the graph, and a replay reads the old one. Results made inside keep
    their storages, which every replay fills again. The capture itself leaves memory as it was: tensors from outside
    get their bytes back, tensors made inside are poisoned (NaN, -1) until the first replay.

    Only torch ops over dense tensors are recorded. What goes by them (NumPy, a kernel that Triton's interpreter runs, a
    deep copy) is refused where it shows, not replayed with what it gave once. Random numbers are drawn anew by each
    replay, as on a GPU.

    Raises:
        SyncError: an op in the block synchronises with the host, which no capture allows.
        GraphError: the block does what cannot be recorded: memory that no recorded op filled, memory from outside that
            grows, a random generator of its own, a sparse tensor, a capture inside a capture.
    """

    def __init__(self) -> None:
        self._calls: list[_Call] | None = None
        self._owned: dict[int, torch.UntypedStorage] = {}

    @property
    def num_ops(self) -> int:
        """Recorded ops; 0 before the capture."""
        return len(self._calls or ())

    @contextlib.contextmanager
    def capture(self) -> Iterator[CpuGraph]:
        """Record the block's ops.

        Raises:
            GraphError: this graph holds a capture already.
        """
        if self._calls is not None:
            raise GraphError("CpuGraph.capture: this graph holds a capture already; make one graph per capture")
        if any(isinstance(mode, _Recorder) for mode in _get_current_dispatch_mode_stack()):
            raise GraphError("CpuGraph.capture: inside another capture; end that one first")
        recorder, drawn = _Recorder(), torch.get_rng_state()
        try:
            with recorder, _HostFunctions(), _no_collection():
                yield self
            self._calls, self._owned = recorder.calls, recorder.owned
        finally:
            recorder.undo()
            torch.set_rng_state(drawn)

    def replay(self) -> None:
        """Run the recorded ops over the recorded addresses.

        Raises:
            GraphError: nothing was captured.
        """
        if self._calls is None:
            raise GraphError("CpuGraph.replay: nothing was captured; use `with graph.capture():` first")
        with torch.inference_mode():  # results of a capture in inference mode may be written in no other
            for call in self._calls:
                call.run()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Python's cycle collector rests: it would walk the thousands of recorded calls again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _HostFunctions(TorchFunctionMode):
    """Refuses functions that hand a tensor's values to the host, or take them from there, unseen by a recorder."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in UNSEEN_FUNCTIONS:
            raise SyncError(f"CpuGraph.capture: {name}() copies between host and device; a graph cannot record it")
        if name == "tensor_split" and any(isinstance(part, Tensor) for part in (*args[1:], *(kwargs or {}).values())):
            raise SyncError("CpuGraph.capture: tensor_split() reads where to split; a graph cannot record it")
        return func(*args, **(kwargs or {}))


class _Recorder(EagerMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.owned: dict[int, torch.UntypedStorage] = {}
        self._unfilled: set[int] = set()
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    @staticmethod
    def records_now() -> bool:
        """Whether a recorder stands for a graph at this moment."""
        return any(isinstance(mode, _Recorder) for mode in _get_current_dispatch_mode_stack())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = decomposed(self, func, args, kwargs)
        if result is not NotImplemented:
            return result
        reason = sync_reason(func, args, kwargs)
        if reason:
            raise SyncError(f"CpuGraph.capture: {reason}; a graph cannot record it")
        if _handles_memory_or_generators(func):
            _refuse_unrecordable(func, args, kwargs)
        if _only_views(func):
            return func(*args, **kwargs)
        before, written = storages((args, kwargs)), storages(_written(func, args, kwargs))
        self._save(written)
        if not self._unfilled.isdisjoint(before):
            self._refuse_unfilled(func, before.keys() - written.keys())
        result = func(*args, **kwargs)
        if written:
            self._refuse_growth(func, written)
        fresh = self._fresh(func, result, before)
        if _makes_empty(func):
            self._unfilled |= {key for leaf in tensors(result) if (key := leaf.untyped_storage()._cdata) not in before}
        elif written or fresh:
            self.calls.append(_Call(func, _pin(args), _pin(kwargs), fresh))
        return result

    def _save(self, written: dict[int, torch.UntypedStorage]) -> None:
        for key, storage in written.items():
            self._unfilled.discard(key)
            if key not in self.owned and key not in self._saved:
                self._saved[key] = storage, storage.clone()

    def _refuse_unfilled(self, func: Any, read: Set[int]) -> None:
        if any(key in self._unfilled and self.owned[key].nbytes() for key in read):
            name = func._schema.name
            raise GraphError(
                f"CpuGraph.capture: {name} reads memory of empty() that no recorded op filled; what wrote it (NumPy, a "
                "kernel of its own) is no torch op, and a replay would not run it"
            )

    def _refuse_growth(self, func: Any, written: dict[int, torch.UntypedStorage]) -> None:
        for key, storage in written.items():
            if key in self._saved and storage.nbytes() != self._saved[key][1].nbytes():
                name = func._schema.name
                raise GraphError(f"CpuGraph.capture: {name} resizes memory from outside; make it large enough before")

    def _fresh(self, func: Any, result: Any, before: dict[int, torch.UntypedStorage]) -> tuple[tuple[int, Tensor], ...]:
        fresh: list[tuple[int, Tensor]] = []
        for position, leaf in enumerate(tensors(result)):
            if leaf.layout is not torch.strided:
                raise GraphError(f"CpuGraph.capture: {func._schema.name} gives a tensor that is not dense")
            if (storage := leaf.untyped_storage())._cdata not in before:
                self.owned[storage._cdata] = storage
                fresh.append((position, _pin(leaf)))
        return tuple(fresh)

    def undo(self) -> None:
        """Give memory from outside its bytes back and poison what was made inside."""
        for storage, bytes_before in self._saved.values():
            if bytes_before.nbytes():
                _bytes(storage)[: bytes_before.nbytes()].copy_(_bytes(bytes_before))
        for storage in self.owned.values():
            _bytes(storage).fill_(POISON_BYTE)


RECORDERS.append(_Recorder.records_now)


def _refuse_unrecordable(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name = func._schema.name
    if any(isinstance(part, torch.Generator) for part in (*args, *kwargs.values())):
        raise GraphError(f"CpuGraph.capture: {name} draws from a generator of its own; a graph replays the default one")
    if name == "aten::set_" and any(isinstance(part, torch.UntypedStorage) for part in args):
        raise GraphError(
            f"CpuGraph.capture: {name} gives a tensor the memory of a storage, which no recorded op fills (Triton's "
            "interpreter, a deep copy and an unpickled tensor do so); a graph cannot record it"
        )


@functools.cache
def _handles_memory_or_generators(func: Any) -> bool:
    """Whether `_refuse_unrecordable` has anything to ask."""
    schema = func._schema
    return schema.name == "aten::set_" or any("Generator" in str(argument.type) for argument in schema.arguments)


@functools.cache
def _makes_empty(func: Any) -> bool:
    """Whether an op gives memory that holds nothing yet: there is nothing to replay."""
    return bool(func._schema.name.removeprefix("aten::").removeprefix("new_").startswith("empty"))


@functools.cache
def _only_views(func: Any) -> bool:
    """Whether an op gives other views of its arguments and does nothing else: there is nothing to replay."""
    schema = func._schema
    return not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)


def _pin(tree: Any) -> Any:
    """The same nest of tuples, lists and dicts over aliases of its tensors, which keep their addresses even if the
    original objects are given another storage."""
    if isinstance(tree, Tensor):
        return tree.detach()
    if isinstance(tree, (tuple, list)):
        return type(tree)(map(_pin, tree))
    return {name: _pin(part) for name, part in tree.items()} if isinstance(tree, dict) else tree


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    if not func._schema.is_mutable:
        return []
    found: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if argument.name in kwargs else args[position : position + 1]
            found.append(value)
    return tensors(found)


class CudaGraph:
    """`torch.cuda.CUDAGraph` behind the interface of `CpuGraph`. Run the work once or twice before the capture."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    @contextlib.contextmanager
    def capture(self) -> Iterator[CudaGraph]:
        """Record the block's launches on a capture stream."""
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph):
            yield self

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()


class NpuGraph:
    """`torch.npu.NPUGraph` behind the interface of `CpuGraph`; torch_npu brings it."""

    def __init__(self) -> None:
        self._npu: Any = _npu_module()
        self._graph = self._npu.NPUGraph()

    @contextlib.contextmanager
    def capture(self) -> Iterator[NpuGraph]:
        """Record the block's launches on a capture stream."""
        self._npu.synchronize()
        with self._npu.graph(self._graph):
            yield self

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()


def graph_for(device: torch.device | str) -> Graph:
    """A new graph of the kind that `device` has: CUDA's or the NPU's own, and the recorder elsewhere."""
    kind = torch.device(device).type
    if kind == "npu" and hasattr(_npu_module(), "NPUGraph"):
        return NpuGraph()
    return CudaGraph() if kind == "cuda" else CpuGraph()


def _npu_module() -> Any:
    return getattr(torch, "npu", None)
