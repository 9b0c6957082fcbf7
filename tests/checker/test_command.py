"""The command: formats, filters, configuration, exit statuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hwbackends.checker.command import check
from hwbackends.checker.rules import DECLARATIONS, RULES
from tests.checker.trees import line_of, write

FAULTY = """
    class Backend:
        def commit(self, steps, rows=None):
            return steps, rows
        def step(self):
            self.commit(1, rows=2)
    class Npu(Backend):
        def commit(self, steps):
            return steps
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with one finding, below the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write(tmp_path / "src", {"backend.py": FAULTY})


def run(*arguments: str) -> Result:
    return CliRunner().invoke(check, list(arguments), catch_exceptions=False)


def test_json_has_the_documented_shape(tree: Path) -> None:
    result = run("src", "--drift", "--format", "json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    (found,) = data["findings"]
    assert found["rule"] == "HWB101"
    assert found["severity"] == "error"
    assert found["confidence"] == "high"
    assert found["missing"] == ["rows"]
    assert found["definition"] == {"file": "src/backend.py", "line": 8, "name": "Npu.commit"}
    assert found["call"] == {"file": "src/backend.py", "line": line_of(tree / "backend.py", "rows=2")}
    assert data["summary"]["findings"] == 1
    assert "Fix:" in found["message"]


def test_text_shows_both_source_lines_and_the_fix(tree: Path) -> None:
    result = run("src", "--drift")
    assert result.exit_code == 1
    assert "def commit(self, steps):" in result.stdout
    assert "self.commit(1, rows=2)" in result.stdout
    assert "Fix: add 'rows'" in result.stdout
    assert "\x1b[" not in result.stdout


def test_github_prints_one_command_for_each_finding(tree: Path) -> None:
    result = run("src", "--drift", "--format", "github")
    (line,) = result.stdout.strip().splitlines()
    assert line.startswith("::error file=src/backend.py,line=8,title=HWB101 ")


def test_sarif_names_rule_place_and_fingerprint(tree: Path) -> None:
    data = json.loads(run("src", "--drift", "--format", "sarif").stdout)
    assert data["version"] == "2.1.0"
    (result,) = data["runs"][0]["results"]
    location = result["locations"][0]["physicalLocation"]
    assert location == {"artifactLocation": {"uri": "src/backend.py"}, "region": {"startLine": 8}}
    rules = data["runs"][0]["tool"]["driver"]["rules"]
    assert rules[result["ruleIndex"]]["id"] == result["ruleId"] == "HWB101"
    assert result["partialFingerprints"]


def test_a_clean_tree_exits_with_zero(tree: Path) -> None:
    (tree / "backend.py").write_text("def fine(x):\n    return x\nfine(1)\n")
    assert run("src", "--drift").exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("missing-folder", "--drift"),
        ("src", "--contract", "missing.yaml"),
        ("src", "--drift", "--select", "HWB999"),
        ("src", "--drift", "--contract", "x.yaml"),
        ("src", "--drift", "--update-baseline"),
        ("src", "--drift", "--config", "missing.toml"),
        ("--explain", "HWB999"),
        ("src", "--drift", "--format", "xml"),
    ],
)
def test_what_cannot_run_exits_with_two_and_says_why(tree: Path, arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("place", ["definition", "call", "line above"])
def test_an_inline_comment_hides_the_finding_of_its_rule_only(tree: Path, place: str) -> None:
    source = (tree / "backend.py").read_text()
    comment = "# hwbackends: ignore[HWB101] the NPU has no rows"
    marked = {
        "definition": source.replace("def commit(self, steps):", f"def commit(self, steps):  {comment}"),
        "call": source.replace("rows=2)", f"rows=2)  {comment}"),
        "line above": source.replace("    def commit(self, steps):", f"    {comment}\n    def commit(self, steps):"),
    }[place]
    (tree / "backend.py").write_text(marked)
    assert run("src", "--drift").exit_code == 0
    (tree / "backend.py").write_text(marked.replace("HWB101", "HWB102"))
    assert run("src", "--drift").exit_code == 1


def test_a_baseline_hides_what_it_lists_even_when_lines_move(tree: Path) -> None:
    assert run("src", "--drift", "--baseline", "base.json", "--update-baseline").exit_code == 0
    assert run("src", "--drift", "--baseline", "base.json").exit_code == 0
    moved = "# one line more\n" + (tree / "backend.py").read_text()
    (tree / "backend.py").write_text(moved)
    assert run("src", "--drift", "--baseline", "base.json").exit_code == 0
    (tree / "backend.py").write_text(moved + "    def other(self):\n        self.commit(1, rows=2, more=3)\n")
    assert run("src", "--drift", "--baseline", "base.json").exit_code == 1


NO_BASELINES = {
    "a list": ("[]", "wants an object with a list 'findings', got a list"),
    "an object of something else": ('{"version": 1}', "got an object without it: ['version']"),
    "an object whose findings are no list": ('{"findings": "all"}', "wants an object with a list 'findings'"),
    "a text": ('"findings"', "got a str"),
    "no JSON": ("findings:\n- all\n", "it is no JSON"),
    "an empty file": ("", "it is no JSON"),
    "bytes": (b"\xff\xfe\x00", "it is no JSON"),
}


@pytest.mark.parametrize(("content", "said"), NO_BASELINES.values(), ids=NO_BASELINES.keys())
def test_a_file_that_is_no_baseline_cannot_run_and_says_why(tree: Path, content: str | bytes, said: str) -> None:
    Path("base.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    for more in ((), ("--update-baseline",)):
        result = run("src", "--drift", "--baseline", "base.json", *more)
        assert result.exit_code == 2
        assert result.stderr.startswith("hwbackends check: base.json is not a baseline: ")
        assert said in result.stderr
        assert result.stderr.count("\n") == 1


def test_a_baseline_that_is_a_folder_cannot_run(tree: Path) -> None:
    result = run("src", "--drift", "--baseline", "src")
    assert result.exit_code == 2
    assert "src cannot be read: Is a directory" in result.stderr


def test_one_of_a_kind_is_counted_in_the_singular(tree: Path) -> None:
    assert "1 finding in 1 file\n" in run("src", "--drift").stdout
    written = run("src", "--drift", "--baseline", "base.json", "--update-baseline")
    assert written.stderr == "1 finding written to base.json\n"
    (tree / "more.py").write_text("x = 1\n")
    assert "1 finding in 2 files" in run("src", "--drift").stdout


def test_an_unreadable_file_is_named_with_its_place_once(tree: Path) -> None:
    (tree / "broken.py").write_text("x = 1\ndef broken(:\n")
    (line,) = [line for line in run("src", "--drift").stdout.splitlines() if "HWB201" in line]
    assert line.startswith("src/broken.py:2: HWB201 broken.py: syntax error: ")
    assert line.count("src/broken.py") == 1


def test_select_ignore_and_confidence_filter(tree: Path) -> None:
    assert run("src", "--drift", "--ignore", "HWB101").exit_code == 0
    assert run("src", "--drift", "--select", "HWB102,HWB103").exit_code == 0
    assert run("src", "--drift", "--select", "HWB1").exit_code == 1


def test_pyproject_configures_and_the_command_line_wins(tree: Path) -> None:
    Path("pyproject.toml").write_text('[tool.hwbackends.check]\ntrees = ["src"]\ndrift = true\nignore = ["HWB101"]\n')
    assert run().exit_code == 0
    assert run("--ignore", "HWB102").exit_code == 1
    Path("pyproject.toml").write_text("[tool.hwbackends.check]\nspeed = 3\n")
    assert run("src").exit_code == 2


def test_excluded_files_are_left_out(tree: Path) -> None:
    Path("src/other.py").write_text("")
    assert run("src", "--drift", "--exclude", "backend.py").exit_code == 0


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_explains_itself_with_both_examples(rule: str) -> None:
    result = run("--explain", rule.lower())
    assert result.exit_code == 0
    assert RULES[rule].bad in result.stdout
    assert RULES[rule].good in result.stdout
    assert RULES[rule].modes in result.stdout
    assert (DECLARATIONS in result.stdout) == rule.startswith("HWB1")


def test_the_documentation_is_printed_from_the_rules() -> None:
    from hwbackends.checker.rules import explain

    page = (Path(__file__).parents[2] / "docs/checker.md").read_text()
    for rule in RULES.values():
        assert explain(rule) in page


def test_the_module_runs_without_torch_or_the_runtime(tree: Path) -> None:
    code = (
        "import sys; sys.argv = ['check', 'src', '--drift', '--no-cache']\n"
        "from hwbackends.checker.command import check\n"
        "try:\n    check()\nexcept SystemExit as stop:\n    assert stop.code == 1\n"
        "loaded = {'torch', 'numpy', 'pluggy', 'triton', 'hwbackends.registry.loading', 'hwbackends.step.pool'} & set(sys.modules)\n"  # noqa: E501
        "assert not loaded, loaded\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    )


@pytest.mark.timeout(60)
def test_text_about_a_pipe_does_not_wait_for_the_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    result = CliRunner().invoke(check, [str(tmp_path), "--no-cache"])
    assert result.exit_code == 1, result.output
    assert "HWB201" in result.output
