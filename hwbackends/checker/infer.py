"""What an expression can be: classes, instances, functions, modules and strings, over all trees. No call is checked.

A value is a tuple whose first item says what it is:

* ``("C", ref, exact)`` a class, ``("I", ref, exact)`` an instance; not exact: perhaps of a subclass
* ``("F", ref)`` a function, ``("B", ref, owner, exact)`` a function bound to an instance or class ``owner``
* ``("M", file)`` a module, ``("S", text)`` a string, ``("E", values)`` a container of values, ``("Z", items)`` a tuple
* ``("P", value, npos, keywords)`` a partial, ``("super", after, owner)`` what ``super()`` gives
* ``("W", values)`` a context manager that yields one of the values
* ``("X", name)`` something of another package, ``UNKNOWN`` anything
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from .failures import Failures
from .model import Assignment, Binding, Expr, Scope
from .program import Member, Patch, Program, Ref, Value, Values, final
from .typetests import TypeTests

UNKNOWN: Value = ("U",)
# Beside other values: which of them it is hangs on arguments, and whoever passed those knows.
EITHER: Value = ("X", "either")
NOTHING: Values = frozenset()
ANY: Values = frozenset({UNKNOWN})
_LIMIT = 60
_DEPTH = 24

_CONTAINERS = frozenset(
    [
        "list",
        "List",
        "set",
        "Set",
        "frozenset",
        "FrozenSet",
        "Sequence",
        "MutableSequence",
        "Iterable",
        "Iterator",
        "Generator",
        "Collection",
        "deque",
        "Deque",
        "AsyncIterator",
        "AsyncIterable",
        "AsyncGenerator",
        "tuple",
        "Tuple",
        "Queue",
        "ModuleList",
    ]
)
_MAPPINGS = frozenset(
    ["dict", "Dict", "Mapping", "MutableMapping", "defaultdict", "DefaultDict", "OrderedDict", "ModuleDict"]
)
_WRAPPERS = frozenset(["Annotated", "ClassVar", "Final", "Required", "NotRequired", "Awaitable", "Coroutine"])
_SAME = frozenset(
    [
        "list",
        "sorted",
        "reversed",
        "iter",
        "tuple",
        "set",
        "copy",
        "deepcopy",
        "ModuleList",
        "ModuleDict",
        "cast",
    ]
)
_MANAGERS = frozenset(["contextmanager", "asynccontextmanager"])
_ELEMENTS = frozenset(["values", "get", "pop", "popleft", "popitem", "setdefault", "copy"])
# Functions that choose by what is configured; their callers do not know what they get.
_FACTORY = re.compile(r"^_*(?:create|make|get|build|init|new|load|select|choose|resolve|instantiate|from)(?:_|$)")
# Resolvers that call the class as well.
_INSTANTIATE = frozenset({"instantiate", "create_instance", "get_instance", "load_and_instantiate"})
_RESOLVERS = re.compile(r"resolve|import|load|locate|qualname|_cls|class|instantiate", re.I)


class Context(NamedTuple):
    """Where an expression stands: ``line`` 0 means "at any time", ``owner`` is the class that ``self`` has."""

    file: int
    scope: int
    line: int
    guard: int
    owner: Ref | None
    exact: bool = False


class Inference:
    """Evaluates expressions on demand and remembers the answers."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._memo: dict[tuple[Expr, Context], Values] = {}
        self._attribute_memo: dict[tuple[Value, str], Values] = {}
        self._return_memo: dict[tuple[Ref, Ref | None], Values] = {}
        self._made_memo: dict[Value, Values] = {}
        self._chains: dict[tuple[int, int], tuple[tuple[Expr | None, bool], ...]] = {}
        self._active: set[Any] = set()
        self._module_memo: dict[tuple[int, str], Values] = {}
        self._outside_memo: dict[str, set[Ref]] = {}
        self._assignments: dict[str, list[tuple[int, Assignment]]] = defaultdict(list)  # x.name = ..., by name
        for index, file in enumerate(program.files):
            for assignment in file.facts.patches:
                self._assignments[assignment[3]].append((index, assignment))
        self._depth = 0
        self.tests = TypeTests(self)

    # -- linking ------------------------------------------------------------------------------------------------

    def link_classes(self, failures: Failures) -> None:
        """Find the bases of every class, then what is patched into classes and modules from outside."""
        program = self.program
        bases: dict[Ref, list[Ref]] = {}
        external: dict[Ref, frozenset[str]] = {}
        for ref in program.classes:
            bases[ref], external[ref] = [], frozenset({"?"})
            program.base_order[ref] = ("?",)
            with failures.contained(program.files[ref[0]].path, program.scope(ref).line, "reading a class"):
                bases[ref], external[ref] = self._bases_of(ref)
        program.link(bases, external)
        self._forget()
        for index, file in enumerate(program.files):
            if not file.is_test:
                for patch in file.facts.patches:
                    with failures.contained(file.path, patch[5], "reading an assignment"):
                        self._patch(index, patch)
        self._forget()

    def _forget(self) -> None:
        for memo in (
            self._memo,
            self._attribute_memo,
            self._return_memo,
            self._module_memo,
            self._made_memo,
        ):
            memo.clear()

    def _bases_of(self, ref: Ref) -> tuple[list[Ref], frozenset[str]]:
        scope = self.program.scope(ref)
        found: list[Ref] = []
        outside: set[str] = set()
        order: list[Ref | str] = []
        context = Context(ref[0], scope.parent, scope.line, scope.guard, None)
        for expr in scope.bases:
            if expr is not None and expr[0] == "i":
                expr = expr[1]
            values = self.evaluate(expr, context) if expr is not None else ANY
            refs = [value[1] for value in values if value[0] == "C" and value[1] != ref]
            found += [item for item in sorted(refs) if item not in found]
            if len(set(refs)) > 1:
                self.program.alternative_bases.add(ref)
            order += sorted(refs)
            if not refs:
                made = (
                    "()" if expr is not None and expr[0] == "c" else ""
                )  # what a call makes is known by its name only
                outside.add(last_name(expr) + made)
                order.append(last_name(expr) + made)
        self.program.base_order[ref] = tuple(order)
        for keyword in scope.class_keywords:
            if keyword.startswith(("metaclass", "**")):
                outside.add(keyword)
        return found, frozenset(outside)

    def _patch(self, file: int, assignment: Assignment) -> None:
        scope, guard, owner, attribute, value, line = assignment
        place = (file, scope)
        if owner[0] not in "na":
            return
        root = owner
        while root[0] == "a":
            root = root[1]
        if root[0] != "n":
            return
        bindings = self.program.files[place[0]].facts.scopes[0].bindings.get(root[1])
        local = self.program.scope(place).bindings.get(root[1])
        if not (bindings or local):
            return
        targets = [target for target in self.evaluate(owner, self.context(place, guard=guard)) if target[0] in "CMI"]
        if not targets:
            return
        context, plain = self.context(place, line, guard), unwrapped(value)[0]
        assigned = self.evaluate(plain, context)
        functions = frozenset(v[1] for v in assigned if v[0] in "FB")
        if plain is not None and plain[0] == "c" and ("a", owner, attribute) in plain[2]:
            signatures = [self.program.scope(function).signature for function in functions]
            if all(s is not None and s.vararg and s.kwarg for s in signatures):
                return  # A.m = traced(A.m): a decorator, whose callers still meet what it wraps
        patch = Patch(place, value, line, functions, guard >= 0)
        seen = bool(assigned) and all(v[0] in "FBP" for v in assigned)
        for target in targets:
            if target[0] == "I":
                self._put_on_an_instance(target[1], attribute, patch, plain)
                continue
            if target[0] == "M":
                self.program.module_patches[(target[1], attribute)].append(patch)
                continue
            written = self.program.scope(target[1])
            behind = place == (target[1][0], written.parent) and guard == written.guard
            self.program.class_patches[(target[1], attribute)].append(patch._replace(replaces=seen and behind))
            for function in functions:
                self.program.patched_into[function].add(target[1])

    def _put_on_an_instance(self, owner: Ref, name: str, patch: Patch, value: Expr | None) -> None:
        """``obj.run = f``: calls of the method can meet ``f``, without a receiver unless ``MethodType`` gives one."""
        written = (self.program.written_members(item, name) for item in self.program.mro(owner))
        methods = next((members for members in written if members), [])
        if value is None or not methods or any(m.binding[2] is None or m.binding[2][0] != "F" for m in methods):
            return
        bound, value = _bound_by_hand(value)
        functions = frozenset(v[1] for v in self.evaluate(value, self.context(patch.place, patch.line)) if v[0] in "FB")
        if not functions:
            return
        changed_value = value if bound else ("c", ("n", "staticmethod"), (value,), 1, ())
        changed = patch._replace(value=changed_value, functions=functions, conditional=True)
        self.program.class_patches[(owner, name)].append(changed)
        if bound:
            for function in functions:
                self.program.patched_into[function].add(owner)

    # -- contexts -----------------------------------------------------------------------------------------------

    def context(self, ref: Ref, line: int = 0, guard: int = -1, owner: Ref | None = None) -> Context:
        """The context inside a scope; ``self`` is the class around it unless an ``owner`` is given."""
        return Context(ref[0], ref[1], line, guard, owner or self.enclosing_class(ref))

    def enclosing_class(self, ref: Ref) -> Ref | None:
        scopes = self.program.files[ref[0]].facts.scopes
        number = ref[1]
        while number >= 0:
            scope = scopes[number]
            if scope.kind == "c":
                return (ref[0], number)
            number = scope.parent
        return None

    def chain(self, file: int, guard: int) -> tuple[tuple[Expr | None, bool], ...]:
        key = (file, guard)
        if key not in self._chains:
            self._chains[key] = tuple(self.program.guards(file, guard))
        return self._chains[key]

    def excluded(self, file: int, first: int, second: int) -> bool:
        """Whether two guards of one file can never hold together."""
        if first < 0 or second < 0 or first == second:
            return False
        other = dict(self.chain(file, second))
        return any(test is not None and other.get(test, holds) != holds for test, holds in self.chain(file, first))

    def inside(self, file: int, outer: int, inner: int) -> bool:
        """Whether ``outer`` holds wherever ``inner`` does."""
        table = self.program.files[file].facts.guards
        while inner >= 0 and inner != outer:
            inner = table[inner][2]
        return inner == outer

    # -- names --------------------------------------------------------------------------------------------------

    def name(self, name: str, context: Context) -> Values:
        scopes = self.program.files[context.file].facts.scopes
        number, line, guard = context.scope, context.line, context.guard
        while number >= 0:
            scope = scopes[number]
            if name in scope.bindings and (scope.kind != "c" or _in_body(scope, name, number == context.scope, line)):
                bindings = self._reaching(scope.bindings[name], context.file, line, guard)
                receiver = self._receiver(name, bindings, context, number)
                values = receiver or self._bound(bindings, context, number, guard)
                if number == 0:
                    values |= self._patched_module(context.file, name)
                return self.tests.narrowed(("n", name), values, context)
            # Outside its own scope a name has its final value, whatever line it is used on.
            line, guard = 0, scope.guard if scope.kind != "m" else -1
            number = scope.parent
        return self._star_or_lazy(context.file, name) if "*" in scopes[0].bindings else ANY

    def _receiver(self, name: str, bindings: list[Binding], context: Context, number: int) -> Values:
        """The value of ``self`` or ``cls``: the first parameter of a function in a class body, never rebound."""
        scope = self.program.files[context.file].facts.scopes[number]
        if scope.signature is None or len(bindings) != 1 or scope.signature.positional[:1] != (name,):
            return NOTHING
        if bindings[0][2] != ("p", None):
            return NOTHING
        around = self.program.files[context.file].facts.scopes[scope.parent]
        if around.kind != "c":
            owners = self.program.patched_into.get((context.file, number), ())
            return frozenset(("I", owner, False) for owner in owners)
        kind = method_kind(scope)
        if kind == "static" and scope.name != "__new__":
            return NOTHING
        owner = context.owner
        enclosing = (context.file, scope.parent)
        if owner is None or enclosing not in self.program.mro(owner):
            owner = enclosing
        exact = context.exact and owner == context.owner
        return frozenset({("C" if kind == "class" or scope.name == "__new__" else "I", owner, exact)})

    def _patched_module(self, file: int, name: str) -> Values:
        found: set[Value] = set()
        for patch in self.program.module_patches.get((file, name), ()):
            found |= self.evaluate(patch.value, self.context(patch.place))
        return frozenset(value for value in found if value[0] in "FCBP")

    def _reaching(self, bindings: list[Binding], file: int, line: int, guard: int) -> list[Binding]:
        """Bindings that a use can see: back to the last one that surely ran, without those of an excluded branch."""
        if len(bindings) == 1:
            return bindings
        if file in self.program.dead:
            bindings = [b for b in bindings if b[1] not in self.program.dead[file]] or bindings
        usable = [b for b in bindings if not self.excluded(file, b[1], guard)] or bindings
        if not line:
            return final(sorted(usable, key=lambda b: b[0]))
        earlier = [b for b in usable if b[0] < line or (b[0] == line and b[2] is not None and b[2][0] == "e")]
        if not earlier:
            return [b for b in usable if b[0] >= line]
        found: list[Binding] = []
        for binding in sorted(earlier, key=lambda b: b[0])[::-1]:
            found.append(binding)
            if self.inside(file, binding[1], guard):
                break
        return found

    def _bound(self, bindings: Iterable[Binding], context: Context, number: int, used_under: int) -> Values:
        found: set[Value] = set()
        for line, guard, value in bindings:
            if value is not None and value[0] == "|" and len(value) == 4:
                value = self._branch(value, context.file, used_under)
            at = Context(context.file, number, line, guard, context.owner, context.exact)
            found |= self.evaluate(value, at)
            if len(found) > _LIMIT:
                break
        return frozenset(found)

    def _branch(self, either: Expr, file: int, guard: int) -> Expr | None:
        """``A if flag else B`` is ``A`` for whoever uses it under ``if flag``."""
        told = dict(self.chain(file, guard)).get(either[3]) if guard >= 0 and either[3] is not None else None
        if told is None:
            return either
        return either[1] if told else either[2]  # type: ignore[no-any-return]

    # -- expressions --------------------------------------------------------------------------------------------

    def evaluate(self, expr: Expr | None, context: Context) -> Values:
        if expr is None:
            return ANY
        key = (expr, context)
        known = self._memo.get(key)
        if known is not None:
            return known
        if key in self._active or self._depth > _DEPTH:
            return NOTHING
        self._active.add(key)
        self._depth += 1
        try:
            result = getattr(self, _EVALUATE.get(expr[0], "_unknown"))(expr, context)
        finally:
            self._active.discard(key)
            self._depth -= 1
        if len(result) > _LIMIT:
            result = ANY
        if self._depth < 4 or result:
            self._memo[key] = result
        return result  # type: ignore[no-any-return]

    def _unknown(self, expr: Expr, context: Context) -> Values:
        return ANY

    def _name(self, expr: Expr, context: Context) -> Values:
        return self.name(expr[1], context)

    def _string(self, expr: Expr, context: Context) -> Values:
        return frozenset({("S", expr[1])})

    def _constant(self, expr: Expr, context: Context) -> Values:
        return NOTHING if expr[1] is None else frozenset({("X", type(expr[1]).__name__)})

    def _function(self, expr: Expr, context: Context) -> Values:
        return frozenset({("F", (context.file, expr[1]))})

    def _class(self, expr: Expr, context: Context) -> Values:
        return frozenset({("C", (context.file, expr[1]), True)})

    def _either(self, expr: Expr, context: Context) -> Values:
        return self.evaluate(expr[1], context) | self.evaluate(expr[2], context)

    def _display(self, expr: Expr, context: Context) -> Values:
        items = tuple(self.evaluate(item, context) for item in expr[1])
        return frozenset({("Z", items)})

    def _dict(self, expr: Expr, context: Context) -> Values:
        found: set[Value] = set()
        for item in expr[1]:
            found |= self.evaluate(item, context)
        return frozenset({("E", frozenset(found))})

    def _element(self, expr: Expr, context: Context) -> Values:
        return elements(self.evaluate(expr[1], context))

    def _entered(self, expr: Expr, context: Context) -> Values:
        name = "__aenter__" if expr[2] else "__enter__"
        return frozenset().union(*(self.entered(value, name) for value in self.evaluate(expr[1], context)))

    def entered(self, manager: Value, method: str) -> Values:
        """What ``with manager as x`` binds: the manager itself where its method returns one of its own line."""
        if manager[0] == "W":
            return manager[1]  # type: ignore[no-any-return]
        if manager[0] != "I" or not self.program.members(manager[1], method):
            return ANY
        line = self.program.mro(manager[1])
        returned = self._returns_of_method(manager, method)
        return frozenset(manager if v[0] == "I" and v[1] in line else v for v in returned)

    def _item(self, expr: Expr, context: Context) -> Values:
        found: set[Value] = set()
        values = self.evaluate(expr[1], context)
        kinds = {v[1] for z in values if z[0] == "Z" and expr[2] < len(z[1]) for v in z[1][expr[2]] if v[0] == "I"}
        if len(kinds) > 1 and sum(value[0] == "Z" for value in values) > 1:
            found.add(EITHER)  # ``planar, found = check(g)``: one item says of which kind the other is
        for value in values:
            if value[0] == "Z":
                found |= value[1][expr[2]] if expr[2] < len(value[1]) else ANY
            elif value[0] == "E":
                found |= value[1]
            else:
                found.add(UNKNOWN)
        return frozenset(found)

    def _subscript(self, expr: Expr, context: Context) -> Values:
        base = self.evaluate(expr[1], context)
        index = expr[2] if len(expr) > 2 else None
        if isinstance(index, tuple) and index and index[0] == "k" and isinstance(index[1], int):
            return self._item(("x", expr[1], index[1]), context)
        found: set[Value] = set()
        for value in base:
            if value[0] == "C":  # a generic class with its arguments, or an enum member
                found.add(("I", value[1], True) if self.program.is_enum(value[1]) else value)
            elif value[0] in "EZ":
                inside = elements(frozenset({value}))
                # A dict of options has another kind of value under each of its keys.
                mixed = UNKNOWN in inside and isinstance(index, tuple) and index[:1] == ("s",)
                found |= ANY if mixed else inside
            elif value[0] == "I":
                found |= self._returns_of_method(value, "__getitem__")
            else:
                found.add(UNKNOWN)
        return frozenset(found)

    def _import(self, expr: Expr, context: Context) -> Values:
        _, level, module, attribute = expr
        file = self.program.import_target(context.file, level, module)
        if file is None:
            return self._without_module(context.file, level, module, attribute)
        if attribute is None:
            return frozenset({("M", file)})
        if file == context.file and (sub := self.program.submodule(file, attribute)) is not None:
            return frozenset({("M", sub)})  # ``from . import ops`` in ``__init__.py``
        return self.module_attribute(file, attribute)

    def _without_module(self, file: int, level: int, module: str, attribute: str | None) -> Values:
        """A package without ``__init__.py`` has submodules all the same."""
        if attribute is not None:
            joined = f"{module}.{attribute}" if module else attribute
            found = self.program.import_target(file, level, joined)
            if found is not None:
                return frozenset({("M", found)})
        elif not level:
            return frozenset({("N", module)})
        return frozenset({("X", f"{module}.{attribute}" if attribute else module)})

    def module_attribute(self, file: int, name: str) -> Values:
        key = (file, name)
        if key in self._module_memo:
            return self._module_memo[key]
        self._module_memo[key] = NOTHING
        scope = self.program.files[file].facts.scopes[0]
        context = Context(file, 0, 0, -1, None)
        if name in scope.bindings:
            values = self.name(name, context)
        elif (sub := self.program.submodule(file, name)) is not None:
            values = frozenset({("M", sub)})
        else:
            values = self._star_or_lazy(file, name)
        self._module_memo[key] = values
        return values

    def _star_or_lazy(self, file: int, name: str) -> Values:
        scope = self.program.files[file].facts.scopes[0]
        found: set[Value] = set()
        for _, _, value in scope.bindings.get("*", ()):
            if value is not None and value[0] == "m":
                target = self.program.import_target(file, value[1], value[2])
                if target is not None and target != file and self.program.exports(target, name):
                    found |= self.module_attribute(target, name)
        known = frozenset(value for value in found if value != UNKNOWN)
        return known or self._patched_module(file, name) or ANY

    def _parameter(self, expr: Expr, context: Context) -> Values:
        scope = self.program.files[context.file].facts.scopes[context.scope]
        return self.annotated(expr[1], context._replace(scope=scope.parent, line=0, guard=scope.guard))

    def _declared(self, expr: Expr, context: Context) -> Values:
        return self.annotated(expr[1], context)

    # -- annotations --------------------------------------------------------------------------------------------

    def annotated(self, expr: Expr | None, context: Context) -> Values:
        """The values a variable of this declared type holds."""
        if expr is None:
            return ANY
        kind = expr[0]
        if kind == "|":
            return self.annotated(expr[1], context) | self.annotated(expr[2], context)
        if kind == "k":
            return NOTHING if expr[1] is None else ANY
        if kind == "i":
            return self._generic(expr, context)
        if kind not in "na":
            return ANY
        name = last_name(expr)
        if name == "Self":
            return frozenset({("I", context.owner, False)}) if context.owner else ANY
        if name in ("Any", "object", "Callable"):
            return ANY
        found: set[Value] = set()
        for value in self._alias(expr, context):
            if value[0] == "C" and not self.program.is_interface(value[1]):
                found.add(("I", value[1], False))
            else:
                found.add(value if value[0] == "X" else UNKNOWN)
        return frozenset(found)

    def _alias(self, expr: Expr, context: Context) -> Values:
        """A name in a type: its value, or that of the union it is an alias of."""
        if expr[0] == "n":
            bindings = self.program.files[context.file].facts.scopes[0].bindings.get(expr[1], ())
            for _, _, value in bindings[-1:]:
                if value is not None and value[0] in "i|":
                    return self._aliased(expr[1], value, context)
                if value is not None and value[0] == "c" and last_name(value[1]) == "TypeVar":
                    return ANY
            if not bindings and context.scope >= 0:
                return self.name(expr[1], context) if self._somewhere(expr[1], context) else _builtin(expr[1])
        return self.evaluate(expr, context)

    def _aliased(self, name: str, union: Expr, context: Context) -> Values:
        """The classes of ``Either = A | B``; one that stands in itself, as ``Tree = A | list["Tree"]``, ends there."""
        key = ("alias", context.file, name)
        if key in self._active:
            return ANY
        self._active.add(key)
        try:
            values = self.annotated(union, Context(context.file, 0, 0, -1, context.owner))
        finally:
            self._active.discard(key)
        return frozenset(("C", v[1], False) if v[0] == "I" else v for v in values)

    def _somewhere(self, name: str, context: Context) -> bool:
        scopes = self.program.files[context.file].facts.scopes
        number = context.scope
        while number >= 0:
            if name in scopes[number].bindings:
                return True
            number = scopes[number].parent
        return "*" in scopes[0].bindings

    def _generic(self, expr: Expr, context: Context) -> Values:
        head = last_name(expr[1])
        args = (
            expr[2] if isinstance(expr[2], tuple) and (not expr[2] or not isinstance(expr[2][0], str)) else (expr[2],)
        )
        if head in ("Optional", "Union"):
            return frozenset().union(*(self.annotated(arg, context) for arg in args))
        if head in ("Type", "type"):
            values = self.annotated(args[0], context) if args else ANY
            return frozenset(("C", v[1], False) if v[0] == "I" else UNKNOWN for v in values)
        if head in _WRAPPERS:
            return self.annotated(args[-1] if head == "Coroutine" else args[0], context) if args else ANY
        if head in ("Literal",):
            return frozenset({("X", "str")})
        if head in _MAPPINGS:
            return frozenset({("E", self.annotated(args[-1], context))}) if args else ANY
        if head in ("tuple", "Tuple") and len(args) > 1 and args[1] is not None:
            return frozenset({("Z", tuple(self.annotated(arg, context) for arg in args))})
        if head in _CONTAINERS:
            return frozenset({("E", self.annotated(args[0], context))}) if args else ANY
        if head == "Callable":
            return ANY
        return self.annotated(expr[1], context)

    # -- attributes ---------------------------------------------------------------------------------------------

    def _attribute(self, expr: Expr, context: Context) -> Values:
        if expr[1] == ("?",):
            return ANY
        found: set[Value] = set()
        for value in self.evaluate(expr[1], context):
            later = value[0] == "I" and expr[1][0] == "n" and self._bound_later(value[1], expr[2], context)
            found |= ANY if later else self.attribute(value, expr[2], context)
            if len(found) > _LIMIT:
                return ANY
        return self.tests.narrowed(expr, frozenset(found), context)

    def _bound_later(self, ref: Ref, name: str, context: Context) -> bool:
        """``self.old = self.run``, then ``self.run = new``: what it was before is nobody's in sight."""
        order = self.program.mro(ref)
        given = [(owner[0], *at) for owner in order for at in self.program.scope(owner).attributes.get(name, ())]
        if not given or not context.line or self.program.members(ref, name):
            return False
        return all((file, scope) == context[:2] and line > context.line for file, scope, _, _, line in given)

    def attribute(self, value: Value, name: str, context: Context | None = None) -> Values:
        """The values of ``value.name``."""
        kind = value[0]
        if kind == "M":
            return self.module_attribute(value[1], name)
        if kind == "N":
            joined = f"{value[1]}.{name}"
            file = self.program.module(joined, context.file if context else 0)
            return frozenset({("M", file) if file is not None else ("N", joined)})
        if kind == "X":
            return frozenset({value if value == EITHER else ("X", f"{value[1]}.{name}")})
        if kind == "super":
            members = self.program.members(value[2], name, after=value[1])
            if self.program.has_alternative_bases(value[2]) or any(
                self.program.hidden(value[2], member.owner, name, value[1]) for member in members
            ):
                return ANY
            return self._members_as_values(members, ("I", value[2], True))
        if kind not in "IC":
            return ANY
        if kind == "C" and context is not None and self._not_yet_replaced(value[1], name, context):
            return self._members_as_values(self.program.written_members(value[1], name), value)
        key = (value, name)
        known = self._attribute_memo.get(key)
        if known is None:
            self._attribute_memo[key] = NOTHING
            known = self._class_attribute(value, name) if kind == "C" else self._instance_attribute(value, name)
            self._attribute_memo[key] = known
        return known

    def _not_yet_replaced(self, ref: Ref, name: str, context: Context) -> bool:
        """Whether ``A.m`` stands before, or in, the statement ``A.m = ...`` that replaces what the class has."""
        return any(
            patch.replaces and patch.place == (context.file, context.scope) and 0 < context.line <= patch.line
            for patch in self.program.class_patches.get((ref, name), ())
        )

    def _class_attribute(self, value: Value, name: str) -> Values:
        if name == "__class__":
            return ANY
        return self._members_as_values(self.program.members(value[1], name), value)

    def _instance_attribute(self, value: Value, name: str) -> Values:
        ref = value[1]
        if name == "__class__":
            return frozenset({("C", ref, value[2])})
        found = set(self._members_as_values(self.program.members(ref, name), value, missing=NOTHING))
        order = self.program.mro(ref)
        if any(name in self.program.scope(item).attributes for item in order):
            # widget = Widget in the body, self.widget = widget() in a method: the instance has no class there
            found = {v for v in found if v[0] != "C" or not v[2]}
        found |= self._assigned(order, name, value)
        informative = {v for v in found if v[0] not in "UX"}
        if not informative and not value[2]:
            found |= self._assigned(self.program.descendants(ref)[1:40], name, value)
        return frozenset(found) if found else ANY

    def _assigned(self, classes: Iterable[Ref], name: str, value: Value) -> set[Value]:
        """What methods assign to ``self.name``; the nearest class that assigns something known shadows its bases."""
        found: set[Value] = set()
        for owner in classes:
            declared: set[Value] = set()
            given: set[Value] = set()
            for scope, guard, expr, line in self.program.scope(owner).attributes.get(name, ()):
                context = Context(owner[0], scope, line, guard, value[1], value[2])
                (declared if expr is not None and expr[0] == "T" else given).update(self.evaluate(expr, context))
                if len(declared) + len(given) > _LIMIT:
                    return {UNKNOWN}
            found |= given if self._constructed_here(name, declared, given) else declared | given
            if any(v[0] in "ICFBPE" for v in found):
                return found
        return found

    def _constructed_here(self, name: str, declared: set[Value], given: set[Value]) -> bool:
        """Whether an attribute of a declared type holds only what its class constructs; nobody else assigns it."""
        kinds = {v[1] for v in declared if v[0] == "I"}
        if not kinds or not given or not all(v[0] == "I" and v[2] for v in given):
            return False
        own = all(kinds & set(self.program.mro(v[1])) for v in given)
        return own and not any(kinds & set(self.program.mro(kind)) for kind in self._assigned_outside(name))

    def _assigned_outside(self, name: str) -> set[Ref]:
        """The classes of what any file assigns to this attribute of some other object."""
        if name not in self._outside_memo:
            found: set[Value] = set()
            for index, (scope, guard, _, _, value, _) in self._assignments.get(name, ()):
                line = self.program.files[index].facts.scopes[scope].line + 100_000
                found |= self.evaluate(value, self.context((index, scope), line, guard))
            self._outside_memo[name] = {v[1] for v in found if v[0] == "I"}
        return self._outside_memo[name]

    def held(self, owner: Ref, name: str) -> Values:
        """Everything that methods of a class and of its bases assign to ``self.name``, ``None`` aside."""
        found: set[Value] = set()
        for item in self.program.mro(owner):
            for scope, guard, expr, line in self.program.scope(item).attributes.get(name, ()):
                if expr != ("k", None):
                    found |= self.evaluate(expr, Context(item[0], scope, line, guard, owner, True))
        return frozenset(found)

    def _members_as_values(self, members: list[Member], receiver: Value, missing: Values = ANY) -> Values:
        if not members:
            return missing
        found: set[Value] = set()
        for member in members:
            found |= self._member_value(member, receiver)
        return frozenset(found)

    def _member_value(self, member: Member, receiver: Value) -> Values:
        value, descriptor = unwrapped(member.binding[2])
        file = member.owner[0]
        if value is not None and value[0] == "F" and not descriptor:
            return self._method_value((file, value[1]), receiver)
        context = Context(file, member.owner[1], member.binding[0], member.binding[1], receiver[1])
        values = self.evaluate(value, context)
        if descriptor == "staticmethod":
            return values
        if value is not None and value[0] == "c" and last_name(value[1]) == "partialmethod" and receiver[0] == "I":
            return frozenset(
                ("P", ("B", v[1][1], receiver[1], receiver[2]), *v[2:]) if v[0] == "P" and v[1][0] == "F" else v
                for v in values
            )
        if descriptor == "classmethod":
            return frozenset(("B", v[1], receiver[1], receiver[2]) if v[0] == "F" else v for v in values)
        if (
            value is not None
            and receiver[0] == "I"
            and (value[0] in "nacmxie" or (value[0] == "|" and len(value) == 4))
        ):
            # A plain function found on the class binds like a method.
            return frozenset(("B", v[1], receiver[1], receiver[2]) if v[0] == "F" else v for v in values)
        return values

    def _method_value(self, ref: Ref, receiver: Value) -> Values:
        kind = method_kind(self.program.scope(ref))
        if kind == "property":
            return self.returns(ref, receiver[1])
        if kind == "static" or (kind == "method" and receiver[0] == "C"):
            return frozenset({("F", ref)})
        return frozenset({("B", ref, receiver[1], receiver[2])})

    # -- calls --------------------------------------------------------------------------------------------------

    def _called(self, expr: Expr, context: Context) -> Values:
        func = expr[1]
        special = self._special_call(func, expr, context)
        if special is not None:
            return special
        found: set[Value] = set()
        for value in self.evaluate(func, context):
            found |= self.result(value, expr, context)
            if value[0] == "F" and func[0] == "a" and found and all(v[0] == "C" for v in found):
                found |= self._other_classes_below(value[1], func[1], frozenset(found), context)
            if len(found) > _LIMIT:
                return ANY
        return frozenset(found)

    def _other_classes_below(self, getter: Ref, receiver: Expr, declared: Values, context: Context) -> Values:
        """What a static getter of a class returns in the classes below the one that its receiver is declared as."""
        found: set[Value] = set()
        for value in self.evaluate(receiver, context):
            if value[0] in "IC" and not value[2]:
                found |= self._other_classes(getter, value[1], declared)
        return frozenset(found)

    def _special_call(self, func: Expr, expr: Expr, context: Context) -> Values | None:
        name, args = last_name(func), expr[2]
        if func[0] == "n" and name == "super":
            return self.super_value(args, context)
        if name == "getattr" and func[0] == "n" and len(args) >= 2 and args[1] is not None and args[1][0] == "s":
            found = self._attribute(("a", args[0], args[1][1]), context) if args[0] else ANY
            # The default stands only for objects without the attribute; of an unknown object it says nothing.
            known = len(args) > 2 and UNKNOWN not in found
            return found | (self.evaluate(args[2], context) if known else NOTHING)
        if name == "cast" and len(args) == 2:
            return self.annotated(args[0], context)
        if name in ("partial", "partialmethod") and args and args[0] is not None:
            inner = self.evaluate(args[0], context)
            return frozenset(("P", v, expr[3] - 1, expr[4]) if v[0] in "FBCP" else UNKNOWN for v in inner)
        if name == "type" and func[0] == "n" and len(args) == 1:
            return frozenset(("C", v[1], v[2]) if v[0] == "I" else UNKNOWN for v in self.evaluate(args[0], context))
        if name == "next" and func[0] == "n" and args:
            return elements(self.evaluate(args[0], context))
        if name in ("enumerate", "zip") and func[0] == "n":
            parts = tuple(elements(self.evaluate(arg, context)) for arg in args)
            return frozenset({("E", frozenset({("Z", (ANY, *parts) if name == "enumerate" else parts)}))})
        if name in ("nullcontext", "closing", "aclosing") and len(args) == 1:
            return frozenset({("W", self.evaluate(args[0], context))})
        if name in ("enter_context", "enter_async_context") and func[0] == "a" and len(args) == 1:
            return self._entered(("w", args[0], name == "enter_async_context"), context)
        if name == "__new__" and func[0] == "a" and args:
            return self._made_by(func[1], args[0], context)
        if name in _SAME and len(args) == 1 and args[0] is not None:
            return self.evaluate(args[0], context)
        return self._container_call(func, name, context)

    def _container_call(self, func: Expr, name: str, context: Context) -> Values | None:
        if func[0] != "a" or name not in _ELEMENTS | {"items"} or func[1] == ("?",):
            return None
        base = [v for v in self.evaluate(func[1], context) if v[0] in "EZ"]
        if not base:
            return None
        inside = elements(frozenset(base))
        if name == "values":
            return frozenset({("E", inside)})
        if name == "items":
            return frozenset({("E", frozenset({("Z", (ANY, inside))}))})
        return frozenset(base) if name == "copy" else inside

    def super_value(self, args: tuple[Expr | None, ...], context: Context) -> Values:
        after = self.enclosing_class((context.file, context.scope))
        if args and args[0] is not None:
            classes = [v[1] for v in self.evaluate(args[0], context) if v[0] == "C"]
            after = classes[0] if len(classes) == 1 else None
        if after is None:
            return ANY
        owner = context.owner if context.owner and after in self.program.mro(context.owner) else after
        return frozenset({("super", after, owner)})

    def result(self, value: Value, expr: Expr, context: Context) -> Values:
        """What calling ``value`` returns."""
        kind = value[0]
        if kind == "C":
            if self.program.is_interface(value[1]):
                return ANY
            made = self.made(value)
            several = len({v[1] for v in made if v[0] == "I"}) > 1
            return made | {EITHER} if several and self._made_by_arguments(value[1]) else made
        if kind in "FB":
            returned = self.returns(value[1], value[2] if kind == "B" else None)
            if any(v[0] == "P" and v[1] == ("F", value[1]) for v in returned):
                return ANY  # ``if func is None: return partial(f, option=1)``: called twice, or once
            if kind == "B" and value[3] and ("I", value[2], False) in returned and self._hands_itself_back(value[1]):
                returned = returned - {("I", value[2], False)} | {("I", value[2], True)}
            return self._resolved_string(returned, expr, context, value)
        if kind == "P":
            return self.result(value[1], expr, context)
        if kind == "I":
            return self._returns_of_method(value, "__call__")
        if value == EITHER:
            return frozenset({EITHER})
        if kind == "X":
            return self._resolved_string(frozenset({("X", value[1] + "()")}), expr, context, value)
        return self._resolved_string(ANY, expr, context, value)

    def _made_by_arguments(self, kind: Ref) -> bool:
        """Whether a ``__new__`` looks at what it was given where it chooses what to make."""
        for (file, _), (_, _, written) in self.program.members(kind, "__new__"):
            scope = self.program.scope((file, written[1])) if written is not None and written[0] == "F" else None
            if scope is not None and scope.signature is not None:
                given = {*scope.signature.positional[1:], *scope.signature.kwonly}
                conditions = (test for guard, _ in scope.returns for test, _ in self.chain(file, guard))
                if any(test is not None and not given.isdisjoint(names_in(test)) for test in conditions):
                    return True
        return False

    def _hands_itself_back(self, ref: Ref) -> bool:
        """Whether a method returns its receiver: ``return self``."""
        scope = self.program.scope(ref)
        own = scope.signature.positional[:1] if scope.signature is not None else ()
        return bool(own and scope.returns) and all(expr == ("n", own[0]) for _, expr in scope.returns)

    def made(self, value: Value) -> Values:
        """What calling a class makes: an instance of it, unless its ``__new__`` makes something else."""
        if value not in self._made_memo:
            self._made_memo[value] = NOTHING  # where one __new__ leads back to itself
            self._made_memo[value] = self._made_in(self.program.members(value[1], "__new__"), value)
        return self._made_memo[value]

    def _made_by(self, base: Expr | None, kind: Expr | None, context: Context) -> Values:
        """``super().__new__(A)`` and ``object.__new__(A)``: an A, unless a ``__new__`` of the trees makes another."""
        found: set[Value] = set()
        for value in self.evaluate(kind, context):
            for above in self.evaluate(base, context) if value[0] == "C" else ():
                members: list[Member] = []
                if above[0] in ("super", "C"):
                    after = above[1] if above[0] == "super" else None
                    members = self.program.members(above[2] if after else above[1], "__new__", after)
                found |= self._made_in(members, value)
        return frozenset(found) or ANY

    def _made_in(self, members: list[Member], value: Value) -> Values:
        """The instances that ``__new__`` returns when it is given a class."""
        found: set[Value] = set()
        for (file, _), (_, _, written) in members:
            if written is not None and written[0] == "F":
                scope = self.program.scope((file, written[1]))
                for guard, expr in scope.returns:
                    at = Context(file, written[1], scope.line + 100_000, guard, value[1], value[2])
                    found |= self.evaluate(expr, at)
        plain = ("I", value[1], value[2])
        # What it looks up somewhere is known as a base of the class at most, or as one class of many.
        instances = {m if m[0] == "I" and m[1] not in self.program.mro(value[1])[1:] else plain for m in found}
        related = frozenset(m for m in instances if value[1] in self.program.mro(m[1]))
        return related or frozenset(instances or {plain})

    def _returns_of_method(self, value: Value, name: str) -> Values:
        found: set[Value] = set()
        for bound in self.attribute(value, name):
            found |= self.returns(bound[1], value[1]) if bound[0] == "B" else ANY
        return frozenset(found) or ANY

    def _resolved_string(self, values: Values, expr: Expr, context: Context, callee: Value) -> Values:
        """``resolve(current.get_worker_cls())``: a dotted string handed to a resolver becomes the class it names."""
        if any(v[0] in "ICE" for v in values) or not expr[2] or not _RESOLVERS.search(last_name(expr[1])):
            return values
        found: set[Value] = set()
        for arg in expr[2]:
            if arg is not None and arg[0] in "nacs":
                for value in self.evaluate(arg, context):
                    if value[0] == "S":
                        found |= self.named_class(value[1], context.file)
        if last_name(expr[1]) in _INSTANTIATE:
            found = {("I", v[1], v[2]) for v in found}
        return frozenset(found) or values

    def named_class(self, dotted: str, file: int) -> Values:
        module, _, name = dotted.replace(":", ".").rpartition(".")
        target = self.program.module(module, file) if module else None
        if target is None:
            return NOTHING
        return frozenset(v for v in self.module_attribute(target, name) if v[0] == "C")

    def returns(self, ref: Ref, owner: Ref | None) -> Values:
        """What a function returns: its annotation where that says something, else its return statements.

        A method whose annotation is no class of the trees is asked in every override, for instance for the
        class names that platforms return as strings.
        """
        key = (ref, owner)
        known = self._return_memo.get(key)
        if known is not None:
            return known
        self._return_memo[key] = NOTHING
        scope = self.program.scope(ref)
        declared = self.annotated(scope.return_annotation, Context(ref[0], scope.parent, 0, -1, owner))
        informative = any(v[0] in "ICEZ" for v in declared)
        result = declared if informative else self._returned(ref, owner, declared)
        if informative and owner is not None and all(v[0] == "C" and not v[2] for v in declared):
            result = self._picked_here(ref, owner) or result
        if informative and method_kind(scope) == "property":
            # A property that hands out what its own class constructs is more exact than its declared base.
            held = self._returned(ref, None, ANY) if owner is None else self._returned_by(ref, owner)
            if held and all(v[0] == "I" and v[2] for v in held):
                result = held
        if informative and owner is None and all(v[0] == "I" for v in declared):
            result = self._made_here(ref) or result
        if owner is not None and result and all(v[0] == "C" for v in result):
            result |= self._other_classes(ref, owner, result)
        result |= self._by_arguments(ref, result)
        if any(last_name(decorator) in _MANAGERS for decorator in scope.decorators):
            result = frozenset({("W", elements(result))})
        self._return_memo[key] = result
        return result

    def _made_here(self, ref: Ref) -> Values:
        """The function inside of a function that it returns, more exact than the protocol that it declares."""
        scope = self.program.scope(ref)
        for _, expr in scope.returns:
            bound = scope.bindings.get(expr[1], ()) if expr is not None and expr[0] == "n" else ()
            if not bound or any(value is None or value[0] != "F" for _, _, value in bound):
                return NOTHING
        found = self._returned(ref, None, NOTHING) if scope.returns else NOTHING
        return found if all(v[0] == "F" for v in found) else NOTHING

    def _picked_here(self, ref: Ref, owner: Ref) -> Values:
        """The classes that a method names in its return statements, where it is declared to give any of a family."""
        if len(self._overrides(ref, owner)) > 1 or not self.program.scope(ref).returns:
            return NOTHING
        picked = self._returned_by(ref, owner)
        return picked if all(v[0] == "C" and v[2] for v in picked) else NOTHING

    def _by_arguments(self, ref: Ref, result: Values) -> Values:
        """``EITHER``, and what overloads declare, where a function says that its arguments decide what it returns."""
        overloads = [self.program.scope(item) for item in self.program.overloads(ref)]
        scope = self.program.scope(ref)
        if not overloads and (scope.return_annotation is None or _FACTORY.match(scope.name)):
            return NOTHING
        outer = Context(ref[0], scope.parent, 0, -1, self.enclosing_class(ref))
        declared = [s.return_annotation for s in overloads or (scope,) if s.return_annotation is not None]
        values = frozenset().union(*(self.annotated(annotation, outer) for annotation in declared))
        found = {v[1] for v in values | result if v[0] == "I"}
        unrelated = {kind for kind in found if not any(kind in self.program.mro(other) for other in found - {kind})}
        if len(unrelated) < 2 or not all(v[0] in "IX" for v in values):
            return NOTHING
        return values | {EITHER}

    def _other_classes(self, ref: Ref, owner: Ref, declared: Values) -> Values:
        """The classes that overrides of a getter return, where they share no base with what the base declares."""
        below = {item for value in declared for item in self.program.descendants(value[1])}
        found: set[Value] = set()
        for item in self._overrides(ref, owner):
            if item != ref:
                found |= {v for v in self.returns(item, None) if v[0] == "C" and v[1] not in below}
        return frozenset(found) if len(found) < _LIMIT else NOTHING

    def _returned(self, ref: Ref, owner: Ref | None, declared: Values) -> Values:
        found: set[Value] = set()
        for item in self._overrides(ref, owner):
            scope = self.program.scope(item)
            line = scope.line + 100_000
            for guard, expr in scope.returns[:30]:
                found |= self.evaluate(
                    expr, Context(item[0], item[1], line, guard, owner or self.enclosing_class(item))
                )
            if len(found) > _LIMIT:
                return ANY
        useful = frozenset(v for v in found if v[0] not in "UX" or v == EITHER)
        inner = {v for v in useful if v[0] == "F" and self.program.scope(v[1]).parent == ref[1] and v[1][0] == ref[0]}
        if len(inner) > 1 or (inner and UNKNOWN in found):
            return ANY  # a factory: which of its functions comes back depends on the arguments
        return useful | (found & ANY if useful else NOTHING) or declared or ANY

    def _returned_by(self, ref: Ref, owner: Ref) -> Values:
        scope = self.program.scope(ref)
        found: set[Value] = set()
        for guard, expr in scope.returns:
            found |= self.evaluate(expr, Context(ref[0], ref[1], scope.line + 100_000, guard, owner))
        return frozenset(found)

    def _overrides(self, ref: Ref, owner: Ref | None) -> list[Ref]:
        if owner is None:
            return [ref]
        name = self.program.scope(ref).name
        found = [ref]
        for item in self.program.descendants(owner)[:80]:
            for binding in self.program.scope(item).bindings.get(name, ()):
                if binding[2] is not None and binding[2][0] == "F" and (item[0], binding[2][1]) != ref:
                    found.append((item[0], binding[2][1]))
        return found


