"""Drift mode: every call of the trees against every definition that it can reach, without a contract."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from typing import NamedTuple

from . import platforms, workers
from .bind import Leftover, Mismatch, Passed, bind, leftover
from .dispatch import Candidate, Dispatcher, Reach
from .elsewhere import Elsewhere
from .failures import Failures
from .findings import Finding, Place, ordinal
from .flags import Conditions
from .infer import Context, Inference, last_name, method_kind
from .model import Call, Expr, Signature
from .modules import Modules
from .origins import Origins
from .program import Program, Ref
from .progress import Progress
from .rules import describe, rule_of
from .rules.hwb109 import Absent, settled
from .typetests import asks_for_kind
from .versions import Versions, asks_version

# A method name that is not everybody's: two words at least, and no dunder.
_TELLING = re.compile(r"^_?[a-zA-Z0-9]+_[a-zA-Z0-9_]*[a-zA-Z0-9]$")


_NAMED_MORE = 3  # of the further definitions that reject a call, in its message


class Verdict(NamedTuple):
    """What one candidate says to one call; ``target`` is the definition that rejects (behind forwarders)."""

    candidate: Candidate
    target: Candidate
    mismatch: Mismatch

    @property
    def kind(self) -> tuple[Ref, bool]:
        """The definition, and whether a module's dispatch led to it: calls of both kinds are counted apart."""
        return self.target.ref, self.candidate.dispatched


class Rejection(NamedTuple):
    """A definition that rejects a call, among those that accept it and ``rejecting`` that do not."""

    file: int
    call: Call
    verdict: Verdict
    accepting: tuple[Verdict, ...]
    rejecting: int
    complete: bool
    untyped: bool  # the candidates were found by name alone
    hardware: bool  # the definition is written for one kind of hardware
    doubtful: bool  # the receiver is probably not what its declaration says
    divided: bool  # the same module, on another platform, accepts
    replaces: bool = False  # a function put in place of a method: it is meant for exactly these calls
    overrides: bool = False  # what the receiver is declared as accepts the call, and this definition overrides it
    alternatives: bool = False  # all candidates are what one imported name can stand for


