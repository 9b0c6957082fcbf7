"""HWB109: A hook that one class of a family lacks while all others define it; this module judges drift mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from .. import platforms
from ..bind import Mismatch
from ..findings import Finding, Place
from ..model import Binding, Call, Scope, Signature
from .record import Rule

if TYPE_CHECKING:  # the rule's text is read without any inference
    from ..dispatch import Candidate, Dispatcher
    from ..infer import Context
    from ..program import Member, Program, Ref

    Reachable = Callable[[Candidate, int, Call, Context, Mismatch], bool]

PAGE = """
In contract mode: a module marks functions as hooks of the contract, or a class writes several of its hooks, and a
hook that the contract requires (optional: false) is left out. In drift mode: a class is the only one of its family
without a method that is called on the family, and the base does not declare it, or only as abstract or with
NotImplementedError. That has medium confidence for a class that is written for one kind of hardware and for an
abstract method, where nothing else is lacking; else low.

Bad:

```python
@hookimpl
def probe(device=None): ...
@hookimpl
def conv_decode(x): ...
# HWB109: conv_extend, which the contract requires, is not defined
```

Good:

```python
@hookimpl
def conv_extend(x): ...
```
"""

_NOTHING = Signature((), (), (), {}, None, None)
_LEAST_SIBLINGS = 2


class Lack(NamedTuple):
    """The one class without a hook, how many siblings have it, and whether it is probably an oversight."""

    owner: Ref
    siblings: int
    likely: bool


def settled(lacking: dict[tuple[Ref, str], Finding]) -> list[Finding]:
    """A class that lacks several hooks takes another part in its family: that is of low confidence."""
    counts = Counter(owner for owner, _ in lacking)
    return [f if counts[owner] == 1 else f._replace(confidence="low") for (owner, _), f in lacking.items()]


class Absent:
    """Remembers for each class and method name who below it lacks the method."""

    def __init__(self, dispatcher: Dispatcher, reachable: Reachable) -> None:
        self.dispatcher = dispatcher
        self.inference = dispatcher.inference
        self.program: Program = dispatcher.program
        self.reachable = reachable
        self._known: dict[tuple[Ref, str], Lack | None] = {}

    def of_call(self, file: int, call: Call, context: Context) -> dict[tuple[Ref, str], Finding]:
        """The class that a call can meet and that has nothing to run, by class and method name."""
        found: dict[tuple[Ref, str], Finding] = {}
        if call.func[0] != "a" or call.func[1] == ("?",):
            return found
        name = call.func[2]
        for value in self.inference.evaluate(call.func[1], context):
            if value[0] == "I" and not value[2]:
                lack = self.lack(value[1], name)
                if (
                    lack is not None
                    and not self._expected(call, file)
                    and self._meets(lack.owner, value[1], file, call, context)
                ):
                    found[(lack.owner, name)] = self._finding(lack, name, file, call)
        return found

    def lack(self, base: Ref, name: str) -> Lack | None:
        """The only leaf class below ``base`` that neither defines nor inherits a method, where the others do."""
        key = (base, name)
        if key not in self._known:
            self._known[key] = self._lack(base, name)
        return self._known[key]

    def _lack(self, base: Ref, name: str) -> Lack | None:
        below = self.program.descendants(base)
        if len(below) <= _LEAST_SIBLINGS + 1 or (name.startswith("__") and name.endswith("__")):
            return None
        leaves = [ref for ref in below[1:] if not self.program.children.get(ref)]
        lacking = []
        for leaf in leaves:
            if not self._has(leaf, base, name):
                lacking.append(leaf)
                if len(lacking) > 1:
                    return None
        if len(lacking) != 1 or len(leaves) <= _LEAST_SIBLINGS or not self._complete(lacking[0]):
            return None
        return Lack(lacking[0], len(leaves) - 1, self._likely(lacking[0], base, name))

    def _likely(self, owner: Ref, base: Ref, name: str) -> bool:
        """Whether a class, whole in itself, is for one kind of hardware or lacks what its base has abstract."""
        parts, scope = self.program.files[owner[0]].parts, self.program.scope(owner)
        own = [self.program.scope((owner[0], f)) for f in _functions(scope)]
        if not own or any(_abstract(method) or (method.stub and method.raises) for method in own):
            return False  # a base for others, or a marker
        if platforms.of_definition(parts, scope.qualname) is not None:
            return True
        declared = [(m.owner[0], f) for m in self.program.members(base, name) for f in _functions_of(m.binding)]
        beside = owner[0] == base[0]  # a base for classes out of sight
        return not beside and bool(declared) and all(_abstract(self.program.scope(ref)) for ref in declared)

    def _has(self, leaf: Ref, base: Ref, name: str) -> bool:
        """Whether a class has something to run: more than what ``base``, or a class above it, merely declares."""
        members = self.program.members(leaf, name)
        if not members:
            return any(name in self.program.scope(c).attributes for c in self.program.mro(leaf))
        return not all(self._declares(m, base) for m in members)

    def _declares(self, member: Member, base: Ref) -> bool:
        functions = _functions_of(member.binding)
        if member.owner not in self.program.mro(base) or not functions:
            return False
        scope = self.program.scope((member.owner[0], functions[0]))
        return scope.stub and (scope.raises or _abstract(scope))

    def _complete(self, owner: Ref) -> bool:
        """Whether a class is checked at all, and everything that it can have is in sight."""
        program = self.program
        hidden = program.unknown_base(owner) or program.members(owner, "__getattr__")
        return not hidden and owner[0] < program.checked and not program.files[owner[0]].is_test

    # -- one call -----------------------------------------------------------------------------------------------

    def _meets(self, owner: Ref, base: Ref, file: int, call: Call, context: Context) -> bool:
        caller = self.dispatcher.self_function(call.func[1], context)
        if caller is not None and not self.dispatcher.runs(owner, caller):
            return False
        allows = self.inference.tests.allows(call.func[1], context)
        if allows is not None and not allows(owner):
            return False
        from ..dispatch import Candidate

        return self.reachable(Candidate(owner, _NOTHING, 0, owner, False), file, call, context, Mismatch())

    def _expected(self, call: Call, file: int) -> bool:
        """Whether the call stands in a ``try``, or in a test: what is missing may be expected there."""
        return self.program.files[file].is_test or any(
            test is not None and str(test[0]).startswith("try") and holds
            for test, holds in self.inference.chain(file, call.guard)
        )

    def _finding(self, lack: Lack, name: str, file: int, call: Call) -> Finding:
        scope = self.program.scope(lack.owner)
        definition = Place(self.program.files[lack.owner[0]].path, scope.line, scope.qualname)
        place = Place(self.program.files[file].path, call.line)
        message = (
            f"{scope.qualname} ({definition.file}:{definition.line}) does not define '{name}', which is called at "
            f"{place.file}:{place.line} and which the {lack.siblings} other classes of the family define. "
            f"Fix: define '{name}' in {scope.qualname}."
        )
        confidence = "medium" if lack.likely else "low"
        return Finding("HWB109", "error", confidence, message, (name,), definition, place)


def _functions(scope: Scope) -> list[int]:
    return [f for bindings in scope.bindings.values() for binding in bindings for f in _functions_of(binding)]


def _functions_of(binding: Binding) -> list[int]:
    written = binding[2]
    return [written[1]] if written is not None and written[0] == "F" else []


def _abstract(scope: Scope) -> bool:
    from ..infer import last_name

    return any(last_name(decorator) == "abstractmethod" for decorator in scope.decorators)


RULE = Rule("HWB109", "hook missing in a family member", "error", True, "contract and drift mode", PAGE)
