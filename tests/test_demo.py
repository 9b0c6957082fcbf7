"""`hwbackends demo` proves what it says, and its exit status says whether it did."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from hwbackends.cli import main
from hwbackends.demo import serve, text
from hwbackends.demo.serve import DemoResult, DemoSettings
from hwbackends.engines.transformers.convs import SidecarConvs
from hwbackends.engines.transformers.tiny import StockAnswer
from hwbackends.runner.drafters import SeededDrafter
from hwbackends.runner.graphs import ForwardOutput, StepGraphs, StepRow
from hwbackends.runner.requests import Request
from hwbackends.runner.serving import PackedRunner
from hwbackends.step.batch import ForwardMode

CHECKS = {
    "tokens equal to stock",
    "logits equal to stock",
    "metadata resolved once per step",
    "decode and verify replayed",
    "addresses moved: none",
    "slots leaked: none",
    "every accepted count occurred",
}


def demo(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["demo", "--requests", "3", *arguments], catch_exceptions=False)


def document(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = demo("--json", "--backend", "reference", *arguments)
    return result.exit_code, json.loads(result.stdout)


def failed(found: dict[str, Any]) -> set[str]:
    return {check["name"] for check in found["checks"] if not check["passed"]}


@pytest.mark.parametrize(("model", "layout"), [("inkling", "ring"), ("lfm2", "window")])
def test_the_demo_passes_and_says_what_it_served(model: str, layout: str) -> None:
    status, found = document("--model", model, "--layout", layout, "--draft", "3")
    assert (status, failed(found), found["passed"]) == (0, set(), True)
    assert {check["name"] for check in found["checks"]} == CHECKS
    assert [entry["request"] for entry in found["requests"]] == [0, 1, 2]
    for entry in found["requests"]:
        histogram = entry["accepted_histogram"]
        assert len(histogram) == 4
        assert entry["steps"] >= sum(histogram)
        weighted = sum(count * times for count, times in enumerate(histogram))
        assert entry["mean_accepted"] == pytest.approx(weighted / sum(histogram), rel=1e-12)
    assert sum(entry["accepted_histogram"][3] for entry in found["requests"]) > 0
    assert set(found["graphs"]) == set(found["steps"]) == {"extend", "decode", "target_verify"}
    for mode, steps in found["steps"].items():
        replayed, eager = (0, steps) if mode == "extend" else (steps, 0)
        assert found["graphs"][mode] == {"replayed": replayed, "eager": eager}
    assert set(found["step_ms"]) == set(found["steps"])
    assert all(ms > 0 for ms in found["step_ms"].values())


@pytest.mark.cuda
@pytest.mark.parametrize("model", ["inkling", "lfm2"])
@pytest.mark.parametrize("layout", ["window", "ring"])
@pytest.mark.parametrize("backend", ["cuda", "reference"])
def test_on_a_gpu_every_decode_and_verify_step_is_a_replay(model: str, layout: str, backend: str) -> None:
    result = demo("--json", "--backend", backend, "--device", "cuda", "--model", model, "--layout", layout)
    found = json.loads(result.stdout)
    assert (result.exit_code, failed(found)) == (0, set())
    for mode in ("decode", "target_verify"):
        assert found["graphs"][mode] == {"replayed": found["steps"][mode], "eager": 0}


def test_without_drafts_nothing_is_verified() -> None:
    status, found = document("--draft", "0", "--model", "lfm2")
    assert status == 0
    assert "every accepted count occurred" not in {check["name"] for check in found["checks"]}
    assert set(found["steps"]) == {"extend", "decode"}


def test_without_graphs_every_step_runs_from_python() -> None:
    status, found = document("--no-graphs", "--model", "lfm2")
    assert (status, failed(found)) == (0, set())
    assert all(counts["replayed"] == 0 and counts["eager"] > 0 for counts in found["graphs"].values())
    [check] = [check for check in found["checks"] if check["name"] == "decode and verify replayed"]
    assert check["detail"].startswith("nothing was recorded on cpu: decode 0 replayed")


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    runs = [document("--model", "lfm2", "--seed", seed, "--requests", "2")[1]["requests"] for seed in ("4", "4", "5")]
    assert runs[0] == runs[1] != runs[2]


def test_tables_show_each_request_and_each_check() -> None:
    result = demo("--backend", "reference", "--model", "lfm2", "--draft", "2")
    assert result.exit_code == 0
    for shown in ("prompt", "new", "steps", "mean accepted", "=0", "=2", "modules asked", "slots leaked", "ties"):
        assert shown in result.stdout
    assert "stock model" in result.stderr


def test_a_commit_that_does_nothing_fails_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    load = serve.hwbackends.load

    class Forgetful:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._backend = load(*args, **kwargs)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._backend, name)

        def update_mamba_state_after_mtp_verify(self, *args: Any, **kwargs: Any) -> None:
            """Leaves every slot at the state before the verify step."""

    monkeypatch.setattr(serve.hwbackends, "load", Forgetful)
    status, found = document("--layout", "window", "--model", "lfm2")
    assert status == 1
    assert {"tokens equal to stock", "logits equal to stock"} <= failed(found)


def test_metadata_resolved_twice_in_a_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    conv = SidecarConvs.conv

    def preparing(self: SidecarConvs, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._sidecar.resolutions += args[0] == 0
        return conv(self, *args, **kwargs)

    monkeypatch.setattr(SidecarConvs, "conv", preparing)
    status, found = document("--model", "lfm2")
    assert (status, failed(found)) == (1, {"metadata resolved once per step"})


def test_a_verify_step_that_no_graph_replays_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = StepGraphs.capture

    def losing(self: StepGraphs) -> None:
        capture(self)
        for (mode, size, _), bucket in self._buckets.items():
            if (mode, size) == (ForwardMode.TARGET_VERIFY, 3):
                bucket.replay = None

    monkeypatch.setattr(StepGraphs, "capture", losing)
    status, found = document("--model", "lfm2")
    assert (status, failed(found)) == (1, {"decode and verify replayed"})
    assert found["graphs"]["target_verify"]["eager"] > 0


def test_a_model_that_runs_beside_its_graphs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    run = StepGraphs.run

    def twice(self: StepGraphs, mode: ForwardMode, rows: Sequence[StepRow]) -> ForwardOutput:
        output = run(self, mode, rows)
        bucket = next(bucket for bucket in self._buckets.values() if bucket.output is output)
        self._launch(bucket)()
        bucket.output = output
        return output

    monkeypatch.setattr(StepGraphs, "run", twice)
    status, found = document("--model", "lfm2")
    assert (status, failed(found)) == (1, {"decode and verify replayed", "metadata resolved once per step"})


def test_a_run_without_some_accepted_count_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SeededDrafter, "_draw", lambda self, most, count: min(most, 2))
    result = demo("--backend", "reference", "--model", "lfm2", "--requests", "5")
    assert result.exit_code == 1
    assert "missing [3]" in " ".join(result.stdout.split())


def test_a_moved_buffer_and_a_leaked_slot_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses, calls = PackedRunner.addresses, []

    def moving(self: PackedRunner) -> dict[str, int]:
        calls.append(1)
        return {name: address + 64 * len(calls) for name, address in addresses(self).items()}

    monkeypatch.setattr(PackedRunner, "addresses", moving)
    monkeypatch.setattr(PackedRunner, "close", lambda self: self.scheduler.allocator.alloc())
    status, found = document("--model", "lfm2")
    assert (status, failed(found)) == (1, {"addresses moved: none", "slots leaked: none"})


def test_ties_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "TIE_MARGIN", 0.05)
    status, found = document("--model", "lfm2")
    assert status == 0
    assert {"request", "step"} == set(found["ties"][0])
    assert "request" in demo("--backend", "reference", "--model", "lfm2").stdout.partition("ties")[2]


def compared(generated: list[int], margin: float) -> DemoResult:
    """One request that generated these tokens, against a stock model that said [1, 2, 3]; `margin` at its step 1."""
    logits = torch.zeros(3, 5)
    for step, token in enumerate([1, 2, 3]):
        logits[step, token] = margin if step == 1 else 1.0
    request = Request(0, (4,), 3)
    request.extend(generated, list(logits))
    result = DemoResult(DemoSettings(), "reference", "cpu", [request])
    serve._compare(result, [StockAnswer([1, 2, 3], logits)])
    return result


def test_texts_that_part_at_a_tie_are_not_different_but_listed() -> None:
    result = compared([1, 0, 0], margin=1e-5)
    assert result.passed
    assert result.ties == [(0, 1)]
    assert "1 parted at a tie" in result.checks[0].detail


@pytest.mark.parametrize("generated", [[1, 0, 3], [1, 2]])
def test_texts_that_part_elsewhere_or_end_early_are_different(generated: list[int]) -> None:
    result = compared(generated, margin=1.0)
    assert not result.checks[0].passed
    assert "different: requests [0]" in result.checks[0].detail


def test_prompts_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "Süß.txt"
    file.write_text("Käse und Brötchen. " * 40, encoding="utf-8")
    status, found = document("--text", str(file), "--model", "lfm2")
    assert (status, found["passed"]) == (0, True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory, wanted a readable file"),
        (b"caf\xe9" * 200, "byte 3 is not UTF-8, wanted UTF-8"),
        (b"short", "5 bytes, wanted at least 512 bytes"),
    ],
)
def test_a_bad_text_file_is_named(content: bytes | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    result = demo("--text", str(file))
    assert result.exit_code == 2
    assert "--text" in result.stderr
    assert message in result.stderr


def test_a_wrong_backend_or_device_is_named() -> None:
    result = demo("--backend", "referense")
    assert result.exit_code == 2
    assert "reference" in result.stderr
    for device in ("warp", "meta"):
        result = demo("--device", device)
        assert result.exit_code == 2
        assert f"--device: got '{device}" in result.stderr


def test_the_default_text_is_the_projects_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    readme, licence = (root / "README.md").read_bytes(), (root / "LICENSE").read_bytes()
    assert text.read_text(None) == readme + b"\n" + licence
    monkeypatch.setattr(text, "__file__", str(tmp_path / "site-packages" / "hwbackends" / "demo" / "text.py"))
    assert b"Apache License" in text.read_text(None), "an installed package brings its licence"


def test_prompts_are_of_every_kind() -> None:
    prompts = text.make_prompts(bytes(range(256)) * 9, 16, chunk=32, width=4, longest=160, seed=0)
    sizes = [len(prompt) for prompt in prompts]
    assert sizes[:7] == [1, 101, 2, 31, 32, 65, 4]
    assert max(sizes) <= 160
    shared = [any(p[:32] == q[:32] for q in prompts[:index] if len(q) > 32) for index, p in enumerate(prompts)]
    assert any(shared)


@pytest.mark.parametrize("seed", ["-1", str(2**32), "99999999999999999999999"])
def test_a_seed_out_of_range_is_named(seed: str) -> None:
    result = demo("--seed", seed)
    assert result.exit_code == 2
    assert "'--seed'" in result.stderr


def test_an_interrupt_while_torch_is_imported_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(MetaPathFinder):
        def find_spec(self, name: str, *args: Any) -> None:
            if name == "hwbackends.demo.serve":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "hwbackends.demo.serve")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    result = demo()
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def test_an_interrupt_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "run_demo", interrupted)
    result = demo()
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def command(*arguments: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        "from hwbackends.cli import main; main()",
        "demo",
        *arguments,
    ]


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_missing_package_says_how_to_get_it(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from hwbackends.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "demo"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"package '{package}' is not installed" in done.stderr
    assert "pip install 'hwbackends[transformers]'" in done.stderr
    shown = subprocess.run([sys.executable, "-c", code, "demo", "--help"], capture_output=True, text=True, check=False)
    assert (shown.returncode, "--layout" in shown.stdout) == (0, True)


def heed_control_c() -> None:
    """A test run in the background of a shell starts its children with the signal ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_control_c_leaves_no_traceback() -> None:
    arguments = command("--requests", "256", "--draft", "0", "--backend", "reference")
    terminal = {**os.environ, "FORCE_COLOR": "1"}  # the progress bar shows itself before it is done
    pipe = subprocess.PIPE
    with subprocess.Popen(
        arguments, stdout=pipe, stderr=pipe, text=True, env=terminal, preexec_fn=heed_control_c
    ) as process:
        deadline = time.monotonic() + 120
        seen = ""
        assert process.stderr is not None
        while "stock model" not in seen and time.monotonic() < deadline:
            seen += process.stderr.read(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in seen + err + out
    assert err.rstrip().endswith("interrupted")


@pytest.mark.parametrize(
    ("model", "backend"), [("inkling", "ascend"), pytest.param("lfm2", "reference", marks=pytest.mark.slow)]
)
def test_the_emulated_device_sees_no_host_sync_in_the_model(model: str, backend: str) -> None:
    """In a process of its own: emulation cannot be undone."""
    arguments = command("--emulate", "--requests", "2", "--model", model, "--backend", backend, "--json")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["backend"], found["device"], failed(found)) == (backend, "npu:0", set())
