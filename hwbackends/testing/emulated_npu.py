"""An emulated `npu` device for tests and demos on machines without one: where tensors lie and when the host waits.

This is emulation, not a device. Every tensor of device `npu:0` wraps a CPU tensor and every op runs on the CPU, so
the numbers are the CPU's and the speed says nothing. What it does show is discipline: an op that mixes in a CPU
tensor raises `DeviceError`, each host synchronisation is recorded by name, and inside `forbid_host_syncs()` it
raises `SyncError`. It rests on PyTorch's Python backend for the PrivateUse1 key, the key that torch_npu occupies:
the two exclude each other in one process.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _device, backend_registration
from torch.utils._pytree import tree_leaves, tree_map

from hwbackends.errors import DeviceError, SyncError, UnsupportedError
from hwbackends.testing.guards import HOST_READ_OPS, INDEX_OPS

DEVICE = "npu"

_COPY_OPS = frozenset({"aten::copy_", "aten::_to_copy", "aten::_copy_from", "aten::_copy_from_and_resize"})
_WIDENED = frozenset({"aten::histc", "aten::silu"})
"""Computed in float64 and rounded: devices count integers, and give every position of a tensor the same exponential."""
_FACTORIES = ("arange", "arange.start", "arange.start_step", "eye", "full", "linspace", "randperm", "tril_indices")
"""Factories whose composite kernel resizes an empty result, which a wrapper tensor cannot do."""


class _SyncRecord:
    """Host synchronisations so far, and whether one is an error now."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.forbidden = False

    def note(self, name: str) -> None:
        self.names.append(name)
        if self.forbidden:
            raise SyncError(f"{name}: the host waits for the device here; compute with tensor ops on the device")


_syncs = _SyncRecord()


class EmulatedNpuTensor(torch.Tensor):
    """A tensor that reports device npu:0 and keeps its data in the CPU tensor `raw`."""

    raw: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> EmulatedNpuTensor:
        wrapper: EmulatedNpuTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=torch.device(DEVICE, 0),
        )
        wrapper.raw = raw
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, dict(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"emulated_npu({self.raw!r})"

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_index(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_index(index), value)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = EmulatedNpuTensor(copy.deepcopy(self.raw, memo))
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    def data_ptr(self) -> int:
        """Address of the wrapped data, so that checks of stable addresses work."""
        return self.raw.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Storage of the wrapped data, so that checks of shared storages work."""
        return self.raw.untyped_storage()

    def new_tensor(  # type: ignore[override]
        self, data: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        """As `torch.tensor`, with this tensor's dtype and device by default."""
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device, **kwargs)

    def tolist(self) -> Any:
        """The values as Python numbers: a host synchronisation."""
        _syncs.note("tolist")
        return self.raw.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """As on a device: copy to the CPU first, unless `force`."""
        if not force:
            raise TypeError("an npu tensor has no numpy view; call .cpu() first")
        _syncs.note("numpy")
        return self.raw.numpy(force=True)


def emulate_npu() -> torch.device:
    """Make device `npu` usable in this process, by emulation. Cannot be undone; a second call changes nothing.

    Returns:
        The device npu:0.

    Raises:
        UnsupportedError: torch_npu is installed, or another backend has taken PyTorch's PrivateUse1 key.
    """
    _install()
    return torch.device(DEVICE, 0)


def is_emulated() -> bool:
    """Whether `emulate_npu` has been called in this process."""
    return _install.cache_info().currsize > 0


@contextlib.contextmanager
def record_host_syncs() -> Iterator[list[str]]:
    """Yield a list that receives the name of each host synchronisation inside the block."""
    outer, _syncs.names = _syncs.names, []
    try:
        yield _syncs.names
    finally:
        outer.extend(_syncs.names)
        _syncs.names = outer


@contextlib.contextmanager
def forbid_host_syncs() -> Iterator[None]:
    """Make each host synchronisation inside the block a `SyncError`; blocking copies from the host count too."""
    before, _syncs.forbidden = _syncs.forbidden, True
    try:
        yield
    finally:
        _syncs.forbidden = before


@functools.cache
def _install() -> tuple[Any, ...]:
    if "torch_npu" in sys.modules or importlib.util.find_spec("torch_npu") is not None:
        hint = "run without emulation, or in an environment without torch_npu"
        raise UnsupportedError("emulate_npu", "device", "an environment with torch_npu", "none", hint)
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", DEVICE):
        raise UnsupportedError("emulate_npu", "device", f"PrivateUse1 taken by {taken}", "PrivateUse1 free")
    backend_registration._setup_privateuseone_for_python_backend(DEVICE, backend_module=_DeviceModule())
    library: Any = torch.library.Library  # untyped in torch
    every_op, factories = library("_", "IMPL"), library("aten", "IMPL")
    every_op.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
    factories.impl("empty.memory_format", _empty, "PrivateUse1")
    factories.impl("empty_strided", _empty_strided, "PrivateUse1")
    for name in _FACTORIES:
        factories.impl(name, _factory(name), "PrivateUse1")
    # `with torch.device(...)` knows constructors by identity, from its first use on: let it see torch's own ones
    torch.utils._device._device_constructors()
    for name in ("tensor", "as_tensor", "asarray"):
        setattr(torch, name, _from_host(getattr(torch, name)))
    return every_op, factories


