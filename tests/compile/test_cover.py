"""Choosing few tasks that show every pair of values, and telling that what is kept is of other sources."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton ships for Linux only")

TOOLS = Path(__file__).parents[2] / "tools" / "compile"
sys.path.insert(0, str(TOOLS))

import compile as job  # noqa: E402
import page  # noqa: E402
import whole  # noqa: E402
from cover import cover, pairs  # noqa: E402
from laboratory import Found  # noqa: E402
from scenes import HOOKS, hot, scenes  # noqa: E402


def test_every_pair_of_values_of_the_whole_is_compiled_for_either_vendor() -> None:
    tasks = job.ci_tasks()
    for chips in (job.AMD, job.NVIDIA):
        product = [(chip, scene) for chip in chips for scene in scenes()]
        shown = {pair for task in tasks if task[0] in chips for pair in pairs(task)}
        assert shown == {pair for task in product for pair in pairs(task)}
    assert {(chip, scene) for chip in job.AMD for scene in hot()} <= set(tasks)
    hooks = {chip: {scene.hook for one, scene in tasks if one == chip} for chip in job.CHIPS}
    assert all(found == {*HOOKS, "commit", "move"} for found in hooks.values())
    assert len(tasks) < len(scenes())


def test_a_cover_is_a_part_of_its_tasks_in_their_order_and_holds_what_was_to_be_kept() -> None:
    tasks = list(itertools.product(job.AMD[:2], scenes()[:40]))
    found = cover(tasks, tasks[7:9])
    assert set(tasks[7:9]) <= set(found) < set(tasks)
    assert found == sorted(found, key=tasks.index)


def found(variant: str, bias: bool, scene: str = "decode ring") -> Found:
    return Found("gfx942", scene, "conv_decode_kernel", "", 2, variant, {"BIAS": str(bias), "SS": "8"}, None)


def test_a_value_that_no_task_compiles_is_told_and_a_derived_size_is_not() -> None:
    scene = next(scene for scene in scenes() if scene.name == "decode ring")
    other = found("b", True, "decode ring bias")
    assert job.uncovered("gfx942", [found("a", False), other], [("gfx950", scene)]) == [
        "gfx942: no task compiles conv_decode_kernel BIAS True"
    ]
    assert job.uncovered("gfx942", [found("a", False)], [("gfx950", scene)]) == []


def test_a_result_of_other_variants_is_stale(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import triton

    kept = {"variants": 1, "digest": whole.digest_of(["a"]), "kernels": {}}
    path = tmp_path / "result.json"
    monkeypatch.setattr(whole, "RESULT", path)
    path.write_text(json.dumps({"triton": triton.__version__, "chips": {"gfx942": kept}}))
    assert job.stale("gfx942", [found("a", False)]) == []
    assert "gfx942: the result is of 1 variants, not of these" in job.stale("gfx942", [found("b", False)])[0]
    assert job.stale("sm_80", [found("b", False)]) == []


def test_the_tables_of_the_page_are_those_of_the_kept_registers_and_of_the_code() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.rendered(text) == text, "run python tools/compile/page.py"
    with pytest.raises(ValueError, match="0 pairs of marks of registers"):
        page.rendered("no tables")
