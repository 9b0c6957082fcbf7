"""What the two GPU backends hold twice: hooks with the contract's signatures over the launchers that they share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from hwbackends.cli import main
from hwbackends.registry.origins import hook_origins

BACKENDS = Path(__file__).parents[2] / "hwbackends"


@pytest.mark.parametrize("name", ["plugin.py", "conv.py", "epilogue.py", "commit.py", "metadata.py", "ssm.py"])
def test_the_hooks_of_rocm_are_those_of_cuda_over_its_own_traits(name: str) -> None:
    ours, theirs = ((BACKENDS / backend / name).read_text(encoding="utf-8") for backend in ("rocm", "cuda"))
    assert ours == theirs.replace("cuda", "rocm")


def test_no_kernel_and_no_launcher_lies_in_the_folder() -> None:
    for path in (BACKENDS / "rocm").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "triton.jit" not in text, path
        assert "inline_asm" not in text, path


HOOKS = {"conv_hooks.py": ("conv_target_verify", "fused_decode_add_rmsnorm"), "ssm_hooks.py": ("ssm_extend",)}


def test_hooks_that_are_made_for_both_are_followed_to_the_function_that_they_are() -> None:
    for name, hooks in HOOKS.items():
        lines = (BACKENDS / "triton_ops" / name).read_text(encoding="utf-8").splitlines()
        for place in hook_origins("hwbackends.rocm.plugin", hooks).values():
            file, _, line = str(place).rpartition(":")
            assert Path(file).name == name
            assert lines[int(line) - 1].strip() == "def call("


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("conv_hooks.py", "        activation: str | None = None,\n"),
        ("conv_hooks.py", "        norm_weight: Tensor,\n"),
        ("ssm_hooks.py", "        scale: float | None = None,\n"),
    ],
)
def test_a_parameter_that_the_one_set_of_signatures_loses_is_found_by_the_checker(
    tmp_path: Path, name: str, line: str
) -> None:
    for folder in ("contract", "cuda", "rocm", "triton_ops"):
        shutil.copytree(BACKENDS / folder, tmp_path / "hwbackends" / folder)
    (tmp_path / "hwbackends" / "__init__.py").touch()
    path = tmp_path / "hwbackends" / "triton_ops" / name
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(line, "", 1), encoding="utf-8")
    done = CliRunner().invoke(main, ["check", str(tmp_path / "hwbackends"), "--no-cache"])
    assert done.exit_code == 1, done.output
    assert "HWB101" in done.output
    assert f"parameters missing: {line.split(':')[0].strip()}" in done.output
