"""Counts what the code base holds itself to: lines of a folder, and lines of each function.

    python tools/size.py [FOLDER] [--since COMMIT]

Prints lines of source (blank lines, comments and docstrings apart), the median and the longest function, and with
`--since` the same of an earlier commit, so that "fewer lines for the same features" is a number. Reads source with
`ast`; imports nothing. Kernel files (`kernels*.py`) hold triton's language and are counted with the lines, not with the
functions."""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import subprocess
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent
_EMPTY = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True, slots=True)
class Function:
    """A function, and its lines from `def` to its end without its docstring."""

    path: str
    name: str
    lines: int


def sources(folder: str, commit: str | None = None) -> dict[str, str]:
    """Text of every Python file below `folder`, of the working tree or of a commit."""
    if commit is None:
        return {p.relative_to(ROOT).as_posix(): p.read_text("utf-8") for p in sorted((ROOT / folder).rglob("*.py"))}
    listed = _git("ls-tree", "-r", "--name-only", commit, folder).splitlines()
    return {path: _git("show", f"{commit}:{path}") for path in listed if path.endswith(".py")}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def lines_of(text: str) -> int:
    """Lines that hold code."""
    tree = ast.parse(text)
    documented = [_docstring(node) for node in ast.walk(tree)]
    words = {line for node in documented if node for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {line for t in tokens if t.type not in _EMPTY for line in range(t.start[0], t.end[0] + 1)}
    return len(code - words)


def _docstring(node: ast.AST) -> ast.Expr | None:
    body = getattr(node, "body", None)
    first = body[0] if isinstance(body, list) and body else None
    text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return first if text and isinstance(first, ast.Expr) else None


def functions(found: dict[str, str]) -> Iterator[Function]:
    """Every function outside of kernel files."""
    for path, text in found.items():
        if PurePosixPath(path).name.startswith("kernels"):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                words = _docstring(node)
                words_lines = 0 if words is None else (words.end_lineno or words.lineno) - words.lineno + 1
                yield Function(path, node.name, (node.end_lineno or node.lineno) - node.lineno + 1 - words_lines)


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="hwbackends")
    parser.add_argument("--since", metavar="COMMIT")
    options = parser.parse_args()
    for commit in (options.since, None) if options.since else (None,):
        found = sources(options.folder, commit)
        each = list(functions(found))
        longest = max(each, key=lambda function: function.lines)
        median = statistics.median(function.lines for function in each)
        print(
            f"{commit or 'now'}: {sum(map(lines_of, found.values()))} lines of code, {len(found)} files; "
            f"{len(each)} functions, median {median:g}, longest {longest.lines} ({longest.path}: {longest.name})"
        )


if __name__ == "__main__":
    main()