def _in_body(scope: Scope, name: str, inside: bool, line: int) -> bool:
    """Whether a class body has given a name a value where a line of that body uses it; before, it means another."""
    return inside and (not line or any(binding[0] < line for binding in scope.bindings[name]))


def names_in(expr: Any) -> set[str]:
    """Every plain name in an expression."""
    if not isinstance(expr, tuple) or not expr:
        return set()
    if expr[0] == "n":
        return {expr[1]}
    return {name for part in expr for name in names_in(part)}


def _bound_by_hand(value: Expr) -> tuple[bool, Expr]:
    """``f`` of ``MethodType(f, obj)`` and ``f.__get__(obj)``, which hand a receiver over; else the value itself."""
    if value[0] == "c" and value[2] and value[2][0] is not None and last_name(value[1]) == "MethodType":
        return True, value[2][0]
    if value[0] == "c" and value[1][0] == "a" and value[1][2] == "__get__":
        return True, value[1][1]
    return False, value


def unwrapped(expr: Expr | None) -> tuple[Expr | None, str]:
    """``f`` and ``"staticmethod"`` of ``staticmethod(f)``, the same for ``classmethod``; else the expression itself."""
    if expr is not None and expr[0] == "c" and expr[1] in _DESCRIPTORS and len(expr[2]) == 1:
        return expr[2][0], expr[1][1]
    return expr, ""