class Drift:
    """Checks all calls of a program. Use :func:`check_drift`."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.failures = Failures()
        self.inference = Inference(program)
        self.inference.link_classes(self.failures)
        self.dispatcher = Dispatcher(self.inference)
        self.forwards: dict[Ref, list[Call]] = defaultdict(list)
        self.accepted: Counter[tuple[Ref, bool]] = Counter()  # by definition, and whether a module's dispatch led to it
        self.modules = Modules(self.dispatcher, self.forwards)
        self.elsewhere = Elsewhere(program, self.inference)
        self._verdicts: dict[tuple[object, ...], Verdict] = {}
        self._handed_to: dict[tuple[Ref, Ref | None, int], Reach | None] = {}
        self.origins = Origins(self.dispatcher)
        self.versions = Versions(program)
        program.dead = self._dead_guards()
        self.absent = Absent(self.dispatcher, self.reachable)
        self.lacking: dict[tuple[Ref, str], Finding] = {}
        self.bar: Progress | None = None
        self._index_calls()

    def _dead_guards(self) -> dict[int, frozenset[int]]:
        """The guards of each file under which other versions of the checked trees run."""
        found = {}
        for index, file in enumerate(self.program.files):
            if any(asks_version(test) for test, _, _ in file.facts.guards):
                guards = range(len(file.facts.guards))
                dead = (g for g in guards if self.versions.dead(self.inference.chain(index, g), index))
                found[index] = frozenset(dead)
        return {index: guards for index, guards in found.items() if guards}

    def _index_calls(self) -> None:
        for index, file in enumerate(self.program.files):
            for raw in file.facts.calls:
                func = raw[3]
                if func[0] == "a" and func[1][0] == "c" and func[1][1] == ("n", "super"):
                    self.dispatcher.note_super_call((index, raw[1]), func[2])
                if raw[6] is not None or raw[7] is not None:
                    call = Call._make(raw)
                    if self._forwards(index, call):
                        self.forwards[(index, call.scope)].append(call)

    def _forwards(self, file: int, call: Call) -> bool:
        """Whether a call hands on the ``*args`` or ``**kwargs`` of the function around it."""
        signature = self.program.scope((file, call.scope)).signature
        if signature is None:
            return False
        return bool((call.star and call.star == signature.vararg) or (call.kwstar and call.kwstar == signature.kwarg))

    # -- one call -----------------------------------------------------------------------------------------------

    def check(self, jobs: int = 1, bar: Progress | None = None) -> list[Finding]:
        """All calls; a rejection is weighed once all of them are known."""
        self.bar = bar
        rejections = self.collect(range(self.program.checked)) if jobs < 2 else self._collect_in_processes(jobs)
        sites: dict[tuple[Ref, bool], set[tuple[int, int]]] = defaultdict(set)
        for item in rejections:
            sites[item.verdict.kind].add((item.file, item.call.line))
        weighed = []
        for item in rejections:
            kind = item.verdict.kind
            with self._contained(item, "weighing a finding"):
                weighed.append((item, confidence(item, len(sites[kind]), self.accepted[kind])))
        return self.findings(self._thinned(weighed)) + settled(self.lacking) + self.failures.findings

    def _contained(self, item: Rejection, doing: str) -> AbstractContextManager[None]:
        return self.failures.contained(self.program.files[item.file].path, item.call.line, doing)

    def close(self) -> None:
        """End the circles of references: what was inferred is freed at once, without a walk of the collector."""
        vars(self.inference).clear()
        vars(self).clear()

    def collect(self, files: Iterable[int]) -> list[Rejection]:
        """The rejections of the calls in some files."""
        found: list[Rejection] = []
        for index in files:
            if self.bar is not None:
                self.bar.step("checking calls", index, self.program.checked)
            path = self.program.files[index].path
            for raw in self.program.files[index].facts.calls:
                try:
                    found += self.check_call(index, Call._make(raw))
                except Exception as error:
                    self.failures.add(path, raw[0], "checking a call", error)
        return found

    def _collect_in_processes(self, jobs: int) -> list[Rejection]:
        """Deal the files out to copies of this process; what each finds is put back in the order of the files."""
        global _shared
        _shared = self
        found: list[Rejection] = []
        try:
            with workers.pool(jobs - 1) as pool:
                parts = [pool.submit(_collect_part, number, jobs) for number in range(1, jobs)]
                found += self.collect(range(0, self.program.checked, jobs))
                for number, part in enumerate(parts, start=1):
                    try:
                        rejections, accepted, lacking, failed = part.result()
                    except BrokenProcessPool:  # a worker was killed, say for memory: its part is done here
                        found += self.collect(range(number, self.program.checked, jobs))
                        continue
                    found += rejections
                    self.failures.findings += failed
                    self.accepted.update(accepted)
                    self._miss(lacking)
        finally:
            _shared = None
        return sorted(found, key=lambda item: (item.file, item.call.line))

    def _miss(self, lacking: dict[tuple[Ref, str], Finding]) -> None:
        """Keep one call for each hook that a class lacks, the same one whatever process sees it first."""
        for key, finding in lacking.items():
            known = self.lacking.get(key)
            if known is None or finding.sort_key < known.sort_key:
                self.lacking[key] = finding

    def _thinned(self, weighed: list[tuple[Rejection, str]]) -> list[tuple[Rejection, str]]:
        """One call stands for all where a definition rejects many calls for the same reason."""
        groups: dict[tuple[object, ...], list[tuple[Rejection, str]]] = defaultdict(list)
        for item, level in weighed:
            groups[(item.verdict.kind, item.verdict.mismatch.unknown, level)].append((item, level))
        found = []
        for group in groups.values():
            if len(group) > 4 and group[0][1] != "low":
                group = sorted(group, key=lambda pair: self.program.files[pair[0].file].is_test)[:1]
            found += group
        return found

    def check_call(self, file: int, call: Call) -> list[Rejection]:
        if self.catches_type_error(file, call.guard) or call.guard in self.program.dead.get(file, ()):
            return []
        context = self.inference.context((file, call.scope), call.line, call.guard)
        reach = self._reach(call, context)
        self._miss(self.absent.of_call(file, call, context))
        if not reach.candidates and reach.untyped and call.func[0] == "a":
            reach = self.by_name(call, file, context)
        return self.rejections(file, call, context, reach) if reach.candidates else []

    def _reach(self, call: Call, context: Context) -> Reach:
        """What a call can run, in the class around it and in subclasses that hold other things than it does."""
        reach = self.dispatcher.reach(call, context)
        known = {candidate.ref for candidate in reach.candidates}
        found: dict[Ref, Candidate] = {}
        for owner in self.origins.rebinding(call, context):
            for candidate in self.dispatcher.reach(call, context._replace(owner=owner, exact=True)).candidates:
                if candidate.ref not in known:
                    found.setdefault(candidate.ref, candidate._replace(rebound=bool(known)))
        return reach._replace(candidates=reach.candidates + list(found.values())) if found else reach

    def by_name(self, call: Call, file: int, context: Context) -> Reach:
        """For a receiver of unknown type: every method of that name, where the name says enough by itself."""
        name, allows = call.func[2], self.inference.tests.allows(call.func[1], context)
        nothing = Reach([], False, True)
        if not _TELLING.match(name) or self.program.files[file].is_test:
            return nothing
        found = []
        for ref in self.program.methods_named.get(name, ()):
            scope = self.program.scope(ref)
            kind = method_kind(scope)
            if kind == "property":
                return nothing
            if scope.signature is None or self.program.files[ref[0]].is_test or self.dispatcher.changes_signature(ref):
                continue
            if self.program.is_replaced(ref):
                found += self.dispatcher.family(("I", (ref[0], scope.parent), True), name)
                continue
            owner = (ref[0], scope.parent)
            if allows is not None and not any(allows(below) for below in self.program.descendants(owner)):
                continue
            found.append(Candidate(ref, scope.signature, 0 if kind == "static" else 1, owner, scope.stub, exact=False))
        return Reach(found, False, True) if len(found) <= 60 else nothing

    def rejections(self, file: int, call: Call, context: Context, reach: Reach) -> list[Rejection]:
        passed = Passed(call.npos, call.keywords, call.star is not None, call.kwstar is not None)
        verdicts = self.verdicts(reach.candidates, passed, file, call, context)
        for verdict in verdicts:
            if not verdict.mismatch.rejects and not reach.untyped and not call.perhaps:
                self.accepted[verdict.kind] += 1
        verdicts += self.swallowing(verdicts, passed) if len(verdicts) > 1 and call.keywords else []
        faulty = [v for v in verdicts if v.mismatch.rejects or v.mismatch.swallowed]
        if call.perhaps:  # what else does not fit is said of the call without these
            faulty = [v for v in faulty if not v.mismatch.about.isdisjoint(call.perhaps)]
        if not faulty:
            return []
        faulty = [
            v for v in faulty if not v.target.stub and self.reachable(v.candidate, file, call, context, v.mismatch)
        ]
        accepting = tuple(
            v for v in verdicts if not (v.mismatch.rejects or v.mismatch.swallowed)
            and self.reachable(v.candidate, file, call, context, v.mismatch)
        )  # fmt: skip
        if all(self._says_nothing(v.target) for v in accepting):
            accepting = ()
        if all(v.mismatch.unknown and v.mismatch.missing and v.target.owner is not None for v in faulty):
            # Another protocol for all of them: what hands everything on would only hand it on to one of these.
            accepting = tuple(v for v in accepting if not _takes_anything(v.target))
        # What the receiver is declared as rejects the call, and only something below accepts it: another receiver.
        own = any(v.candidate.declared for v in accepting)
        narrow = bool(accepting) and not own and any(v.candidate.declared for v in faulty)
        return [
            Rejection(file, call, v, accepting, len(faulty), reach.complete, reach.untyped,
                      self.platform_of(v.candidate) is not None,
                      narrow or self.doubtful(v, accepting, reach, call, passed, context),
                      self.divided(v, verdicts), self._replaces_a_method(v.target),
                      not self._on_self(call, context, v) and self._overrides(v.target, accepting),
                      self._one_name(call, context))
            for v in faulty
        ]  # fmt: skip

    def _says_nothing(self, target: Candidate) -> bool:
        """Whether a function takes anything and looks at nothing: a stand-in, for whatever is called otherwise."""
        signature = target.signature
        caught = {name for name in (signature.vararg, signature.kwarg) if name}
        if not caught or target.skip or _named(signature, target.skip):
            return False
        return caught <= set(self.program.scope(target.ref).unread)

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
                if self.reachable(verdict.candidate, file, call, context, verdict.mismatch):
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

    def swallowing(self, verdicts: list[Verdict], passed: Passed) -> list[Verdict]:
        """Definitions whose unread ``**kwargs`` takes a keyword that a sibling, otherwise alike, names and reads."""
        found = []
        for verdict in verdicts:
            target = verdict.target
            scope = self.program.scope(target.ref)
            if verdict.mismatch.rejects or not target.signature.kwarg or target.signature.kwarg not in scope.unread:
                continue
            if len(target.signature.positional) - target.skip < 2:
                continue  # takes no part in what the hook is about
            lost = leftover(target.signature, passed, target.skip).keywords
            if lost and any(self._names(other, target, lost) for other in verdicts):
                found.append(verdict._replace(mismatch=Mismatch(swallowed=lost)))
        return found

    def _names(self, other: Verdict, target: Candidate, lost: tuple[str, ...]) -> bool:
        candidate = other.target
        if other.mismatch.rejects or candidate.ref == target.ref or candidate.owner is None or target.owner is None:
            return False
        if candidate.stub or (candidate.ref[0] == target.ref[0] and candidate.owner == target.owner):
            return False
        above = {(candidate.ref[0], self.program.scope(candidate.ref).parent)}
        if not above & set(self.program.mro(target.owner)):
            return False  # only what an override loses of what it overrides
        unread = self.program.scope(candidate.ref).unread
        return lags(target, candidate, set(lost)) and not set(lost) & set(unread)

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
        if self.versions.undecided(self.inference.chain(context.file, call.guard), context.file):
            return True
        if accepting and self.origins.picked_by_a_name(call, context):
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
            return self._hands_down(call, context, target) or self._strange(verdict, accepting)
        if not accepting and reach.opaque:
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
        hardware = self.platform_of(target) is not None
        if not hardware and self.program.scope((context.file, context.scope)).name == call.func[-1]:
            return True  # a wrapper hands on to what it holds, and holds only what takes that
        if self.program.scope(target.ref).name == "__init__" or self.program.scope(target.ref).kind == "c":
            held = call.func[0] == "a" and self._overrides(target, accepting)  # a field for classes of one base
            if not verdict.candidate.exact and not hardware and not held:
                return True  # constructors of a family need not agree
            rejected = len(reach.candidates) - len(accepting)
            return rejected > len(accepting) or (len(reach.candidates) > 2 and self._chosen_by_name(call, context))
        return False

    def _strange(self, verdict: Verdict, accepting: tuple[Verdict, ...]) -> bool:
        """Whether none of a definition's kin accepts what is passed, by name where names are passed."""
        unknown = set(verdict.mismatch.unknown)
        kin = [v.target for v in accepting if self.related(verdict.target, v.target)]
        knowing = (other for other in kin if not unknown or unknown & set(_named(other.signature, other.skip)))
        return bool(accepting) and not any(knowing)

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
            test is not None and _reads_attribute(test, receiver)
            for test, _ in self.inference.chain(context.file, call.guard)
        )

    def related(self, left: Candidate, right: Candidate) -> bool:
        """Whether two methods' classes share a class of the trees."""
        if left.owner is None or right.owner is None:
            return left.owner is right.owner
        return bool(set(self.program.mro(left.owner)) & set(self.program.mro(right.owner)))

    def divided(self, verdict: Verdict, verdicts: list[Verdict]) -> bool:
        """Whether a module, and no other is called, rejects on one platform what it accepts on another."""
        owner = verdict.candidate.owner
        if owner is None or not verdict.candidate.dispatched:
            return False
        same = all(v.candidate.dispatched and self.dispatcher.provides(owner, v.target.ref) for v in verdicts)
        return same and any(not v.mismatch.rejects for v in verdicts)

    def _replaces_a_method(self, target: Candidate) -> bool:
        scope = self.program.scope(target.ref)
        around = self.program.files[target.ref[0]].facts.scopes[scope.parent]
        return target.owner is not None and scope.kind == "f" and around.kind != "c"

    def _one_name(self, call: Call, context: Context) -> bool:
        """Whether a plain name is called that only imports and definitions of this file bind."""
        if call.func[0] != "n":
            return False
        scopes = self.program.files[context.file].facts.scopes
        number = context.scope
        while number >= 0 and call.func[1] not in scopes[number].bindings:
            number = scopes[number].parent
        bindings = scopes[number].bindings.get(call.func[1], ()) if number >= 0 else ()
        return bool(bindings) and all(value is not None and value[0] in "mF" for _, _, value in bindings)

    def _on_self(self, call: Call, context: Context, verdict: Verdict) -> bool:
        """Whether a method calls another one of its own object; what an attribute holds is another object."""
        scope = self.program.scope(verdict.target.ref)
        method = call.func[0] == "a" and scope.kind == "f" and scope.name not in ("__init__", "__new__")
        return method and self.dispatcher.self_function(call.func[1], context) is not None

    def _overrides(self, target: Candidate, accepting: tuple[Verdict, ...]) -> bool:
        """Whether a definition overrides one that the receiver is declared to have, and that takes the call."""
        if target.owner is None:
            return False
        order = self.program.mro(target.owner)
        return any(v.candidate.declared and not v.target.stub and v.target.owner in order for v in accepting)

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
            if ref in (target.ref, own) or scope.signature is None or _named(scope.signature, 1) == ():
                continue
            if not bind(scope.signature, passed, 1).rejects:
                return True
        return False

    def _chosen_by_name(self, call: Call, context: Context) -> bool:
        """Whether a string comparison around the call picks one class of a registry."""
        return any(
            test is not None and test[0] == "=" and _has_string(test)
            for test, _ in self.inference.chain(context.file, call.guard)
        )

    def verdict(self, candidate: Candidate, passed: Passed, depth: int = 0) -> Verdict:
        """Whether a candidate takes what is passed; remembered, because families are asked the same often."""
        mismatch = bind(candidate.signature, _with_prefix(candidate, passed), candidate.skip)
        if mismatch.rejects or depth > 3 or candidate.ref not in self.forwards:
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
        if not calls or scope.kwarg_edited or len(calls) > 3:
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
        if reach is None or not reach.candidates or not reach.complete or len(reach.candidates) > 12:
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
            test is not None and test[0] == "n" and given.get(test[1], holds) != holds
            for test, holds in self.inference.chain(candidate.ref[0], call.guard)
        )

    def _reach_behind(self, candidate: Candidate, call: Call) -> Reach | None:
        key = (candidate.ref, candidate.owner, id(call))
        if key not in self._handed_to:
            context = self.inference.context(candidate.ref, call.line, call.guard, candidate.owner)
            caught = self.catches_type_error(candidate.ref[0], call.guard)
            exact = context._replace(exact=candidate.owner is not None)
            self._handed_to[key] = None if caught else self.dispatcher.reach(call, exact)
        return self._handed_to[key]

    # -- reachability -------------------------------------------------------------------------------------------

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
        if mismatch.rejects and (
            self.elsewhere.imported_under_others(candidate, file, conditions)
            or self.elsewhere.only_called_on_others(platform, context)
            or self._handed_over_elsewhere(candidate, call, context, mismatch)
        ):
            return False
        conditions += self.elsewhere.implied(conditions, context) if mismatch.rejects else ()
        return not self._any_rules_out(conditions, candidate, call, context, mismatch)

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
            for scope, guard, expr in self.program.scope(owner).attributes.get(call.func[2], ()):
                values = self.inference.evaluate(expr, self.inference.context((owner[0], scope), 1 << 30, guard))
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
        if test[0] == "=" and test[1] in ("In", "NotIn") and test[2][0] == "s" and _asks_signature(test[3]):
            has = test[2][1] in (*candidate.signature.positional, *candidate.signature.kwonly)
            asked: bool = holds == (test[1] == "In")
            return has != asked
        if (test[0] == "&" and holds) or (test[0] == "V" and not holds):
            parts = tuple((part, holds) for part in test[1])
            return self._any_rules_out(parts, candidate, call, context, mismatch)
        if holds and mismatch.rejects and _mentions(test, mismatch.unknown):
            return True
        known = self._flag(test, candidate, call)
        return known is not None and known != holds

    def _resolved_test(self, test: Expr, context: Context) -> Expr:
        """A name in a condition stands for the comparison it was given."""
        for _ in range(3):
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

    # -- findings -----------------------------------------------------------------------------------------------

    def findings(self, weighed: list[tuple[Rejection, str]]) -> list[Finding]:
        """One finding for a definition and a call; one for the call where many definitions, or a guess, reject it."""
        grouped: dict[tuple[object, ...], list[tuple[Rejection, str]]] = defaultdict(list)
        for item, level in weighed:
            alone = () if item.untyped or item.rejecting > 6 else (item.verdict.target.ref,)
            grouped[(item.file, item.call.line, item.call.func, level, *alone)].append((item, level))
        found: list[Finding] = []
        for group in grouped.values():
            with self._contained(group[0][0], "writing a finding"):
                found.append(self.finding([item for item, _ in group], group[0][1]))
        return found

    def finding(self, items: list[Rejection], confidence: str) -> Finding:
        item = items[0]
        mismatch, target = item.verdict.mismatch, item.verdict.target
        missing = missing_names(mismatch, target, item.call, [v.target for v in item.accepting])
        rule = rule_of(mismatch, bool(item.accepting))
        definition = self.place(target.ref)
        place = Place(self.program.files[item.file].path, item.call.line)
        also = tuple(dict.fromkeys(self.place(other.verdict.target.ref) for other in items[1:]))
        message = describe(rule, definition, place, mismatch, missing, last_name(item.call.func))
        if also:
            shown = ", ".join(f"{p.name} ({p.file}:{p.line})" for p in also[:_NAMED_MORE])
            rest = f" and {len(also) - _NAMED_MORE} others" if len(also) > _NAMED_MORE else ""
            message += f" {len(also)} more reject this call: {shown}{rest}."
        accepts = self._overridden(target, item.accepting)
        return Finding(rule, "error", confidence, message, missing, definition, place, also, accepts)

    def _overridden(self, target: Candidate, accepting: tuple[Verdict, ...]) -> Place | None:
        """The nearest definition above that takes the call."""
        order = self.program.mro(target.owner) if target.owner is not None else ()
        above = [v.target for v in accepting if v.target.owner in order and v.target.ref != target.ref]
        nearest = min(above, key=lambda other: order.index(other.owner), default=None)
        return self.place(nearest.ref) if nearest is not None else None

    def place(self, ref: Ref) -> Place:
        scope = self.program.scope(ref)
        return Place(self.program.files[ref[0]].path, scope.line, scope.qualname)


