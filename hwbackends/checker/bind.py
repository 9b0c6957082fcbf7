"""Does a signature accept a call? The same answer as ``inspect.signature(...).bind``, from counts and names alone."""

from __future__ import annotations

from typing import NamedTuple

from .model import Signature


class Passed(NamedTuple):
    """What a call passes: ``star``/``kwstar`` say that unknown further arguments may follow."""

    npos: int
    keywords: tuple[str, ...]
    star: bool = False
    kwstar: bool = False


class Mismatch(NamedTuple):
    """Why a call is rejected; empty lists where it is accepted."""

    unknown: tuple[str, ...] = ()  # keywords that no parameter takes
    missing: tuple[str, ...] = ()  # required parameters that nothing fills
    excess: int = 0  # positional arguments beyond the last parameter
    twice: tuple[str, ...] = ()  # filled by position and by keyword
    capacity: int = 0  # positional parameters a caller can fill
    swallowed: tuple[str, ...] = ()  # keywords that only a catch-all takes which nothing reads; no rejection

    @property
    def about(self) -> frozenset[str]:
        """The keywords that do not arrive where they should."""
        return frozenset((*self.unknown, *self.twice, *self.swallowed))

    @property
    def rejects(self) -> bool:
        return bool(self.unknown or self.missing or self.excess or self.twice)


class Leftover(NamedTuple):
    """What ``*args`` and ``**kwargs`` of a definition receive from one call."""

    npos: int
    keywords: tuple[str, ...]


def bind(signature: Signature, passed: Passed, skip: int = 0) -> Mismatch:
    """Compare a call with a definition whose first ``skip`` positional parameters are already filled (``self``)."""
    positional = signature.positional
    # A bound method without a named first parameter has its receiver taken by *args.
    fillable = positional[skip:]
    keyword_ok = set(signature.args[max(0, skip - len(signature.posonly)) :]) | set(signature.kwonly)
    filled = fillable[: passed.npos]
    excess = 0 if signature.vararg else max(0, passed.npos - len(fillable))
    unknown = () if signature.kwarg else tuple(k for k in passed.keywords if k not in keyword_ok)
    by_position = {name for name in filled if name not in signature.posonly}
    twice = tuple(k for k in passed.keywords if k in by_position)
    missing = _missing(signature, passed, fillable)
    if signature.vararg is None and len(positional) < skip:
        excess += 1
    return Mismatch(unknown, missing, excess, twice, len(fillable))


def _missing(signature: Signature, passed: Passed, fillable: tuple[str, ...]) -> tuple[str, ...]:
    if passed.kwstar:
        return ()
    given = set(passed.keywords)
    rest: tuple[str, ...] = () if passed.star else fillable[passed.npos :]
    required = [
        name for name in rest if name not in signature.defaults and (name not in given or name in signature.posonly)
    ]
    required += [name for name in signature.kwonly if name not in signature.defaults and name not in given]
    return tuple(required)


def leftover(signature: Signature, passed: Passed, skip: int = 0) -> Leftover:
    """The part of a call that lands in ``*args`` and ``**kwargs``."""
    fillable = signature.positional[skip:]
    named = set(signature.args) | set(signature.kwonly)
    keywords = tuple(k for k in passed.keywords if k not in named) if signature.kwarg else ()
    return Leftover(max(0, passed.npos - len(fillable)) if signature.vararg else 0, keywords)
