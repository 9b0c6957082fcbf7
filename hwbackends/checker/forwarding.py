"""What a definition says to a call, followed through everything that hands ``*args`` and ``**kwargs`` on."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from .bind import Leftover, Mismatch, Passed, bind, leftover
from .dispatch import Candidate, Dispatcher, Reach
from .infer import Context, names_in
from .model import Call
from .modules import Modules
from .program import Ref
from .reachability import Reachability
from .typetests import asks_for_kind

_LONGEST_CHAIN = 3  # forwarders behind each other
_MOST_CALLS = 3  # forwarded calls in one definition
_MOST_BEHIND = 12  # definitions that one forwarded call can run


class Verdict(NamedTuple):
    """What one candidate says to one call; ``target`` is the definition that rejects (behind forwarders)."""

    candidate: Candidate
    target: Candidate
    mismatch: Mismatch

    @property
    def kind(self) -> tuple[Ref, bool]:
        """The definition, and whether a module's dispatch led to it: calls of both kinds are counted apart."""
        return self.target.ref, self.candidate.dispatched


class Forwarding:
    """Binds calls to candidates. Remembers verdicts, because families are asked the same often."""

    def __init__(self, dispatcher: Dispatcher, reachability: Reachability) -> None:
        self.dispatcher = dispatcher
        self.inference = dispatcher.inference
        self.program = dispatcher.program
        self.reachability = reachability
        self.forwards: dict[Ref, list[Call]] = defaultdict(list)
        self.modules = Modules(dispatcher, self.forwards)
        self._verdicts: dict[tuple[object, ...], Verdict] = {}
        self._handed_to: dict[tuple[Ref, Ref | None, int], Reach | None] = {}

    def note(self, file: int, call: Call) -> None:
        """Keep a call that hands on the ``*args`` or ``**kwargs`` of the function around it."""
        signature = self.program.scope((file, call.scope)).signature
        if signature is None:
            return
        if (call.star and call.star == signature.vararg) or (call.kwstar and call.kwstar == signature.kwarg):
            self.forwards[(file, call.scope)].append(call)

    def verdicts(
        self, candidates: list[Candidate], passed: Passed, file: int, call: Call, context: Context
    ) -> list[Verdict]:
        """What each candidate says; instead of a module's ``forward``, each platform's definition behind it."""
        found: list[Verdict] = []
        behind: dict[Ref, Verdict] = {}
        for candidate in candidates:
            ways = self.modules.behind(candidate) if candidate.modules else []
            if not ways and not candidate.dispatched:
                found.append(self.verdict(candidate, passed))
                continue
            onward = self._handed_on(candidate, passed) if ways else passed
            if onward is None:
                found.append(self.verdict(candidate, passed))
                continue
            for way in ways or self.modules.direct(candidate):
                verdict = self.verdict(way.landing, onward)._replace(candidate=way.via._replace(exact=candidate.exact))
                if self.reachability.reachable(verdict.candidate, file, call, context, verdict.mismatch):
                    behind.setdefault(way.landing.ref, verdict)
        return found + list(behind.values())

    def _handed_on(self, forward: Candidate, passed: Passed) -> Passed | None:
        """What a ``forward`` hands on of a call; None where it does not take the call itself."""
        given = _with_prefix(forward, passed)
        if bind(forward.signature, given, forward.skip).rejects:
            return None
        rest = leftover(forward.signature, given, forward.skip)
        popped = self.program.scope(forward.ref).kwarg_popped
        return Passed(rest.npos, tuple(k for k in rest.keywords if k not in popped), passed.star, passed.kwstar)

    def verdict(self, candidate: Candidate, passed: Passed, depth: int = 0) -> Verdict:
        """Whether a candidate takes what is passed; remembered, because families are asked the same often."""
        mismatch = bind(candidate.signature, _with_prefix(candidate, passed), candidate.skip)
        if mismatch.rejects or depth > _LONGEST_CHAIN or candidate.ref not in self.forwards:
            return Verdict(candidate, candidate, mismatch)
        key = (candidate.ref, candidate.skip, candidate.owner, candidate.prefix, passed)
        known = self._verdicts.get(key)
        if known is None:
            self._verdicts[key] = known = Verdict(candidate, candidate, mismatch)  # where forwarders form a circle
            known = self._forwarded(candidate, _with_prefix(candidate, passed), depth) or known
            self._verdicts[key] = known
        return known

    def _forwarded(self, candidate: Candidate, passed: Passed, depth: int) -> Verdict | None:
        """Follow ``*args, **kwargs`` to what they are handed to; None where that accepts or cannot be seen."""
        calls = self.forwards.get(candidate.ref)
        scope = self.program.scope(candidate.ref)
        if not calls or scope.kwarg_edited or len(calls) > _MOST_CALLS:
            return None
        rest = leftover(candidate.signature, passed, candidate.skip)
        rejected: Verdict | None = None
        for call in calls:
            verdict = self._forwarded_call(candidate, call, rest, passed, scope.kwarg_popped, depth)
            if verdict is None:
                return None
            rejected = rejected or verdict
        return rejected

    def _forwarded_call(
        self, candidate: Candidate, call: Call, rest: Leftover, passed: Passed, popped: tuple[str, ...], depth: int
    ) -> Verdict | None:
        if self._tested_before(candidate, call) or self._asks_for_arguments(candidate, call, rest):
            return None
        signature = candidate.signature
        positional = rest.npos if call.star == signature.vararg and call.star else 0
        handed = tuple(k for k in rest.keywords if k not in popped) if call.kwstar == signature.kwarg else ()
        unknown_star = call.star is not None and (call.star != signature.vararg or passed.star)
        unknown_kwstar = call.kwstar is not None and (call.kwstar != signature.kwarg or passed.kwstar)
        onward = Passed(call.npos + positional, call.keywords + handed, unknown_star, unknown_kwstar)
        reach = self._reach_behind(candidate, call)
        if reach is None or not reach.candidates or not reach.complete or len(reach.candidates) > _MOST_BEHIND:
            return None
        verdicts = [self.verdict(c, onward, depth + 1) for c in reach.candidates]
        if all(v.mismatch.rejects and not v.target.stub for v in verdicts):
            return verdicts[0]._replace(candidate=candidate)
        return None

    def _tested_before(self, candidate: Candidate, call: Call) -> bool:
        """Whether a forwarder asks first what it was given: ``if isinstance(x, A): return g(*args, **kwargs)``."""
        conditions = self.inference.chain(candidate.ref[0], call.guard)
        return any(asks_for_kind(test) for test, _ in conditions)

    def _asks_for_arguments(self, candidate: Candidate, call: Call, rest: Leftover) -> bool:
        """``if args: return g(*args)`` is not reached without any; ``if not args:`` not with some."""
        given = {candidate.signature.vararg: rest.npos > 0, candidate.signature.kwarg: bool(rest.keywords)}
        return any(
            given.get(test[1], holds) != holds if test[0] == "n" else not names_in(test).isdisjoint(given)
            for test, holds in self.inference.chain(candidate.ref[0], call.guard)
            if test is not None
        )

    def _reach_behind(self, candidate: Candidate, call: Call) -> Reach | None:
        key = (candidate.ref, candidate.owner, id(call))
        if key not in self._handed_to:
            context = self.inference.context(candidate.ref, call.line, call.guard, candidate.owner)
            caught = self.reachability.catches_type_error(candidate.ref[0], call.guard)
            exact = context._replace(exact=candidate.owner is not None)
            self._handed_to[key] = None if caught else self.dispatcher.reach(call, exact)
        return self._handed_to[key]


def _with_prefix(candidate: Candidate, passed: Passed) -> Passed:
    prefix = candidate.prefix
    if prefix == Passed(0, ()):
        return passed
    keywords = tuple(dict.fromkeys((*passed.keywords, *prefix.keywords)))
    return Passed(passed.npos + prefix.npos, keywords, passed.star or prefix.star, passed.kwstar or prefix.kwstar)