def _with_prefix(candidate: Candidate, passed: Passed) -> Passed:
    prefix = candidate.prefix
    if prefix == Passed(0, ()):
        return passed
    keywords = tuple(dict.fromkeys((*passed.keywords, *prefix.keywords)))
    return Passed(passed.npos + prefix.npos, keywords, passed.star or prefix.star, passed.kwstar or prefix.kwstar)


def confidence(item: Rejection, sites: int, accepted: int) -> str:
    """How likely a rejection is a fault; what stands behind a base or decorator out of sight is never certain."""
    level = _confidence(item, sites, accepted)
    certain = _in_sight(item) and not item.call.perhaps  # a keyword under a condition may be meant for some only
    return "medium" if level == "high" and not certain else level


def _in_sight(item: Rejection) -> bool:
    return item.verdict.candidate.sure and item.verdict.target.sure


def _confidence(item: Rejection, sites: int, accepted: int) -> str:
    """How likely a rejection is a fault and not a second protocol under one name.

    Drift leaves a definition that resembles its siblings and rejects few calls; a protocol of its own has other
    parameters, or is rejected by most calls of the name because those never reach it.
    """
    if item.doubtful or set(item.verdict.mismatch.unknown) & set(item.verdict.target.prefix.keywords):
        return "low"
    if not item.accepting:
        if item.untyped:
            return "medium" if sites < 3 and item.rejecting > 1 and _mostly_known(item) else "low"
        if not _in_sight(item):
            return "low"
        return "high" if item.complete else "medium"
    if item.divided:
        return "high" if item.complete else "medium"
    if item.untyped and item.verdict.mismatch.excess:
        return "low"  # two methods of one name that count their arguments differently: nothing says they are one
    target, unknown = item.verdict.target, set(item.verdict.mismatch.unknown)
    behind = not item.verdict.mismatch.missing and any(lags(target, o.target, unknown) for o in item.accepting)
    outnumbered = len(item.accepting) >= 3 * item.rejecting
    # The alternatives of one import, of which one lags by exactly what is passed: each of its callers meets it.
    if behind and item.alternatives:
        return "high" if item.complete else "medium"
    if sites > 4 and not item.replaces and not (behind and outnumbered and (item.hardware or accepted >= sites)):
        return "low"
    few = accepted < (1 if behind else sites) and not item.replaces
    if sites > 2 and few and not (behind and item.hardware):
        return "low"
    if item.verdict.mismatch.swallowed:
        return "medium"
    if behind:
        return "high" if item.complete else "medium"
    # An override answers to its base, whatever else it is called with.
    answers = item.overrides and 2 * item.rejecting <= len(item.accepting) + 1
    another = "medium" if answers and item.verdict.mismatch.unknown else "low"
    if item.verdict.mismatch.excess > 2:
        return another
    declared = [other for other in item.accepting if other.candidate.declared]
    likeness = max(similarity(target, other.target) for other in declared or item.accepting)
    if likeness < (0.6 if _renamed(item) else 0.5) or (item.rejecting > 3 and item.rejecting > len(item.accepting)):
        return another
    return "high" if item.complete and likeness >= 0.6 else "medium"