class _DeviceModule(backend_registration._DummyBackendModule):
    """What `torch.npu` offers here."""

    def synchronize(self, device: object = None) -> None:
        """Every op has finished when it returns, but the call is a host synchronisation all the same."""
        _syncs.note("synchronize")

    def is_current_stream_capturing(self) -> bool:
        """Emulation records no graphs."""
        return False

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Check devices and host waits, run on the wrapped CPU tensors, and wrap what comes out."""
    name: str = func._schema.name
    _check_devices(name, args, kwargs)
    _note_syncs(name, args, kwargs)
    if name in ("aten::copy_", "aten::_copy_from"):
        return _copy(name, args, kwargs)
    to_npu = _result_on_npu(args, kwargs)
    if name in _WIDENED and args[0].dtype != torch.float64:
        return EmulatedNpuTensor(func(args[0].raw.double(), *args[1:], **kwargs).to(args[0].dtype))
    if name == "aten::_to_copy":
        return _to_copy(func, args[0], kwargs, to_npu)
    result = func(*tree_map(_unwrap, args), **_on_cpu(kwargs))
    if not to_npu:
        return result
    return tree_map(functools.partial(_wrap, written=_written(func, args, kwargs)), result)


def _index(index: Any) -> Any:
    """An index with its lists as device tensors, which C++ cannot make for a backend written in Python."""
    if isinstance(index, list):
        return torch.tensor(index, device=DEVICE, dtype=None if index else torch.long)
    return tuple(map(_index, index)) if type(index) is tuple else index


def _is_npu_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE


def _is_npu(value: object) -> bool:
    return isinstance(value, EmulatedNpuTensor)


def _unwrap(value: Any) -> Any:
    return value.raw if isinstance(value, EmulatedNpuTensor) else value


def _wrap(value: Any, written: Mapping[int, EmulatedNpuTensor]) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, EmulatedNpuTensor):
        return value
    own = written.get(id(value))
    return EmulatedNpuTensor(value) if own is None else own


def _on_cpu(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    changed = {key: tree_map(_unwrap, value) for key, value in kwargs.items()}
    if changed.get("device") is not None:
        changed["device"] = torch.device("cpu")
    if "pin_memory" in changed:
        changed["pin_memory"] = False
    return changed


def _result_on_npu(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if kwargs.get("device") is not None:
        return _is_npu_device(kwargs["device"])
    return any(map(_is_npu, tree_leaves((args, kwargs))))


def _check_devices(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """On a device a CPU tensor may join an op only as a 0-d scalar, or as one side of a copy."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    foreign = [t for t in tensors if not _is_npu(t) and (t.dim() > 0 or name in INDEX_OPS)]
    if name not in _COPY_OPS and foreign and any(map(_is_npu, tensors)):
        got = f"a {foreign[0].device} tensor of shape {tuple(foreign[0].shape)}"
        raise DeviceError(name, "tensors", got, f"all tensors on {DEVICE}:0", "create the tensor on the device")


def _note_syncs(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if name in HOST_READ_OPS:
        _syncs.note(name)
    elif name in INDEX_OPS and any(_is_npu(i) and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
        _syncs.note(f"{name} with a boolean mask")
    elif name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
        _syncs.note(f"{name} without output_size")


def _note_transfer(source: torch.Tensor, to_npu: bool, non_blocking: bool) -> None:
    if _is_npu(source) and not to_npu:
        _syncs.note("copy from npu to cpu")
    elif to_npu and not _is_npu(source) and source.dim() > 0 and not non_blocking:
        _syncs.note("blocking copy from cpu to npu")


def _copy(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """`copy_(destination, source)` and `_copy_from(source, destination)`."""
    target, source = (args[0], args[1]) if name == "aten::copy_" else (args[1], args[0])
    non_blocking = bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
    _note_transfer(source, _is_npu(target), non_blocking)
    _unwrap(target).copy_(_unwrap(source))
    return target


def _to_copy(func: Any, source: torch.Tensor, kwargs: dict[str, Any], to_npu: bool) -> Any:
    _note_transfer(source, to_npu, bool(kwargs.get("non_blocking")))
    result = func(_unwrap(source), **_on_cpu(kwargs))
    return EmulatedNpuTensor(result) if to_npu else result


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, EmulatedNpuTensor]:
    """The arguments that the op writes, by identity of their data: an in-place op returns its own argument."""
    schema = func._schema.arguments
    given = [*zip(args, schema, strict=False), *((kwargs[a.name], a) for a in schema if a.name in kwargs)]
    written: dict[int, EmulatedNpuTensor] = {}
    for value, argument in given:
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        for tensor in filter(_is_npu, tree_leaves(value)):
            if tensor.shape != tensor.raw.shape:
                got = f"{tuple(tensor.raw.shape)}, resized from {tuple(tensor.shape)}"
                raise UnsupportedError(func._schema.name, argument.name, got, "an output of the right shape")
            written[id(tensor.raw)] = tensor
    return written


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> EmulatedNpuTensor:
    layout = memory_format or torch.contiguous_format
    return EmulatedNpuTensor(torch.empty(size, dtype=dtype or torch.get_default_dtype(), memory_format=layout))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> EmulatedNpuTensor:
    return EmulatedNpuTensor(torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype()))


def _factory(name: str) -> Callable[..., EmulatedNpuTensor]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def make(*args: Any, **kwargs: Any) -> EmulatedNpuTensor:
        return EmulatedNpuTensor(op(*args, **_on_cpu(kwargs)))

    return make


def _from_host(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.tensor` and its kin build device tensors in C++, which a backend written in Python cannot serve."""

    @functools.wraps(original)
    def build(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is None:
            device = data.device if isinstance(data, torch.Tensor) else _device.CURRENT_DEVICE
        if not _is_npu_device(device):
            return original(data, *args, device=device, **kwargs)
        if isinstance(data, EmulatedNpuTensor):
            return data.to(*args, **kwargs) if args or kwargs else data
        return original(data, *args, device="cpu", **kwargs).to(device)

    return build
