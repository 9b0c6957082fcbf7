"""Where a receiver came from: every assignment that gave it a value, under which conditions, and by which names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from . import flags
from .dispatch import Candidate, Dispatcher
from .expressions import holds
from .flags import Conditions
from .infer import Context, last_name
from .model import Call, Expr
from .program import Ref, Value
from .typetests import subjects_of

_DEPTH = 4
_EACH = 12  # alternatives of one name
# A comparison with one of these picks a family member by its name.
_STRING_METHODS = frozenset({"startswith", "endswith", "lower", "upper", "strip"})


class Origin(NamedTuple):
    """One value that a receiver can have: what is written, where, and what must hold for it."""

    expr: Expr | None
    context: Context
    conditions: tuple[tuple[Expr | None, bool], ...]


class Origins:
    """Reads the assignments behind a call's receiver."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.inference = dispatcher.inference
        self.program = dispatcher.program

    # -- conditions of construction against those of use --------------------------------------------------------

    def under_other_flags(self, candidate: Candidate, call: Call, context: Context, conditions: Conditions) -> bool:
        """``self.impl = A() if flag else B()`` and ``if flag: self.impl.run()`` never meet ``B.run``."""
        conditions = tuple(conditions)
        if not conditions:
            return False
        receivers = [call.func[1]] if call.func[0] == "a" else []
        for receiver in [*receivers, call.func]:
            found = excluded = 0
            for origin in self.of(receiver, context):
                if self._gives(origin, candidate, receiver is call.func):
                    found += 1
                    excluded += flags.contradict(origin.conditions, conditions)
            if 0 < found == excluded:
                return True
        return False

    def _gives(self, origin: Origin, candidate: Candidate, called: bool) -> bool:
        values = self.inference.evaluate(origin.expr, origin.context)
        return any(self._leads_to(value, candidate, called) for value in values)

    def _leads_to(self, value: Value, candidate: Candidate, called: bool) -> bool:
        if value[0] in "IC":
            owner = candidate.owner or candidate.ref
            return owner == value[1] if value[2] else owner in self.program.descendants(value[1])
        if value[0] == "P":
            return self._leads_to(value[1], candidate, called)
        return called and value[0] in "FB" and value[1] == candidate.ref

    def of(self, expr: Expr | None, context: Context, depth: int = 0) -> Iterator[Origin]:
        """The alternatives of an expression, each with the conditions of the assignment that it comes from."""
        if expr is None or depth > _DEPTH:
            return
        if expr[0] == "|" and len(expr) == 4:
            for side, holds in ((expr[1], True), (expr[2], False)):
                for origin in self._or_itself(side, context, depth):
                    yield origin._replace(conditions=((expr[3], holds), *origin.conditions))
            return
        for value, at, conditions in self._assignments(expr, context):
            for origin in self._or_itself(value, at, depth):
                yield origin._replace(conditions=conditions + origin.conditions)
        yield from self._returned_here(expr, context, depth)
        if expr[0] == "c" and expr[1][0] == "n":  # cls = A if flag else B; cls()
            for origin in self.of(expr[1], context, depth + 1):
                if origin.expr is not None:
                    yield origin._replace(expr=("c", origin.expr, *expr[2:]))

    def _returned_here(self, expr: Expr, context: Context, depth: int) -> Iterator[Origin]:
        """What ``self.pick()`` returns, each under the conditions of its ``return``."""
        if expr[0] != "c" or expr[1][0] != "a" or self.dispatcher.self_function(expr[1][1], context) is None:
            return
        for value in self.inference.evaluate(expr[1], context):
            if value[0] == "B":
                scope = self.program.scope(value[1])
                for guard, returned in scope.returns[:_EACH]:
                    at = self.inference.context(value[1], scope.line + 100_000, guard, context.owner)
                    conditions = self.inference.chain(value[1][0], guard)
                    for origin in self._or_itself(returned, at, depth):
                        yield origin._replace(conditions=conditions + origin.conditions)

    def _or_itself(self, expr: Expr | None, context: Context, depth: int) -> list[Origin]:
        return list(self.of(expr, context, depth + 1))[:_EACH] or [Origin(expr, context, ())]

    def _assignments(
        self, expr: Expr, context: Context
    ) -> Iterator[tuple[Expr | None, Context, tuple[tuple[Expr | None, bool], ...]]]:
        if expr[0] == "n":
            yield from self._of_name(expr[1], context)
        elif expr[0] == "a" and expr[1][0] == "n" and context.owner is not None:
            if self.dispatcher.self_function(expr[1], context) is None:
                return
            for owner in self.program.mro(context.owner):
                for scope, guard, value, line in self.program.scope(owner).attributes.get(expr[2], ()):
                    at = Context(owner[0], scope, line, guard, context.owner)
                    yield value, at, self.inference.chain(owner[0], guard)

    def _of_name(
        self, name: str, context: Context
    ) -> Iterator[tuple[Expr | None, Context, tuple[tuple[Expr | None, bool], ...]]]:
        scopes = self.program.files[context.file].facts.scopes
        number = context.scope
        while number >= 0:
            for line, guard, value in scopes[number].bindings.get(name, ()):
                if value is not None and value[0] not in "p":
                    yield (
                        value,
                        context._replace(scope=number, line=line, guard=guard),
                        self.inference.chain(context.file, guard),
                    )
            if name in scopes[number].bindings:
                return
            number = scopes[number].parent

    def decided_together(self, call: Call, context: Context, conditions: Conditions) -> bool:
        """Whether what was constructed hangs on a switch that a condition around the call asks for as well."""
        receivers = [call.func, *([call.func[1]] if call.func[0] == "a" else [])]
        asked = flags.subjects(conditions) - {flags.dotted(receiver) for receiver in receivers}  # not: is it there
        if not asked:
            return False
        return any(
            not asked.isdisjoint(flags.subjects(origin.conditions))
            for receiver in receivers
            for origin in self.of(receiver, context)
        )

    # -- a name that picked the receiver ------------------------------------------------------------------------

    def picked_by_a_name(self, call: Call, context: Context) -> bool:
        """Whether the receiver was looked up by a name that a condition around the call compares with a string."""
        around = {part for test, _ in self.inference.chain(context.file, call.guard) for part in _compared(test)}
        receivers = [call.func, *([call.func[1]] if call.func[0] == "a" else [])]
        origins = [origin for r in receivers for origin in (Origin(r, context, ()), *self.of(r, context))]
        origins += [Origin(*given) for r in receivers for given in self._assignments(r, context)]
        behind = {part for origin in origins for test, _ in origin.conditions for part in _compared(test)}
        compared = around | behind
        return bool(compared) and any(_mentioned(origin.expr, compared) for origin in origins)

    def made_of_what_is_asked(self, call: Call, context: Context) -> bool:
        """``kind = x.kind()``, then ``kind.load()`` under ``isinstance(x, A)``: the kind is that of an ``A``."""
        tests = (test for test, holds in self.inference.chain(context.file, call.guard) if holds)
        asked = {subject for test in tests for subject in subjects_of(test)}
        receivers = [call.func, *([call.func[1]] if call.func[0] == "a" else [])]
        asked -= {*receivers, ("n", "self")}
        return any(
            holds(origin.expr, subject) for subject in asked for r in receivers for origin in self.of(r, context)
        )

    # -- attributes that a subclass holds something else in -----------------------------------------------------

    def rebinding(self, call: Call, context: Context) -> Iterator[Ref]:
        """Subclasses that run the calling method with something of their own in an attribute that the call uses."""
        if context.owner is None or len(self.program.descendants(context.owner)) < 2:
            return
        caller = self.method_of(context)
        names = set(self._held(call.func, context, 0)) if caller is not None else set()
        if not names or caller is None:
            return
        for owner in self.program.descendants(context.owner)[1:]:
            scope = self.program.scope(owner)
            own = any(name in scope.attributes or name in scope.bindings for name in names)
            if own and self.dispatcher.runs(owner, caller):
                yield owner

    def method_of(self, context: Context) -> Ref | None:
        """The method that a place lies in."""
        scopes = self.program.files[context.file].facts.scopes
        number = context.scope
        while number >= 0:
            if scopes[number].kind == "f" and scopes[scopes[number].parent].kind == "c":
                return (context.file, number)
            number = scopes[number].parent
        return None

    def _held(self, expr: Expr | None, context: Context, depth: int) -> Iterator[str]:
        """The attributes of ``self`` that the value of an expression comes from."""
        if expr is None or depth > 2 * _DEPTH:
            return
        if expr[0] == "a":
            if expr[1][0] == "n" and self.dispatcher.self_function(expr[1], context) is not None:
                if depth:  # self.m() itself is what families are about
                    yield str(expr[2])
                return
            yield from self._held(expr[1], context, depth + 1)
        elif expr[0] in "eixw":
            yield from self._held(expr[1], context, depth + 1)
        elif expr[0] == "c":
            yield from self._held(expr[1], context, depth + 1)
            for arg in expr[2] if last_name(expr[1]) in ("enumerate", "zip", "reversed", "list", "iter") else ():
                yield from self._held(arg, context, depth + 1)
        elif expr[0] == "n" and not self._is_self(expr, context):
            for _, _, value in self.program.files[context.file].facts.scopes[context.scope].bindings.get(expr[1], ()):
                yield from self._held(value, context, depth + 1)

    def _is_self(self, expr: Expr, context: Context) -> bool:
        return self.dispatcher.self_function(expr, context) is not None