def _renamed(item: Rejection) -> bool:
    """Whether the definition has other names for what is passed: some unknown to it, and some required by it."""
    target = item.verdict.target
    passed = Passed(item.call.npos, item.call.keywords, item.call.star is not None)
    return bool(item.verdict.mismatch.unknown and bind(target.signature, passed, target.skip).missing)


def _takes_anything(target: Candidate) -> bool:
    """Whether a method has no parameter but ``*args`` or ``**kwargs``."""
    signature = target.signature
    return target.owner is not None and bool(signature.vararg or signature.kwarg) and not _named(signature, target.skip)


def _named(signature: Signature, skip: int) -> tuple[str, ...]:
    return signature.positional[skip:] + signature.kwonly


def _mostly_known(item: Rejection) -> bool:
    """Whether the call seems to know the definition: by two keywords, more than do not fit, or by all its positions."""
    signature = item.verdict.target.signature
    known = set(item.call.keywords) & {*signature.positional, *signature.kwonly}
    amiss = len(item.verdict.mismatch.unknown) + len(item.verdict.mismatch.missing)
    return len(known) > max(1, amiss) or _same_names(item)


def _same_names(item: Rejection) -> bool:
    """Whether what is passed by position is called there what the definition calls it, and nothing is too much."""
    target, call = item.verdict.target, item.call
    own = target.signature.positional[target.skip :]
    fits = not item.verdict.mismatch.unknown and not item.verdict.mismatch.excess
    return fits and call.npos > 0 and call.argnames == own[: call.npos]


