"""Runs a check from roots to findings: lists, reads, parses in processes, remembers by content, then asks a mode."""

from __future__ import annotations

import gc
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from hwbackends.contract.model import Contracts

from . import cache, files, model, surroundings
from .failures import RULE as INTERNAL
from .failures import Failures, failure
from .findings import Finding, Place
from .model import FileFacts, Problem
from .progress import Progress
from .rules import hwb201

if TYPE_CHECKING:  # what only reads and infers is loaded once no earlier run knows the answer
    from .program import Program

_CHUNK_BYTES = 1_500_000
_RECURSION = 2500


class Options(NamedTuple):
    """What to check: a contract, or drift when there is none."""

    contract: Contracts | None = None
    exclude: tuple[str, ...] = ()
    cache_dir: str | None = None
    jobs: int = 0  # 0: as many as there are usable cores
    package: bool = False  # drift mode: read what a tree imports from the package around it
    progress: bool | None = False  # draw a bar on stderr; None: where a terminal watches


class Outcome(NamedTuple):
    """Findings, inline ignores by file and line, and how much was read."""

    findings: list[Finding]
    ignores: dict[str, dict[int, tuple[str, ...]]]
    files: int
    parsed: int
    cached: bool


def run(roots: list[str], options: Options) -> Outcome:
    """Check all trees together; without the garbage collector, which would walk all facts again and again."""
    collecting, limit = gc.isenabled(), sys.getrecursionlimit()
    gc.disable()
    sys.setrecursionlimit(max(limit, 4 * _RECURSION))  # what could be read can be walked
    try:
        return _run(roots, options)
    finally:
        sys.setrecursionlimit(limit)
        if collecting:
            gc.enable()


def _run(roots: list[str], options: Options) -> Outcome:
    paths, problems = files.discover(roots, options.exclude)
    wanted = None
    if options.contract is not None:
        from .contract import pattern

        wanted = pattern(options.contract)
    sources = _read(paths, problems, wanted)
    store = cache.Store(options.cache_dir)
    around = surroundings.packages(roots) if options.package and options.contract is None else []

    def key(beside: list[tuple[str, bytes]]) -> str:
        return store.result_key(sources + beside, options.contract, around, problems)

    alone = key([])
    beside = _sources(surroundings.existing(around, store.paths(alone)))
    known = store.result(key(beside))
    if known is not None:
        return Outcome(known[0], known[1], len(paths), 0, True)
    bar = Progress(options.progress)
    try:
        return _checked(paths, problems, sources, store, around, options, roots, (alone, key), bar)
    finally:
        bar.clear()


def _checked(
    paths: list[str],
    problems: list[Problem],
    sources: list[tuple[str, bytes]],
    store: cache.Store,
    around: list[surroundings.Package],
    options: Options,
    roots: list[str],
    keys: tuple[str, Callable[[list[tuple[str, bytes]]], str]],
    bar: Progress,
) -> Outcome:
    """What no earlier run has found out."""
    from .program import Program

    alone, key = keys
    gathered = _gathered(_Reader(store, _tops(paths), options.jobs, problems, bar), sources, around)
    facts, outside, beside = gathered.facts, gathered.outside, gathered.beside
    store.keep_paths(alone, gathered.asked)
    findings = [_unreadable(problem) for problem in problems]
    program = Program(facts + outside, checked=len(facts))
    findings += _judged(program, options, roots, bar)
    ignores = {path: found.ignores for path, found in facts if found.ignores}
    store.keep_result(key(beside), findings, ignores)
    return Outcome(findings, ignores, len(paths), gathered.parsed, False)


def _judged(program: Program, options: Options, roots: list[str], bar: Progress) -> list[Finding]:
    from .contract import check_contract
    from .drift import check_drift

    if options.contract is None:
        return check_drift(program, _jobs(options.jobs), bar)
    failures, found = Failures(), []
    with failures.contained(roots[0], 1, "holding the tree against its contract"):
        found = check_contract(program, options.contract)
    return found + failures.findings


class _Gathered(NamedTuple):
    """Facts of the trees, and of what they import from the packages around them."""

    facts: list[tuple[str, FileFacts]]
    outside: list[tuple[str, FileFacts]]
    beside: list[tuple[str, bytes]]  # the files of the latter, with their digests
    asked: list[str]  # where they were looked for
    parsed: int


def _gathered(reader: _Reader, sources: list[tuple[str, bytes]], around: list[surroundings.Package]) -> _Gathered:
    """Read everything and keep it in the cache; what the reader holds of it ends with this call."""
    facts = newest = reader.facts(sources, reader.problems)
    outside: list[tuple[str, FileFacts]] = []
    beside: list[tuple[str, bytes]] = []
    asked: dict[str, None] = {}
    for _ in range(surroundings.STEPS):
        wanted = [path for path in surroundings.imported(around, newest) if path not in asked]
        asked.update(dict.fromkeys(wanted))
        fresh = _sources(surroundings.existing(around, wanted))
        if not fresh:
            break
        beside += fresh
        newest = reader.facts(fresh, [])
        outside += newest
    reader.keep()
    return _Gathered(facts, outside, beside, list(asked), reader.parsed)


def _sources(paths: list[str]) -> list[tuple[str, bytes]]:
    return _read(paths, [], None)


