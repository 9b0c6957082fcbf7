"""What conditions say about the class of a value: ``isinstance``, ``issubclass``, ``type(x) is A``, and their kin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from .model import Expr
from .program import Ref, Value, Values

if TYPE_CHECKING:
    from .infer import Context, Inference

Allows = Callable[[Ref], bool]

_EXACT = {"Is": True, "Eq": True, "In": True, "IsNot": False, "NotEq": False, "NotIn": False}
# Classes that a base which is known by its name may derive from, or that ask for methods instead of bases.
_ABOVE_OTHERS = frozenset(
    {"object", "Module", "BaseException", "Exception", "Enum", "ABC", "Protocol", "Generic", "tuple"}
)
_TESTS = frozenset({"isinstance", "issubclass"})


class Kinds(NamedTuple):
    """The classes that a test names.

    ``sure`` leaves out those that stand for some class below them (``type[Base]``); ``complete`` is False where the
    test names something that cannot be seen, or such a class.
    """

    classes: frozenset[Ref]
    sure: frozenset[Ref]
    complete: bool
    outside: frozenset[str] | None = frozenset()  # classes of other packages; None where not even their names are known


class TypeTests:
    """Reads the conditions around a place. Remembers which of them are about a class at all: few are."""

    def __init__(self, inference: Inference) -> None:
        self.inference = inference
        self.program = inference.program
        self._known: dict[tuple[int, int], tuple[tuple[int, Expr, bool, set[Expr]], ...]] = {}

    def narrowed(self, expr: Expr, values: Values, context: Context) -> Values:
        """The values of an expression that the conditions around it leave over."""
        if context.guard < 0:
            return values
        values = self._identified(expr, values, context)
        if not self._all(context):
            return values
        for test, holds in self._about(expr, context):
            asserted = self._asserted(test, holds, expr, context)
            if asserted is not None:
                values = self._met(values, asserted)
                continue
            values = frozenset(v for v in values if v[0] not in "IC" or self._can_be(v, test, holds, expr, context))
        return values

    def _identified(self, expr: Expr, values: Values, context: Context) -> Values:
        """Modules, functions and classes that ``if x is a.b`` leaves over."""
        if len(values) < 2 or expr[0] not in "na":
            return values
        for test, holds in self.inference.chain(context.file, context.guard):
            if test is None or test[0] != "=" or test[2] != expr or test[1] not in ("Is", "Eq", "IsNot", "NotEq"):
                continue
            named = self.inference.evaluate(test[3], context._replace(guard=-1))
            if len(named) == 1 and next(iter(named))[0] in "MFC":
                same = holds == (test[1] in ("Is", "Eq"))
                left = frozenset(v for v in values if (v in named or v[0] == "U") == same or v[0] == "U")
                values = (left & named if same else left) or left or values
        return values

    def allows(self, expr: Expr, context: Context) -> Allows | None:
        """Tells for a class whether an instance of exactly it passes the conditions; None where all do."""
        if context.guard < 0 or not self._all(context):
            return None
        tests = list(self._about(expr, context))
        if not tests:
            return None
        return lambda owner: all(self._truth(test, expr, owner, context) in (None, holds) for test, holds in tests)

    # -- conditions ---------------------------------------------------------------------------------------------

    def _about(self, expr: Expr, context: Context) -> Iterator[tuple[Expr, bool]]:
        """The conditions about the class of an expression, unless it is bound anew behind them."""
        for number, test, holds, subjects in self._all(context):
            if expr in subjects and not self._bound_behind(number, expr, context):
                yield test, holds

    def _all(self, context: Context) -> tuple[tuple[int, Expr, bool, set[Expr]], ...]:
        key = (context.file, context.guard)
        known = self._known.get(key)
        if known is None:
            table = self.program.files[context.file].facts.guards
            number, found = context.guard, []
            while number >= 0:
                test, holds, above = table[number]
                named = self._named(test, context)
                if named is not None and (subjects := subjects_of(named)):
                    found.append((number, named, holds, subjects))
                number = above
            self._known[key] = known = tuple(found)
        return known

    def _named(self, test: Expr | None, context: Context) -> Expr | None:
        """``is_npu = isinstance(x, Npu)``: a name that was given a condition stands for it."""
        if test is None or test[0] != "n":
            return test
        bindings = self.program.files[context.file].facts.scopes[context.scope].bindings.get(test[1], ())
        return bindings[0][2] if len(bindings) == 1 else None

    def _bound_behind(self, number: int, expr: Expr, context: Context) -> bool:
        """Whether a name, or an attribute of ``self``, is assigned under the condition that asked for its class."""
        scopes = self.program.files[context.file].facts.scopes
        guards: Iterable[int] = ()
        if expr[0] == "n":
            guards = [binding[1] for binding in scopes[context.scope].bindings.get(expr[1], ())]
        elif expr[0] == "a" and (around := self.inference.enclosing_class((context.file, context.scope))):
            assigned = self.program.scope(around).attributes.get(expr[2], ())
            guards = [guard for scope, guard, _, _ in assigned if scope == context.scope]
        return any(self.inference.inside(context.file, number, guard) for guard in guards)

    # -- classes ------------------------------------------------------------------------------------------------

    def _kinds(self, expr: Expr | None, context: Context) -> Kinds:
        """The classes of ``A``, ``(A, B)``, ``A | B``, and of a name for any of them."""
        outer = context._replace(guard=-1)
        found: set[Ref] = set()
        sure: set[Ref] = set()
        complete = True
        outside: set[str] | None = set()
        pending = list(expr[1]) if expr is not None and expr[0] == "t" else [expr]
        values = [value for part in pending for value in self.inference.evaluate(part, outer)]
        while values:
            value = values.pop()
            if value[0] == "Z":
                values += [inner for item in value[1] for inner in item]
            elif value[0] == "E":
                values += value[1]
            elif value[0] == "C":
                found.add(value[1])
                if value[2]:
                    sure.add(value[1])
                complete = complete and value[2]
            else:
                complete = False
                if value[0] not in "XN":
                    outside = None
                elif outside is not None:
                    outside.add(value[1].rpartition(".")[2])
        return Kinds(frozenset(found), frozenset(sure), complete, None if outside is None else frozenset(outside))

    def _asserted(self, test: Expr, holds: bool, expr: Expr, context: Context) -> Values | None:
        """What an expression must be where a condition holds (or not); None where it only excludes something."""
        if test[0] == "!":
            return self._asserted(test[1], not holds, expr, context) if test[1] else None
        if (test[0] == "V" and holds) or (test[0] == "&" and not holds):
            found: set[Value] = set()
            for part in test[1]:
                inner = self._asserted(part, holds, expr, context) if part else None
                if inner is None:
                    return None
                found |= inner
            return frozenset(found)
        if _subject(test) != expr or holds != (test[0] == "c" or _EXACT[test[1]]):
            return None
        kinds, exact = self._kinds(test[2][1] if test[0] == "c" else test[3], context), test[0] == "="
        if exact and not kinds.complete:
            return None
        tag = "C" if _asks_for_subclass(test) else "I"
        unseen: Values = frozenset() if kinds.complete or tag == "C" else frozenset({("U",)})
        return frozenset((tag, ref, exact) for ref in kinds.classes) | unseen or None

    def _met(self, values: Values, asserted: Values) -> Values:
        """Values that are of an asserted class, or the asserted classes that a value can turn out to be."""
        found: set[Value] = set()
        for value in values:
            if value[0] not in "IC":
                found |= asserted
                continue
            same = [kind for kind in asserted if kind[0] == value[0]]
            if any(not kind[2] and kind[1] in self.program.mro(value[1]) for kind in same):
                found.add(value)
                continue
            below = {kind for kind in same if value[1] in self.program.mro(kind[1])}
            if value[2]:
                found |= {kind for kind in below if kind[1] == value[1]}
            else:
                found |= below or asserted  # a class that derives from both, or a declaration that says too little
        return frozenset(found) or asserted

    def _can_be(self, value: Value, test: Expr, holds: bool, expr: Expr, context: Context) -> bool:
        if value[0] == "C" and test[0] == "c" and test[1] == ("n", "isinstance") and test[2][1] == ("n", "type"):
            return holds
        owners = (value[1],) if value[2] else self.program.descendants(value[1])
        wanted = "C" if _asks_for_subclass(test) else "I"
        return value[0] != wanted or any(self._truth(test, expr, o, context) in (None, holds) for o in owners)

    def _truth(self, test: Expr | None, expr: Expr, owner: Ref, context: Context) -> bool | None:
        """What a condition gives where an expression is of exactly one class; None where other things decide."""
        if test is None:
            return None
        if test[0] == "!":
            inner = self._truth(test[1], expr, owner, context)
            return None if inner is None else not inner
        if test[0] in "V&":
            decides = test[0] == "V"
            parts = [self._truth(part, expr, owner, context) for part in test[1]]
            return decides if decides in parts else (None if None in parts else not decides)
        if _subject(test) != expr:
            return None
        if test[0] == "c":
            return self._is_one_of(owner, self._kinds(test[2][1], context))
        kinds, same = self._kinds(test[3], context), _EXACT[test[1]]
        if owner not in kinds.classes:
            return not same if kinds.complete else None
        return same if test[1] in ("In", "NotIn") or kinds.sure == {owner} else None

    def _is_one_of(self, owner: Ref, kinds: Kinds) -> bool | None:
        order = set(self.program.mro(owner))
        if kinds.classes & order:
            return True if kinds.sure & order else None
        if not kinds.complete and kinds.outside and not self.program.unknown_base(owner):
            # Every base of the class is known by name: it is none of another package's classes but those.
            written = frozenset().union(*(self.program.external.get(item, frozenset()) for item in order))
            if kinds.outside.isdisjoint(written | _ABOVE_OTHERS):
                return False
        structural = any("Protocol" in self.program.external.get(kind, ()) for kind in kinds.classes)
        return None if not kinds.complete or structural or self.program.unknown_base(owner) else False


def subjects_of(test: Expr | None) -> set[Expr]:
    """The expressions whose classes a condition asks for."""
    if test is None:
        return set()
    if test[0] == "!":
        return subjects_of(test[1])
    if test[0] in "V&":
        return {subject for part in test[1] for subject in subjects_of(part)}
    subject = _subject(test)
    return set() if subject is None else {subject}


def _subject(test: Expr) -> Expr | None:
    """``x`` of ``isinstance(x, A)``, ``issubclass(x, A)``, ``type(x) is A`` and ``x.__class__ is A``."""
    if test[0] == "c" and test[1][0] == "n" and test[1][1] in _TESTS and len(test[2]) > 1:
        return test[2][0]  # type: ignore[no-any-return]
    if test[0] != "=" or test[1] not in _EXACT:
        return None
    left = test[2]
    if left[0] == "c":
        return left[2][0] if left[1] == ("n", "type") and len(left[2]) == 1 else None
    return left[1] if left[0] == "a" and left[2] == "__class__" else None


def _asks_for_subclass(test: Expr | None) -> bool:
    if test is None:
        return False
    if test[0] in "V&":
        return any(_asks_for_subclass(part) for part in test[1])
    return _asks_for_subclass(test[1]) if test[0] == "!" else test[:2] == ("c", ("n", "issubclass"))


def asks_for_kind(test: Expr | None) -> bool:
    """Whether a condition is about the class, or the attributes, of something."""
    if test is None:
        return False
    if test[0] == "!":
        return asks_for_kind(test[1])
    if test[0] in "V&":
        return any(asks_for_kind(part) for part in test[1])
    if test[0] == "c" and test[1][0] == "n" and test[1][1] in ("hasattr", "callable"):
        return True
    return _subject(test) is not None
