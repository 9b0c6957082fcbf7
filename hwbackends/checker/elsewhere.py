"""Conditions away from a call that keep it from a definition: around its import, or around the caller's own calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from . import platforms
from .dispatch import Candidate, Dispatcher
from .flags import Conditions, told
from .infer import Context
from .model import Expr
from .program import Ref

_CALLERS = 2  # how far the callers of a caller are followed


class Elsewhere:
    """Answers from the whole program; asked only about definitions that reject a call."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.program = dispatcher.program
        self.inference = dispatcher.inference
        self.runs = dispatcher.runs
        # Calls by attribute: file, scope, guard, and whether the receiver is self.
        self._calls: dict[str, list[tuple[int, int, int, bool]]] | None = None

    def imported_under_others(self, candidate: Candidate, file: int, conditions: Conditions) -> bool:
        """Whether a file imports a function only where the opposite of these conditions holds."""
        if candidate.owner is not None or candidate.ref[0] == file:
            return False
        decided = told(conditions)
        found = excluded = 0
        for guard in self._imports(candidate, file) if decided else ():
            found += 1
            excluded += any(
                decided.get(test, holds) != holds for test, holds in told(self.inference.chain(file, guard)).items()
            )
        return found > 0 and found == excluded

    def _imports(self, candidate: Candidate, file: int) -> Iterable[int]:
        name = self.program.scope(candidate.ref).name
        for number, scope in enumerate(self.program.files[file].facts.scopes):
            for bindings in scope.bindings.values():
                for line, guard, value in bindings:
                    if value is not None and value[0] == "m" and value[3] == name:
                        values = self.inference.evaluate(value, Context(file, number, line, guard, None))
                        if ("F", candidate.ref) in values:
                            yield guard

    def only_called_on_others(self, platform: str | None, context: Context) -> bool:
        """Whether every call of the calling method stands under conditions that this hardware cannot meet."""
        scope = self.program.scope((context.file, context.scope))
        if platform is None or scope.signature is None or context.owner is None:
            return False
        if self._calls is None:
            self._calls = self._indexed()
        calls = [place for place in self._calls.get(scope.name, ()) if self._may_mean(place, context.owner)]
        return bool(calls) and not any(
            platforms.can_meet(platform, self.inference.chain(file, guard)) for file, _, guard, _ in calls
        )

    def called_by_none_of(self, owner: Ref, method: Ref, depth: int = 0) -> bool:
        """Whether every call of a method is one on ``self``, in a method that a class overrides and never runs."""
        if self._calls is None:
            self._calls = self._indexed()
        callers = set()
        for file, number, _, on_self in self._calls.get(self.program.scope(method).name, ()):
            caller = self._method_around((file, number)) if on_self else None
            if caller is None:
                return False
            if caller != method and (caller[0], self.program.scope(caller).parent) in self.program.mro(owner):
                callers.add(caller)
        return bool(callers) and all(
            not self.runs(owner, caller) or (depth < _CALLERS and self.called_by_none_of(owner, caller, depth + 1))
            for caller in callers
        )

    def _method_around(self, place: Ref) -> Ref | None:
        """The method that a place lies in."""
        scopes = self.program.files[place[0]].facts.scopes
        number = place[1]
        while number >= 0:
            if scopes[number].kind == "f" and scopes[scopes[number].parent].kind == "c":
                return (place[0], number)
            number = scopes[number].parent
        return None

    def implied(self, conditions: Conditions, context: Context) -> tuple[tuple[Expr | None, bool], ...]:
        """What held where a name got its only value but None, for each name that is tested not to be None."""
        bindings = self.program.scope((context.file, context.scope)).bindings
        found: list[tuple[Expr | None, bool]] = []
        for test, holds in conditions:
            if test is None or test[:2] != ("=", "IsNot") or test[2][0] != "n" or test[3] != ("k", None) or not holds:
                continue
            given = [guard for _, guard, value in bindings.get(test[2][1], ()) if value != ("k", None)]
            if len(given) == 1:
                found += self.inference.chain(context.file, given[0])
        return tuple(found)

    def _may_mean(self, place: tuple[int, int, int, bool], owner: Ref) -> bool:
        """Whether a call by this name can be one of the owner's method: ``self.m()`` of another family cannot."""
        file, scope, _, on_self = place
        caller = self.inference.enclosing_class((file, scope))
        return not on_self or caller is None or caller in self.program.mro(owner) or owner in self.program.mro(caller)

    def _indexed(self) -> dict[str, list[tuple[int, int, int, bool]]]:
        found: dict[str, list[tuple[int, int, int, bool]]] = defaultdict(list)
        for index, file in enumerate(self.program.files):
            for raw in file.facts.calls:
                if raw[3][0] == "a":
                    on_self = raw[3][1] == ("n", "self") or raw[3][1][:2] == ("c", ("n", "super"))
                    found[raw[3][2]].append((index, raw[1], raw[2], on_self))
        return found
