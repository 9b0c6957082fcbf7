"""How the command behaves: bars, interruptions, file names, comments that excuse nothing, patches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from urllib.parse import unquote

import pytest
from click.testing import CliRunner, Result

from hwbackends import cli
from hwbackends.checker import drift, extract
from hwbackends.checker.command import check
from hwbackends.checker.progress import Progress
from tests.checker.trees import write

BASE = """
class Backend:
    def commit(self, steps, rows=None, *, track: bool = False):
        return steps, rows, track
    def step(self):
        self.commit(1, rows=2, track=True)
"""
LACKING = "from base import Backend\nclass Npu(Backend):\n    def commit(self, steps):\n        return steps\n"

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(check, [*arguments, "--no-cache", "--jobs", "1"])


# -- errors of the checker --------------------------------------------------------------------------------------------


def test_an_error_of_the_checker_is_contained_to_its_call_and_has_a_status_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"base.py": BASE, "npu.py": LACKING, "use.py": "def f(a): return a\n\n\nf(1)\n"})
    real = drift.Drift.check_call

    def failing(self: drift.Drift, file: int, call: drift.Call) -> list[drift.Rejection]:
        if self.program.files[file].path.endswith("use.py"):
            raise IndexError("tuple index out of range")
        return real(self, file, call)

    monkeypatch.setattr(drift.Drift, "check_call", failing)
    result = run(str(tmp_path), "--drift", "--format", "json", "--select", "HWB101")
    assert result.exit_code == 3
    lost, internal = sorted(json.loads(result.stdout)["findings"], key=lambda found: found["rule"])
    assert (lost["rule"], internal["rule"]) == ("HWB101", "HWB202")
    assert internal["definition"] == {"file": str(tmp_path / "use.py"), "line": 4, "name": ""}
    assert "IndexError: tuple index out of range" in internal["message"]


def test_an_error_in_one_file_leaves_the_others_to_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"base.py": BASE, "npu.py": LACKING, "odd.py": "odd = 1\n"})
    real = extract.extract

    def failing(tree, source, external):  # type: ignore[no-untyped-def]
        if source.startswith(b"odd"):
            raise KeyError("odd")
        return real(tree, source, external)

    monkeypatch.setattr(extract, "extract", failing)
    result = run(str(tmp_path), "--drift")
    assert result.exit_code == 3
    assert "HWB101" in result.stdout
    assert "odd.py:1: HWB202" in result.stdout


def test_neither_a_comment_nor_a_baseline_hides_an_error_of_the_checker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"use.py": "def f(a): return a\nf(1)  # hwbackends: ignore\n"})
    monkeypatch.setattr(drift.Drift, "check_call", lambda *_: 1 / 0)
    baseline = str(tmp_path / "baseline.json")
    assert run(str(tmp_path), "--drift", "--baseline", baseline, "--update-baseline").exit_code == 0
    assert run(str(tmp_path), "--drift", "--baseline", baseline).exit_code == 3


# -- interruptions and bars -------------------------------------------------------------------------------------------


def test_an_interrupt_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"use.py": "def f(a): return a\nf(1)\n"})

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(drift.Drift, "collect", interrupted)
    result = run(str(tmp_path), "--drift")
    assert result.exit_code == 130
    assert "interrupted" in result.stderr


@pytest.mark.slow
def test_ctrl_c_ends_the_workers_too(tmp_path: Path) -> None:
    body = "\n".join(f"def f{i}(a): return a\nf{i}({i}, x=1)" for i in range(4000))
    write(tmp_path, {f"m{number}.py": body for number in range(30)})
    command = [sys.executable, "-m", "hwbackends.checker", str(tmp_path), "--drift", "--no-cache", "--jobs", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        time.sleep(2)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors


def test_a_bar_is_drawn_where_it_is_asked_for_and_wiped_away() -> None:
    stream = StringIO()
    bar = Progress(True, stream)
    bar.step("checking calls", 1, 4)
    bar.clear()
    assert "25% checking calls" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_no_bar_is_drawn_into_a_file_or_at_once() -> None:
    stream = StringIO()
    bar = Progress(None, stream)
    bar.step("checking calls", 1, 4)
    bar.clear()
    assert not stream.getvalue()


# -- file names -------------------------------------------------------------------------------------------------------

NAMES = [
    "a b.py",
    "50%.py",
    "q?x=1#y.py",
    "ä中.py",
    "co:lon.py",
    "new\nline.py",
    b"bad\xff.py".decode("utf-8", "surrogateescape"),
]


@pytest.mark.parametrize("name", NAMES)
def test_sarif_and_text_survive_any_file_name(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tree").mkdir()
    (Path("tree") / name).write_text("def f(a): return a\nf(1, b=2)\n")
    result = run("tree", "--drift", "--format", "sarif")
    data = json.loads(result.stdout.encode("utf-8"))  # no half of a surrogate pair is left
    (found,) = data["runs"][0]["results"]
    uri = found["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert os.fsdecode(unquote(uri, errors="surrogateescape")) == f"tree/{name}"
    assert not set(uri) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~/%")
    lines = run("tree", "--drift").stdout.splitlines()
    assert len(lines) == 4  # the finding, its two source lines, the count


def test_an_absolute_path_becomes_a_file_uri(tmp_path: Path) -> None:
    (tmp_path / "a b.py").write_text("def f(a): return a\nf(1, b=2)\n")
    data = json.loads(run(str(tmp_path), "--drift", "--format", "sarif").stdout)
    uri = data["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert uri == f"file://{tmp_path}/a%20b.py"


def test_long_source_lines_are_cut(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(f"def f(a): return a\nf(1, b={'1 + ' * 400}1)\n")
    assert max(map(len, run(str(tmp_path), "--drift").stdout.splitlines()[1:])) < 200


# -- nothing to do ----------------------------------------------------------------------------------------------------


def test_a_tree_without_python_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    result = run(str(tmp_path), "--drift")
    assert result.exit_code == 2
    assert "no Python file" in result.stderr


def test_an_ignore_that_matches_nothing_is_named(tmp_path: Path) -> None:
    source = "def f(a): return a  # hwbackends: ignore[HWB101]\n# hwbackends: ignore[HWB105]\nf(1, b=2)\n"
    (tmp_path / "a.py").write_text(source)
    result = run(str(tmp_path), "--drift")
    assert result.exit_code == 0
    assert "a.py:1: this ignore of HWB101 matches nothing" in result.stdout
    assert "a.py:2" not in result.stdout
    summary = json.loads(run(str(tmp_path), "--drift", "--format", "json").stdout)["summary"]
    assert summary["unused_ignores"] == [{"file": str(tmp_path / "a.py"), "line": 1}]


def test_an_ignore_for_one_contract_is_obeyed_there_and_not_called_unused_elsewhere(tmp_path: Path) -> None:
    source = "def f(a): return a\nf(1, b=2)  # hwbackends: ignore[{}]\n"
    (tmp_path / "a.py").write_text(source.format("sglang:HWB105"))
    elsewhere = run(str(tmp_path), "--drift")
    assert "HWB105" in elsewhere.stdout
    assert "matches nothing" not in elsewhere.stdout
    (tmp_path / "a.py").write_text(source.format("sglang:HWB101, drift:HWB105"))
    assert "0 findings" in run(str(tmp_path), "--drift").stdout
    (tmp_path / "a.py").write_text("def f(a): return a  # hwbackends: ignore[drift:HWB105]\n")
    assert "a.py:1: this ignore of HWB105 matches nothing" in run(str(tmp_path), "--drift").stdout


def test_an_ignore_that_our_own_contract_does_not_need_is_the_sglang_contracts() -> None:
    steps = str(ROOT / "hwbackends/engines/sglang/steps.py")
    for options in ([], ["--contract", str(ROOT / "contracts/engines/sglang.yaml")]):
        result = run(steps, *options)
        assert result.exit_code == 0, result.stdout
        assert "matches nothing" not in result.stdout


@pytest.mark.parametrize(
    ("head", "fixed"),
    [
        ("    def run(self, x): return x", "    def run(self, x, late=3): return x"),
        ("    async def run(self, x: dict[str, int] = {1: 2}) -> int: return x",
         "    async def run(self, x: dict[str, int] = {1: 2}, late=3) -> int: return x"),
        ("    def run(\n  self, x='ä中',\n  y={':': 1},  # (\n    ): return x",
         "    def run(\n  self, x='ä中',\n  y={':': 1},\n  late=3,  # (\n    ): return x"),
        ("\tdef run(self, x, *a): return a", "\tdef run(self, x, *a, late=3): return a"),
    ],
)  # fmt: skip
def test_a_patch_needs_only_the_head_of_a_definition(tmp_path: Path, head: str, fixed: str) -> None:
    base = (
        "class A:\n    def run(self, x=1, late=3): return x, late\n    def go(self): self.run(1, late=4)\nclass B(A):\n"
    )
    path = tmp_path / "a.py"
    path.write_text(base + head + "\n", encoding="utf-8")
    run(str(tmp_path), "--drift", "--fix", "--confidence", "low")
    assert path.read_text(encoding="utf-8") == base + fixed + "\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_check_leaves_no_worker_behind() -> None:
    source = (
        "import os, signal, time\nfrom hwbackends.checker import workers\n"
        "with workers.pool(1) as pool:\n    print(pool.submit(os.getpid).result(), flush=True)\n"
        "    pool.submit(time.sleep, 60)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = Path("/proc") / process.stdout.readline().strip()
        process.wait()
    until = time.monotonic() + 20
    while worker.exists() and (worker / "stat").read_text().split()[2] != "Z":
        assert time.monotonic() < until, "the worker still waits for work"
        time.sleep(0.1)


@pytest.mark.parametrize("coding", ["rot13", "hex", "nope", "latin-1", "utf-16"])
def test_a_coding_line_of_any_kind_is_reported_in_every_form(tmp_path: Path, coding: str) -> None:
    head = f"# -*- coding: {coding} -*-\n"
    write(tmp_path, {"odd.py": head + "def f(a): return a\nf(1, b=2)\n", "plain.py": "def g(a): return a\ng(1, b=2)\n"})
    for form in ("text", "json", "sarif", "github"):
        result = run(str(tmp_path), "--drift", "--format", form)
        assert result.exit_code == 1, (form, result.stderr)
        assert "plain.py" in result.stdout


def test_an_interrupt_while_a_subcommand_is_loaded_is_not_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", interrupted)
    assert CliRunner().invoke(cli.main, ["check", "."]).exit_code == 130


# -- ways out ---------------------------------------------------------------------------------------------------------


def test_each_finding_names_the_smallest_change_at_the_definition_at_the_call_and_as_an_ignore(tmp_path: Path) -> None:
    write(tmp_path, {"base.py": BASE, "npu.py": LACKING})
    (found,) = json.loads(run(str(tmp_path), "--drift", "--format", "json").stdout)["findings"]
    assert [(way["where"], way["patch"]) for way in found["ways"]] == [
        ("definition", True),
        ("call", False),
        ("ignore", False),
    ]
    assert found["ways"][0]["text"] == "add 'rows', 'track' to Npu.commit"
    assert found["accepted_by"]["name"] == "Backend.commit"


def test_a_patch_adds_what_the_base_has_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write(tmp_path, {"base.py": BASE, "npu.py": LACKING}))
    result = run(".", "--drift", "--fix", "--diff")
    assert result.exit_code == 1
    assert "+    def commit(self, steps, rows=None, track=False):" in result.stdout
    assert Path("npu.py").read_text() == LACKING


DEFINITIONS = {
    "on one line": (
        "def commit(self, steps): return steps",
        "def commit(self, steps, rows=None, track=False): return steps",
    ),
    "behind keywords only": (
        "def commit(self, steps, *, track=False): return track",
        "def commit(self, steps, *, track=False, rows=None): return track",
    ),
    "one line for each": (
        "def commit(\n        self,\n        steps: int,\n    ): return steps",
        "def commit(\n        self,\n        steps: int,\n        rows=None,\n        track=False,\n    ): "
        "return steps",
    ),
    "behind a default that spans text": (
        'def commit(self, steps="ä, (b)"): return steps',
        'def commit(self, steps="ä, (b)", rows=None, track=False): return steps',
    ),
}


@pytest.mark.parametrize(("before", "after"), DEFINITIONS.values(), ids=DEFINITIONS.keys())
def test_a_fix_writes_the_signature_and_the_finding_is_gone(tmp_path: Path, before: str, after: str) -> None:
    head = "from base import Backend\nclass Npu(Backend):\n    "
    write(tmp_path, {"base.py": BASE})
    (tmp_path / "npu.py").write_text(head + before + "\n")
    assert run(str(tmp_path), "--drift", "--fix").exit_code == 0
    assert (tmp_path / "npu.py").read_text() == head + after + "\n"
    assert run(str(tmp_path), "--drift").exit_code == 0


def test_a_default_that_is_no_constant_is_left_to_somebody_who_reads_it(tmp_path: Path) -> None:
    base = BASE.replace("rows=None", "rows=make()")
    write(tmp_path, {"base.py": "def make(): return 1\n" + base, "npu.py": LACKING})
    result = run(str(tmp_path), "--drift", "--fix")
    assert result.exit_code == 1
    assert (tmp_path / "npu.py").read_text() == LACKING
    assert "0 definitions changed; 1 finding left to read" in result.stderr


def test_a_patch_alone_wants_fix(tmp_path: Path) -> None:
    write(tmp_path, {"base.py": BASE})
    assert run(str(tmp_path), "--drift", "--diff").exit_code == 2
