"""Files that cannot be read are findings; the rest of the tree is checked all the same; nothing outside is followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hwbackends.checker import drift, engine, files
from hwbackends.checker.findings import Finding
from tests.checker.trees import shown, write

SOUND = "def f(x):\n    return x\nf(1, y=2)\n"


def unreadable(root: Path) -> dict[str, Finding]:
    """HWB201 findings by file name; the sound file beside them must have been checked."""
    found = shown(root)
    assert [f.rule for f in found if f.rule != "HWB201"] == ["HWB105"]
    return {Path(f.place.file).name: f for f in found if f.rule == "HWB201"}


def test_syntax_encoding_and_null_bytes_are_findings(tmp_path: Path) -> None:
    write(tmp_path, {"sound.py": SOUND, "syntax.py": "def broken(:\n"})
    (tmp_path / "encoding.py").write_bytes(b"name = '\xff\xfe'\n")
    (tmp_path / "unknown.py").write_bytes(b"# -*- coding: no-such-codec -*-\n")
    (tmp_path / "null.py").write_bytes(b"x = 1\x00\n")
    assert set(unreadable(tmp_path)) == {"syntax.py", "encoding.py", "unknown.py", "null.py"}


@pytest.mark.parametrize(
    "text", ["(" * 5_000 + ")" * 5_000, "-" * 50_000 + "1", "x" + ".a" * 20_000, "+".join("x" * 30_000)]
)
def test_nesting_too_deep_for_the_parser_is_a_finding(tmp_path: Path, text: str) -> None:
    write(tmp_path, {"sound.py": SOUND, "deep.py": f"y = {text}\n"})
    assert set(unreadable(tmp_path)) == {"deep.py"}


def test_a_file_beyond_the_size_limit_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 1_000)
    write(tmp_path, {"sound.py": SOUND, "large.py": "x = 1\n" * 1_001})
    assert "limit" in unreadable(tmp_path)["large.py"].message


def test_links_out_of_the_tree_and_in_circles_are_findings_and_not_followed(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", {"secret.py": "def g(x):\n    return x\ng(1, 2, 3)\n"})
    tree = write(tmp_path / "tree", {"sound.py": SOUND, "pkg/inner.py": "x = 1\n"})
    (tree / "pkg/loop").symlink_to(tree)
    (tree / "out").symlink_to(outside)
    (tree / "out_file.py").symlink_to(outside / "secret.py")
    (tree / "dangling.py").symlink_to(tree / "nowhere.py")
    assert set(unreadable(tree)) == {"loop", "out", "out_file.py", "dangling.py"}


def test_a_fifo_is_a_finding_and_does_not_block(tmp_path: Path) -> None:
    write(tmp_path, {"sound.py": SOUND})
    os.mkfifo(tmp_path / "pipe.py")
    assert set(unreadable(tmp_path)) == {"pipe.py"}


def test_a_file_without_permission_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"sound.py": SOUND, "closed.py": "x = 1\n"})
    (tmp_path / "closed.py").chmod(0)
    real = os.open

    def refuse(path: str, flags: int, *rest: int) -> int:  # root reads anything: refuse as the system would
        if str(path).endswith("closed.py"):
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    assert "Permission denied" in unreadable(tmp_path)["closed.py"].message


def test_nothing_in_the_tree_is_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    write(tmp_path / "tree", {"evil.py": f"open({str(marker)!r}, 'w')\n", "conftest.py": "raise SystemExit(3)\n"})
    assert not shown(tmp_path / "tree")
    assert not marker.exists()


def test_processes_and_one_process_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_CHUNK_BYTES", 100)
    write(
        tmp_path, {f"m{n}.py": f"def f{n}(x):\n    return x\nf{n}(1, y{n}=2)\n" for n in range(7)} | {"bad.py": "def ("}
    )
    alone = engine.run([str(tmp_path)], engine.Options(jobs=1))
    together = engine.run([str(tmp_path)], engine.Options(jobs=2))
    assert alone.findings == together.findings
    assert len(alone.findings) == 8


def test_a_type_of_many_alternatives_is_walked_without_running_out_of_stack(tmp_path: Path) -> None:
    union = " | ".join(["int"] * 700)
    write(tmp_path, {"sound.py": SOUND, "wide.py": f"def g(x: {union}):\n    return x.bit_length_of(1)\n"})
    assert [f.rule for f in shown(tmp_path)] == ["HWB105"]


def test_a_file_name_that_is_no_text_is_still_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from hwbackends.checker.command import check

    monkeypatch.chdir(tmp_path)
    (tmp_path / os.fsdecode(b"bad\xff.py")).write_text("def (")
    for form in ("text", "json", "sarif", "github"):
        result = CliRunner().invoke(check, [".", "--drift", "--no-cache", "--format", form])
        assert (result.exit_code, "HWB201" in result.stdout) == (1, True), (form, result.output)


def test_processes_and_one_process_judge_the_same_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "_WORTH_FORKING", 0)
    base = "class Base:\n    def step(self):\n        self.commit(1, rows=2)\n        self.finish()\n"
    both = "    def commit(self, a, rows=None): return a, rows\n    def finish(self): return 1\n"
    lacking = "    def commit(self, a): return a\n    def other(self): return 1\n"
    classes = {"cuda": both, "xpu": both, "npu": lacking}
    write(
        tmp_path,
        {"base.py": base}
        | {
            f"{name}.py": f"from base import Base\nclass {name.title()}(Base):\n{body}"
            for name, body in classes.items()
        },
    )
    alone = engine.run([str(tmp_path)], engine.Options(jobs=1))
    together = engine.run([str(tmp_path)], engine.Options(jobs=3))
    assert alone.findings == together.findings
    assert {f.rule for f in alone.findings} == {"HWB101", "HWB109"}


def test_a_file_that_ends_the_process_that_reads_it_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_CHUNK_BYTES", 1)
    write(tmp_path, {"sound.py": SOUND, "deadly.py": "x = 1\n", "more.py": "y = 1\n"})
    real = files.parse

    def die(path: str, source: bytes) -> object:
        if path.endswith("deadly.py"):
            os._exit(3)
        return real(path, source)

    monkeypatch.setattr(files, "parse", die)
    outcome = engine.run([str(tmp_path)], engine.Options(jobs=2))
    assert sorted(f.rule for f in outcome.findings) == ["HWB105", "HWB201"]
    (found,) = [f for f in outcome.findings if f.rule == "HWB201"]
    assert found.message.startswith("deadly.py: ends the parser's process")


def test_a_file_can_be_named_itself(tmp_path: Path) -> None:
    write(tmp_path, {"sound.py": SOUND, "other.py": "f(1, z=1)\n"})
    assert [f.missing for f in shown(tmp_path / "sound.py")] == [("y",)]


def test_a_folder_that_cannot_be_listed_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"sound.py": SOUND, "closed/inner.py": "x = 1\n"})
    real = os.scandir

    def refuse(path: str) -> object:  # root lists anything: refuse as the system would
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert unreadable(tmp_path)["closed"].message.startswith("closed: directory cannot be listed: Permission denied.")


def test_a_file_that_fails_while_it_is_read_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"sound.py": SOUND, "broken.py": "x = 1\n"})
    real, opened = os.fstat, os.open
    failing: set[int] = set()

    def remember(path: str, flags: int, *rest: int) -> int:
        descriptor = opened(path, flags, *rest)
        if str(path).endswith("broken.py"):
            failing.add(descriptor)
        else:
            failing.discard(descriptor)
        return descriptor

    def fail(descriptor: int) -> os.stat_result:
        if descriptor in failing:
            raise OSError(5, "Input/output error")
        return real(descriptor)

    monkeypatch.setattr(os, "open", remember)
    monkeypatch.setattr(os, "fstat", fail)
    assert "cannot be read: Input/output error" in unreadable(tmp_path)["broken.py"].message


def test_environments_and_other_files_are_no_part_of_a_tree(tmp_path: Path) -> None:
    write(
        tmp_path, {"sound.py": SOUND, ".venv/lib/bad.py": "def (", "node_modules/bad.py": "def (", "notes.txt": "def ("}
    )
    assert not unreadable(tmp_path)


def test_links_inside_the_tree_and_to_other_files_say_nothing(tmp_path: Path) -> None:
    write(
        tmp_path, {"outside.txt": "x", "tree/sound.py": SOUND, "tree/pkg/inner.py": "x = 1\n", "tree/script": "def ("}
    )
    tree = tmp_path / "tree"
    (tree / "again.py").symlink_to(tree / "sound.py")
    (tree / "again").symlink_to(tree / "pkg")
    (tree / "data.txt").symlink_to(tmp_path / "outside.txt")
    (tree / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    assert not unreadable(tree)
    (tree / "named.py").symlink_to(tree / "script")  # read here: its own name does not say that it is Python
    assert set(unreadable(tree)) == {"named.py"}