def lags(behind: Candidate, ahead: Candidate, unknown: set[str]) -> bool:
    """Whether one definition is the other without exactly the keywords that a call passes: it missed a change."""
    a = {*behind.signature.positional[behind.skip :], *behind.signature.kwonly}
    b = {*ahead.signature.positional[ahead.skip :], *ahead.signature.kwonly}
    return bool(unknown) and a | unknown == b


def similarity(left: Candidate, right: Candidate) -> float:
    """Shared parameter names over all parameter names, receivers aside."""
    a = {*left.signature.positional[left.skip :], *left.signature.kwonly}
    b = {*right.signature.positional[right.skip :], *right.signature.kwonly}
    return len(a & b) / len(a | b) if a | b else 1.0


def missing_names(mismatch: Mismatch, target: Candidate, call: Call, accepting: list[Candidate]) -> tuple[str, ...]:
    """The names that do not fit; a surplus position is named after the parameter that another definition has there."""
    names = [*mismatch.unknown, *mismatch.missing, *mismatch.twice, *mismatch.swallowed]
    own = (*target.signature.positional, *target.signature.kwonly)
    for position in range(call.npos - mismatch.excess, call.npos):
        if position < 0:  # a method without a first parameter is handed its receiver all the same
            names.append("its receiver (as 1st positional)")
            continue
        name = next(
            (c.signature.positional[position + c.skip] for c in accepting
             if position + c.skip < len(c.signature.positional)), None
        )  # fmt: skip
        if name is None and position < len(call.argnames) and call.argnames[position] not in own:
            name = call.argnames[position]
        place = f"{ordinal(position + 1)} positional"
        names.append(f"{name} ({place})" if name else place)
    return tuple(names)


