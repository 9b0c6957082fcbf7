"""What a check reports: one definition and one call that do not fit, or a file that cannot be read."""

from __future__ import annotations

from typing import Any, NamedTuple

AT_CALL = frozenset({"HWB105", "HWB106"})  # the rules where the call is at fault


class Place(NamedTuple):
    """A file and line; ``name`` is the qualified name of a definition."""

    file: str
    line: int
    name: str = ""


class Finding(NamedTuple):
    """One finding. ``missing`` names the parameters or positions that do not fit."""

    rule: str
    severity: str
    confidence: str
    message: str
    missing: tuple[str, ...]
    definition: Place | None
    call: Place | None
    also: tuple[Place, ...] = ()  # further definitions that reject the same call
    accepts: Place | None = None  # the definition that this one overrides, where it takes the call

    @property
    def sort_key(self) -> tuple[Any, ...]:
        place = self.call or self.definition or Place("", 0)
        other = self.definition or place
        return (place.file, place.line, other.file, other.line, self.rule, self.missing)

    @property
    def place(self) -> Place:
        """Where to point a reader: at the definition when it is at fault, else at the call."""
        at_call = self.rule in AT_CALL and self.call is not None
        return (self.call if at_call else self.definition) or self.call or Place("", 1)

    def as_json(self) -> dict[str, Any]:
        def spot(place: Place | None, named: bool) -> dict[str, Any] | None:
            if place is None:
                return None
            found: dict[str, Any] = {"file": place.file, "line": place.line}
            return found | {"name": place.name} if named else found

        return {
            "rule": self.rule, "severity": self.severity, "confidence": self.confidence, "message": self.message,
            "missing": list(self.missing), "definition": spot(self.definition, True), "call": spot(self.call, False),
            "also": [spot(place, True) for place in self.also], "accepted_by": spot(self.accepts, True),
        }  # fmt: skip


def counted(number: int, noun: str) -> str:
    """``"1 file"``, ``"2 files"``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def ordinal(number: int) -> str:
    """``1 -> "1st"``."""
    suffix = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
