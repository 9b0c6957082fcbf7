"""How certain a rejection is a fault, and not a second protocol under one name."""

from __future__ import annotations

from typing import NamedTuple

from .bind import Passed, bind
from .forwarding import Verdict
from .likeness import ALIKE, lags, similarity
from .model import Call

# A definition that rejects more calls than this, and lags nobody, is another protocol under one name.
_MANY_SITES = 4
_SOME_SITES = 2
_OUTNUMBERED = 3  # so many times more definitions accept a call than reject it
_MANY_REJECT = 3
_MOST_EXCESS = 2  # positions beyond the last parameter that an oversight explains
# Shared names over all names, where a definition renames what is passed, and where nothing else is possible.
_ALIKE_RENAMED, _ALIKE_FOR_SURE = 0.6, 0.6
_GUESSED_SITES = 3  # of a definition that was found by name alone


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
            return "medium" if sites < _GUESSED_SITES and item.rejecting > 1 and _mostly_known(item) else "low"
        if not _in_sight(item):
            return "low"
        one = item.rejecting == 1 or item.hardware  # several of what a call can be say little about the rest of it
        return "high" if item.complete else ("medium" if one else "low")
    if item.divided:
        return "high" if item.complete else "medium"
    knows = _behind_any(item) or _mostly_known(item)
    if item.untyped and item.rejecting > max(_MANY_REJECT, len(item.accepting)):
        return "low"  # the name is everybody's, and the call is for some of them
    if item.untyped and (item.verdict.mismatch.excess or not knows):
        return "low"  # two methods of one name that count their arguments differently: nothing says they are one
    target, unknown = item.verdict.target, set(item.verdict.mismatch.unknown)
    behind = not item.verdict.mismatch.missing and any(lags(target, o.target, unknown) for o in item.accepting)
    outnumbered = len(item.accepting) >= _OUTNUMBERED * item.rejecting
    # The alternatives of one import, of which one lags by exactly what is passed: each of its callers meets it.
    if behind and item.alternatives:
        return "high" if item.complete else "medium"
    if (
        sites > _MANY_SITES
        and not item.replaces
        and not (behind and outnumbered and (item.hardware or accepted >= sites))
    ):
        return "low"
    few = accepted < (1 if behind else sites) and not item.replaces and not _nearly_fits(item)
    if sites > _SOME_SITES and few and not (behind and item.hardware):
        return "low"
    if item.verdict.mismatch.swallowed:
        return "medium"
    if behind:
        return "high" if item.complete else "medium"
    # An override answers to its base, whatever else it is called with.
    answers = item.overrides and 2 * item.rejecting <= len(item.accepting) + 1
    another = "medium" if answers and item.verdict.mismatch.unknown else "low"
    if item.verdict.mismatch.excess > _MOST_EXCESS:
        return another
    declared = [other for other in item.accepting if other.candidate.declared]
    likeness = max(similarity(target, other.target) for other in declared or item.accepting)
    if likeness < (_ALIKE_RENAMED if _renamed(item) else ALIKE) or (
        item.rejecting > _MANY_REJECT and item.rejecting > len(item.accepting)
    ):
        return another
    return "high" if item.complete and likeness >= _ALIKE_FOR_SURE else "medium"


def _nearly_fits(item: Rejection) -> bool:
    """Whether the definition takes the call but for what is passed under a condition."""
    amiss = item.verdict.mismatch
    return bool(item.call.perhaps) and set(amiss.unknown) <= set(item.call.perhaps) and not amiss.missing


def _behind_any(item: Rejection) -> bool:
    """Whether a definition is one that accepts, without exactly what is passed."""
    unknown = set(item.verdict.mismatch.unknown)
    return any(lags(item.verdict.target, other.target, unknown) for other in item.accepting)


def _renamed(item: Rejection) -> bool:
    """Whether the definition has other names for what is passed: some unknown to it, and some required by it."""
    target = item.verdict.target
    passed = Passed(item.call.npos, item.call.keywords, item.call.star is not None)
    return bool(item.verdict.mismatch.unknown and bind(target.signature, passed, target.skip).missing)


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
