"""Waivers: failures that a vendor has accepted for a while, in the open. A waiver names one test, one clause, why,
where it is tracked, and until when; one that is unknown, expired, or not needed is an error."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hwbackends.contract.document import nearest, read_document
from hwbackends.contract.reader import installed
from hwbackends.errors import ContractError

_KEYS: dict[str, type | tuple[type, ...]] = {
    "id": str, "clause": str, "reason": str, "url": str, "expires": (datetime.date, str),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Waiver:
    """One accepted failure: test id as the report prints it, clause, reason, address of the issue, last valid day."""

    id: str
    clause: str
    reason: str
    url: str
    expires: datetime.date


def read_waivers(path: Path, today: datetime.date | None = None) -> tuple[Waiver, ...]:
    """The waivers of a YAML list.

    Raises:
        ContractError: not a list, a key is missing or unknown, an unknown clause, an expired or repeated waiver.
    """
    document = read_document(path)
    if not isinstance(document.data, list):
        raise document.error((), f"got {type(document.data).__name__}, wanted a list of waivers")
    today = today or datetime.date.today()
    found: list[Waiver] = []
    for index in range(len(document.data)):
        data = document.mapping((index,), required=_KEYS, optional={})
        expires = _date(data["expires"])
        if expires is None:
            raise document.error((index, "expires"), f"got {data['expires']!r}, wanted a date such as 2027-01-31")
        known = installed().clauses
        if data["clause"] not in known:
            raise document.error(
                (index, "clause"), f"unknown clause {data['clause']!r}{nearest(data['clause'], known)}"
            )
        if expires < today:
            raise document.error((index, "expires"), f"expired on {expires}; fix the failure or renew the waiver")
        if any(w.id == data["id"] and w.clause == data["clause"] for w in found):
            raise document.error((index,), f"{data['id']} and {data['clause']} are waived twice")
        found.append(Waiver(data["id"], data["clause"], data["reason"], data["url"], expires))
    return tuple(found)


def _date(value: object) -> datetime.date | None:
    if isinstance(value, datetime.date):
        return value
    try:
        return datetime.date.fromisoformat(str(value))
    except ValueError:
        return None


def waived_clauses(waivers: Iterable[Waiver], test_id: str) -> frozenset[str]:
    """The clauses that may fail in one test."""
    return frozenset(waiver.clause for waiver in waivers if waiver.id == test_id)


def unknown_ids(waivers: Iterable[Waiver], collected: Iterable[str]) -> list[str]:
    """A sentence for each waiver whose test does not exist.

    Raises nothing: the caller decides when the list of tests is whole.
    """
    known = set(collected)
    ids = sorted({waiver.id for waiver in waivers} - known)
    return [f"waiver for unknown test {test_id!r}{nearest(test_id, known)}" for test_id in ids]


__all__ = ["ContractError", "Waiver", "read_waivers", "unknown_ids", "waived_clauses"]
