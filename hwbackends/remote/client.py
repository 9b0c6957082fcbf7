"""The caller's side: encodes arguments, sends what changed, takes back what the hooks wrote into its own tensors, and
turns a crash, a hang or an error over there into an exception here."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hwbackends import errors
from hwbackends.remote.wire import LARGE, Answer, Call, Ref, Request, View, class_name
from hwbackends.remote.zygote import START_S, zygote
from hwbackends.step.batch import ForwardMode
from hwbackends.step.pool import WRAPPED, StatePool

_PRIVATE = {"cache", "handles", "host_mirrors", "engine"}


class HookError(RuntimeError):
    """A hook raised something that is no named error; the text begins with its class."""


class ProcessLost(RuntimeError):
    """The process crashed or did not answer; the text says how."""


@dataclass(frozen=True, slots=True)
class Made:
    """What came of a call besides what it wrote: its result, storages that changed, and what was seen.

    Attributes:
        result: tensor on the caller's side, or a plain value.
        given: the result is one of the caller's own tensors.
        shared: a new tensor that lies in memory of the caller's.
        changed: storage tokens whose bytes changed.
        notes: as in `wire.Answer`.
    """

    result: Any
    given: bool
    shared: bool
    changed: frozenset[int]
    notes: dict[str, Any]


class Client:
    """One backend in one process, which is started when needed and replaced when it dies.

    Args:
        backend: name or import path.
        device: where its tensors lie; the caller's lie in host memory.
        timeout_s: longest time of one answer.
    """

    def __init__(self, backend: str, device: str, timeout_s: float = 120.0) -> None:
        self.backend, self.device, self.timeout_s = backend, device, timeout_s
        self.info: dict[str, Any] = {}
        self._connection: Connection | None = None
        self._pid = 0
        self._log: Path | None = None
        self.started = 0
        self.forget()

    # --- the process ---

    def start(self) -> dict[str, Any]:
        """Start a process, if there is none, and load the backend; returns its description.

        Raises:
            ProcessLost: it crashed or hung while it was imported.
            HookError: it cannot be loaded.
        """
        if self._connection is not None:
            return self.info
        if self._log is None:
            handle, name = tempfile.mkstemp(prefix="hwbackends-", suffix=".log")
            os.close(handle)
            self._log = Path(name)
        self._log.write_bytes(b"")
        self._clear()
        self._connection, self._pid = zygote().fork(self._log)
        self.started += 1
        self._connection.send_bytes(pickle.dumps((self.backend, self.device)))
        answer = self._receive("importing the plugin", min(START_S, self.timeout_s))
        if answer.error:
            self.stop()
            raise HookError(f"{answer.error[0]}: {answer.error[2]}")
        self.info = answer.info
        return self.info

    def _receive(self, what: str, limit: float) -> Answer:
        assert self._connection is not None
        try:
            if self._connection.poll(limit):
                answer: Answer = pickle.loads(self._connection.recv_bytes())
                return answer
        except (EOFError, OSError):
            raise ProcessLost(self._crashed(what)) from None
        tail = self._tail()
        self.stop()
        raise ProcessLost(f"HANG: {what}: no answer in {limit:g} s{tail}")

    def _crashed(self, what: str) -> str:
        code = zygote().ended(self._pid, 2.0)
        tail = self._tail()
        self._pid = 0 if code is not None else self._pid
        self.stop()
        if code is None:
            return f"CRASH: {what}: the process closed its connection{tail}"
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return f"CRASH: {what}: the process {how}{tail}"

    def _tail(self) -> str:
        """The end of what the process wrote, where a crash leaves its traces."""
        text = self._log.read_text(errors="replace")[-1500:].strip() if self._log else ""
        return f"\n{text}" if text else ""

    def stop(self) -> None:
        """End the process."""
        if self._connection is not None:
            self._connection.close()
            if self._pid and zygote().ended(self._pid, 0.2) is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
                zygote().ended(self._pid, 5.0)
        self._connection = None
        self._clear()

    def close(self) -> None:
        """End the process and remove its log."""
        self.stop()
        if self._log is not None:
            self._log.unlink(missing_ok=True)
            self._log = None

    # --- memory ---

    def forget(self) -> None:
        """Let go of every tensor and object on both sides."""
        self._pools: list[StatePool] = []
        self._clear()

    def _clear(self) -> None:
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
        self._bytes: dict[int, Any] = {}
        self._shadow: dict[int, Any] = {}
        self._tensors: dict[int, tuple[int, Tensor]] = {}
        self._views: dict[int, tuple[View, Tensor]] = {}
        self._objects: dict[int, tuple[int, Any]] = {}
        self._next = 0
        self._fresh = True

    def adopt(self, pool: StatePool) -> None:
        """States of this pool travel as its own."""
        self._pools.append(pool)

    def token(self, tensor: Tensor) -> int:
        """Token of the storage that a tensor lies in; 0 if it never travelled."""
        found = self._storages.get(tensor.untyped_storage().data_ptr())
        return found[0] if found else 0

    def mask(self, tensors: Iterable[Tensor]) -> dict[int, Any]:
        """For each small storage, which of its bytes the given tensors cover."""
        found: dict[int, Any] = {}
        for tensor in tensors:
            token = self.token(tensor)
            if not token or token not in self._bytes:
                continue
            cover = found.setdefault(token, np.zeros(len(self._bytes[token]), bool))
            size = tensor.element_size()
            if tensor.numel():
                strides = (*(step * size for step in tensor.stride()), 1)
                start = cover[tensor.storage_offset() * size :]
                np.lib.stride_tricks.as_strided(start, (*tensor.shape, size), strides)[...] = True
        return found

    @property
    def large(self) -> frozenset[int]:
        """Storages that travel by their views."""
        return frozenset(token for token, _ in self._storages.values()) - frozenset(self._bytes)

    def difference(self, token: int) -> Any:
        """[bytes] of a small storage that the last call changed."""
        return self._changed[token]

    def _new(self) -> int:
        self._next += 1
        return self._next

    def _storage(self, tensor: Tensor, request: Request) -> int:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self._storages:
            token = self._new()
            self._storages[key] = token, storage
            request.storages[token] = storage.nbytes()
            if storage.nbytes() <= LARGE:
                flat = torch.empty(0, dtype=torch.uint8).set_(storage)
                self._bytes[token] = flat.numpy()
        return self._storages[key][0]

    def _encode(self, value: Any, request: Request) -> Any:
        if isinstance(value, Tensor):
            return self._encode_tensor(value, request)
        if isinstance(value, ForwardMode):
            return Ref("mode", value.value)
        for pool in self._pools:
            for kind, states in (("state", pool._states), ("family_state", pool._family_states)):
                for (name, layer), state in states.items():
                    if state is value:
                        return Ref(kind, (self._encode(pool, request).value, name, layer))
        if isinstance(value, StatePool) or class_name(value):
            return self._encode_object(value, request)
        if isinstance(value, dict):
            return Ref("tree", {key: self._encode(item, request) for key, item in value.items()})
        if isinstance(value, (list, tuple)):
            return Ref("tree", type(value)(self._encode(item, request) for item in value))
        return value

    def _encode_tensor(self, tensor: Tensor, request: Request) -> Ref:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.device.type != "cpu":
            return Ref("elsewhere", (dtype, tuple(tensor.shape)))
        known = self._tensors.get(id(tensor))
        if known is None:
            view = View(
                self._storage(tensor, request),
                dtype,
                tuple(tensor.shape),
                tensor.stride(),
                int(tensor.storage_offset()),
            )
            known = self._tensors[id(tensor)] = self._new(), tensor
            self._views[known[0]] = view, tensor
            request.views[known[0]] = view
        return Ref("view", known[0])

    def _encode_object(self, value: Any, request: Request) -> Ref:
        known = self._objects.get(id(value))
        if known is None:
            known = self._objects[id(value)] = self._new(), value
        names = [f.name for f in fields(value) if f.name not in _PRIVATE] if is_dataclass(value) else WRAPPED
        encoded = {name: self._encode(getattr(value, name), request) for name in names}
        request.objects[known[0]] = class_name(value), encoded
        return Ref("object", known[0])

    # --- calls ---

    def call(self, hook: str, args: tuple[Any, ...], kwargs: dict[str, Any], watch: str = "") -> Made:
        """One hook call.

        Raises:
            HwBackendsError: the named error that the hook raised.
            TypeError: as the hook raised it.
            HookError: anything else that it raised.
            ProcessLost: it crashed or hung.
        """
        self.start()
        request = Request("call", watch=watch)
        request.calls = [self._call(hook, args, kwargs, request)]
        return self._do(request, hook)

    def capture(self, calls: Iterable[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> int:
        """Warm up and capture calls as one graph; returns its token."""
        self.start()
        request = Request("capture")
        request.calls = [self._call(*call, request) for call in calls]
        request.graph = self._new()
        self._do(request, f"capture of {', '.join(call.hook for call in request.calls)}")
        return request.graph

    def replay(self, graph: int, calls: Iterable[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> None:
        """Replay a graph, over the contents that the captured calls' tensors have now."""
        self.start()
        request = Request("replay", graph=graph)
        for call in calls:
            self._call(*call, request)  # brings what it reads up to date
        self._do(request, "replay")

    def repeat(self, calls: Iterable[tuple[str, tuple[Any, ...], dict[str, Any]]], count: int) -> dict[str, float]:
        """The calls `count` times, over new metadata objects; returns what stays in use, per round."""
        self.start()
        request = Request("repeat", count=count)
        request.calls = [self._call(*call, request) for call in calls]
        growth: dict[str, float] = self._do(request, request.calls[-1].hook).notes["growth"]
        return growth

    def _call(self, hook: str, args: tuple[Any, ...], kwargs: dict[str, Any], request: Request) -> Call:
        return Call(
            hook,
            tuple(self._encode(value, request) for value in args),
            {key: self._encode(value, request) for key, value in kwargs.items()},
        )

    def _do(self, request: Request, what: str) -> Made:
        request.fresh, self._fresh = self._fresh, False  # a new process, or a new test: nothing is known there
        self._changes(request)
        self._send(request)
        answer = self._receive(what, self.timeout_s)
        self._changed = self._apply(answer)
        changed = frozenset({*answer.whole, *(self._views[token][0].storage for token in answer.contents)})
        if answer.error:
            error = _error(answer.error)
            error.made = Made(None, False, False, changed, answer.notes)  # type: ignore[attr-defined]
            raise error
        result, given, shared = self._result(answer.result)
        return Made(result, given, shared, changed, answer.notes)

    def _send(self, request: Request) -> None:
        assert self._connection is not None
        with contextlib.suppress(OSError):  # the answer tells
            self._connection.send_bytes(pickle.dumps(request, 5))

    def _changes(self, request: Request) -> None:
        for token, flat in self._bytes.items():
            now = flat.tobytes()
            if self._shadow.get(token) != now:
                self._shadow[token] = request.whole[token] = now
        for token, (view, tensor) in self._views.items():
            if view.storage not in self._bytes:
                now = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                if self._shadow.get(token) != now:
                    self._shadow[token] = request.contents[token] = now

    def _apply(self, answer: Answer) -> dict[int, Any]:
        changed = {}
        for token, data in answer.whole.items():
            now = np.frombuffer(data, np.uint8)
            changed[token] = now != np.frombuffer(self._shadow[token], np.uint8)
            self._bytes[token][:] = now
            self._shadow[token] = data
        for token, data in answer.contents.items():
            _, tensor = self._views[token]
            tensor.copy_(torch.frombuffer(bytearray(data), dtype=tensor.dtype).reshape(tensor.shape))
            self._shadow[token] = data
        return changed

    def _result(self, value: Any) -> tuple[Any, bool, bool]:
        if isinstance(value, Ref) and value.kind == "view":
            return self._views[value.value][1], True, False
        if isinstance(value, Ref):
            dtype, shape, data, shared, wrong_device = value.value
            if wrong_device:
                raise HookError("the result lies on another device than x")
            kind = getattr(torch, dtype)
            made = (
                torch.frombuffer(bytearray(data), dtype=kind).reshape(shape) if data else torch.empty(shape, dtype=kind)
            )
            return made, False, shared
        return value, False, False


def _error(raised: tuple[str, tuple[str, ...], str, str]) -> Exception:
    """What a hook raised, as an exception of this process; only named errors keep their class."""
    name, bases, text, trace = raised
    for base in bases:
        module, _, kind = base.rpartition(".")
        known = getattr(errors, kind, None) if module == "hwbackends.errors" else None
        if known is not None:
            made: Exception = known.__new__(known)
            made.args = (text,)
            return made
        if base == "builtins.TypeError":
            return TypeError(f"{text}")
    return HookError(f"{name}: {text}\n{trace}")
