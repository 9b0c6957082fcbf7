"""The definitions that one call can reach, with what each of them is bound to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from . import platforms
from .bind import Passed
from .infer import EITHER, Context, Inference, last_name, method_kind
from .model import Call, Expr, Scope, Signature
from .program import Ref, Value, Values
from .typetests import Allows
from .wrappers import Wrappers

_RECORD_BASES = frozenset(
    {"object", "ABC", "Protocol", "Generic", "metaclass=ABCMeta", "NamedTuple", "Struct", "Exception", "Enum", "Module"}
)
# Decorators of a class that leave its constructor alone.
_CLASS_KEEPING = frozenset(
    {"dataclass", "final", "runtime_checkable", "total_ordering", "deprecated", "unique", "register_pytree_node_class",
     "dataclass_transform"}
)  # fmt: skip
_TRANSPARENT_BASES = frozenset({"object", "ABC", "Protocol", "Generic", "metaclass=ABCMeta"})
_CHANGING = frozenset(
    [
        "fixture",
        "command",
        "group",
        "option",
        "argument",
        "given",
        "patch",
        "overload",
        "singledispatch",
        "setter",
        "getter",
        "deleter",
        "property",
        "cached_property",
        "validator",
        "field_validator",
        "model_validator",
        "root_validator",
        "hybrid_property",
        "bass_jit",
        "custom_vjp",
        "parametrize",
        "pass_context",
        "composite",
    ]
)
_KEEPING = frozenset(
    [
        "staticmethod",
        "classmethod",
        "abstractmethod",
        "override",
        "final",
        "cache",
        "lru_cache",
        "wraps",
        "no_grad",
        "inference_mode",
        "contextmanager",
        "asynccontextmanager",
        "jit",
        "compile",
        "deprecated",
        "typing_override",
        "torch_compile",
    ]
)


# Their decorators return something that is called like what they were given, those in _CHANGING aside.
_KEEPING_PACKAGES = frozenset({"functools", "contextlib", "abc", "typing", "typing_extensions", "warnings", "torch"})


class Candidate(NamedTuple):
    """A definition that a call can run."""

    ref: Ref  # a function, or the class whose constructor is generated
    signature: Signature
    skip: int
    owner: Ref | None
    stub: bool
    prefix: Passed = Passed(0, ())  # what partials between call and definition add
    exact: bool = True  # the receiver was constructed here, not merely declared
    declared: bool = False  # the definition that the receiver's declared type itself has, with others below it
    modules: tuple[Ref, ...] = ()  # of a forward that takes anything: the classes whose instances run it
    platform: str | None = None  # the hardware whose dispatch leads here
    dispatched: bool = False  # one of the methods that a module's forward chooses from
    sure: bool = True  # no base and no decorator out of sight can make it another definition
    rebound: bool = False  # what a subclass holds under a name that the calling method inherits


class Reach(NamedTuple):
    """All candidates of a call; ``complete`` is False where something unknown can be called too."""

    candidates: list[Candidate]
    complete: bool
    untyped: bool  # nothing at all is known about the receiver
    opaque: bool = False  # an alternative is known, but not what calling it runs
    either: bool = False  # which alternative it is was decided by arguments that the caller has passed


class Dispatcher:
    """Turns calls into candidates. Remembers what a class family offers for a name."""

    def __init__(self, inference: Inference) -> None:
        self.inference = inference
        self.program = inference.program
        self._families: dict[tuple[Ref, bool, str], list[tuple[Value, list[Ref]]]] = {}
        self._generated: dict[Ref, Signature | None] = {}
        self._changing: dict[Ref, bool] = {}
        self._unseen: dict[Ref, bool] = {}
        self._super_calls: set[tuple[Ref, str]] = set()
        self._partly: dict[tuple[Ref, bool, str], str] = {}
        self.wrappers = Wrappers(self.program)

    def note_super_call(self, function: Ref, name: str) -> None:
        """``function`` calls ``super().name``: what it overrides runs too."""
        self._super_calls.add((function, name))

    def reach(self, call: Call, context: Context) -> Reach:
        func = call.func
        if func[0] == "a" and func[1] != ("?",):
            return self._attribute_call(func, context)
        values = self.inference.evaluate(func, context)
        reach = self._reach_values(values, self.inference.tests.allows(func, context))
        caller = self.self_function(func, context)  # self(x)
        if caller is None:
            return reach
        return reach._replace(candidates=[c for c in reach.candidates if c.owner is None or self.runs(c.owner, caller)])

    def _reach_values(self, values: Values, allows: Allows | None) -> Reach:
        found: list[Candidate] = []
        complete, untyped, opaque = bool(values), False, False
        for value in sorted(values, key=repr):
            if value[0] in "UXN":
                complete = complete and value == EITHER
                untyped = untyped or value[0] == "U"
            else:
                part = self._instance(value, allows) if value[0] == "I" else self.callable(value)
                found += part
                opaque = opaque or not part
        return Reach(_unique(found), complete, untyped and not found, opaque, EITHER in values)

    def _attribute_call(self, func: Expr, context: Context) -> Reach:
        special = self.inference._container_call(func, func[2], context)
        if special is not None:
            return Reach([], False, False)
        receivers = self.inference.evaluate(func[1], context)
        caller, allows = self.self_function(func[1], context), self.inference.tests.allows(func[1], context)
        held = self.inference.tests.allows(func, context)  # if isinstance(self.part, A): self.part(x)
        found: list[Candidate] = []
        complete, untyped, opaque, unseen = bool(receivers), False, False, False
        for value in sorted(receivers, key=repr):
            part: list[Candidate] = []
            if value[0] == "U":
                untyped = True
            elif _of_another_package(value):
                opaque = True
            elif value[0] in "IC":
                part = self.family(value, func[2], caller, allows)
                if held is not None:
                    part = [c for c in part if c.owner is None or held(c.owner)]
                opaque = opaque or not part or self._partly_unknown(value, func[2])
                beside = self._partly.get((value[1], value[2], value[0] + func[2]), "")
                opaque, unseen = opaque or "X" in beside, unseen or bool(beside)
            elif value[0] in ("M", "super"):
                values = self.inference.tests.narrowed(func, self.inference.attribute(value, func[2], context), context)
                for item in sorted(values, key=repr):
                    part += self.callable(item)
            found += part
            complete = complete and (bool(part) or value == EITHER)
        return Reach(_unique(found), complete and not unseen, untyped and not found, opaque, EITHER in receivers)

    def _partly_unknown(self, receiver: Value, name: str) -> bool:
        """Whether an attribute that holds something to call may hold another thing that nobody can see into."""
        offers = self._offers(receiver, name)
        if len(offers) < 2 or any(value[0] == "B" for value, _ in offers):
            return False
        return any(not self.callable(value, owners[0]) for value, owners in offers)

    def self_function(self, receiver: Expr, context: Context) -> Ref | None:
        """For ``self.m()``: the method that makes the call, since only classes that run it matter."""
        if receiver[0] == "c" and receiver[1] == ("n", "type") and len(receiver[2]) == 1 and receiver[2][0]:
            receiver = receiver[2][0]  # type(self).m()
        elif receiver[0] == "a" and receiver[2] == "__class__":
            receiver = receiver[1]
        if receiver[0] != "n":
            return None
        scopes = self.program.files[context.file].facts.scopes
        number = context.scope
        while number >= 0:
            scope = scopes[number]
            if scope.signature is not None and scopes[scope.parent].kind == "c":
                return (context.file, number) if scope.signature.positional[:1] == (receiver[1],) else None
            number = scope.parent
        return None

    # -- families -----------------------------------------------------------------------------------------------

    def family(
        self, receiver: Value, name: str, caller: Ref | None = None, allows: Allows | None = None
    ) -> list[Candidate]:
        """What ``receiver.name(...)`` can run in the receiver's class and, when not exact, in those below it.

        Only classes count that run the method ``caller``, and that ``allows`` says the call is not kept away from.
        """
        found: list[Candidate] = []
        for value, owners in self._offers(receiver, name):
            if caller is not None:
                owners = [owner for owner in owners if self.runs(owner, caller)]
            if allows is not None:
                owners = [owner for owner in owners if allows(owner)]
            if owners:
                owner = owners[0]
                at_top = not receiver[2] and receiver[1] in owners and len(self._offers(receiver, name)) > 1
                found += [
                    c._replace(
                        owner=c.owner or owner,
                        exact=c.exact if value[0] in "CI" else receiver[2],  # what an attribute holds is another object
                        declared=c.declared or at_top,
                    )
                    for c in self.callable(value, owner)
                ]
                if name == "__class__" and not receiver[2]:
                    found = [c for c in found if not self._lacks_constructor(c)]
                if name in ("forward", "__call__"):
                    found = [_dispatching(c, value, owners) for c in found]
        return found

    def platform_methods(self, owner: Ref) -> list[Candidate]:
        """The methods of a class that are named after a platform, its own and inherited ones."""
        found: dict[Ref, Candidate] = {}
        for name in platforms.PLATFORM_METHODS:
            for member in self.program.members(owner, name):
                written = member.binding[2]
                if written is not None and written[0] == "F":
                    for candidate in self._method((member.owner[0], written[1]), owner):
                        found.setdefault(candidate.ref, candidate._replace(platform=platforms.of_method(name)))
        return list(found.values())

    def _method(self, ref: Ref, owner: Ref) -> list[Candidate]:
        kind = method_kind(self.program.scope(ref))
        return [] if kind == "property" else self._function(ref, 0 if kind == "static" else 1, owner)

    def provides(self, owner: Ref, ref: Ref) -> bool:
        """Whether a class has a method, its own or an inherited one, that nothing nearer hides."""
        place = (ref[0], self.program.scope(ref).parent)
        return any(member.owner == place for member in self.program.members(owner, self.program.scope(ref).name))

    def _offers(self, receiver: Value, name: str) -> list[tuple[Value, list[Ref]]]:
        key = (receiver[1], receiver[2], receiver[0] + name)
        if key not in self._families:
            self._families[key] = self._collect(receiver, name)
        return self._families[key]

    def _collect(self, receiver: Value, name: str) -> list[tuple[Value, list[Ref]]]:
        found: dict[tuple[object, ...], tuple[Value, list[Ref]]] = {}
        owners = (receiver[1],) if receiver[2] else self.program.descendants(receiver[1])
        for owner in owners:
            at = (receiver[0], owner, True)
            for value in self._callables_of(at, name):
                if value[0] in "UXN":
                    beside = self._partly.get((receiver[1], receiver[2], receiver[0] + name), "")
                    self._partly[(receiver[1], receiver[2], receiver[0] + name)] = beside + value[0]
                    continue
                key = value[:2] if value[0] in "BF" else value
                found.setdefault(key, (value, []))[1].append(owner)
        return list(found.values())

    def _callables_of(self, receiver: Value, name: str) -> Iterator[Value]:
        members = self.program.members(receiver[1], name)
        held = any(name in self.program.scope(item).attributes for item in self.program.mro(receiver[1]))
        if members and not held and all(m.binding[2] is not None and m.binding[2][0] == "F" for m in members):
            for member in members:
                ref = (member.owner[0], member.binding[2][1])  # type: ignore[index]
                if method_kind(self.program.scope(ref)) == "property":
                    yield from (v for v in self.inference.returns(ref, receiver[1]) if _may_be_called(v))
                else:
                    yield from self.inference._method_value(ref, receiver)
        else:
            values = self.inference.attribute(receiver, name)
            there = bool(members) or held  # of what is nowhere bound, nothing is known but that
            yield from (v for v in values if v[0] in "FBPIC" or (there and _may_be_called(v)))

    def runs(self, owner: Ref, method: Ref) -> bool:
        """Whether instances of ``owner`` can run ``method`` (it is not overridden, or the override calls it)."""
        name = self.program.scope(method).name
        place = (method[0], self.program.scope(method).parent)
        order = self.program.mro(owner)
        if place not in order:
            return True
        for item in order:
            if item == place:
                return True
            for member in self.program.own_members(item, name):
                value = member.binding[2]
                if (
                    value is not None
                    and value[0] == "F"
                    and ((member.owner[0], value[1]), name) not in self._super_calls
                ):
                    return False
        return True

    # -- callables ----------------------------------------------------------------------------------------------

    def callable(self, value: Value, owner: Ref | None = None, depth: int = 0) -> list[Candidate]:
        """The definitions that calling one value runs."""
        kind = value[0]
        if depth > 4:
            return []
        if kind == "F":
            return self._function(value[1], 0, None)
        if kind == "B":
            static = method_kind(self.program.scope(value[1])) == "static"
            return self._function(value[1], 0 if static else 1, owner or value[2])
        if kind == "C":
            return self.constructors(value)
        if kind == "I":
            return self._instance(value)
        if kind == "P":
            inner = self.callable(value[1], owner, depth + 1)
            return [c._replace(prefix=_prefix(c.prefix, value[2], value[3])) for c in inner]
        return []

    def _function(self, ref: Ref, skip: int, owner: Ref | None) -> list[Candidate]:
        scope = self.program.scope(ref)
        if scope.signature is None or self.changes_signature(ref):
            return []
        sure = not self.decorated_out_of_sight(ref)
        place = (ref[0], scope.parent)
        if owner is not None and owner != place and place in self.program.mro(owner):
            sure = sure and not self.program.hidden(owner, place, scope.name)
        return [Candidate(ref, scope.signature, skip, owner, scope.stub, sure=sure)]

    def _instance(self, value: Value, allows: Allows | None = None) -> list[Candidate]:
        called = self.family(value, "__call__", allows=allows)
        if called or not self.program.unknown_base_or_module(value[1]):
            return called
        return self.family(value, "forward", allows=allows) or self._behind_unseen_forward(value)

    def _behind_unseen_forward(self, value: Value) -> list[Candidate]:
        """Methods named after platforms, where a base outside the trees has the ``forward`` that chooses among them."""
        owners = (value[1],) if value[2] else self.program.descendants(value[1])
        seen = [owner for owner in owners if self.program.unknown_base(owner)]
        return [c._replace(exact=value[2], dispatched=True) for owner in seen for c in self.platform_methods(owner)]

    def changes_signature(self, ref: Ref) -> bool:
        """Whether a decorator makes the callers' signature differ from the written one, as far as can be seen."""
        if ref not in self._changing:
            scope = self.program.scope(ref)
            context = Context(ref[0], scope.parent, scope.line, scope.guard, None)
            said = {self._decorator_keeps(d, context) for d in scope.decorators}
            self._changing[ref] = False in said
            self._unseen[ref] = None in said
        return self._changing[ref]

    def decorated_out_of_sight(self, ref: Ref) -> bool:
        """Whether a decorator that cannot be read may give a definition another signature."""
        return not self.changes_signature(ref) and self._unseen[ref]

    def _decorator_keeps(self, decorator: Expr | None, context: Context) -> bool | None:
        """Whether what a decorator returns is called like what it is given; None where nobody can see."""
        name = last_name(decorator)
        if decorator is None or name in _CHANGING:
            return False
        if name in _KEEPING:
            return True
        is_call = decorator[0] == "c"
        values = self.inference.evaluate(decorator[1] if is_call else decorator, context)
        kept = {v: self._keeps(v[1], factory=is_call) for v in values if v[0] == "F"}
        if any(v[0] == "C" for v in values) or False in kept.values():
            return False
        seen = bool(values) and all(
            (v[0] == "F" and kept[v] and not self._hands_on_to_others(v[1]))
            or (v[0] == "X" and v[1].partition(".")[0] in _KEEPING_PACKAGES)
            for v in values
        )
        return True if seen else None

    def _hands_on_to_others(self, ref: Ref) -> bool:
        """Whether a decorator returns what one of another package makes of it."""
        scope = self.program.scope(ref)
        own = {*scope.signature.positional, *scope.signature.kwonly} if scope.signature is not None else set()
        returned = [expr for _, expr in scope.returns if expr is None or expr[0] != "n" or expr[1] not in own]
        context = self.inference.context(ref)
        return any(v[0] == "X" for expr in returned for v in self.inference.evaluate(expr, context))

    def _keeps(self, ref: Ref, factory: bool) -> bool | None:
        """A decorator of the trees keeps a signature when what it returns takes anything, or is what it was given.

        What takes anything must hand all of it on; None where it is not seen what it calls.
        """
        scopes = self.program.files[ref[0]].facts.scopes
        inner = [s for s in scopes if s.parent == ref[1] and s.kind == "f"]
        signature = scopes[ref[1]].signature
        # With a default for what it decorates it is a factory too: ``@traced`` and ``@traced(name="x")``.
        either = bool(signature and set(signature.positional[:1]) & set(signature.defaults))
        if factory or either:
            inner += [s for t in inner for s in scopes if s.kind == "f" and scopes[s.parent] is t]
        takes_all = [s for s in inner if s.signature and s.signature.vararg and s.signature.kwarg]
        if any(s.kwarg_popped or s.kwarg_edited or _takes_more(s) for s in takes_all):
            return False  # the wrapper takes arguments of its own out, or adds some
        own = [s for s in inner if s.name != "<lambda>"]
        if not own and any(v[0] in "IP" for v in self.inference.returns(ref, None)):
            return False  # an object that stands for the function, or a partial that waits for one
        handed = {self.wrappers.hands_on(ref[0], number) for number, s in enumerate(scopes) if s in takes_all}
        if False in handed:
            return False
        return (None not in handed) if takes_all else not own or (factory and len(own) == 1)

    # -- constructors -------------------------------------------------------------------------------------------

    def constructors(self, value: Value) -> list[Candidate]:
        owners = (value[1],) if value[2] else self.program.descendants(value[1])
        return _unique(
            [
                c._replace(exact=value[2], declared=not value[2] and owner == value[1] and len(owners) > 1)
                for owner in owners
                for c in self._constructor(owner)
                if value[2] or not self._lacks_constructor(c)
            ]
        )

    def _lacks_constructor(self, candidate: Candidate) -> bool:
        """Whether a class has none but that of ``object``: a mixin that constructs its class; its kin bring one."""
        ref = candidate.ref
        return ref == candidate.owner and self.program.scope(ref).kind == "c" and not self._generated.get(ref)

    def _constructor(self, owner: Ref) -> list[Candidate]:
        """What ``owner(...)`` runs: its own constructor, or those of the classes that its ``__new__`` makes."""
        made = [v[1] for v in self.inference.made(("C", owner, True)) if owner in self.program.mro(v[1])]
        if set(made) <= {owner}:
            return self._own_constructor(owner)
        chooser = [
            candidate
            for member in self.program.members(owner, "__new__")
            if member.binding[2] is not None and member.binding[2][0] == "F"
            for candidate in self._function((member.owner[0], member.binding[2][1]), 1, owner)
        ]
        # What comes back is initialized with the same arguments; its own __new__ was given others.
        started = [candidate for item in sorted(made) for candidate in self._own_constructor(item)]
        return chooser + [c for c in started if self.program.scope(c.ref).name == "__init__"]

    def _own_constructor(self, owner: Ref) -> list[Candidate]:
        if self.program.is_enum(owner) or self.program.is_interface(owner):
            return []  # calling it looks a member up, or adapts what it is given
        if self._remade(owner):
            return []
        outside = set(self._all_external(owner)) - {"metaclass=ABCMeta"}
        if any(name.startswith(("metaclass", "**")) for name in outside):
            return []
        for item in self.program.mro(owner):
            scope = self.program.scope(item)
            for name in ("__init__", "__new__"):
                for member in self.program.own_members(item, name):
                    written = member.binding[2]
                    if written is None or written[0] != "F":
                        return []
                    return self._function((member.owner[0], written[1]), 1, owner)
            generated = self._generated_signature(item)
            if generated is not None:
                return [Candidate(item, generated, 0, owner, False)]
            if _record_kind(scope) or self.program.external.get(item, frozenset()) - _TRANSPARENT_BASES:
                return []
        if _decorated(self.program.scope(owner)):
            return []
        return [Candidate(owner, Signature((), (), (), {}, None, None), 0, owner, False)]

    def _remade(self, owner: Ref) -> bool:
        """Whether a decorator of a class may give it another constructor: ``@make_norm class Log(Norm): ...``."""
        scope = self.program.scope(owner)
        others = [d for d in scope.decorators if last_name(d) not in _CLASS_KEEPING]
        if not others or _record_kind(scope) == "record" or "__init__" in scope.bindings or "__new__" in scope.bindings:
            return False
        context = Context(owner[0], scope.parent, scope.line, scope.guard, None)
        return any(self._makes_another(d, context) for d in others)

    def _makes_another(self, decorator: Expr | None, context: Context) -> bool:
        """Whether a class decorator of the trees returns a class of its own."""
        if decorator is None or self._returns_what_it_gets(decorator, context):
            return False
        values = self.inference.evaluate(decorator[1] if decorator[0] == "c" else decorator, context)
        return any(value[0] in "FBP" for value in values)

    def _all_external(self, owner: Ref) -> Iterable[str]:
        return (name for item in self.program.mro(owner) for name in self.program.external.get(item, ()))

    def _generated_signature(self, item: Ref) -> Signature | None:
        if _record_kind(self.program.scope(item)) != "record" and not self._record_by_base(item):
            return None
        if item not in self._generated:
            seen = self._record_in_sight(item)
            self._generated[item] = self._record_signature(item) if seen else None
        return self._generated[item]

    def _record_in_sight(self, item: Ref) -> bool:
        """Whether nothing out of sight may add a field or replace the constructor: no base, and no other decorator."""
        if any(set(self.program.external.get(base, ())) - _RECORD_BASES for base in self.program.mro(item)):
            return False
        scope = self.program.scope(item)
        context = Context(item[0], scope.parent, scope.line, scope.guard, None)
        others = [d for d in scope.decorators if last_name(d) not in _CLASS_KEEPING]
        return all(self._returns_what_it_gets(d, context) for d in others)

    def _returns_what_it_gets(self, decorator: Expr | None, context: Context) -> bool:
        """Whether a class decorator of the trees hands back the class: ``def register(cls): ...; return cls``."""
        if decorator is None:
            return False
        is_call = decorator[0] == "c"
        values = self.inference.evaluate(decorator[1] if is_call else decorator, context)
        return bool(values) and all(v[0] in "FB" and self._identity(v[1], is_call) for v in values)

    def _identity(self, ref: Ref, factory: bool) -> bool:
        scopes = self.program.files[ref[0]].facts.scopes
        inner = [s for s in scopes if s.kind == "f" and s.parent == ref[1]]
        wanted = inner if factory and inner else [scopes[ref[1]]]
        return all(
            s.signature is not None and bool(s.returns)
            and all(expr == ("n", name) for _, expr in s.returns for name in s.signature.positional[-1:])
            for s in wanted
        )  # fmt: skip

    def _record_by_base(self, item: Ref) -> bool:
        """A NamedTuple, or a Struct of msgspec, whose subclasses are records too."""
        if "NamedTuple" in self.program.external.get(item, ()):
            return True
        return any("Struct" in self.program.external.get(base, ()) for base in self.program.mro(item))

    def _record_signature(self, item: Ref) -> Signature | None:
        """Fields of the class and its record bases, bases first; a redeclared field keeps its place."""
        order: dict[str, tuple[bool, bool]] = {}
        for base in reversed(self.program.mro(item)):
            scope = self.program.scope(base)
            kw_only = _keyword_only(scope)
            if base != item and _record_kind(scope) != "record" and not self._record_by_base(base):
                continue
            for name, has_default, init, head in scope.fields:
                if head == "KW_ONLY" and name == "_":
                    kw_only = True
                elif head != "ClassVar" and init:
                    order[name] = (has_default, kw_only or head == "KW_ONLY")
                elif not init:
                    order.pop(name, None)
        defaults = {name: "..." for name, (has_default, _) in order.items() if has_default}
        positional = tuple(name for name, (_, keyword) in order.items() if not keyword)
        return Signature((), positional, tuple(n for n, (_, k) in order.items() if k), defaults, None, None)


