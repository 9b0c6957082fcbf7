"""The process that serves a backend's hooks: loads the plugin, keeps a copy of the caller's memory and objects, makes
the calls, and says what the hooks wrote."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import itertools
import os
import pickle
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from hwbackends.remote.sparse import sparse_bytes
from hwbackends.remote.wire import LARGE, Answer, Call, Ref, Request, View
from hwbackends.step.batch import ForwardMode
from hwbackends.step.metadata import StepMetadata
from hwbackends.step.pool import StatePool


class Memory:
    """The caller's storages, tensors and objects, by token."""

    def __init__(self, device: torch.device, emulated: bool) -> None:
        self.device, self.emulated = device, emulated
        self.forget()

    def forget(self) -> None:
        """Drop everything."""
        self.bases: dict[int, Tensor] = {}
        self.flats: dict[int, Any] = {}
        self.known: dict[int, bytes] = {}
        self.views: dict[int, View] = {}
        self.tensors: dict[int, Tensor] = {}
        self.objects: dict[int, Any] = {}
        self.fields: dict[int, dict[str, Any]] = {}
        self.given: dict[int, dict[str, Any]] = {}
        self.contents: dict[int, Any] = {}

    def take(self, request: Request) -> None:
        """Bring everything up to date before the hooks run."""
        for token, size in request.storages.items():
            host = self.emulated or self.device.type == "cpu"
            device = "cpu" if host else self.device
            sparse = host and size > LARGE
            base = sparse_bytes(size) if sparse else torch.empty(size, dtype=torch.uint8, device=device)
            self.bases[token] = base
            if host and not sparse:
                self.flats[token] = base.numpy()
        for token, data in request.whole.items():
            self.known[token] = data
            if data:
                self.bases[token].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        for token, view in request.views.items():
            self.views[token], self.tensors[token] = view, self._make(view)
        for token, data in request.contents.items():
            raw = self._raw(token)
            self.contents[token] = data
            if not data:
                continue
            raw.copy_(torch.frombuffer(bytearray(data), dtype=raw.dtype).reshape(raw.shape))
        for token, (name, fields) in request.objects.items():
            self._object(token, name, fields)

    def _make(self, view: View) -> Tensor:
        base = self.bases[view.storage]
        empty = torch.empty(0, dtype=getattr(torch, view.dtype), device=base.device)
        made = empty.set_(base.untyped_storage(), view.offset, view.shape, view.stride)
        if self.emulated:
            from hwbackends.testing.emulated_npu import EmulatedNpuTensor

            return EmulatedNpuTensor(made)
        return made

    def _raw(self, token: int) -> Tensor:
        tensor = self.tensors[token]
        return getattr(tensor, "raw", tensor)

    def _object(self, token: int, name: str, fields: dict[str, Any]) -> None:
        values = {key: self.decode(value) for key, value in fields.items()}
        known = self.objects.get(token)
        if known is None:
            self.objects[token] = _class(name)(**values) if name else _pool(values)
        else:
            for key, value in values.items():
                if fields[key] != self.fields[token].get(key):
                    setattr(known, key, value)
        self.fields[token] = fields
        owner = self.objects[token]
        held = {key: getattr(owner, key) for key, value in fields.items() if not _elsewhere(value)}
        self.given[token] = {key: dict(value) if isinstance(value, dict) else value for key, value in held.items()}

    def decode(self, value: Any) -> Any:
        """The argument that an encoded one stands for."""
        if not isinstance(value, Ref):
            return value
        if value.kind == "view":
            return self.tensors[value.value]
        if value.kind == "object":
            return self.objects[value.value]
        if value.kind == "state":
            pool, stream, layer = value.value
            return self.objects[pool].conv_state(stream, layer)
        if value.kind == "family_state":
            pool, state, layer = value.value
            return self.objects[pool].state(state, layer)
        if value.kind == "mode":
            return ForwardMode(value.value)
        if value.kind == "elsewhere":
            dtype, shape = value.value
            place = "cpu" if self.device.type != "cpu" else "meta"
            return torch.zeros(shape, dtype=getattr(torch, dtype), device=place)
        items = value.value
        if isinstance(items, dict):
            return {key: self.decode(item) for key, item in items.items()}
        return type(items)(self.decode(item) for item in items)

    def written(self) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """Contents of the storages, and of the views of large ones, that are not what the caller knows."""
        found: dict[int, bytes] = {}
        for token, base in self.bases.items():
            if base.nbytes <= LARGE:
                flat = self.flats.get(token)
                now = (base.cpu().numpy() if flat is None else flat).tobytes()
                if now != self.known.get(token):
                    self.known[token] = found[token] = now
        large: dict[int, bytes] = {}
        for token, view in self.views.items():
            if self.bases[view.storage].nbytes > LARGE:
                now_bytes = _content(self._raw(token))
                if now_bytes != self.contents.get(token):
                    large[token] = self.contents[token] = now_bytes
        return found, large

    def replaced(self) -> list[str]:
        """Fields of the caller's objects that hold something else than the caller put there; they are put back."""
        found = []
        for token, given in self.given.items():
            owner = self.objects[token]
            for key, want in given.items():
                now = getattr(owner, key)
                if now is want:
                    continue
                names = _differing(now, want)
                found += [f"{type(owner).__name__}.{key}{name and f'[{name}]'}" for name in names]
                if names:
                    setattr(owner, key, dict(want) if isinstance(want, dict) else want)
        return found

    def encode_result(self, result: Any) -> Any:
        """A result: a known tensor by its token, another by its bytes, anything else as it is."""
        if not isinstance(result, Tensor):
            return tuple(result) if isinstance(result, tuple) else result
        raw = getattr(result, "raw", result)
        for token, tensor in self.tensors.items():
            mine = getattr(tensor, "raw", tensor)
            if result is tensor or (raw.data_ptr() == mine.data_ptr() and _layout(raw) == _layout(mine)):
                return Ref("view", token)
        shared = any(raw.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for b in self.bases.values())
        dtype = str(result.dtype).removeprefix("torch.")
        wrong_device = result.device != self.device
        return Ref("new", (dtype, tuple(result.shape), _content(raw), bool(shared and raw.numel()), wrong_device))