def _read(paths: list[str], problems: list[Problem], wanted: re.Pattern[bytes] | None) -> list[tuple[str, bytes]]:
    """Paths with the digests of their contents; in contract mode only files that name a hook."""
    found: list[tuple[str, bytes]] = []
    for path in paths:
        source = files.read(path)
        if isinstance(source, Problem):
            problems.append(source)
        elif wanted is None or wanted.search(source):
            found.append((path, hashlib.blake2b(source, digest_size=16).digest()))
    return found


def _tops(paths: Iterable[str]) -> frozenset[str]:
    """Every name that could start an import of something in the trees: folders, and modules."""
    found: set[str] = set()
    for path in paths:
        found.update(os.path.abspath(path)[:-3].split(os.sep))
    return frozenset(found)


class _Reader:
    """Facts of files, from the cache where their content is known; :meth:`keep` writes back what was used."""

    def __init__(
        self, store: cache.Store, tops: frozenset[str], jobs: int, problems: list[Problem], bar: Progress
    ) -> None:
        self.store, self.tops, self.jobs, self.problems, self.bar = store, tops, _jobs(jobs), problems, bar
        self.known: dict[bytes, bytes] = {}
        self.fresh: dict[bytes, cache.Facts] = {}
        self.parsed = 0

    def facts(self, sources: list[tuple[str, bytes]], problems: list[Problem]) -> list[tuple[str, FileFacts]]:
        digests = dict(sources)
        loaded: dict[str, FileFacts] = {}
        self.known |= self.store.facts((digest for _, digest in sources if digest not in self.known), self.tops)
        todo = [path for path, digest in sources if digest not in self.known and digest not in self.fresh]
        for number, (path, result) in enumerate(_parse_all(todo, self.tops, self.jobs)):
            self.bar.step("reading files", number, len(todo))
            if isinstance(result, Problem):
                problems.append(result)
            else:
                self.parsed += 1
                self.fresh[digests[path]] = result
                loaded[path] = model.load(result.data)  # while the workers read on
        found = []
        for path, digest in sources:
            if path in loaded:
                found.append((path, loaded[path]))
                continue
            data = self.fresh[digest].data if digest in self.fresh else self.known.get(digest)
            if data is not None:
                found.append((path, model.load(data)))
        return found

    def keep(self) -> None:
        if self.fresh:
            self.store.keep_facts(self.fresh.items())


def _jobs(jobs: int) -> int:
    if jobs > 0:
        return jobs
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, 8)


_Parsed = tuple[str, cache.Facts | Problem]


def _parse_all(paths: list[str], tops: frozenset[str], jobs: int) -> Iterator[_Parsed]:
    """Parse in processes when that pays."""
    from concurrent.futures.process import BrokenProcessPool

    from . import extract, workers

    assert extract  # loaded before workers are forked: they share it
    chunks = _chunks(paths)
    if jobs < 2 or len(chunks) < 2:
        for chunk in chunks:
            yield from parse_files(chunk, tops)
        return
    done: set[str] = set()
    try:
        with workers.pool(jobs) as pool:
            for part in pool.map(parse_files, chunks, [tops] * len(chunks)):
                done.update(path for path, _ in part)
                yield from part
    except BrokenProcessPool:
        yield from _one_by_one([path for path in paths if path not in done], tops)


def _one_by_one(paths: list[str], tops: frozenset[str]) -> list[_Parsed]:
    """After a worker died: find the file that the interpreter cannot survive, and say so."""
    from concurrent.futures.process import BrokenProcessPool

    from . import workers

    found: list[_Parsed] = []
    for path in paths:
        try:
            with workers.pool(1) as pool:
                found += pool.submit(parse_files, [path], tops).result()
        except BrokenProcessPool:
            found.append((path, Problem(path, 1, "ends the parser's process")))
    return found


def _chunks(paths: list[str]) -> list[list[str]]:
    chunks: list[list[str]] = [[]]
    size = 0
    for path in paths:
        chunks[-1].append(path)
        try:
            size += os.path.getsize(path)
        except OSError:
            continue
        if size > _CHUNK_BYTES:
            chunks.append([])
            size = 0
    return [chunk for chunk in chunks if chunk]


def parse_files(paths: list[str], tops: frozenset[str]) -> list[_Parsed]:
    """Facts of some files, ready to be handed between processes."""
    found: list[_Parsed] = []
    collecting, limit = gc.isenabled(), sys.getrecursionlimit()
    gc.disable()
    sys.setrecursionlimit(max(limit, _RECURSION))
    try:
        for path in paths:
            found.append((path, _parse_file(path, tops)))
    finally:
        sys.setrecursionlimit(limit)
        if collecting:
            gc.enable()
    return found


def _parse_file(path: str, tops: frozenset[str]) -> cache.Facts | Problem:
    from .extract import extract

    source = files.read(path)
    if isinstance(source, Problem):
        return source
    tree = files.parse(path, source)
    if isinstance(tree, Problem):
        return tree
    asked: set[str] = set()

    def external(module: str) -> bool:
        root = module.partition(".")[0]
        asked.add(root)
        return root not in tops

    try:
        data = model.dump(extract(tree, source, external))
        return cache.Facts(data, tuple(sorted(asked - tops)), tuple(sorted(asked & tops)))
    except (RecursionError, ValueError):
        return Problem(path, 1, "is nested too deeply to be read")
    except Exception as error:
        return Problem(path, 1, failure(path, 1, "reading a file", error).message, internal=True)


def _unreadable(problem: Problem) -> Finding:
    if problem.internal:
        return Finding(INTERNAL, "error", "high", problem.reason, (), Place(problem.path, problem.line), None)
    return hwb201.finding(problem)
