"""What travels between a caller and the process that serves hooks, as plain values: names of tensors, of the objects
that hold them and of the storages that they lie in, and the bytes of those storages."""

from __future__ import annotations

from dataclasses import dataclass, field, is_dataclass
from typing import Any

LARGE = 1 << 26
"""Bytes from which on a storage travels by the views that are used, never whole: its pages may not exist."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor: storage, dtype, shape, strides and offset in elements."""

    storage: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Ref:
    """One of: `view` a tensor, `object` a structure, `state` (pool, stream, layer), `family_state` (pool, name, layer),
    `mode` a forward mode, `elsewhere` (dtype, shape) a tensor on another device, `tree` a tuple, list or dict of
    values."""

    kind: str
    value: Any


def class_name(value: object) -> str:
    """`module:class` of one of this package's structures, of whatever family, that travels field by field; "" for a
    plain value and for a `StatePool`, which is no structure of fields."""
    kind = type(value)
    mine = is_dataclass(value) and kind.__module__.startswith("hwbackends.")
    return f"{kind.__module__}:{kind.__qualname__}" if mine else ""


@dataclass(slots=True)
class Call:
    """One hook call: its name and encoded arguments."""

    hook: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Request:
    """What the process is to do.

    Attributes:
        kind: call, capture, replay or repeat.
        fresh: forget everything first.
        calls: the hooks, in order; a capture records all of them, `call` makes one.
        storages: new storages: token to bytes.
        views: new views by token.
        objects: class name ("" for a pool) and encoded fields by token; known ones are brought up to date.
        whole: contents of storages that changed at the caller's.
        contents: contents of views of large storages that changed.
        watch: "", sync, alloc or ops: what to look for while the hook runs.
        count: repetitions.
        graph: token of a captured graph.
    """

    kind: str
    fresh: bool = False
    calls: list[Call] = field(default_factory=list)
    storages: dict[int, int] = field(default_factory=dict)
    views: dict[int, View] = field(default_factory=dict)
    objects: dict[int, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    whole: dict[int, bytes] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)
    watch: str = ""
    count: int = 1
    graph: int = 0


@dataclass(slots=True)
class Answer:
    """What came of it.

    Attributes:
        result: encoded result of the last hook.
        error: name, names of its bases, text and traceback of what was raised; empty if nothing was.
        whole, contents: as in `Request`, what the hook wrote.
        notes: what was seen besides: fields that were replaced, ops, growth.
        info: answer to a question that is no call.
    """

    result: Any = None
    error: tuple[str, tuple[str, ...], str, str] | None = None
    whole: dict[int, bytes] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