def _may_be_called(value: Value) -> bool:
    """What an attribute holds and a call can run; or of which nobody can say that it cannot."""
    return value[0] in "FBPICUN" or _of_another_package(value)


def _of_another_package(value: Value) -> bool:
    return bool(value[0] == "X" and "." in value[1])


def _prefix(prefix: Passed, npos: int, keywords: tuple[str, ...]) -> Passed:
    """What a partial adds to a call; of ``*`` and ``**`` in it nobody knows how much."""
    star, kwstar = "*" in keywords, "**" in keywords
    named = tuple(name for name in keywords if name not in ("*", "**"))
    return Passed(prefix.npos + npos - star, prefix.keywords + named, prefix.star or star, prefix.kwstar or kwstar)


def _record_kind(scope: Scope) -> str:
    """``"record"`` for a plain dataclass, ``"unknown"`` for a decorator that may add a constructor, else ``""``."""
    for decorator in scope.decorators:
        name = last_name(decorator)
        if name == "dataclass":
            options = decorator[4] if decorator and decorator[0] == "c" else ()
            return "unknown" if "init" in options else "record"
        if name in ("define", "frozen", "attrs", "s", "mutable", "struct", "pytree_dataclass", "register_dataclass"):
            return "unknown"
    return ""


def _takes_more(wrapper: Scope) -> bool:
    """Whether a wrapper has a keyword of its own, or hands on other positions than it was given."""
    signature = wrapper.signature
    if signature is None:
        return False
    return bool(signature.kwonly) or len(wrapper.bindings.get(signature.vararg or "", ())) > 1


def _keyword_only(scope: Scope) -> bool:
    if "kw_only=True" in scope.class_keywords:
        return True
    return any(d is not None and d[0] == "c" and "kw_only" in d[4] for d in scope.decorators)


def _decorated(scope: Scope) -> bool:
    return any(last_name(d) not in ("final", "runtime_checkable") for d in scope.decorators)


def _dispatching(candidate: Candidate, value: Value, owners: list[Ref]) -> Candidate:
    """A ``forward`` that takes anything, with all classes that run it."""
    if value[0] != "B" or value[1] != candidate.ref or not (candidate.signature.vararg and candidate.signature.kwarg):
        return candidate
    return candidate._replace(modules=tuple(owners))


def _unique(candidates: list[Candidate]) -> list[Candidate]:
    found: dict[tuple[object, ...], Candidate] = {}
    for candidate in candidates:
        found.setdefault((candidate.ref, candidate.skip, candidate.prefix, candidate.modules), candidate)
    return list(found.values())
