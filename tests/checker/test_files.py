"""Files that cannot be read are findings; the rest of the tree is checked all the same; nothing outside is followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hwbackends.checker import engine, files
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
