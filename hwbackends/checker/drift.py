"""Drift mode: every call of the trees against every definition that it can reach, without a contract."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager

from . import workers
from .bind import Mismatch, Passed, leftover
from .confidence import Rejection, confidence
from .dispatch import Candidate, Dispatcher, Reach
from .doubts import Doubts
from .failures import Failures
from .findings import Finding, Place, ordinal
from .forwarding import Forwarding, Verdict
from .infer import Context, Inference, last_name, method_kind
from .likeness import comparable, lags, named, takes_anything
from .model import Call
from .origins import Origins
from .program import Program, Ref
from .progress import Progress
from .reachability import Reachability
from .rules import describe, rule_of
from .rules.hwb109 import Absent, settled
from .versions import Versions, asks_version

# A method name that is not everybody's: two words at least, and no dunder.
_TELLING = re.compile(r"^_?[a-zA-Z0-9]+_[a-zA-Z0-9_]*[a-zA-Z0-9]$")


_NAMED_MORE = 3  # of the further definitions that reject a call, in its message


class Drift:
    """Checks all calls of a program. Use :func:`check_drift`."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.failures = Failures()
        self.inference = Inference(program)
        self.inference.link_classes(self.failures)
        self.dispatcher = Dispatcher(self.inference)
        self.accepted: Counter[tuple[Ref, bool]] = Counter()  # by definition, and whether a module's dispatch led to it
        self.origins = Origins(self.dispatcher)
        self.versions = Versions(program)
        self.reachability = Reachability(self.dispatcher, self.origins)
        self.forwarding = Forwarding(self.dispatcher, self.reachability)
        self.doubts = Doubts(self.dispatcher, self.origins, self.versions, self.reachability)
        program.dead = self._dead_guards()
        self.absent = Absent(self.dispatcher, self.reachability.reachable)
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
                    self.forwarding.note(index, Call._make(raw))

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
        if self.reachability.catches_type_error(file, call.guard) or call.guard in self.program.dead.get(file, ()):
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
        verdicts = self.forwarding.verdicts(reach.candidates, passed, file, call, context)
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
            v
            for v in faulty
            if not v.target.stub and self.reachability.reachable(v.candidate, file, call, context, v.mismatch)
        ]
        accepting = tuple(
            v for v in verdicts if not (v.mismatch.rejects or v.mismatch.swallowed)
            and self.reachability.reachable(v.candidate, file, call, context, v.mismatch)
        )  # fmt: skip
        if all(self._says_nothing(v.target) for v in accepting):
            accepting = ()
        if all(v.mismatch.unknown and v.mismatch.missing and v.target.owner is not None for v in faulty):
            # Another protocol for all of them: what hands everything on would only hand it on to one of these.
            accepting = tuple(v for v in accepting if not takes_anything(v.target))
        # What the receiver is declared as rejects the call, and only something below accepts it: another receiver.
        own = any(v.candidate.declared for v in accepting)
        narrow = bool(accepting) and not own and any(v.candidate.declared for v in faulty)
        kin = [v for v in faulty if any(comparable(v.target, other.target) for other in accepting)]
        return [
            Rejection(file, call, v, accepting, self._rejecting(v, accepting, kin if v in kin else faulty, file),
                      reach.complete, reach.untyped,
                      self.reachability.platform_of(v.candidate) is not None,
                      narrow or self.doubts.doubtful(v, accepting, reach, call, passed, context),
                      self.divided(v, verdicts), self._replaces_a_method(v.target),
                      not self._on_self(call, context, v) and self.doubts.overrides(v.target, accepting),
                      self._one_name(call, context))
            for v in faulty
        ]  # fmt: skip

    def _rejecting(self, verdict: Verdict, accepting: tuple[Verdict, ...], like_it: list[Verdict], file: int) -> int:
        """How many reject a call as this one does: what shares little with those that accept speaks for itself.

        Where a plugin calls what it has of its own, of which another one accepts, the host's are not what it means.
        """
        home = self.program.package(file)
        own = [v for v in like_it if self.program.package(v.target.ref[0]) == home]
        meant = verdict in own and any(self.program.package(v.target.ref[0]) == home for v in accepting)
        return len(own if meant else like_it)

    def _says_nothing(self, target: Candidate) -> bool:
        """Whether a function takes anything and looks at nothing: a stand-in, for whatever is called otherwise."""
        signature = target.signature
        caught = {name for name in (signature.vararg, signature.kwarg) if name}
        if not caught or target.skip or named(signature, target.skip):
            return False
        return caught <= set(self.program.scope(target.ref).unread)

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

        def rank(other: Candidate) -> tuple[int, bool, Ref]:  # what is written there before what is put in its place
            assert other.owner is not None
            return order.index(other.owner), self._replaces_a_method(other), other.ref

        nearest = min(above, key=rank, default=None)
        return self.place(nearest.ref) if nearest is not None else None

    def place(self, ref: Ref) -> Place:
        scope = self.program.scope(ref)
        return Place(self.program.files[ref[0]].path, scope.line, scope.qualname)


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
