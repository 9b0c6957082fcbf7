"""What calling a module runs behind a ``forward`` that hands everything on to one method per platform."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from . import platforms
from .dispatch import Candidate, Dispatcher
from .model import Call, Signature
from .program import Ref, Value

_MOST_CLASSES = 80


class Behind(NamedTuple):
    """One platform's way through a ``forward``: the method that is dispatched to, and the one that it ends in."""

    via: Candidate
    landing: Candidate


class Modules:
    """Finds the methods between which a dispatching ``forward`` chooses. Remembers them for each class."""

    def __init__(self, dispatcher: Dispatcher, forwards: Mapping[Ref, list[Call]]) -> None:
        self.dispatcher = dispatcher
        self.inference = dispatcher.inference
        self.program = dispatcher.program
        self.forwards = forwards
        self._known: dict[tuple[Ref, Ref], list[Behind]] = {}

    def behind(self, candidate: Candidate) -> list[Behind]:
        """What a ``forward`` chooses from in all classes that run it, where it hands its whole call on; else nothing.

        Ways that end in the same definition follow each other, the direct one first.
        """
        found: dict[tuple[Ref, Ref], Behind] = {}
        for owner in candidate.modules[:_MOST_CLASSES]:
            key = (candidate.ref, owner)
            if key not in self._known:
                self._known[key] = self._of_class(*key)
            for way in self._known[key]:
                found.setdefault((way.landing.ref, way.via.ref), way)
        return sorted(found.values(), key=lambda way: (way.landing.ref, way.via.ref != way.landing.ref, way.via.ref))

    def direct(self, candidate: Candidate) -> list[Behind]:
        """Where one method ends that a ``forward`` outside the trees can choose."""
        owner = candidate.owner or candidate.ref
        return [Behind(candidate, landing) for landing in self._landings(candidate, owner, frozenset())]

    def _of_class(self, forward: Ref, owner: Ref) -> list[Behind]:
        methods: dict[Ref, Candidate] = {}
        for call in self._whole(forward):
            chosen = self._chosen(forward, call, owner)
            if len(chosen) > 1:
                methods |= chosen
        own = platforms.of_definition(self.program.files[owner[0]].parts, self.program.scope(owner).qualname)
        ways = []
        for ref, method in methods.items():
            platform = platforms.of_method(self.program.scope(ref).name)
            if platform and own and platform != own:
                continue
            for landing in self._landings(method, owner, frozenset()):
                ends = platform or platforms.of_method(self.program.scope(landing.ref).name)
                ways.append(Behind(method._replace(platform=ends, dispatched=True), landing))
        return ways

    def _whole(self, ref: Ref) -> list[Call]:
        """The calls of a definition that hand on its ``*args`` and ``**kwargs`` and nothing else."""
        scope = self.program.scope(ref)
        signature = scope.signature
        if signature is None or scope.kwarg_edited:
            return []
        return [
            call
            for call in self.forwards.get(ref, ())
            if not call.npos and not call.keywords and call.star == signature.vararg and call.kwstar == signature.kwarg
            and not any(t is not None and t[0] == "try-type" for t, _ in self.inference.chain(ref[0], call.guard))
        ]  # fmt: skip

    def _chosen(self, forward: Ref, call: Call, owner: Ref) -> dict[Ref, Candidate]:
        """The methods of a class that one such call can run."""
        complete, found = True, {}
        for value in sorted(self._values(forward, call, owner), key=repr):
            method = self._method(value, owner)
            complete = complete and method is not None
            if method is not None:
                found[method.ref] = method
        if not complete:  # chosen by a name that is put together at run time, or by something outside the trees
            found |= {method.ref: method for method in self.dispatcher.platform_methods(owner)}
        return found

    def _values(self, forward: Ref, call: Call, owner: Ref) -> frozenset[Value]:
        context = self.inference.context(forward, call.line, call.guard, owner)._replace(exact=True)
        func = call.func
        receiver = (self.program.scope(forward).signature or Signature((), (), (), {}, None, None)).positional[:1]
        if func[0] == "a" and func[1] == ("n", *receiver):
            held = self.inference.held(owner, func[2])
            if held:
                return held
        return self.inference.evaluate(func, context)

    def _method(self, value: Value, owner: Ref) -> Candidate | None:
        if value[0] not in "BF" or (value[1][0], self.program.scope(value[1]).parent) not in self.program.mro(owner):
            return None
        found = self.dispatcher.callable(value, owner)
        return found[0]._replace(owner=owner) if found else None

    def _landings(self, method: Candidate, owner: Ref, seen: frozenset[Ref]) -> list[Candidate]:
        """Where a method ends that only hands on; nothing for a declaration, and for an end that cannot be seen."""
        signature = method.signature
        if method.stub or method.ref in seen:
            return []
        calls = self._whole(method.ref)
        if not calls or signature.positional[method.skip :] or signature.kwonly:
            return [method]
        found: dict[Ref, Candidate] = {}
        for call in calls:
            for ref, following in self._chosen(method.ref, call, owner).items():
                if ref not in found:
                    found |= {c.ref: c for c in self._landings(following, owner, seen | {method.ref})}
        return list(found.values())