_DESCRIPTORS = (("n", "staticmethod"), ("n", "classmethod"))
_EVALUATE = {
    "n": "_name", "a": "_attribute", "c": "_called", "s": "_string", "k": "_constant", "i": "_subscript",
    "|": "_either", "t": "_display", "d": "_dict", "e": "_element", "x": "_item", "F": "_function", "K": "_class",
    "m": "_import", "p": "_parameter", "T": "_declared", "w": "_entered",
}  # fmt: skip

_BUILTIN_TYPES = frozenset(
    ["int", "str", "float", "bool", "bytes", "list", "dict", "tuple", "set", "complex", "range", "slice", "type"]
)


def _builtin(name: str) -> Values:
    return frozenset({("X", name)}) if name in _BUILTIN_TYPES else ANY


def elements(values: Values) -> Values:
    """The values inside containers."""
    found: set[Value] = set()
    for value in values:
        if value[0] == "E":
            found |= value[1]
        elif value[0] == "Z":
            for item in value[1]:
                found |= item
        else:
            found.add(UNKNOWN)
    return frozenset(found)


def last_name(expr: Expr | None) -> str:
    """The final identifier of a name or attribute, or ``""``."""
    if expr is None:
        return ""
    if expr[0] == "n":
        return str(expr[1])
    if expr[0] == "a":
        return str(expr[2])
    return last_name(expr[1]) if expr[0] in "ci" else ""


_PROPERTIES = frozenset({"cache_readonly", "reify", "lazy_attribute", "memoized_attribute"})


def method_kind(scope: Scope) -> str:
    """``"static"``, ``"class"``, ``"property"`` or ``"method"``, from the decorators."""
    for decorator in scope.decorators:
        name = last_name(decorator)
        if name == "staticmethod" or scope.name == "__new__":
            return "static"
        if name in ("classmethod", "abstractclassmethod") or scope.name in ("__init_subclass__", "__class_getitem__"):
            return "class"
        if name in _PROPERTIES or name.lower().endswith("property") or name in ("setter", "deleter", "getter"):
            return "property"
    if scope.name == "__new__":
        return "static"
    return "class" if scope.name in ("__init_subclass__", "__class_getitem__") else "method"
