"""What a test gets: the backend's hooks, random numbers, and checks that are booked on a clause.

It lives in the judge's process, which never imports the plugin: a hook runs in a process of its own
(`hwbackends.remote`), and its inputs and outputs travel. After every call the kit checks by itself what no hook may do:
write to what it does not own, write before it refuses, replace what the caller holds. A failed check does not end a
test: one test may judge several clauses, and only those that fail turn red."""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hwbackends.conformance import oracle
from hwbackends.conformance.marks import Item, Point
from hwbackends.conformance.ownership import ORDER, Owned, owned
from hwbackends.contract.claims import Claims, read_claims
from hwbackends.contract.reader import installed
from hwbackends.errors import HwBackendsError
from hwbackends.remote.client import Client, Made, ProcessLost
from hwbackends.remote.sparse import sparse_bytes

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
HookCall = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A call that is yet to be made: hook, arguments, keyword arguments."""
_SHOWN = 4
"""Places shown per failed comparison."""


class NotClaimed(Exception):
    """The backend does not claim what a test needs; the text says what."""


class KitError(Exception):
    """A test of the kit is wrong: it proves nothing, or checks a clause that it does not name."""


@dataclass(slots=True)
class Outcome:
    """What became of one test.

    Attributes:
        outcome: passed, failed or not_claimed.
        reason: of a failure or a missing claim, in a few words.
        details: everything that failed, with values, ready to print.
        clauses: clause id to whether every check of it held.
        worst: largest error seen per clause, in units in the last place, and as share of its bound.
        seed: seed of the test's random numbers.
        hooks: hooks that it called.
        input: the call that failed first, in words; `size` its elements.
    """

    outcome: str
    reason: str = ""
    details: str = ""
    clauses: dict[str, bool] = field(default_factory=dict)
    worst: dict[str, tuple[float, float]] = field(default_factory=dict)
    seed: int = 0
    hooks: tuple[str, ...] = ()
    input: str = ""
    size: int = 0


class Kit:
    """The hooks of one backend on one device, and the checks of one test.

    Attributes:
        hooks: one callable per hook of the contract; each call goes to the backend's process.
        claims: what the manifest claims.
        device: where the judge's tensors lie: host memory, whatever the backend's device.
        target: the backend's device, as a string.
        point: claimed values that the running test is made for.
        rng: random numbers of the running test, from its own seed.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.info = client.start()
        self.device = torch.device("cpu")
        self.target, self.emulated = str(self.info["device"]), bool(self.info["emulated"])
        contracts = installed().only(self.info["contracts"])
        self.hooks = SimpleNamespace(**{name: self._hook(name) for name in contracts.hooks})
        self.claims: Claims = read_claims(self.info["capabilities"], contracts, tuple(self.info["hooks_present"]))
        self.lost: dict[str, str] = {}
        self.base_seed = 0
        self.begin("", (), 0, Point("window", "float32", 4, "int64"))

    def begin(self, test_id: str, declared: tuple[str, ...], seed: int, point: Point) -> None:
        """Forget the last test."""
        self.test_id, self.declared, self.seed, self.point = test_id, declared, seed, point
        self.rng = np.random.default_rng(seed)
        self.failures: list[tuple[str, str]] = []
        self.clauses: dict[str, bool] = {}
        self.worst: dict[str, tuple[float, float]] = {}
        self.called: dict[str, None] = {}
        self.last: tuple[str, tuple[Any, ...], dict[str, Any]] | None = None
        self.input, self.size = "", 0
        self._far_bytes = 0
        self.client.forget()

    # --- calls ---

    def _hook(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.call(name, *args, **kwargs).result

        return call

    def call(self, hook: str, *args: Any, watch: str = "", **kwargs: Any) -> Made:
        """One hook call; its result, and what was seen. Judges by itself what no hook may do.

        Raises:
            HwBackendsError, TypeError, HookError: what the hook raised.
            ProcessLost: it crashed or hung, now or in an earlier test: a hang costs one time-out per hook.
        """
        self.called[hook] = None
        if hook in self.lost:
            raise ProcessLost(f"not called again: {self.lost[hook]}")
        self.last = hook, args, kwargs
        rules = owned(hook, args, kwargs)
        try:
            made = self.client.call(hook, args, kwargs, watch)
        except ProcessLost as error:
            if "HANG" in str(error):
                self.lost[hook] = str(error)
            raise
        except Exception as error:
            self._untouched(rules, getattr(error, "made", None), error)
            raise
        self._kept(rules, made)
        return made

    def capture(self, calls: Sequence[HookCall]) -> int:
        """Warm up and capture calls as one graph, over there; returns its token."""
        self._note(calls)
        return self.client.capture(calls)

    def replay(self, graph: int, calls: Sequence[HookCall]) -> None:
        """Replay a graph over what the captured calls' tensors hold now."""
        self._note(calls)
        self.client.replay(graph, calls)

    def repeat(self, calls: Sequence[HookCall], count: int) -> dict[str, float]:
        """Many rounds of calls, each over new metadata; what stays in use, per round."""
        self._note(calls)
        return self.client.repeat(calls, count)

    def _note(self, calls: Sequence[HookCall]) -> None:
        self.called.update(dict.fromkeys(call[0] for call in calls))
        self.last = calls[-1]

    def _untouched(self, rules: Owned, made: Made | None, error: Exception) -> None:
        """A refusal comes before any write."""
        if made is None or not isinstance(error, (HwBackendsError, TypeError)):
            return
        if made.changed or made.notes.get("replaced"):
            what = self._named(rules, made.changed) or ", ".join(made.notes["replaced"])
            self.book(rules.refusal, False, f"{rules.hook} raised {type(error).__name__} after it wrote to {what}")

    def _kept(self, rules: Owned, made: Made) -> None:
        """Nothing changed but what the hook owns."""
        cover = self.client.mask(rules.writes) if made.changed else {}
        large = self.client.large if made.changed else frozenset()
        for token in made.changed:
            mine = cover.get(token)
            if token in large:
                if token not in {self.client.token(tensor) for tensor in rules.writes}:
                    name, clause = self._whose(rules, token, False)
                    self.book(clause, False, f"{rules.hook} wrote to {name}")
                continue
            stray = self.client.difference(token) & (~mine if mine is not None else True)
            if stray.any():
                name, clause = self._whose(rules, token, mine is not None)
                self.book(clause, False, f"{rules.hook} wrote to {name} ({int(stray.sum())} bytes)")
        for what in made.notes.get("replaced", ()):
            self.book(rules.keeps, False, f"{rules.hook} put another value in place of the caller's {what}")
        if made.shared:
            self.book(rules.keeps, False, f"{rules.hook} returned a tensor in memory that is not its own")
        if "clobbered" in made.notes:
            self.book(rules.keeps, False, f"{rules.hook}: {made.notes['clobbered']}")

    def _whose(self, rules: Owned, token: int, partly: bool) -> tuple[str, str]:
        for name, tensor, clause in rules.inputs:
            if self.client.token(tensor) == token:
                return name, clause
        return ("memory around its output" if partly else "a tensor of another call"), rules.keeps

    def _named(self, rules: Owned, tokens: Sequence[int] | frozenset[int]) -> str:
        known = {self.client.token(t): name for name, t, _ in rules.inputs}
        known |= {self.client.token(t): "what it would have written" for t in rules.writes}
        return ", ".join(sorted({known.get(token, "other memory") for token in tokens}))

    def need(self, **needs: Any) -> None:
        """End the test as not claimed unless the manifest claims every need, see `Claims.missing`."""
        reason = self.claims.missing(**needs)
        if reason:
            raise NotClaimed(reason)

    @property
    def silu(self) -> str | None:
        """The activation that is claimed, or none."""
        return "silu" if "silu" in self.claims.activations else None

    def rows(self, count: int) -> int:
        """`count` requests, or as many as are claimed."""
        return count if self.claims.max_requests is None else min(count, self.claims.max_requests)

    # --- tensors ---

    def tensor(self, values: Any, dtype: str) -> Tensor:
        """`values` as a tensor of the judge's."""
        return torch.tensor(np.asarray(values)).to(getattr(torch, dtype))

    def far(self, tensor: Tensor, dim: int, entry: int, beyond: int) -> Tensor:
        """The same values, where entry `entry` of dimension `dim` lies more than `beyond` elements from the first.

        Other dimensions stay dense. In host memory only the pages that hold values exist.

        Raises:
            NotClaimed: the device's memory cannot hold what lies between.
        """
        step = beyond // entry + 8
        sizes = [size for place, size in enumerate(tensor.shape) if place != dim]
        strides = [int(np.prod(sizes[place + 1 :])) for place in range(len(sizes))]
        strides.insert(dim, step)
        count = ((tensor.shape[dim] - 1) * step + int(np.prod(sizes))) * tensor.element_size()
        self._far_bytes += count
        room = self.info.get("device_memory")
        if room is not None and self._far_bytes > 0.9 * room:
            raise NotClaimed(f"{self._far_bytes >> 30} GiB of device memory")
        wide = sparse_bytes(count).view(tensor.dtype).as_strided(tensor.shape, strides)
        return wide.copy_(tensor)

    @staticmethod
    def host(tensor: Tensor) -> Tensor:
        """A copy that later calls do not change."""
        return tensor.detach().clone()

    # --- checks ---

    def check(self, clause: str, holds: bool, message: str) -> bool:
        """Book one check on a clause; a failure is kept and the test goes on."""
        if clause not in self.declared:
            raise KitError(f"{self.test_id} checks {clause}, which it does not name")
        return self.book(clause, holds, message)

    def book(self, clause: str, holds: bool, message: str) -> bool:
        """As `check`, for what is judged after every call, whatever the test is about."""
        self.clauses[clause] = bool(holds) and self.clauses.get(clause, True)
        if not holds:
            self.failures.append((clause, message))
            if not self.input and self.last is not None:
                self.input, self.size = describe_call(*self.last)
        return bool(holds)

    def equal(self, clause: str, got: Any, want: Any, what: str) -> bool:
        """Same numbers, NaN equal to NaN; no tolerance."""
        mine, theirs = np.asarray(_numbers(got)), np.asarray(_numbers(want))
        if mine.shape != theirs.shape:
            return self.check(clause, False, f"{what}: shape {mine.shape}, wanted {theirs.shape}")
        wrong = (mine != theirs) & ~(np.isnan(mine) & np.isnan(theirs))
        return self._compared(clause, wrong, mine, theirs, what)

    def same_bits(self, clause: str, got: Tensor, want: Tensor, what: str) -> bool:
        """The same bytes, NaN and the sign of zero included."""
        mine, theirs = bits(self.host(got)), bits(self.host(want))
        wrong = (mine != theirs).numpy()
        return self._compared(clause, wrong, _numbers(got), _numbers(want), what)

    def _compared(self, clause: str, wrong: Any, got: Any, want: Any, what: str) -> bool:
        """Book the outcome of a comparison, with the places where it failed."""
        found = bool(wrong.any())
        return self.check(clause, not found, f"{what}: {places(wrong, got, want)}" if found else "")

    def within(self, clause: str, got: Any, want: oracle.Array, bound: oracle.Array, dtype: str, what: str) -> bool:
        """|got - want| <= bound for each element; keeps the worst error."""
        mine = np.asarray(_numbers(got), oracle.WIDE)
        with np.errstate(invalid="ignore"):
            error = np.abs(mine - want)
        error = np.where(np.isnan(error), np.inf, error)
        wrong = ~(error <= bound)
        if error.size:
            ulps = float(np.max(error / oracle.ulp(want, dtype)))
            share = float(np.max(error / np.maximum(bound, np.finfo(np.float64).tiny)))
            before = self.worst.get(clause, (0.0, 0.0))
            self.worst[clause] = (max(before[0], ulps), max(before[1], share))
        text = f"{what}: {places(wrong, mine, want)}, bound {float(bound[wrong].min()):.3g}" if wrong.any() else ""
        return self.check(clause, not wrong.any(), text)

    def refuses(self, clause: str, wanted: type[BaseException], call: Callable[[], Any], what: str) -> bool:
        """`call` raises `wanted`; another error, or none, is a failure."""
        try:
            call()
        except wanted:
            return self.check(clause, True, "")
        except Exception as error:
            return self.check(
                clause, False, f"{what}: raised {type(error).__name__}: {error}; wanted {wanted.__name__}"
            )
        return self.check(clause, False, f"{what}: raised nothing, wanted {wanted.__name__}")


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a host tensor as integers."""
    plain = tensor.contiguous()
    return plain.view(_BITS[plain.element_size()])


def places(wrong: Any, got: Any, want: Any, first: int = 0) -> str:
    """The first places where a comparison failed, with both values; `first` is the number of the first entry."""
    found = np.argwhere(np.asarray(wrong))
    shift = np.zeros(np.asarray(wrong).ndim, int)
    shift[:1] = first
    shown = [f"{(p + shift).tolist()}: {got[tuple(p)]} instead of {want[tuple(p)]}" for p in found[:_SHOWN]]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ("; ".join(shown) or "a single value") + more


def _numbers(value: Any) -> Any:
    if isinstance(value, Tensor):
        host = value.detach().cpu()
        return (host if host.dtype in (torch.bool, torch.int32, torch.int64) else host.double()).numpy()
    return np.asarray(value, np.float64)


# --- tests -----------------------------------------------------------------------------------------------------------


def run(kit: Kit, test_id: str, test: Callable[..., None], item: Item, base_seed: int) -> Outcome:
    """One test at one point of the claims."""
    seed = zlib.crc32(test_id.encode()) ^ base_seed
    declared: tuple[str, ...] = test.clauses  # type: ignore[attr-defined]
    if item.point.missing:
        return Outcome("not_claimed", item.point.missing, seed=seed)
    kit.base_seed = base_seed
    kit.begin(test_id, declared, seed, item.point)
    details = ""
    try:
        test(kit, **item.arguments)
        if not kit.clauses:
            raise KitError(f"{test_id} made no check")
    except NotClaimed as reason:
        if not kit.failures:
            return Outcome("not_claimed", str(reason), seed=seed)
    except Exception as error:
        if kit.last is not None and not kit.input:
            kit.input, kit.size = describe_call(*kit.last)
        kit.failures.insert(0, (", ".join(declared), f"{type(error).__name__}: {error}"))
        kit.clauses |= dict.fromkeys(declared, False)
        details = "" if isinstance(error, ProcessLost) else traceback.format_exc()
    return _outcome(kit, details)


def _outcome(kit: Kit, details: str) -> Outcome:
    lines = [f"{clause}: {message}" for clause, message in kit.failures]
    return Outcome(
        "failed" if lines else "passed",
        reason=lines[0] if lines else "",
        details="\n".join([*lines, details]).rstrip(),
        clauses=dict(kit.clauses),
        worst=dict(kit.worst),
        seed=kit.seed,
        hooks=tuple(kit.called),
        input=kit.input,
        size=kit.size,
    )


def describe_call(hook: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, int]:
    """A call in words, as small as it can be said, and the elements of its tensors."""
    sizes: list[int] = []
    named = [*zip(ORDER.get(hook, ()), args, strict=False), *kwargs.items()]
    parts = [f"{name}={_shown(value, sizes)}" for name, value in named if value is not None]
    return f"{hook}({', '.join(parts)})", sum(sizes)


def _shown(value: Any, sizes: list[int]) -> str:
    if isinstance(value, Tensor):
        sizes.append(value.numel())
        dtype = str(value.dtype).removeprefix("torch.")
        strides = "" if value.is_contiguous() else f" strides {list(value.stride())}"
        short = value.dim() == 1 and value.numel() <= 12 and not (value.is_floating_point() or value.is_meta)
        return f"{dtype}{value.tolist() if short else list(value.shape)}{strides}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(item, sizes)}" for key, item in value.items()) + "}"
    names = getattr(value, "__slots__", None) or getattr(value, "__dict__", None)
    if names is None or isinstance(value, (str, int, float)) or hasattr(value, "value"):
        return str(getattr(value, "value", value))
    held = [
        (name, getattr(value, name))
        for name in names
        if not name.startswith("_") and name not in ("cache", "handles", "engine")
    ]
    text = ", ".join(f"{name}={_shown(item, sizes)}" for name, item in held if item is not None)
    return f"{type(value).__name__}({text})"
