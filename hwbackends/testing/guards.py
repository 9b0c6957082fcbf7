"""Guards that make a forbidden act fail where it happens: `no_sync` (host synchronisation), `no_alloc` (allocation)
and `frozen_addresses` (buffers that move). They watch torch ops on any device; a CPU tensor stands for a device tensor.
"""

# torch's dispatch modes and storage references are not annotated
# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hwbackends.errors import AllocationError, GraphError, SyncError

HOST_READ_OPS = frozenset(
    {
        "aten::_linalg_check_errors",
        "aten::_local_scalar_dense",
        "aten::_to_sparse",
        "aten::_unique",
        "aten::_unique2",
        "aten::bincount",
        "aten::equal",
        "aten::is_nonzero",
        "aten::masked_select",
        "aten::nonzero",
        "aten::nonzero_numpy",
        "aten::unique_consecutive",
        "aten::unique_dim",
        "aten::unique_dim_consecutive",
    }
)
"""Ops whose result, or whose result's shape, the host must read from the device."""

HOST_FUNCTIONS = frozenset({"__array__", "as_tensor", "cpu", "from_numpy", "item", "new_tensor", "numpy", "tolist"})
"""Python functions that copy to or from the host and, on a CPU tensor, reach no op that could be seen."""

UNSEEN_FUNCTIONS = frozenset({"__array__", "__dlpack__", "cpu", "numpy", "tolist"})
"""Those of them after which what a CPU tensor held at that moment is in the host's hands, or the other way round,
without an op that tells."""

INDEX_OPS = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})


def sync_reason(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Why this op synchronises with the host, or an empty string.

    Args:
        func: an `OpOverload`, as `__torch_dispatch__` gets it.
    """
    name: str = func._schema.name
    if name in HOST_READ_OPS:
        return f"{name} reads a device value on the host"
    if name == "aten::lift_fresh" and args[0].dim():  # torch.tensor([...]); a single number travels with the launch
        return f"{name} copies host values to the device"
    if name in INDEX_OPS and any(_is_mask(index) for index in args[1]):
        return f"{name} with a boolean mask counts it on the host"
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
        return f"{name} without output_size sums the repeats on the host"
    if name in ("aten::copy_", "aten::_to_copy") and _crosses_devices(name, args, kwargs):
        return f"{name} copies between host and device"
    return ""


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _crosses_devices(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if not isinstance(args[0], Tensor):  # torch.vmap hands over numbers of its own
        return False
    here: torch.device = args[0].device
    there = args[1].device if name == "aten::copy_" else torch.device(kwargs.get("device") or here)
    return here.type != there.type and "cpu" in (here.type, there.type)


class EagerMode(TorchDispatchMode):
    """A dispatch mode that torch takes as it is. By default torch wraps a mode to keep its compiler out, and imports
    the compiler for that at the first op: seconds of a process, and one more call at each op."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def decomposed(mode: TorchDispatchMode, func: Any, args: Any, kwargs: Any) -> Any:
    """A composite op as the ops it is made of, each shown to `mode`; NotImplemented for an op that is not composite.

    Under `torch.inference_mode` composite ops reach a dispatch mode whole, and what they do would stay unseen.
    """
    with mode:
        return func.decompose(*args, **kwargs)


class _SyncFunctions(TorchFunctionMode):
    """Sees what reaches no op: `tolist`, `numpy`, `cpu` of a CPU tensor, lists used as an index."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in HOST_FUNCTIONS or (name == "to" and _names_cpu(args[1:], kwargs or {})):
            raise SyncError(f"{name}() copies between host and device, inside no_sync()")
        if name in ("__getitem__", "__setitem__") and any(isinstance(i, list) for i in _index(args[1])):
            raise SyncError(f"{name} with a list copies the list to the device, inside no_sync()")
        return func(*args, **(kwargs or {}))


def _names_cpu(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    named = [a for a in (*args, kwargs.get("device")) if isinstance(a, (str, torch.device))]
    return any(torch.device(device).type == "cpu" for device in named)


def _index(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


class _SyncOps(EagerMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = decomposed(self, func, args, kwargs)
        if result is not NotImplemented:
            return result
        reason = sync_reason(func, args, kwargs)
        if reason:
            raise SyncError(f"{reason}, inside no_sync()")
        return func(*args, **kwargs)


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    """Fail at the first host synchronisation: item, tolist, nonzero, copies between host and device, boolean-mask
    indexing, `repeat_interleave` without `output_size`. On CUDA torch's own check is switched on as well.

    Raises:
        SyncError: at the call that synchronises.
    """
    with contextlib.ExitStack() as stack:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch says once that its check is a prototype
                torch.cuda.set_sync_debug_mode("error")
        stack.enter_context(_SyncOps())
        stack.enter_context(_SyncFunctions())
        yield


def tensors(tree: Any) -> list[Tensor]:
    """Every tensor in a nest of tuples, lists and dicts, which is all that an op takes or gives. A recorder asks this
    several times per op, and torch's own walk over trees costs more than most small ops."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    elif not isinstance(tree, (tuple, list)):
        return []
    found: list[Tensor] = []
    for part in tree:
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, (tuple, list, dict)):
            found += tensors(part)
    return found


def storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    """Storages of every tensor in a nest of tuples, lists and dicts, by identity."""
    found = (leaf.untyped_storage() for leaf in tensors(tree))
    return {storage._cdata: storage for storage in found}


class Allocations(EagerMode):
    """What a `no_alloc` block allocated. `allow` takes out what the contract lets a hook allocate: its output."""

    def __init__(self, temporaries: bool) -> None:
        super().__init__()
        self._temporaries = temporaries
        self._born: dict[int, tuple[StorageWeakRef, str]] = {}

    def allow(self, *tensors: Tensor) -> None:
        """These outlive the block rightly."""
        for key in storages(tensors):
            self._born.pop(key, None)

    def survivors(self) -> list[str]:
        """The ops whose results are alive, dead cycles swept first if need be."""
        if any(not ref.expired() for ref, _ in self._born.values()):
            gc.collect()
        return [op for ref, op in self._born.values() if not ref.expired()]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = decomposed(self, func, args, kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        before = storages((args, kwargs))
        for key, storage in storages(result).items():
            if key not in before and storage.nbytes():
                self._note(key, storage, func._schema.name)
        return result

    def _note(self, key: int, storage: torch.UntypedStorage, op: str) -> None:
        if not self._temporaries:
            raise AllocationError(f"{op} allocated {storage.nbytes()} bytes, inside no_alloc(temporaries=False)")
        known = self._born.get(key)
        if known is None or known[0].expired():
            self._born[key] = StorageWeakRef(storage), op


@contextlib.contextmanager
def no_alloc(*, temporaries: bool = True) -> Iterator[Allocations]:
    """Fail when the block allocates.

    The rule for temporaries: a backend written in plain torch ops (the reference) cannot avoid intermediate results.
    With `temporaries=True` a storage born in the block is exempt if it is dead when the block ends; whatever outlives
    it, and was not handed to `allow`, is an error. With `temporaries=False` nothing is exempt: the first op that makes
    a new storage fails, and on CUDA so does any call into the caching allocator.

    Raises:
        AllocationError: names the ops that allocated.
    """
    allocations = Allocations(temporaries)
    calls = _cuda_allocations()
    with allocations:
        yield allocations
    alive = allocations.survivors()
    if alive:
        raise AllocationError(f"{len(alive)} allocation(s) outlive a no_alloc() block, made by {', '.join(alive)}")
    if not temporaries and _cuda_allocations() != calls:
        raise AllocationError(f"{_cuda_allocations() - calls} CUDA allocation(s) inside no_alloc(temporaries=False)")


def _cuda_allocations() -> int:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return 0
    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))


class HasAddresses(Protocol):
    """A sidecar, a state pool, metadata buffers."""

    def addresses(self) -> dict[str, int]:
        """Name to address of every tensor that a graph may hold."""
        ...


@contextlib.contextmanager
def frozen_addresses(*sources: HasAddresses | Callable[[], Mapping[str, int]]) -> Iterator[None]:
    """Fail if a tensor of `sources` has another address after the block, or is gone, or is new.

    Raises:
        GraphError: names every tensor that moved.
    """
    before = [_addresses(source) for source in sources]
    yield
    moved: list[str] = []
    for old, source in zip(before, sources, strict=True):
        new = _addresses(source)
        moved += [name for name in old | new if old.get(name) != new.get(name)]
    if moved:
        raise GraphError(f"address moved: {', '.join(moved)}; a captured graph would still read the old one")


def _addresses(source: HasAddresses | Callable[[], Mapping[str, int]]) -> dict[str, int]:
    return dict(source() if callable(source) else source.addresses())
