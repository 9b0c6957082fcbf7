"""Contract mode: every definition and every call of the hooks that a YAML file names, against that file."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hwbackends.contract import source
from hwbackends.contract.model import Contracts, Hook, Parameter
from hwbackends.contract.signatures import Definition, compare, inspected, unknown_hook, unmarked_hook
from hwbackends.contract.signatures import Drift as Contradiction

from .bind import Mismatch, Passed, bind
from .dispatch import Candidate
from .drift import Drift, missing_names
from .findings import Finding, Place
from .forwarding import Verdict
from .infer import last_name, method_kind, unwrapped
from .model import Call, Expr, Scope, Signature
from .program import Program, Ref
from .rules import describe

_MARKS = frozenset({"hookimpl", "hookspec"})
_RULES = {
    "missing": "HWB101",
    "renamed": "HWB101",
    "positional-only": "HWB101",
    "extra-required": "HWB102",
    "lost-default": "HWB102",
    "order": "HWB103",
    "keyword-only": "HWB103",
    "other-default": "HWB104",
}
"""Rules of the kinds of drift; the others, which would hide one, are HWB110."""


def pattern(contracts: Contracts) -> re.Pattern[bytes]:
    """Matches every file that can hold a definition or a call."""
    return re.compile(b"|".join(re.escape(name.encode()) for name in sorted(contracts.hooks, key=len)))


def _signature(hook: Hook) -> Signature:
    """What callers may pass, as a definition would say it."""
    defaults = {p.name: _default(p) or "..." for p in hook.parameters if p.omittable}
    return Signature((), tuple(p.name for p in hook.parameters), (), defaults, None, None)


def _default(parameter: Parameter) -> str | None:
    return None if parameter.required else repr(parameter.default)


def _distinctive(hook: Hook) -> bool:
    """Whether the name alone tells that a function is meant as this hook."""
    return hook.name.count("_") >= 2 or len(hook.name) >= 16


class _Definition(NamedTuple):
    hook: Hook
    candidate: Candidate


class ContractCheck:
    """Checks a program against one contract. Use :func:`check_contract`."""

    def __init__(self, program: Program, contract: Contracts) -> None:
        self.program = program
        self.contract = contract
        self.drift = Drift(program)
        self.calls: dict[str, list[tuple[int, Call]]] = defaultdict(list)
        self._trees: dict[int, ast.Module] = {}
        self.marked = {
            scope.name
            for file in program.files
            for scope in file.facts.scopes
            if scope.name in contract.hooks and any(last_name(d) in _MARKS for d in scope.decorators)
        }
        self.marked |= {hook.name for hook, *_ in self._marked_assignments()}
        for index, file in enumerate(program.files):
            for raw in file.facts.calls:
                name = last_name(raw[3]) if raw[3][0] in "na" else ""
                if name in contract.hooks:
                    self.calls[name].append((index, Call._make(raw)))

    def check(self) -> Iterator[Finding]:
        for definition in self.definitions():
            yield from self.check_definition(definition)
        yield from self.plugins()
        for name, calls in self.calls.items():
            hook = self.contract.hooks[name]
            for file, call in calls:
                if self._is_hook_call(hook, file, call):
                    yield from self.check_call(hook, file, call)
        yield from self.absent()

    # -- definitions --------------------------------------------------------------------------------------------

    def definitions(self) -> Iterator[_Definition]:
        """Functions that are meant as a hook: by name in a class, by mark or company in a module, by assignment."""
        seen: set[tuple[Ref, str]] = set()
        for index, file in enumerate(self.program.files):
            for number, scope in enumerate(file.facts.scopes):
                hook = self.contract.hooks.get(scope.name)
                if hook is None or self.program.is_replaced((index, number)):
                    continue
                if scope.signature is not None and self._meant(hook, index, scope):
                    seen.add(((index, number), hook.name))
                    yield _Definition(hook, self._candidate((index, number), scope))
        for hook, candidate in self._assigned():
            if (candidate.ref, hook.name) not in seen:
                seen.add((candidate.ref, hook.name))
                yield _Definition(hook, candidate)

    def _candidate(self, ref: Ref, scope: Scope) -> Candidate:
        around = self.program.scope((ref[0], scope.parent))
        in_class = around.kind == "c"
        skip = 1 if in_class and method_kind(scope) != "static" else 0
        assert scope.signature is not None
        return Candidate(ref, scope.signature, skip, (ref[0], scope.parent) if in_class else None, scope.stub)

    def _meant(self, hook: Hook, file: int, scope: Scope) -> bool:
        """Whether a function is an implementation: marked where the trees mark theirs, else a method of that name."""
        if method_kind(scope) == "property" or any(last_name(d) == "fixture" for d in scope.decorators):
            return False
        if any(last_name(d) in _MARKS for d in scope.decorators):
            return True
        around = self.program.files[file].facts.scopes[scope.parent]
        if hook.name in self.marked or around.kind != "c":
            return False  # a plain function of that name is a helper
        return _distinctive(hook) or sum(name in around.bindings for name in self.contract.hooks) > 1

    def _marked_assignments(self) -> Iterator[tuple[Hook, Ref, int, int, Expr]]:
        """``hook = hookimpl(function)`` in a module: the hook, the module, line and guard, and the function."""
        for index, file in enumerate(self.program.files):
            bindings = file.facts.scopes[0].bindings
            for name in self.contract.hooks.keys() & bindings.keys():
                for line, guard, value in bindings[name]:
                    if value is not None and value[0] == "c" and value[2] and last_name(value[1]) in _MARKS:
                        yield self.contract.hooks[name], (index, 0), line, guard, value[2][0]

    def _assigned(self) -> Iterator[tuple[Hook, Candidate]]:
        """``hook = hookimpl(function)``, ``Class.hook = function``, ``hook = other`` in a class body, ``setattr`` and
        ``type(...)``."""
        inference = self.drift.inference
        for marked, ref, line, guard, function in self._marked_assignments():
            for item in inference.evaluate(function, inference.context(ref, line, guard)):
                yield from self._from_value(marked, item, False)
        for index, file in enumerate(self.program.files):
            for scope, guard, owner, name, assigned, _ in file.facts.patches:
                hook = self.contract.hooks.get(name)
                value, descriptor = unwrapped(assigned)
                if hook is not None and value is not None:
                    bound = descriptor != "staticmethod" and not self._is_instance(index, scope, owner)
                    for item in inference.evaluate(value, inference.context((index, scope), guard=guard)):
                        yield from self._from_value(hook, item, bound)
            for number, found in enumerate(file.facts.scopes):
                if found.kind == "c":
                    for name in self.contract.hooks.keys() & found.bindings.keys():
                        yield from self._from_body(self.contract.hooks[name], (index, number), found)
                    for name in self.contract.hooks.keys() & found.attributes.keys():
                        for place, guard, value, _ in found.attributes[name]:
                            for item in inference.evaluate(value, inference.context((index, place), guard=guard)):
                                yield from self._from_value(self.contract.hooks[name], item, False)

    def _from_body(self, hook: Hook, ref: Ref, scope: Scope) -> Iterator[tuple[Hook, Candidate]]:
        for line, guard, value in scope.bindings[hook.name]:
            if value is not None and value[0] not in "FKmpT":
                context = self.drift.inference.context(ref, line, guard)
                for item in self.drift.inference.evaluate(value, context):
                    yield from self._from_value(hook, item, True)

    def _from_value(self, hook: Hook, value: tuple[Any, ...], bound: bool) -> Iterator[tuple[Hook, Candidate]]:
        if value[0] not in "FBP":
            return
        for candidate in self.drift.dispatcher.callable(value):
            plain = candidate.skip == 0 and candidate.owner is None
            yield hook, candidate._replace(skip=1 if bound and plain else candidate.skip)

    def _is_instance(self, file: int, scope: int, owner: tuple[Any, ...]) -> bool:
        if owner == ("?",):
            return False
        values = self.drift.inference.evaluate(owner, self.drift.inference.context((file, scope)))
        return not any(value[0] == "C" for value in values)

    def check_definition(self, definition: _Definition) -> Iterator[Finding]:
        hook, candidate = definition
        described = self._described(candidate) if hook.closed else None
        if described is not None:
            yield from self._drifts(compare(hook, described), self.drift.place(candidate.ref))
            yield from self._unread(hook, candidate, {p.name for p in described.parameters})
            return
        renamed = self._renamed(hook, candidate)
        accepted = {*candidate.signature.positional[candidate.skip :], *candidate.signature.kwonly}
        verdict = self._all_keywords(hook, candidate, renamed)
        lacking = verdict.mismatch.unknown or self._lost(hook, candidate, renamed)
        if lacking:
            yield self._definition_finding("HWB101", hook, verdict.target, Mismatch(unknown=lacking), lacking)
        demanded = self._demanded(hook, candidate, renamed)
        if demanded:
            yield self._definition_finding("HWB102", hook, candidate, Mismatch(missing=demanded), demanded)
        if not lacking and not demanded:
            yield from self._order(hook, candidate, renamed)
        yield from self._defaults(hook, candidate)
        yield from self._unread(hook, candidate, accepted)

    # -- definitions of a contract that names every parameter: the registry's comparison --------------------------

    def _described(self, candidate: Candidate) -> Definition | None:
        """A definition as the registry would see it; None for what is not written as a function."""
        scope, path = self.program.scope(candidate.ref), self.program.files[candidate.ref[0]].path
        node = source.node_at(self._tree(candidate.ref[0]), scope.line, scope.name)
        if node is None:
            return None
        described = source.described(node, self._tree(candidate.ref[0]), path, candidate.skip)
        return source.bound(described, candidate.prefix.npos, candidate.prefix.keywords)

    def _tree(self, index: int) -> ast.Module:
        if index not in self._trees:
            self._trees[index] = ast.parse(Path(self.program.files[index].path).read_bytes())
        return self._trees[index]

    def _drifts(self, drifts: Iterable[Contradiction], place: Place) -> Iterator[Finding]:
        """A finding for each way in which a definition differs from its hook."""
        for drift in drifts:
            rule = _RULES.get(drift.kind, "HWB110")
            where = f"{place.name} ({place.file}:{place.line})"
            message = f"{where}, hook {drift.hook}: {drift.message}. Fix: define it as the contract does."
            yield Finding(rule, "error", "high", message, drift.parameters or (drift.hook,), place, None)

    def plugins(self) -> Iterator[Finding]:
        """What the registry refuses of a module that marks hooks: unknown names, functions without the mark, and names
        that are bound to no function."""
        hooks = self.contract.hooks
        if not all(hook.closed for hook in hooks.values()):
            return
        for index, file in enumerate(self.program.files):
            if not any(last_name(d) == "hookimpl" for scope in file.facts.scopes for d in scope.decorators):
                continue
            found = list(source.bindings(self._tree(index)))
            if sum(binding.marked for binding in found) > 1:
                for binding in found:
                    place = Place(file.path, binding.line, binding.hook)
                    yield from self._drifts(self._binding_drifts(binding, index, [b.hook for b in found]), place)

    def _binding_drifts(self, binding: source.Marked, index: int, bound: list[str]) -> Iterator[Contradiction]:
        hook = self.contract.hooks.get(binding.hook)
        tree, path = self._tree(index), self.program.files[index].path
        described = None if binding.function is None else source.described(binding.function, tree, path)
        if hook is None:
            if binding.marked and described is not None:
                yield unknown_hook(binding.hook, described, list(self.contract.hooks))
        elif described is not None and not binding.marked:
            yield unmarked_hook(hook, described)
        elif described is not None and binding.function is not None and binding.function.name != hook.name:  # type: ignore[union-attr]
            yield from compare(hook, described)
        elif isinstance(binding.value, ast.Constant) and bound.count(hook.name) == 1:
            yield from compare(hook, inspected(binding.value.value))

    # -- definitions of somebody else's hooks: what callers pass must be taken -------------------------------------

    def _renamed(self, hook: Hook, candidate: Candidate) -> dict[str, str]:
        """Contract names of ``any_name`` parameters to the names that this definition uses in their place."""
        positional = candidate.signature.positional[candidate.skip :]
        known = {p.name for p in hook.parameters}
        return {
            parameter.name: positional[index]
            for index, parameter in enumerate(hook.parameters)
            if parameter.any_name and index < len(positional) and positional[index] not in known
        }

    def _all_keywords(self, hook: Hook, candidate: Candidate, renamed: dict[str, str]) -> Verdict:
        keywords = tuple(renamed.get(p.name, p.name) for p in hook.parameters)
        return self.drift.forwarding.verdict(candidate, Passed(0, keywords))

    def _lost(self, hook: Hook, candidate: Candidate, renamed: dict[str, str]) -> tuple[str, ...]:
        """Hook parameters that only an unread ``**kwargs`` takes, of a definition that names some of the others."""
        signature = candidate.signature
        if not signature.kwarg or signature.kwarg not in self.program.scope(candidate.ref).unread:
            return ()
        named = {*signature.positional[candidate.skip :], *signature.kwonly}
        wanted = [renamed.get(p.name, p.name) for p in hook.parameters]
        if len(named & set(wanted)) < 2:
            return ()
        return tuple(name for name in wanted if name not in named)

    def _demanded(self, hook: Hook, candidate: Candidate, renamed: dict[str, str]) -> tuple[str, ...]:
        """Parameters that the definition requires and a call of the contract may omit."""
        demandable = [p for p in hook.parameters if not p.omittable or p.required]
        given = {renamed.get(p.name, p.name) for p in demandable} | set(candidate.prefix.keywords)
        signature = candidate.signature
        names = (*signature.positional[candidate.skip + candidate.prefix.npos :], *signature.kwonly)
        return tuple(n for n in names if n not in signature.defaults and n not in given)

    def _order(self, hook: Hook, candidate: Candidate, renamed: dict[str, str]) -> Iterator[Finding]:
        """Positional callers rely on the order of the parameters that both have."""
        wanted = [renamed.get(p.name, p.name) for p in hook.parameters]
        positional = list(candidate.signature.positional[candidate.skip + candidate.prefix.npos :])
        written = [name for name in positional if name in wanted]
        expected = [name for name in wanted if name in written]
        moved = tuple(a for a, b in zip(written, expected, strict=True) if a != b)
        first_extra = next((i for i, name in enumerate(positional) if name not in wanted), len(positional))
        if not moved and first_extra < len(written):
            moved = (positional[first_extra],)
        if moved and self._passed_by_position(hook, len(wanted)):
            yield self._definition_finding("HWB103", hook, candidate, Mismatch(), moved)

    def _passed_by_position(self, hook: Hook, count: int) -> bool:
        """Without any call in sight, the contract's order holds; else it matters as far as calls use it."""
        calls = self.calls.get(hook.name, [])
        return count > 1 and (not calls or any(call.npos > 1 for _, call in calls))

    def _defaults(self, hook: Hook, candidate: Candidate) -> Iterator[Finding]:
        for parameter in hook.parameters:
            written = candidate.signature.defaults.get(parameter.name)
            default = _default(parameter)
            if written not in (None, "...", default) and default is not None:
                yield self._plain_finding(
                    "HWB104", "warning", "high", candidate, (parameter.name,),
                    f"defaults {parameter.name!r} to {written}, the contract to {default}",
                    f"write {parameter.name}={default}",
                )  # fmt: skip

    def _unread(self, hook: Hook, candidate: Candidate, accepted: set[str]) -> Iterator[Finding]:
        scope = self.program.scope(candidate.ref)
        if scope.stub:
            return
        names = {p.name for p in hook.parameters}
        unread = tuple(n for n in scope.unread if n in names and n in accepted)
        if unread:
            yield self._plain_finding(
                "HWB107", "warning", "medium", candidate, unread,
                f"accepts {', '.join(map(repr, unread))} and never reads it", "use it, or delete it and say so",
            )  # fmt: skip
        signature = candidate.signature
        swallowed = tuple(n for n in (signature.vararg, signature.kwarg) if n and n in scope.unread)
        if swallowed:
            yield self._plain_finding(
                "HWB108", "warning", "low", candidate, swallowed,
                f"swallows whatever it is given in {', '.join(map(repr, swallowed))}", "name the hook's parameters",
            )  # fmt: skip

    def absent(self) -> Iterator[Finding]:
        """Implementations of some hooks that leave a required one out: modules by their marks, and leaf classes."""
        for index, file in enumerate(self.program.files):
            named = [s for s in file.facts.scopes if s.kind == "f" and s.name in self.contract.hooks]
            marked = [s for s in named if any(last_name(d) == "hookimpl" for d in s.decorators)]
            required = self._required(scope.name for scope in marked)
            lacking = [name for name in required if name not in file.facts.scopes[0].bindings]
            if len(marked) > 1 and lacking and file.facts.scopes[marked[0].parent].kind == "m":
                yield self._absent_finding(Place(file.path, marked[0].line, marked[0].qualname), file.path, lacking)
            for number, scope in enumerate(file.facts.scopes):
                if scope.kind == "c" and self._implements((index, number), scope):
                    required = self._required(name for name in self.contract.hooks if name in scope.bindings)
                    left_out = [name for name in required if not self._provides((index, number), name)]
                    if left_out:
                        yield self._absent_finding(
                            Place(file.path, scope.line, scope.qualname), scope.qualname, left_out
                        )

    def _required(self, implemented: Iterable[str]) -> list[str]:
        """Hooks that must be there beside those that are: of the same contracts, and of what these import."""
        owners = {self.contract.owners[name].name: self.contract.owners[name] for name in implemented}
        wanted = {name for owner in owners.values() for name in (owner.name, *owner.imports)}
        return [hook.name for hook in self.contract.only(wanted).hooks.values() if not hook.optional]

    def _implements(self, ref: Ref, scope: Scope) -> bool:
        """A class that nobody extends, whose bases can be seen, and which writes at least two hooks itself."""
        own = [name for name in self.contract.hooks if name in scope.bindings]
        if len(own) < 2 or any(name in self.marked for name in own):
            return False
        return not self.program.children.get(ref) and not self.program.unknown_base(ref)

    def _provides(self, ref: Ref, name: str) -> bool:
        order = self.program.mro(ref)
        return bool(self.program.members(ref, name)) or any(name in self.program.scope(c).attributes for c in order)

    def _absent_finding(self, place: Place, owner: str, lacking: list[str]) -> Finding:
        listed = ", ".join(map(repr, lacking))
        contract = self.contract.owners[lacking[0]].name
        message = (
            f"{owner} ({place.file}:{place.line}) implements hooks of contract {contract} and lacks {listed}."
            f" Fix: define {listed}."
        )
        return Finding("HWB109", "error", "medium", message, tuple(lacking), place, None)

    # -- calls --------------------------------------------------------------------------------------------------

    def _is_hook_call(self, hook: Hook, file: int, call: Call) -> bool:
        """Whether a call of that name is meant for an implementation of the hook."""
        if call.func[0] == "a" and hook.name not in self.marked and _distinctive(hook):
            return True
        context = self.drift.inference.context((file, call.scope), call.line, call.guard)
        reach = self.drift.dispatcher.reach(call, context)
        named = [c for c in reach.candidates if self.program.scope(c.ref).name == hook.name]
        if named or call.func[0] == "n":
            return any(self._meant(hook, c.ref[0], self.program.scope(c.ref)) for c in named)
        if hook.name in self.marked:
            return False
        names = {last_name(raw[3]) for raw in self.program.files[file].facts.calls}
        return len(names & self.contract.hooks.keys()) > 1

    def check_call(self, hook: Hook, file: int, call: Call) -> Iterator[Finding]:
        if self.drift.reachability.catches_type_error(file, call.guard):
            return
        passed = Passed(call.npos, call.keywords, call.star is not None, call.kwstar is not None)
        passed = self._without_receiver(file, call, passed)
        mismatch = bind(_signature(hook), passed)
        if not mismatch.rejects:
            return
        rule = "HWB105" if mismatch.unknown else "HWB106" if mismatch.missing and not mismatch.excess else "HWB103"
        candidate = Candidate((file, call.scope), _signature(hook), 0, None, False)
        missing = missing_names(mismatch, candidate, call, [])
        definition = self._nearest_definition(hook)
        place = Place(self.program.files[file].path, call.line)
        shown = definition or Place(f"contract {self.contract.owners[hook.name].name}", 1, hook.name)
        yield Finding(
            rule,
            "error",
            "high",
            describe(rule, shown, place, mismatch, missing, hook.name),
            missing,
            definition,
            place,
        )

    def _without_receiver(self, file: int, call: Call, passed: Passed) -> Passed:
        """``Base.hook(self, ...)`` hands the receiver over by position."""
        if call.func[0] != "a" or call.func[1] == ("?",) or not call.npos:
            return passed
        context = self.drift.inference.context((file, call.scope), call.line, call.guard)
        values = self.drift.inference.evaluate(call.func[1], context)
        unbound = bool(values) and all(value[0] == "C" for value in values)
        return passed._replace(npos=passed.npos - 1) if unbound and call.argnames[:1] == ("self",) else passed

    def _nearest_definition(self, hook: Hook) -> Place | None:
        refs = self.program.methods_named.get(hook.name) or self.program.functions_named.get(hook.name)
        return self.drift.place(refs[0]) if refs else None

    # -- findings -----------------------------------------------------------------------------------------------

    def _definition_finding(
        self, rule: str, hook: Hook, candidate: Candidate, mismatch: Mismatch, names: tuple[str, ...]
    ) -> Finding:
        definition = self.drift.place(candidate.ref)
        call = self._witness(hook, names)
        listed = ", ".join(repr(name) for name in names)
        contract = self.contract.owners[hook.name].name
        said = {
            "HWB101": f"does not take {listed}, which contract {contract} passes",
            "HWB102": f"requires {listed}, which calls of contract {contract} may omit",
            "HWB103": f"has {listed} at another position than contract {contract}",
        }[rule]
        fix = {
            "HWB101": f"add {listed} to {definition.name}",
            "HWB102": f"give {listed} a default in {definition.name}",
            "HWB103": f"order the parameters as {', '.join(p.name for p in hook.parameters)}",
        }[rule]
        at_call = f"; called at {call.file}:{call.line}" if call else ""
        message = f"{definition.name} ({definition.file}:{definition.line}) {said}{at_call}. Fix: {fix}."
        return Finding(rule, "error", "high", message, names, definition, call)

    def _witness(self, hook: Hook, names: tuple[str, ...]) -> Place | None:
        """A call of the hook that shows the fault: one that passes (or omits) the first of the names."""
        for file, call in self.calls.get(hook.name, []):
            if names[0] in call.keywords:
                return Place(self.program.files[file].path, call.line)
        for file, call in self.calls.get(hook.name, []):
            return Place(self.program.files[file].path, call.line)
        return None

    def _plain_finding(
        self,
        rule: str,
        severity: str,
        confidence: str,
        candidate: Candidate,
        names: tuple[str, ...],
        said: str,
        fix: str,
    ) -> Finding:
        definition = self.drift.place(candidate.ref)
        message = f"{definition.name} ({definition.file}:{definition.line}) {said}. Fix: {fix}."
        return Finding(rule, severity, confidence, message, names, definition, None)


def check_contract(program: Program, contract: Contracts) -> list[Finding]:
    """All findings of contract mode, in order of place."""
    found = {finding.sort_key: finding for finding in ContractCheck(program, contract).check()}
    return [found[key] for key in sorted(found, key=repr)]