def _asks_signature(expr: Expr | None) -> bool:
    """``inspect.signature(f).parameters``, also through ``set(...)``, ``.keys()`` or ``getfullargspec``."""
    if expr is None or expr[0] not in "acin":
        return False
    if expr[0] == "c":
        name = last_name(expr[1])
        if name in ("signature", "getfullargspec", "_signature"):
            return True
        inner = [expr[1], *expr[2]]
        return any(_asks_signature(item) for item in inner)
    return expr[0] in "ai" and _asks_signature(expr[1])


_ASKS_NOTHING = frozenset({"isinstance", "type", "issubclass", "len", "bool", "id", "callable", "hasattr"})


def _reads_attribute(test: Expr, receiver: Expr) -> bool:
    """``receiver.kind == ...`` and ``receiver.can_x()``, but not ``receiver is not None`` or ``isinstance``."""
    if test[0] == "a" and test[1] == receiver:
        return True
    if test[0] == "c" and test[3]:
        if (test[1][0] != "n" or test[1][1] not in _ASKS_NOTHING) and receiver in test[2]:
            return True  # a question about the receiver: shards(allocator) > 1
        return any(_reads_attribute(arg, receiver) for arg in test[2] if arg is not None and arg[0] != "n")
    return any(_reads_attribute(part, receiver) for part in _parts(test))


