"""Conditions on the version of another checked tree: a plugin that serves several hosts has a branch for each."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from .flags import Conditions
from .model import Expr
from .program import Program

Release = tuple[int, ...]

_NUMBER = re.compile(r"^[vV]?(\d+(?:\.\d+)*)")
_ASKS = re.compile(r"version|greater_or_equal", re.I)
_COMPARE: dict[str, Callable[[Release, Release], bool]] = {
    "Eq": operator.eq, "NotEq": operator.ne, "Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt,
    "GtE": operator.ge, "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge,
}  # fmt: skip
# How the name of a function says which comparison it makes; the first that fits.
_NAMED = (
    (re.compile(r"greater_or_equal|at_least|_ge$|_gte$|newer_or_equal|since|_from$", re.I), operator.ge),
    (re.compile(r"less_or_equal|at_most|_le$|_lte$", re.I), operator.le),
    (re.compile(r"greater|newer|above|later|_gt$|after", re.I), operator.gt),
    (re.compile(r"less|older|below|earlier|_lt$|before", re.I), operator.lt),
    (re.compile(r"version_(?:is|eq|equals?)$|is_\w*version|version_match", re.I), operator.eq),
)
# Words of a condition that name no package.
_PLAIN = frozenset(
    {"version", "is", "at", "least", "parse", "packaging", "host", "engine", "greater", "or", "equal", "less", "older",
     "newer", "version_is", "is_version", "version_at_least"}
)  # fmt: skip
_PLACES = ("_version", "version", "__version__", "__about__", "")


def release(text: str) -> Release | None:
    """``(0, 10)`` of ``"0.10.0rc1+cpu"``: the numbers of a release, without zeros at the end."""
    match = _NUMBER.match(text.strip())
    if match is None:
        return None
    numbers = [int(part) for part in match.group(1).split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


class Versions:
    """What the checked trees say about their own versions, and what that makes of a condition."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._known: dict[str, Release] = {}
        for index, file in enumerate(program.files):
            package = self._package_of(file.parts, file.is_package)
            if package is not None:
                self._read(package, index)

    def _package_of(self, parts: tuple[str, ...], is_package: bool) -> str | None:
        """The top package whose version this module may tell."""
        if not is_package and parts[-1] not in _PLACES:
            return None
        folder = parts if is_package else parts[:-1]
        return folder[-1] if folder and self.program.is_root(folder) else None

    def _read(self, package: str, index: int) -> None:
        bindings = self.program.files[index].facts.scopes[0].bindings
        for name in ("__version__", "version", "VERSION"):
            for _, _, value in bindings.get(name, ()):
                found = release(value[1]) if value is not None and value[0] == "s" else None
                if found:
                    self._known.setdefault(package.lower(), found)

    # -- conditions ---------------------------------------------------------------------------------------------

    def dead(self, conditions: Conditions, file: int) -> bool:
        """Whether these conditions ask for another version than the trees have."""
        return any(
            (truth := self.truth(test, file)) is not None and truth != holds for test, holds in conditions if test
        )

    def undecided(self, conditions: Conditions, file: int) -> bool:
        """Whether one of these conditions asks for a package's version that nobody here tells."""
        return any(_of_package(test) and self.truth(test, file) is None for test, _ in conditions if test)

    def truth(self, test: Expr, file: int) -> bool | None:
        if test[0] == "!" and test[1] is not None:
            inner = self.truth(test[1], file)
            return None if inner is None else not inner
        if test[0] in "V&":
            decides = test[0] == "V"
            parts = [self.truth(part, file) if part is not None else None for part in test[1]]
            return decides if decides in parts else (None if None in parts else not decides)
        if test[0] == "=" and test[1] in _COMPARE and asks_version(test[2]):
            wanted, have = _literal(test[3]), self._have(test[2], file)
            return _COMPARE[test[1]](have, wanted) if have and wanted else None
        if test[0] == "c" and asks_version(test):
            return self._called(test, file)
        return None

    def _called(self, test: Expr, file: int) -> bool | None:
        """``vllm_version_is("0.10")``, ``is_vllm_version(">=", "0.10")``, ``is_torch_greater_or_equal("2.5")``."""
        texts = [arg[1] for arg in test[2] if arg is not None and arg[0] == "s"]
        name, have = _words(test[1])[-1:], self._have(test, file)
        if not have or not texts or not name:
            return None
        wanted = release(texts[-1])
        if wanted is None:
            return None
        if len(texts) > 1 and texts[-2] in _COMPARE:
            return _COMPARE[texts[-2]](have, wanted)
        compare = next((compare for pattern, compare in _NAMED if pattern.search(name[0])), None)
        return compare(have, wanted) if compare is not None else None

    def _have(self, expr: Expr, file: int) -> Release | None:
        """The version of the tree that an expression names; where it names none, of the only other tree."""
        words = {word for name in _words(expr) for word in (name.lower(), *re.split(r"[_\W]+", name.lower()))}
        named = [package for package in self._known if package in words]
        if len(named) == 1:
            return self._known[named[0]]
        own = {part.lower() for part in self.program.files[file].parts}
        others = [version for package, version in self._known.items() if package not in own]
        plain = not words - _PLAIN
        return others[0] if not named and plain and len(others) == 1 else None


def asks_version(test: Expr | None) -> bool:
    """Whether a condition is about a version at all."""
    names = _words(test)
    return any(_ASKS.search(name) for name in names) and not {"hip", "cuda"} & set(names)


def _of_package(test: Expr) -> bool:
    """Whether a condition reads ``__version__``, parses a version, or hands a release to a function named for it."""
    if test[0] in "V&":
        return any(_of_package(part) for part in test[1] if part is not None)
    if test[0] == "!":
        return test[1] is not None and _of_package(test[1])
    if not asks_version(test):
        return False
    handed = test[0] == "c" and any(a is not None and a[0] == "s" and release(a[1]) for a in test[2])
    return handed or bool({"__version__", "Version"} & set(_words(test)))


def _words(expr: Expr | None) -> list[str]:
    """The names in an expression, the outermost last."""
    if expr is None:
        return []
    if expr[0] == "n":
        return [str(expr[1])]
    if expr[0] == "a":
        return [*_words(expr[1]), str(expr[2])]
    if expr[0] == "c":
        return [*(word for arg in expr[2] for word in _words(arg)), *_words(expr[1])]
    if expr[0] == "=":
        return [*_words(expr[3]), *_words(expr[2])]
    return _words(expr[1]) if expr[0] in "!i" and isinstance(expr[1], tuple) else []


def _literal(expr: Expr | None) -> Release | None:
    """``"0.10"``, ``Version("0.10")``, ``(0, 10)``."""
    if expr is None:
        return None
    if expr[0] == "s":
        return release(expr[1])
    if expr[0] == "c" and expr[2]:
        return _literal(expr[2][0])
    if expr[0] == "t" and all(item is not None and item[0] == "k" for item in expr[1]):
        return release(".".join(str(item[1]) for item in expr[1]))
    return None
