"""Whether a call can meet a definition at all, by what its surroundings, and places elsewhere, say."""

from __future__ import annotations

from . import platforms
from .bind import Mismatch
from .dispatch import Candidate, Dispatcher
from .elsewhere import Elsewhere
from .expressions import asks_code, asks_signature, mentions
from .flags import Conditions
from .infer import Context
from .model import Call, Expr
from .origins import Origins
from .program import Ref

_BELOW = 60  # classes that are asked whether they run a method
_RESOLUTIONS = 3  # how often a name in a condition is followed to what it was given


class Reachability:
    """Answers for one call and one definition. Remembers nothing."""

    def __init__(self, dispatcher: Dispatcher, origins: Origins) -> None:
        self.dispatcher = dispatcher
        self.inference = dispatcher.inference
        self.program = dispatcher.program
        self.origins = origins
        self.elsewhere = Elsewhere(dispatcher)

    def catches_type_error(self, file: int, guard: int) -> bool:
        return any(test is not None and test[0] == "try-type" for test, _ in self.inference.chain(file, guard))

    def reachable(self, candidate: Candidate, file: int, call: Call, context: Context, mismatch: Mismatch) -> bool:
        conditions = self.inference.chain(file, call.guard)
        platform = self.platform_of(candidate)
        here = platforms.of_definition(self.program.files[file].parts, "") or self._method_platform(context)
        if platform and here and platform != here:
            return False
        if not platforms.can_meet(platform, conditions):
            return False
        if "Cuda" in self.program.name_of(candidate.ref) and not platforms.can_meet("cuda", conditions):
            return False
        if self._bound_under_other_conditions(candidate, call, context, conditions):
            return False
        if mismatch.rejects and self.origins.under_other_flags(candidate, call, context, conditions):
            return False
        if mismatch.rejects and self._method_never_runs(candidate, call, context):
            return False
        if mismatch.rejects and (
            self.elsewhere.imported_under_others(candidate, file, conditions)
            or self.elsewhere.only_called_on_others(platform, context)
            or self._handed_over_elsewhere(candidate, call, context, mismatch)
        ):
            return False
        conditions += self.elsewhere.implied(conditions, context) if mismatch.rejects else ()
        return not self._any_rules_out(conditions, candidate, call, context, mismatch)

    def _method_never_runs(self, candidate: Candidate, call: Call, context: Context) -> bool:
        """Whether ``self.m()`` stands in a private method whose own callers the candidate's classes override."""
        caller = self.origins.method_of(context)
        if candidate.owner is None or caller is None or call.func[0] != "a" or call.func[1][0] != "n":
            return False
        name = self.program.scope(caller).name
        private = name.startswith("_") and not name.startswith("__")
        if not private or not self.dispatcher.self_function(call.func[1], context):
            return False
        return self.no_caller_runs(candidate, caller)

    def no_caller_runs(self, candidate: Candidate, caller: Ref) -> bool:
        """Whether none of the classes that have a definition runs a method in which the given one is called."""
        below = self.program.descendants(candidate.owner or candidate.ref)[:_BELOW]
        having = [owner for owner in below if self.dispatcher.provides(owner, candidate.ref)]
        return bool(having) and all(self.elsewhere.called_by_none_of(owner, caller) for owner in having)

    def _any_rules_out(
        self, conditions: Conditions, candidate: Candidate, call: Call, context: Context, mismatch: Mismatch
    ) -> bool:
        return any(
            self.rules_out(test, holds, candidate, call, context, mismatch) for test, holds in conditions if test
        )

    def _handed_over_elsewhere(self, candidate: Candidate, call: Call, context: Context, mismatch: Mismatch) -> bool:
        """``capture = partial(x.graph)`` under ``if x.enabled``: whatever ``capture`` is called, ``x`` is enabled."""
        if call.func[0] != "n" or candidate.owner is None:
            return False
        found = excluded = 0
        for line, guard, value in self.program.scope((context.file, context.scope)).bindings.get(call.func[1], ()):
            method = value[2][0] if value is not None and value[0] == "c" and value[2] else value
            if method is None or method[0] != "a":
                continue
            at = context._replace(line=line, guard=guard)
            if not any(v[0] == "B" and v[1] == candidate.ref for v in self.inference.evaluate(method, at)):
                continue
            found += 1
            bound = call._replace(func=method)
            excluded += self._any_rules_out(
                self.inference.chain(context.file, guard), candidate, bound, context, mismatch
            )
        return 0 < found == excluded

    def _bound_under_other_conditions(
        self, candidate: Candidate, call: Call, context: Context, conditions: tuple[tuple[Expr | None, bool], ...]
    ) -> bool:
        """``self.f = g`` under ``if self.flag`` never meets a ``self.f()`` under ``if not self.flag``."""
        if call.func[0] != "a" or context.owner is None or not conditions:
            return False
        holds = dict(conditions)
        bound = excluded = 0
        for owner in self.program.mro(context.owner):
            for scope, guard, expr, line in self.program.scope(owner).attributes.get(call.func[2], ()):
                values = self.inference.evaluate(expr, self.inference.context((owner[0], scope), line, guard))
                if any(value[0] in "FB" and value[1] == candidate.ref for value in values):
                    bound += 1
                    chain = self.inference.chain(owner[0], guard)
                    excluded += any(test is not None and holds.get(test, told) != told for test, told in chain)
        return bound > 0 and bound == excluded

    def _method_platform(self, context: Context) -> str | None:
        """What the calling method is named after; ``cuda`` is what other platforms inherit."""
        named = platforms.of_method(self.program.scope((context.file, context.scope)).name)
        return named if named != "cuda" else None

    def platform_of(self, candidate: Candidate) -> str | None:
        if candidate.platform is not None:
            return candidate.platform
        ref = candidate.ref
        class_name = self.program.scope(ref).qualname.rpartition(".")[0]
        found = platforms.of_definition(self.program.files[ref[0]].parts, class_name)
        if found is None and candidate.owner is not None and candidate.owner != ref:
            owner = candidate.owner
            found = platforms.of_definition(self.program.files[owner[0]].parts, self.program.scope(owner).qualname)
        return found

    def rules_out(
        self, test: Expr, holds: bool, candidate: Candidate, call: Call, context: Context, mismatch: Mismatch
    ) -> bool:
        """Whether a condition around the call keeps it from reaching the candidate."""
        test = self._resolved_test(test, context)
        if test[0] == "!" and test[1]:
            return self.rules_out(test[1], not holds, candidate, call, context, mismatch)
        if test[0] == "=" and test[1] in ("In", "NotIn") and test[2][0] == "s" and asks_signature(test[3]):
            has = test[2][1] in (*candidate.signature.positional, *candidate.signature.kwonly)
            asked: bool = holds == (test[1] == "In")
            return has != asked
        if (test[0] == "&" and holds) or (test[0] == "V" and not holds):
            parts = tuple((part, holds) for part in test[1])
            return self._any_rules_out(parts, candidate, call, context, mismatch)
        if holds and mismatch.rejects and mentions(test, mismatch.unknown):
            return True
        if mismatch.rejects and asks_code(test, call.func):
            return True
        compared = self._comparison(test, candidate, call)
        if compared is not None and compared != holds:
            return True
        known = self._flag(test, candidate, call)
        return known is not None and known != holds

    def _resolved_test(self, test: Expr, context: Context) -> Expr:
        """A name in a condition stands for the comparison it was given."""
        for _ in range(_RESOLUTIONS):
            if test[0] == "n":
                replaced = self._local(test[1], context)
                if replaced is None or replaced[0] not in "=ac":
                    return test
                test = replaced
            elif test[0] == "=" and test[3][0] == "n":
                replaced = self._local(test[3][1], context)
                if replaced is None:
                    return test
                test = (*test[:3], replaced)
            elif test[0] == "=" and test[3][0] == "a" and test[3][1][0] == "n":
                replaced = self._local(test[3][1][1], context)
                if replaced is None:
                    return test
                test = (*test[:3], ("a", replaced, test[3][2]))
        return test

    def _local(self, name: str, context: Context) -> Expr | None:
        scopes = self.program.files[context.file].facts.scopes
        number = context.scope
        while number >= 0:
            bindings = scopes[number].bindings.get(name)
            if bindings:
                return bindings[0][2] if len(bindings) == 1 else None
            number = scopes[number].parent
        return None

    def _flag(self, test: Expr, candidate: Candidate, call: Call) -> bool | None:
        """The truth of ``receiver.flag`` or ``receiver.flag()`` where the candidate's class fixes it."""
        default: bool | None = None
        if test[0] == "c" and test[1] == ("n", "getattr") and len(test[2]) >= 2 and test[2][1] and test[2][1][0] == "s":
            owner_expr, name = test[2][0], test[2][1][1]
            if len(test[2]) > 2 and test[2][2] is not None and test[2][2][0] == "k":
                default = bool(test[2][2][1])
        elif test[0] == "c" and not test[2] and test[1][0] == "a":
            owner_expr, name = test[1][1], test[1][2]
        elif test[0] == "c" and test[1] == ("n", "hasattr") and test[2][1:] and test[2][1] and test[2][1][0] == "s":
            return self._has(test[2][0], test[2][1][1], candidate, call)
        elif test[0] == "a":
            owner_expr, name = test[1], test[2]
        else:
            return None
        if candidate.owner is None or call.func[0] != "a" or owner_expr != call.func[1]:
            return None
        return self._constant(candidate.owner, name, default)

    def _comparison(self, test: Expr, candidate: Candidate, call: Call) -> bool | None:
        """The truth of ``self.SIZE == 2`` where the candidate's class gives ``SIZE`` one plain value."""
        known = test[0] == "=" and test[1] in ("Eq", "NotEq") and test[2][0] == "a" and test[3][0] in "sk"
        if not known or candidate.owner is None or call.func[0] != "a" or test[2][1] != call.func[1]:
            return None
        if any(test[2][2] in self.program.scope(c).attributes for c in self.program.mro(candidate.owner)):
            return None
        members = self.program.members(candidate.owner, test[2][2])
        value = members[0].binding[2] if len(members) == 1 else None
        if value is None or value[0] != test[3][0]:
            return None
        return bool((value[1] == test[3][1]) == (test[1] == "Eq"))

    def _has(self, owner_expr: Expr | None, name: str, candidate: Candidate, call: Call) -> bool | None:
        if candidate.owner is None or call.func[0] != "a" or owner_expr != call.func[1]:
            return None
        if self.program.members(candidate.owner, name):
            return True
        assigned = any(name in self.program.scope(c).attributes for c in self.program.mro(candidate.owner))
        return True if assigned else (None if self.program.unknown_base(candidate.owner) else False)

    def _constant(self, owner: Ref, name: str, default: bool | None) -> bool | None:
        if any(name in self.program.scope(c).attributes for c in self.program.mro(owner)):
            return None
        members = self.program.members(owner, name)
        if not members:
            return default if not self.program.unknown_base(owner) else None
        if len(members) != 1 or members[0].binding[2] is None:
            return None
        value = members[0].binding[2]
        if value[0] == "k":
            return bool(value[1])
        if value[0] == "F":
            returned = self.program.scope((members[0].owner[0], value[1])).returns
            if len(returned) == 1 and returned[0][0] < 0 and returned[0][1] and returned[0][1][0] == "k":
                return bool(returned[0][1][1])
        return None