def _compared(test: Expr | None) -> Iterator[str]:
    """The last names of what a condition compares with strings."""
    if test is None:
        return
    if test[0] == "!":
        yield from _compared(test[1])
    elif test[0] in "V&":
        for part in test[1]:
            yield from _compared(part)
    elif test[0] == "=" and test[1] in ("Is", "IsNot", "Eq", "NotEq") and _is_class(test[3]):
        yield from _names(test[2])
    elif test[0] == "=" and (_is_text(test[3]) or _is_text(test[2])):
        yield from _names(test[2] if _is_text(test[3]) else test[3])
    elif test[0] == "c" and test[1][0] == "a" and test[1][2] in ("startswith", "endswith"):
        yield from _names(test[1][1])


def _is_text(expr: Expr) -> bool:
    """A string, an enum's member, or a collection of such."""
    if expr[0] == "t":
        return bool(expr[1]) and all(item is not None and _is_text(item) for item in expr[1])
    constant = expr[0] in "na" and last_name(expr).isupper()  # a member of an enum, a table of names
    return expr[0] == "s" or constant


def _is_class(expr: Expr) -> bool:
    """What is written like a class: ``frame_or_series is pd.DataFrame``."""
    name = last_name(expr) if expr[0] in "na" else ""
    return name[:1].isupper() and not name.isupper()


