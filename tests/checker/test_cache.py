"""The cache knows contents, not times: a second run reads it, a changed byte is seen, damage is ignored."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hwbackends.checker.engine import Options, Outcome, run
from tests.checker.trees import write

FILES = {
    "base.py": "class Base:\n    def m(self, x, y=None):\n        return x, y\n    def go(self):\n        self.m(1, y=2)\n",  # noqa: E501
    "sub.py": "from base import Base\nclass Sub(Base):\n    def m(self, x):\n        return x\n",
}


def check(tmp_path: Path) -> Outcome:
    return run([str(tmp_path / "tree")], Options(cache_dir=str(tmp_path / "cache"), jobs=1))


def test_an_unchanged_tree_is_answered_from_the_cache_with_the_same_findings(tmp_path: Path) -> None:
    write(tmp_path / "tree", FILES)
    first, second = check(tmp_path), check(tmp_path)
    assert (first.cached, first.parsed) == (False, 2)
    assert (second.cached, second.parsed) == (True, 0)
    assert second.findings == first.findings
    assert len(first.findings) == 1


def test_a_change_of_the_same_size_and_time_is_seen_and_only_that_file_is_parsed(tmp_path: Path) -> None:
    write(tmp_path / "tree", FILES)
    check(tmp_path)
    path = tmp_path / "tree/base.py"
    times = path.stat()
    path.write_text(FILES["base.py"].replace("y=2", "x=2").replace("m(1, ", "m(  "))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed = check(tmp_path)
    assert (changed.cached, changed.parsed, changed.findings) == (False, 1, [])


def test_a_damaged_cache_is_ignored(tmp_path: Path) -> None:
    write(tmp_path / "tree", FILES)
    first = check(tmp_path)
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(path.read_bytes()[:40] + b"\x00damaged")
    assert check(tmp_path).findings == first.findings


def test_a_cache_that_cannot_be_written_costs_only_the_cache(tmp_path: Path) -> None:
    write(tmp_path / "tree", FILES)
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert len(check(tmp_path).findings) == 1


def test_a_file_that_is_added_is_the_only_one_that_is_read(tmp_path: Path) -> None:
    write(tmp_path / "tree", FILES)
    check(tmp_path)
    write(tmp_path / "tree", {"deep/down/another.py": "import json\n\ndef f(a): return a\n\nf(1)\n"})
    assert check(tmp_path).parsed == 1


def test_a_file_that_moves_is_not_read_again(tmp_path: Path) -> None:
    write(tmp_path / "tree", FILES)
    first = check(tmp_path)
    (tmp_path / "tree/inner").mkdir()
    (tmp_path / "tree/sub.py").rename(tmp_path / "tree/inner/lower.py")
    moved = check(tmp_path)
    assert moved.parsed == 0
    assert [f.rule for f in moved.findings] == [f.rule for f in first.findings]


def test_a_tree_that_lies_elsewhere_shares_what_is_known_of_its_contents(tmp_path: Path) -> None:
    write(tmp_path / "tree", FILES)
    check(tmp_path)
    (tmp_path / "tree").rename(tmp_path / "elsewhere")
    outcome = run([str(tmp_path / "elsewhere")], Options(cache_dir=str(tmp_path / "cache"), jobs=1))
    assert outcome.parsed == 0
    assert len(outcome.findings) == 1


def test_a_package_that_comes_into_the_trees_is_followed_where_it_was_left_out(tmp_path: Path) -> None:
    write(tmp_path / "tree", {"use.py": "from helper import f\n\nf(1)\n"})
    assert not check(tmp_path).findings
    write(tmp_path / "tree", {"helper.py": "def f(a, b): return a, b\n"})
    assert [f.missing for f in check(tmp_path).findings] == [("b",)]
    (tmp_path / "tree/helper.py").unlink()
    assert not check(tmp_path).findings


def test_a_run_whose_answer_is_known_loads_no_inference(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f(a): return a\nf(1, b=2)\n")
    code = (
        "import sys\nfrom hwbackends.checker.command import check\n"
        "try:\n    check()\nfinally:\n    print('hwbackends.checker.infer' in sys.modules)\n"
    )
    options = [str(tmp_path / "a.py"), "--drift", "--cache-dir", str(tmp_path / "cache")]
    cold, warm = (
        subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True, check=False).stdout
        for _ in range(2)
    )
    assert cold.splitlines()[:-1] == warm.splitlines()[:-1]
    assert "HWB105" in warm
    assert (cold.splitlines()[-1], warm.splitlines()[-1]) == ("True", "False")