def _has_string(test: Expr) -> bool:
    return test[0] == "s" or any(_has_string(part) for part in _parts(test))


def _mentions(test: Expr, names: tuple[str, ...]) -> bool:
    """Whether a condition holds one of these keywords as a string: some check of what the callee accepts."""
    if test[0] == "s":
        return test[1] in names
    return any(_mentions(part, names) for part in _parts(test))


def _parts(test: Expr) -> Iterator[Expr]:
    for item in test[1:]:
        if isinstance(item, tuple) and item and isinstance(item[0], str):
            yield item
        elif isinstance(item, tuple):
            yield from (part for part in item if isinstance(part, tuple) and part)


_Part = tuple[list[Rejection], Counter[tuple[Ref, bool]], dict[tuple[Ref, str], Finding], list[Finding]]
# The checker whose copies the workers are.
_shared: Drift | None = None
_WORTH_FORKING = 20_000


def _collect_part(number: int, jobs: int) -> _Part:
    assert _shared is not None
    _shared.bar = None  # one process draws
    rejections = _shared.collect(range(number, _shared.program.checked, jobs))
    return rejections, _shared.accepted, _shared.lacking, _shared.failures.findings


def check_drift(program: Program, jobs: int = 1, bar: Progress | None = None) -> list[Finding]:
    """All findings of drift mode, in order of place."""
    large = sum(len(file.facts.calls) for file in program.files) > _WORTH_FORKING
    drift = Drift(program)
    findings = drift.check(jobs if large and workers.can_fork() else 1, bar)
    drift.close()
    found = {finding.sort_key: finding for finding in findings}
    return [found[key] for key in sorted(found, key=repr)]