def _elsewhere(value: Any) -> bool:
    """Whether an encoded value is a tensor on another device, which is made anew each time."""
    return isinstance(value, Ref) and value.kind == "elsewhere"


def _differing(now: Any, want: Any) -> list[str]:
    """Keys under which a dict holds something else than was put there; "" for any other value that differs."""
    if isinstance(want, dict):
        keys = [*want, *(now if isinstance(now, dict) else ())]
        return [key for key in dict.fromkeys(keys) if not isinstance(now, dict) or now.get(key) is not want.get(key)]
    return [] if not isinstance(want, Tensor) and now == want else [""]


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()


def _content(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _class(name: str) -> Any:
    module, _, found = name.partition(":")
    return getattr(importlib.import_module(module), found)


def _pool(values: dict[str, Any]) -> StatePool:
    wrapped = {key: value for key, value in values.items() if key != "conv_streams"}
    pool = StatePool.wrap(values["conv_streams"], **wrapped)
    pool.draft_rows = values["draft_rows"] or {}
    return pool


class Server:
    """One backend's hooks over one caller's memory."""

    def __init__(self, backend: str, device: str) -> None:
        from hwbackends.remote.plugin import Plugin

        self.plugin = Plugin(backend, device)
        self.memory = Memory(self.plugin.device, self.plugin.emulated)
        self.graphs: dict[int, Any] = {}
        self.last: tuple[Tensor, bytes] | None = None

    def handle(self, request: Request) -> Answer:
        """Do what is asked."""
        if request.fresh:
            self.memory.forget()
            self.graphs.clear()
            self.last = None
        answer, made = Answer(), None
        try:
            self.memory.take(request)
            made = getattr(self, f"_{request.kind}")(request, answer)
            answer.result = self.memory.encode_result(made)
        except (Exception, SystemExit) as error:
            bases = tuple(f"{base.__module__}.{base.__name__}" for base in type(error).__mro__)
            answer.error = (type(error).__name__, bases, str(error), traceback.format_exc()[-3000:])
        replaced = self.memory.replaced()
        if replaced:
            answer.notes["replaced"] = replaced
        answer.whole, answer.contents = self.memory.written()
        self._look_back(answer, made)
        return answer

    def _look_back(self, answer: Answer, made: Any) -> None:
        """Whether the tensor that the last call returned is what it was, now that another call was made."""
        if self.last is not None and _content(self.last[0]) != self.last[1]:
            answer.notes["clobbered"] = "the output of an earlier call changed"
        self.last = None
        if isinstance(answer.result, Ref) and answer.result.kind == "new" and isinstance(made, Tensor):
            raw = getattr(made, "raw", made)
            self.last = (raw, _content(raw))

    def _run(self, call: Call) -> Any:
        hook = self.plugin.hooks[call.hook]
        args = [self.memory.decode(value) for value in call.args]
        kwargs = {key: self.memory.decode(value) for key, value in call.kwargs.items()}
        return hook(*args, **kwargs)

    def _call(self, request: Request, answer: Answer) -> Any:
        call = request.calls[0]
        if call.kwargs.get("out", 0) is None:
            self._litter(call)
        result = None
        with _watching(request.watch, self.plugin.emulated, answer) as allow:
            result = self._run(call)
            if isinstance(result, Tensor):
                allow(result)
        return result

    def _litter(self, call: Call) -> None:
        """Leave NaN in the memory that an allocator hands out next."""
        x = self.memory.decode(call.kwargs.get("v", call.kwargs.get("x", call.args[0] if call.args else None)))
        if isinstance(x, Tensor) and x.device.type != "meta" and x.is_floating_point() and x.nbytes < LARGE:
            litter = [torch.full(x.shape, torch.nan, dtype=x.dtype, device=x.device) for _ in range(6)]
            del litter

    def _capture(self, request: Request, answer: Answer) -> None:
        from hwbackends.testing.recorder import graph_for

        for _ in range(2):
            for call in request.calls:
                self._run(call)
        graph = self.graphs[request.graph] = graph_for(self.plugin.device)
        with graph.capture():
            for call in request.calls:
                self._run(call)

    def _replay(self, request: Request, answer: Answer) -> None:
        self.graphs[request.graph].replay()

    def _repeat(self, request: Request, answer: Answer) -> None:
        """The calls again and again, each time over new metadata, and how much memory stays in use."""
        marks = []
        for _ in range(request.count):  # what a process builds up once is not a leak
            self._round(request)
        for _ in range(4):  # a leak shows in every stretch; what settles, in the first ones
            for _ in range(request.count // 4):
                self._round(request)
            marks.append(_in_use())
        stretches = [{key: after[key] - before[key] for key in after} for before, after in itertools.pairwise(marks)]
        answer.notes["growth"] = {key: min(s[key] for s in stretches) / (request.count // 4) for key in marks[0]}

    def _round(self, request: Request) -> None:
        import dataclasses

        fresh: dict[int, Any] = {}
        for call in request.calls:
            args = [self.memory.decode(value) for value in call.args]
            kwargs = {key: self.memory.decode(value) for key, value in call.kwargs.items()}
            for place, value in [*enumerate(args), *kwargs.items()]:
                if isinstance(value, StepMetadata):
                    if id(value) not in fresh:
                        fresh[id(value)] = dataclasses.replace(value)
                    if isinstance(place, int):
                        args[place] = fresh[id(value)]
                    else:
                        kwargs[str(place)] = fresh[id(value)]
            self.plugin.hooks[call.hook](*args, **kwargs)


def _in_use() -> dict[str, float]:
    """Python's blocks, bytes of the C allocator and of the device that are in use."""
    gc.collect()
    found = {"blocks": float(sys.getallocatedblocks()), "bytes": float(_malloc_bytes())}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["device"] = float(torch.cuda.memory_allocated())
    return found


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`; the fields that matter are named."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("a", "b", "c", "d", "hblkhd", "e", "f", "uordblks", "g", "h")]


def _malloc_bytes() -> int:
    """Bytes in use from glibc's allocator; resident pages elsewhere."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _Mallinfo
        info = function()
        return int(info.uordblks) + int(info.hblkhd)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def _watching(watch: str, emulated: bool, answer: Answer) -> Iterator[Any]:
    """Run the block under a guard; what it finds is a note, not an error."""
    if not watch:
        yield lambda result: None
        return
    from hwbackends.errors import GraphError
    from hwbackends.remote.watch import GUARDS

    try:
        with GUARDS[watch](emulated, answer.notes) as allow:
            yield allow
    except (GraphError, RuntimeError) as error:
        answer.notes[watch] = f"{type(error).__name__}: {error}"


def serve(connection: Connection) -> None:
    """Answer until the connection closes. The first message says which backend on which device."""
    for name in [name for name in os.environ if name.startswith(("PYTEST", "COV_"))]:
        del os.environ[name]
    backend, device = pickle.loads(connection.recv_bytes())
    server: Server | None = None
    try:
        server = Server(backend, device)
        first = Answer(info=server.plugin.describe())
        gc.collect()
        gc.freeze()
    except (Exception, SystemExit) as error:
        first = Answer(error=(type(error).__name__, (), str(error), traceback.format_exc()[-3000:]))
    connection.send_bytes(pickle.dumps(first))
    while server is not None:
        try:
            data = connection.recv_bytes()
        except (EOFError, OSError):
            return
        connection.send_bytes(pickle.dumps(server.handle(pickle.loads(data)), 5))
