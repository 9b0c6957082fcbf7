"""What earlier runs found out, keyed by content alone: facts per file, and findings per set of files.

A key holds the digest of every file, of the checker's own source and the interpreter's version, so nothing stale can
be read; a damaged cache is ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from .findings import Finding, Place
from .model import Problem

if TYPE_CHECKING:
    from hwbackends.contract.model import Contracts

    from .surroundings import Package

# The same content can be read for trees of different packages: one row for each.
_TABLE = (
    "CREATE TABLE IF NOT EXISTS facts "
    "(digest BLOB, outside TEXT, inside TEXT, data BLOB, PRIMARY KEY (digest, outside, inside))"
)
_ASK = "SELECT data, outside, inside FROM facts WHERE digest = ?"


class Facts(NamedTuple):
    """What one file yields, and the packages that it imports from outside of the trees and from inside."""

    data: bytes
    outside: tuple[str, ...]
    inside: tuple[str, ...]


Ignores = dict[str, dict[int, tuple[str, ...]]]


@lru_cache(maxsize=1)
def _own_digest() -> bytes:
    """The checker's source and the interpreter: another version of either reads no old entry."""
    digest = hashlib.blake2b(sys.version.encode(), digest_size=16)
    for folder, inner, names in os.walk(os.path.dirname(__file__)):
        inner.sort()
        for name in sorted(names):
            if name.endswith(".py"):
                with open(os.path.join(folder, name), "rb") as stream:
                    digest.update(stream.read())
    return digest.digest()


class Store:
    """One folder of cache files; ``directory`` None keeps nothing."""

    def __init__(self, directory: str | None) -> None:
        self.directory = directory

    def result_key(
        self,
        sources: list[tuple[str, bytes]],
        contract: Contracts | None,
        around: list[Package],
        problems: list[Problem],
    ) -> str:
        digest = hashlib.blake2b(_own_digest(), digest_size=16)
        digest.update(repr((contract, around)).encode("utf-8", "surrogateescape"))
        digest.update(repr(problems).encode("utf-8", "surrogateescape"))
        for path, content in sources:
            digest.update(path.encode("utf-8", "surrogateescape") + b"\0" + content)
        return digest.hexdigest()

    def result(self, key: str) -> tuple[list[Finding], Ignores] | None:
        """The findings of a run over exactly these contents."""
        data = self._load(f"findings-{key}.json")
        if data is None:
            return None
        try:
            raw = json.loads(data)
            findings = [_finding(item) for item in raw["findings"]]
            ignores = {p: {int(n): tuple(r) for n, r in lines.items()} for p, lines in raw["ignores"].items()}
        except (ValueError, KeyError, TypeError):
            return None
        return findings, ignores

    def keep_result(self, key: str, findings: list[Finding], ignores: Ignores) -> None:
        text = json.dumps({"findings": findings, "ignores": ignores})
        self._save(f"findings-{key}.json", text.encode("utf-8", "surrogateescape"))

    def paths(self, key: str) -> list[str]:
        """Where the run over exactly these contents looked for modules outside its trees."""
        data = self._load(f"paths-{key}.json")
        try:
            found = json.loads(data) if data is not None else []
        except ValueError:
            return []
        return [item for item in found if isinstance(item, str)] if isinstance(found, list) else []

    def keep_paths(self, key: str, paths: list[str]) -> None:
        if paths:
            self._save(f"paths-{key}.json", json.dumps(paths).encode("utf-8", "surrogateescape"))

    def facts(self, digests: Iterable[bytes], tops: frozenset[str]) -> dict[bytes, bytes]:
        """Facts by the digest of the content they came from, wherever that lies.

        What counts as another package decides which calls are kept: an entry is of use where the packages that its file
        imports are in the trees, or out of them, as they were then.
        """
        found: dict[bytes, bytes] = {}
        with self._database() as database:  # what goes wrong in it ends here
            for digest in digests:
                if database is None:
                    break
                for data, outside, inside in database.execute(_ASK, (digest,)):
                    if tops.isdisjoint(outside.split()) and tops.issuperset(inside.split()):
                        found[digest] = data
        return found

    def keep_facts(self, fresh: Iterable[tuple[bytes, Facts]]) -> None:
        with self._database() as database:
            if database is None:
                return
            rows = [(digest, " ".join(f.outside), " ".join(f.inside), f.data) for digest, f in fresh]
            database.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?, ?, ?)", rows)
            database.commit()

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection | None]:
        """The facts of this version of the checker; None where there is no cache, or it cannot be used."""
        connection = None
        try:
            connection = self._connected() if self.directory is not None else None
            yield connection
        except sqlite3.Error:
            if connection is None:
                yield None
        finally:
            if connection is not None:
                connection.close()

    def _connected(self) -> sqlite3.Connection | None:
        assert self.directory is not None
        try:
            os.makedirs(self.directory, exist_ok=True)
        except OSError:
            return None
        path = os.path.join(self.directory, f"facts-{_own_digest().hex()}.db")
        connection = sqlite3.connect(path, timeout=5)
        connection.execute("PRAGMA synchronous=OFF")  # a cache that is lost is read again
        connection.execute(_TABLE)
        return connection

    def _load(self, name: str) -> bytes | None:
        if self.directory is None:
            return None
        try:
            with open(os.path.join(self.directory, name), "rb") as stream:
                return stream.read()
        except OSError:
            return None

    def _save(self, name: str, data: bytes) -> None:
        """Write beside and rename, so that a reader never sees half a file; a full disk costs only the cache."""
        if self.directory is None:
            return
        try:
            os.makedirs(self.directory, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self.directory)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
            os.replace(temporary, os.path.join(self.directory, name))
        except OSError:
            return


def _finding(item: list[object]) -> Finding:
    rule, severity, confidence, message, missing, definition, call, also, accepts = item
    return Finding(
        str(rule), str(severity), str(confidence), str(message), tuple(missing),  # type: ignore[arg-type]
        Place(*definition) if definition else None, Place(*call) if call else None,  # type: ignore[misc]
        tuple(Place(*place) for place in also),  # type: ignore[attr-defined]
        Place(*accepts) if accepts else None,  # type: ignore[misc]
    )  # fmt: skip


def default_directory() -> str:
    """``$XDG_CACHE_HOME/hwbackends`` or ``~/.cache/hwbackends``."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "hwbackends")
