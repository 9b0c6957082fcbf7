"""Signs that a call which a definition rejects is meant for something else."""

from __future__ import annotations

import re

from . import platforms
from .bind import Passed, bind
from .dispatch import Candidate, Dispatcher, Reach
from .expressions import has_string, own_names, reads_attribute
from .forwarding import Verdict
from .infer import Context, last_name, method_kind
from .likeness import named
from .model import Call, Expr
from .origins import Origins
from .reachability import Reachability
from .versions import Versions

# What a variable is called that holds a class, or makes an instance.
_CLASS_NAME = re.compile(r"(?:^|_)(?:cls|klass|class|type|factory|ctor|constructor)$", re.I)


class Doubts:
    """Asked about each rejection, with what accepts the same call. Remembers nothing."""

    def __init__(
        self, dispatcher: Dispatcher, origins: Origins, versions: Versions, reachability: Reachability
    ) -> None:
        self.dispatcher = dispatcher
        self.inference = dispatcher.inference
        self.program = dispatcher.program
        self.origins = origins
        self.versions = versions
        self.reachability = reachability

    def doubtful(
        self,
        verdict: Verdict,
        accepting: tuple[Verdict, ...],
        reach: Reach,
        call: Call,
        passed: Passed,
        context: Context,
    ) -> bool:
        """Signs that the call is meant for something else than its receiver's declared type offers."""
        target = verdict.target
        if self._runs_on_mocks(context):
            return True
        files = self.program.files
        if files[target.ref[0]].is_test and not files[context.file].is_test:
            return True  # what a test defines is made for what that test does with it
        if (reach.either and accepting) or self._meant_by_the_other_branch(verdict, accepting, call, context):
            return True
        if self.versions.undecided(self.inference.chain(context.file, call.guard), context.file):
            return True
        if self.origins.picked_by_a_name(call, context) or (
            accepting and (self.origins.made_of_what_is_asked(call, context) or self._set_together(call, context))
        ):
            return True
        conditions = self.inference.chain(context.file, call.guard)
        if (accepting or call.perhaps) and self.origins.decided_together(call, context, conditions):
            return True
        if verdict.candidate.rebound:
            return False
        if any(self._patched_nearby(target, v.target, context) for v in accepting):
            return True
        if accepting and self._asks_receiver(call, context, verdict.candidate.dispatched):
            return True
        if reach.untyped:
            return self._hands_down(call, context, target) or self._strange(verdict, accepting, reach, passed)
        if self._of_a_class_in_hand(verdict, accepting, call) or self._never_called_here(verdict, call, context):
            return True
        if self._lacks_only_its_receiver(verdict) or self._constructs(verdict, call, passed):
            return True  # declared as the class, and an instance is meant, or the other way around
        if not accepting and (reach.opaque or (not reach.complete and self._stands_in(target))):
            return True
        if not accepting:
            return not verdict.candidate.exact and self._accepted_elsewhere(call, passed, target, context)
        if verdict.candidate.dispatched:  # a module of another class, with another protocol, accepts
            return not any(self._in_line(target, v.target) for v in accepting)
        related = [v for v in accepting if self.related(target, v.target)]
        if self.program.scope(target.ref).name in ("forward", "__call__") and last_name(call.func) not in (
            "forward", "__call__",
        ):  # fmt: skip
            return not related
        hardware = self.reachability.platform_of(target) is not None
        if not hardware and self.program.scope((context.file, context.scope)).name == call.func[-1]:
            return True  # a wrapper hands on to what it holds, and holds only what takes that
        if self.program.scope(target.ref).name == "__init__" or self.program.scope(target.ref).kind == "c":
            held = self._declared_field(call, context) and self.overrides(target, accepting)
            if not verdict.candidate.exact and not hardware and not held:
                return True  # constructors of a family need not agree
            if held:
                return False
            rejected = len(reach.candidates) - len(accepting)
            return rejected > len(accepting) or (len(reach.candidates) > 2 and self._chosen_by_name(call, context))
        return False

    def _meant_by_the_other_branch(
        self, verdict: Verdict, accepting: tuple[Verdict, ...], call: Call, context: Context
    ) -> bool:
        """``if flag: x.run(a) else: x.run(b=1)``: what takes one of the two only is what the flag stands for."""
        if call.guard < 0 or not accepting:
            return False
        for raw in self.program.files[context.file].facts.calls:
            other = Call._make(raw)
            if other.func != call.func or other.scope != call.scope or other.perhaps or other.line == call.line:
                continue
            if not self.inference.excluded(context.file, other.guard, call.guard):
                continue
            passed = Passed(other.npos, other.keywords, other.star is not None, other.kwstar is not None)
            taken = not bind(verdict.target.signature, passed, verdict.target.skip).rejects
            if taken and all(bind(v.target.signature, passed, v.target.skip).rejects for v in accepting):
                return True
        return False

    def _declared_field(self, call: Call, context: Context) -> bool:
        """Whether what is called is an attribute that a class body annotates: a field for classes of one base."""
        if call.func[0] != "a":
            return False
        receivers = self.inference.evaluate(call.func[1], context)
        owners = {item for v in receivers if v[0] in "IC" for item in self.program.mro(v[1])}
        return any(field[0] == call.func[2] for item in owners for field in self.program.scope(item).fields)

    def _lacks_only_its_receiver(self, verdict: Verdict) -> bool:
        target, missing = verdict.target, verdict.mismatch.missing
        method = self.program.files[target.ref[0]].facts.scopes[self.program.scope(target.ref).parent].kind == "c"
        first = target.signature.positional[:1]
        return method and not target.skip and not verdict.candidate.exact and bool(first) and missing[:1] == first

    def _constructs(self, verdict: Verdict, call: Call, passed: Passed) -> bool:
        """Whether what is declared as an instance is called as its class is: ``kind: Model``, then ``kind(sizes)``."""
        name, owner = self.program.scope(verdict.target.ref).name, verdict.candidate.owner
        if name not in ("forward", "__call__") or last_name(call.func) == name or verdict.candidate.exact or not owner:
            return False
        if _CLASS_NAME.search(last_name(call.func)):
            return True
        made = self.dispatcher.constructors(("C", owner, False))
        return any(not bind(c.signature, passed, c.skip).rejects and (passed.npos or passed.keywords) for c in made)

    def _stands_in(self, target: Candidate) -> bool:
        """Whether a definition is written under a condition, for where something else is missing; not for hardware."""
        file, number = target.ref
        scopes = self.program.files[file].facts.scopes
        conditions: list[Expr | None] = []
        while number >= 0:
            conditions += [test for test, _ in self.inference.chain(file, scopes[number].guard)]
            number = scopes[number].parent
        return bool(conditions) and not any(platforms.of_condition(test) for test in conditions)

    def _strange(self, verdict: Verdict, accepting: tuple[Verdict, ...], reach: Reach, passed: Passed) -> bool:
        """Whether none of a definition's kin accepts what is passed, by name where names are passed.

        Nor does it count where what they have in common rejects the call as well: then it is for those that accept.
        """
        unknown = set(verdict.mismatch.unknown)
        kin = [v.target for v in accepting if self._one_family(verdict.target, v.target)]
        knowing = (other for other in kin if not unknown or unknown & set(named(other.signature, other.skip)))
        if accepting and not any(knowing):
            return True
        above = {owner for v in accepting if v.target.owner for owner in self.program.mro(v.target.owner)[1:]}
        common = (c for c in reach.candidates if c.owner in above)
        return any(bind(c.signature, passed, c.skip).rejects for c in common)

    def _one_family(self, left: Candidate, right: Candidate) -> bool:
        """Whether a class that both derive from has the method: another base says nothing about its protocol."""
        if left.owner is None or right.owner is None:
            return left.owner is right.owner
        shared = set(self.program.mro(left.owner)) & set(self.program.mro(right.owner))
        name = self.program.scope(left.ref).name
        return any(self.program.members(item, name) or item in (left.owner, right.owner) for item in shared)

    def _of_a_class_in_hand(self, verdict: Verdict, accepting: tuple[Verdict, ...], call: Call) -> bool:
        """Whether a method is called on a class that is not written by its name: its metaclass, or it, is another."""
        target = verdict.target
        parent = self.program.files[target.ref[0]].facts.scopes[self.program.scope(target.ref).parent]
        direct = verdict.candidate.ref == target.ref
        if accepting or not direct or parent.kind != "c" or target.skip or call.func[0] != "a":
            return False
        receiver = call.func[1]
        written = receiver[0] in "na" and last_name(receiver).lstrip("_")[:1].isupper()
        return method_kind(self.program.scope(target.ref)) == "method" and not written

    def _never_called_here(self, verdict: Verdict, call: Call, context: Context) -> bool:
        """Whether ``self.m()`` stands in a method that is only called in others, which this one's classes override."""
        caller = self.origins.method_of(context)
        if caller is None or call.func[0] != "a" or verdict.candidate.owner is None:
            return False
        own = self.dispatcher.self_function(call.func[1], context) is not None
        return own and self.reachability.no_caller_runs(verdict.candidate, caller)

    def _set_together(self, call: Call, context: Context) -> bool:
        """``if self.flag: self.kind().run()`` where subclasses set both ``flag`` and ``kind`` in their bodies."""
        if context.owner is None or call.func[0] != "a":
            return False
        asked = {name for test, _ in self.inference.chain(context.file, call.guard) for name in own_names(test)}
        used = {name for origin in self.origins.of(call.func[1], context) for name in own_names(origin.expr)}
        used |= set(own_names(call.func[1]))
        if not asked or not used - asked:
            return False
        bodies = [self.program.scope(item).bindings for item in self.program.descendants(context.owner)[1:]]
        return any(not asked.isdisjoint(body) and not (used - asked).isdisjoint(body) for body in bodies)

    def _hands_down(self, call: Call, context: Context, target: Candidate) -> bool:
        """Whether a method calls its own name on its parts, which are not of its own kind."""
        if context.owner is None or target.owner is None or call.func[1] == ("n", "self"):
            return False
        caller = self.program.scope((context.file, context.scope)).name
        return caller == call.func[-1] and bool(
            set(self.program.mro(context.owner)) & set(self.program.mro(target.owner))
        )

    def _runs_on_mocks(self, context: Context) -> bool:
        """Whether ``@patch("x.A")`` or ``@patch.object(...)`` stands above the caller: what is called is not known."""
        decorators = self.program.scope((context.file, context.scope)).decorators
        called = [d[1] if d[0] == "c" else d for d in decorators if d is not None]
        return any("patch" in (last_name(d), last_name(d[1]) if d[0] == "a" else "") for d in called)

    def _patched_nearby(self, target: Candidate, accepting: Candidate, context: Context) -> bool:
        """Whether code of the caller's own folder may have put the definition that accepts in place of the other."""
        scope = self.program.scope(target.ref)
        here = self.program.files[context.file].parts[:-1]
        return any(
            accepting.ref in patch.functions
            and not patch.conditional
            and self.program.files[patch.place[0]].parts[:-1] == here
            for patch in self.program.class_patches.get(((target.ref[0], scope.parent), scope.name), ())
        )

    def _asks_receiver(self, call: Call, context: Context, module: bool) -> bool:
        """Whether a condition around the call reads an attribute of the receiver: it picks some of the family."""
        called_itself = module and last_name(call.func) not in ("forward", "__call__")
        receiver = call.func if called_itself else call.func[1]
        if call.func[0] != "a" or receiver in (("n", "self"), ("n", "cls")):
            return False
        return any(
            test is not None and reads_attribute(test, receiver)
            for test, _ in self.inference.chain(context.file, call.guard)
        )

    def related(self, left: Candidate, right: Candidate) -> bool:
        """Whether two methods' classes share a class of the trees."""
        if left.owner is None or right.owner is None:
            return left.owner is right.owner
        return bool(set(self.program.mro(left.owner)) & set(self.program.mro(right.owner)))

    def _in_line(self, left: Candidate, right: Candidate) -> bool:
        """Whether one method's class is the other's, or derives from it."""
        if left.owner is None or right.owner is None:
            return False
        return left.owner in self.program.mro(right.owner) or right.owner in self.program.mro(left.owner)

    def _accepted_elsewhere(self, call: Call, passed: Passed, target: Candidate, context: Context) -> bool:
        """Whether another method of that name takes the call; one that makes it on what it holds does not count."""
        own = (context.file, context.scope) if call.func[0] == "a" and call.func[1] != ("n", "self") else None
        written = self.program.scope(target.ref).name
        name = written if written in ("__call__", "forward") else last_name(call.func)
        for ref in self.program.methods_named.get(name, ()):
            scope = self.program.scope(ref)
            if ref in (target.ref, own) or scope.signature is None or named(scope.signature, 1) == ():
                continue
            if not bind(scope.signature, passed, 1).rejects:
                return True
        return False

    def _chosen_by_name(self, call: Call, context: Context) -> bool:
        """Whether a string comparison around the call picks one class of a registry."""
        return any(
            test is not None and test[0] == "=" and has_string(test)
            for test, _ in self.inference.chain(context.file, call.guard)
        )

    def overrides(self, target: Candidate, accepting: tuple[Verdict, ...]) -> bool:
        """Whether a definition overrides one that the receiver is declared to have, and that takes the call."""
        if target.owner is None:
            return False
        order = self.program.mro(target.owner)
        return any(v.candidate.declared and not v.target.stub and v.target.owner in order for v in accepting)
