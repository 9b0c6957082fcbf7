"""What the compile job covers: every kernel of the GPU backends, and every launch size that they choose at the channels
of Inkling."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton ships for Linux only")

from hwbackends.cuda import tuning
from hwbackends.rocm.tuning import Tuning

ROOT = Path(__file__).parents[2]
HOT = ROOT / "tools" / "compile" / "registers.json"
ROWS = [1, 2, 8, 17, 32, 33, 64, 65, 128, 200, 512, 4096]
TOKENS = [1, 16, 512, 4096, 16384, 1 << 17]
DIM = 4096


SLOW = pytest.mark.slow  # half a minute: `make compile-kernels` holds the same of every chip


def tool(*arguments: str) -> list[str]:
    """Lines that the job prints."""
    command = [sys.executable, "tools/compile/compile.py", *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def whole() -> dict[str, list[dict[str, Any]]]:
    """Every variant of the whole product for one chip of either vendor."""
    found = [json.loads(line) for line in tool("--list", "--chip", "gfx942", "--chip", "sm_90")]
    return {chip: [one for one in found if one["chip"] == chip] for chip in ("gfx942", "sm_90")}


@pytest.fixture(scope="module")
def amd(whole: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return whole["gfx942"]


@pytest.fixture(scope="module")
def nvidia(whole: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return whole["sm_90"]


def kernels_of(*folders: str) -> set[str]:
    """Kernels that hooks launch: functions called `..._kernel` in these folders' kernel files."""
    trees = [
        ast.parse(p.read_text()) for folder in folders for p in (ROOT / "hwbackends" / folder).glob("kernels_*.py")
    ]
    functions = (node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef))
    return {name for name in functions if name.endswith("_kernel")}


@SLOW
def test_every_kernel_is_compiled_for_both_vendors(amd: list[dict[str, Any]], nvidia: list[dict[str, Any]]) -> None:
    assert {one["kernel"] for one in amd} == kernels_of("triton_ops")
    assert {one["kernel"] for one in nvidia} == kernels_of("triton_ops", "cuda")


def sizes(found: list[dict[str, Any]], kernel: str, *constants: str) -> set[tuple[int, ...]]:
    """Constants and warps that a kernel is launched with at Inkling's channels."""
    mine = [one for one in found if one["kernel"] == kernel and one["constants"].get("D") == str(DIM)]
    return {(*(int(one["constants"][name]) for name in constants), one["warps"]) for one in mine}


@SLOW
@pytest.mark.parametrize("chip", ["amd", "nvidia"])
def test_every_launch_size_of_the_conv_hooks_is_compiled(chip: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue(chip)
    ours: Any = Tuning(64) if chip == "amd" else tuning
    assert sizes(found, "conv_decode_kernel", "BLOCK_D") >= {ours.decode(rows, DIM) for rows in ROWS}
    assert sizes(found, "conv_draft_kernel", "BLOCK_D") >= {ours.draft(rows, DIM) for rows in ROWS}
    wanted = {ours.extend(tokens, DIM) for tokens in TOKENS}
    assert sizes(found, "conv_extend_kernel", "BLOCK_D", "BLOCK_T") >= wanted
    streamed = {one["constants"]["STREAMED"] for one in found if one["kernel"] == "conv_extend_kernel"}
    assert streamed == {"True", "False"}


@SLOW
def test_amd_launches_are_never_dependent_and_the_forms_of_nvidia_s_are(
    amd: list[dict[str, Any]], nvidia: list[dict[str, Any]]
) -> None:
    assert not any(one["form"] for one in amd)
    dependent = {one["kernel"] for one in nvidia if one["form"] == "dependent"}
    convs = {"conv_decode_kernel", "conv_extend_kernel", "conv_draft_kernel", "fused_add_rmsnorm_kernel"}
    assert dependent == convs | {"conv_decode_ahead_kernel", "fused_add_rmsnorm_ahead_kernel"}


def test_the_table_holds_every_hot_kernel_without_a_spill() -> None:
    table = json.loads(HOT.read_text(encoding="utf-8"))
    assert sorted(table["kernels"]) == ["gfx1100", "gfx1201", "gfx942", "gfx950"]
    columns = {name: table["columns"].index(name) for name in ("spills", "scalar_spills", "scratch")}
    for chip, rows in table["kernels"].items():
        assert len(rows) == 36 + 6, chip
        for key, row in rows.items():
            assert [row[at] for at in columns.values()] == [0, 0, 0], (chip, key)