def _names(expr: Expr) -> Iterator[str]:
    while expr[0] == "c" and expr[1][0] == "a" and expr[1][2] in _STRING_METHODS:
        expr = expr[1][1]
    if expr[0] in "na":
        yield last_name(expr).lstrip("_")


def _mentioned(expr: Expr | None, names: set[str], inside: bool = False, depth: int = 0) -> bool:
    """Whether a look-up or a call in an expression is given one of these names."""
    if expr is None or depth > 2 * _DEPTH:
        return False
    if expr[0] in "na" and inside and last_name(expr).lstrip("_") in names:
        return True
    if expr[0] == "c":
        inside = inside or (expr[1] is not None and expr[1][0] == "n")  # made = kind(1): what is called was compared
        given = any(_mentioned(arg, names, True, depth + 1) for arg in expr[2])
        return given or not names.isdisjoint(expr[4]) or _mentioned(expr[1], names, inside, depth + 1)
    if expr[0] == "i":
        index = (
            expr[2]
            if len(expr) > 2 and isinstance(expr[2], tuple) and expr[2] and isinstance(expr[2][0], str)
            else None
        )
        return _mentioned(index, names, True, depth + 1) or _mentioned(expr[1], names, inside, depth + 1)
    if expr[0] in "aexw":
        return _mentioned(expr[1], names, inside, depth + 1)
    return expr[0] == "|" and any(_mentioned(side, names, inside, depth + 1) for side in expr[1:3])
