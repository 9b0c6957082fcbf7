"""How much two definitions have in common, by the names of their parameters."""

from __future__ import annotations

from .dispatch import Candidate
from .model import Signature

ALIKE = 0.5  # shared names over all names of two definitions of one protocol


def named(signature: Signature, skip: int) -> tuple[str, ...]:
    return signature.positional[skip:] + signature.kwonly


def takes_anything(target: Candidate) -> bool:
    """Whether a method has no parameter but ``*args`` or ``**kwargs``."""
    signature = target.signature
    return target.owner is not None and bool(signature.vararg or signature.kwarg) and not named(signature, target.skip)


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


def comparable(left: Candidate, right: Candidate) -> bool:
    """Whether two definitions share so many names that they can be one protocol."""
    return similarity(left, right) >= ALIKE
