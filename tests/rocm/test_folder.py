"""What the two GPU backends hold twice: hooks with the contract's signatures over the launchers that they share."""

from __future__ import annotations

from pathlib import Path

import pytest

BACKENDS = Path(__file__).parents[2] / "hwbackends"


@pytest.mark.parametrize("name", ["plugin.py", "conv.py", "epilogue.py", "commit.py", "metadata.py"])
def test_the_hooks_of_rocm_are_those_of_cuda_over_its_own_traits(name: str) -> None:
    ours, theirs = ((BACKENDS / backend / name).read_text(encoding="utf-8") for backend in ("rocm", "cuda"))
    assert ours == theirs.replace("cuda", "rocm")


def test_no_kernel_and_no_launcher_lies_in_the_folder() -> None:
    for path in (BACKENDS / "rocm").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "triton.jit" not in text, path
        assert "inline_asm" not in text, path
