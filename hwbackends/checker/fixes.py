"""Changes that a program can make safely: a keyword that an override lacks and its base has with a plain default."""

from __future__ import annotations

import ast
import difflib
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from . import files
from .findings import Finding, Place

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Edit(NamedTuple):
    """Text to put into a file at a byte offset."""

    offset: int
    text: bytes


class Fixes:
    """The edits for some findings, by file; each definition is changed once."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.count = 0
        self._sources: dict[str, bytes | None] = {}
        self._functions: dict[tuple[str, int], _Function | None] = {}
        self._edits: dict[str, list[Edit]] = defaultdict(list)
        wanted: dict[Place, dict[str, str]] = defaultdict(dict)
        for finding in findings:
            defaults = self._defaults(finding)
            if defaults and finding.definition is not None:
                wanted[finding.definition] |= defaults
        for place, names in wanted.items():
            edit = self._edit(place, names)
            if edit is not None:
                self._edits[place.file].append(edit)
                self.count += 1

    def safe(self, finding: Finding) -> bool:
        """Whether a patch for one finding would be made."""
        defaults = self._defaults(finding)
        return (
            bool(defaults) and finding.definition is not None and self._edit(finding.definition, defaults) is not None
        )

    def changed(self) -> Iterator[tuple[str, bytes, bytes]]:
        """Path, old and new content of each file."""
        for path, edits in self._edits.items():
            read = self._read(path)
            if read is None:
                continue
            source = new = read
            for offset, text in sorted(edits, reverse=True):
                new = new[:offset] + text + new[offset:]
            yield path, source, new

    def diff(self) -> str:
        """All changes as one unified diff."""
        lines: list[str] = []
        for path, old, new in self.changed():
            before, after = (text.decode("utf-8", "replace").splitlines(keepends=True) for text in (old, new))
            lines += difflib.unified_diff(before, after, f"a/{path.lstrip('/')}", f"b/{path.lstrip('/')}")
        return "".join(lines)

    def write(self) -> None:
        for path, _, new in self.changed():
            Path(path).write_bytes(new)

    # -- one definition -----------------------------------------------------------------------------------------

    def _defaults(self, finding: Finding) -> dict[str, str]:
        """What is missing with the defaults of the base, where those are plain constants; empty where not all are."""
        if finding.rule != "HWB101" or finding.accepts is None or finding.definition is None:
            return {}
        base = self._function(finding.accepts)
        found = _constants(base.args) if base is not None else {}
        return {name: found[name] for name in finding.missing} if all(n in found for n in finding.missing) else {}

    def _edit(self, place: Place, names: dict[str, str]) -> Edit | None:
        function, source = self._function(place), self._read(place.file)
        if function is None or source is None or function.args.posonlyargs:
            return None
        arguments = function.args
        last = _last(arguments)
        taken = {arg.arg for arg in (*arguments.args, *arguments.kwonlyargs)}
        if last is None or taken & set(names):
            return None
        own_line = last.lineno > function.lineno
        separator = b",\n" + _indentation(source, last.lineno) if own_line else b", "
        text = b"".join(separator + f"{name}={default}".encode() for name, default in names.items())
        return Edit(_offset(source, last.end_lineno or 1, last.end_col_offset or 0), text)

    def _function(self, place: Place) -> _Function | None:
        key = (place.file, place.line)
        if key not in self._functions:
            source = self._read(place.file)
            self._functions[key] = _head_at(source, place.line) if source is not None else None
        return self._functions[key]

    def _read(self, path: str) -> bytes | None:
        if path not in self._sources:
            source = files.read(path)
            self._sources[path] = source if isinstance(source, bytes) else None
        return self._sources[path]


def _head_at(source: bytes, line: int) -> _Function | None:
    """The definition on a line, with the lines and columns of its file: only its head is parsed, with an empty body.

    None where the file is not UTF-8: columns would not be bytes there.
    """
    lines = source.splitlines(keepends=True)[line - 1 :]
    try:
        head = "".join(_head(text.decode("utf-8") for text in lines))
        # A block around it keeps its columns where it is indented.
        tree = ast.parse(("if 1:\n" if head[:1] in (" ", "\t") else "\n") + head + " pass")
    except (SyntaxError, ValueError, tokenize.TokenError, RecursionError, MemoryError):
        return None
    found = next((n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))), None)
    if found is not None:
        ast.increment_lineno(found, line - found.lineno)
    return found


def _head(lines: Iterator[str]) -> Iterator[str]:
    """The lines of a definition up to the colon behind its parameters and its return type."""
    read: list[str] = []

    def readline() -> str:
        read.append(next(lines, ""))
        return read[-1]

    depth = 0
    for token in tokenize.generate_tokens(readline):
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
            if token.string == ":" and not depth:
                yield from read[: token.end[0] - 1]
                yield read[token.end[0] - 1][: token.end[1]]
                return


def _constants(arguments: ast.arguments) -> dict[str, str]:
    """The parameters of a definition that have a constant as default, and its text."""
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(reversed(positional), reversed(arguments.defaults), strict=False)]
    pairs += [(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None]
    return {arg.arg: ast.unparse(default) for arg, default in pairs if _is_plain(default)}


def _is_plain(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return _is_plain(node.operand)
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Tuple) and not node.elts)


def _last(arguments: ast.arguments) -> ast.expr | ast.arg | None:
    """What a new keyword parameter goes behind: everything but ``**kwargs``; None where nothing stands there."""
    behind: list[ast.expr | ast.arg | None] = [*arguments.args, *arguments.defaults, arguments.vararg]
    behind += [*arguments.kwonlyargs, *arguments.kw_defaults]
    there = [node for node in behind if node is not None]
    there += [arg.annotation for arg in there if isinstance(arg, ast.arg) and arg.annotation is not None]
    return max(there, key=lambda node: (node.end_lineno or 0, node.end_col_offset or 0), default=None)


def _indentation(source: bytes, line: int) -> bytes:
    text = source.splitlines()[line - 1]
    return text[: len(text) - len(text.lstrip())]


def _offset(source: bytes, line: int, column: int) -> int:
    lines = source.splitlines(keepends=True)
    return sum(map(len, lines[: line - 1])) + column
