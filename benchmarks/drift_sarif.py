"""The SARIF output against its published schema, over trees whose files have hostile names.

    python benchmarks/drift_sarif.py SCHEMA

SCHEMA is `sarif-schema-2.1.0.json` as OASIS publishes it; the `jsonschema` package must be installed. Every name is
checked as a relative and as an absolute tree, and each URI must be a URI reference that gives the name back. The exit
status is 1 where a report is not valid.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import jsonschema

NAMES = [
    "a b.py", "50%.py", "%41.py", "q?x=1#y.py", "ä中.py", "co:lon.py", "new\nline.py", "tab\t.py", "quote\"'.py",
    "back\\slash.py", "[x]{y}^|`.py", "emoji\U0001f600.py", "~tilde.py", "+plus&and;.py", "<tag>.py", "bell\a.py",
    b"bad\xff.py".decode("utf-8", "surrogateescape"),
]  # fmt: skip
_REFERENCE = re.compile(r"(file:///)?[A-Za-z0-9\-._~/%]+")


def report(tree: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "hwbackends.checker", tree, "--drift", "--no-cache", "--format", "sarif"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    found: dict[str, Any] = json.loads(result.stdout.decode("utf-8"))
    return found


def faults(name: str, validator: Any) -> list[str]:
    """What is wrong with the reports about one file of this name."""
    found: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        tree.mkdir()
        Path(folder, "elsewhere").mkdir()
        (tree / name).write_text("def f(a): return a\nf(1, b=2)\n", encoding="utf-8")
        for root, working in (("tree", folder), (str(tree), f"{folder}/elsewhere")):
            log = report(root, Path(working))
            found += [error.message[:200] for error in validator.iter_errors(log)]
            results = log["runs"][0]["results"]
            places = [place for result in results for place in (*result["locations"], *result["relatedLocations"])]
            uris = [place["physicalLocation"]["artifactLocation"]["uri"] for place in places]
            found += [] if uris else ["nothing was reported"]
            for uri in uris:
                path = os.fsdecode(unquote(uri.removeprefix("file://"), errors="surrogateescape"))
                if not _REFERENCE.fullmatch(uri) or path != f"{root}/{name}":
                    found.append(f"{uri} is not {root}/{name!r}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schema", type=Path)
    schema = json.loads(parser.parse_args().schema.read_text(encoding="utf-8"))
    validator = jsonschema.validators.validator_for(schema)(
        schema, format_checker=jsonschema.validators.validator_for(schema).FORMAT_CHECKER
    )
    wrong = 0
    for name in NAMES:
        found = faults(name, validator)
        wrong += bool(found)
        print(f"{'invalid' if found else 'valid  '} {name!r}", *found, sep="\n    " if found else " ", flush=True)
    print(f"{len(NAMES) - wrong} of {len(NAMES)} valid")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
