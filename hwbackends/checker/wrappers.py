"""Whether what a decorator of the trees returns hands every argument on to what it decorates."""

from __future__ import annotations

from collections import defaultdict

from .model import Call
from .program import Program


class Wrappers:
    """Reads the calls inside wrappers; remembers them by file and scope."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._calls: dict[int, dict[int, list[Call]]] = {}

    def hands_on(self, file: int, number: int) -> bool | None:
        """Whether a wrapper calls what its decorator was given with all that it gets, and with nothing else.

        None where it calls something else only: a name that stands for it, or an object that holds it.
        """
        scopes = self.program.files[file].facts.scopes
        around = scopes[scopes[number].parent].signature
        decorated = around.positional[0] if around is not None and around.positional else ""
        found = [self._same(call, file, number, decorated) for call in self._inside(file, number)]
        said = [answer for answer in found if answer is not None]
        return all(said) if said else None

    def _same(self, call: Call, file: int, number: int, decorated: str) -> bool | None:
        """Whether one call hands on exactly what the wrapper gets; None for a call of something else."""
        signature = self.program.files[file].facts.scopes[number].signature
        assert signature is not None
        everything = call.star == signature.vararg and call.kwstar == signature.kwarg
        if call.func != ("n", decorated):  # run(f, *args, **kwargs), partial(f, *args, **kwargs)
            return True if everything and decorated in call.argnames else None
        return everything and call.npos == len(signature.positional) and set(call.keywords) <= set(signature.kwonly)

    def _inside(self, file: int, number: int) -> list[Call]:
        """The calls of a function and of those written in it."""
        if file not in self._calls:
            found: dict[int, list[Call]] = defaultdict(list)
            for raw in self.program.files[file].facts.calls:
                found[raw[1]].append(Call._make(raw))
            self._calls[file] = found
        scopes = self.program.files[file].facts.scopes
        inside, calls = {number}, list(self._calls[file].get(number, ()))
        for other in range(number + 1, len(scopes)):
            if scopes[other].parent not in inside:
                if scopes[other].parent < number:
                    break
                continue
            inside.add(other)
            calls += self._calls[file].get(other, ())
        return calls
