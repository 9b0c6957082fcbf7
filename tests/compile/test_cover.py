"""Choosing few tasks that show every pair of values, and telling that what is kept is of other sources."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton ships for Linux only")

TOOLS = Path(__file__).parents[2] / "tools" / "compile"
sys.path.insert(0, str(TOOLS))

import compile as job  # noqa: E402
import page  # noqa: E402
import whole  # noqa: E402
from cover import cover, pairs  # noqa: E402
from families import FAMILIES, family_of, hot  # noqa: E402
from laboratory import Found, Machine  # noqa: E402
from scenes import HOOKS, scenes  # noqa: E402


def test_every_pair_of_values_of_the_whole_is_compiled_for_either_vendor() -> None:
    tasks = job.ci_tasks()
    for (family, every), chips in itertools.product(FAMILIES.items(), (job.AMD, job.NVIDIA)):
        product = [(chip, scene) for chip in chips for scene in every()]
        mine = [task for task in tasks if task[0] in chips and family_of(task[1]) == family]
        assert {pair for task in mine for pair in pairs(task)} == {pair for task in product for pair in pairs(task)}
    assert {(chip, scene) for chip in job.AMD for scene in hot()} <= set(tasks)
    hooks = {chip: {scene.hook for one, scene in tasks if one == chip} for chip in job.CHIPS}
    assert all(found >= {*HOOKS, "commit", "move"} for found in hooks.values())
    assert len(tasks) < len(scenes()) + len(FAMILIES["ssm"]())


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


@pytest.fixture
def result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A result in which gfx942 has one conv variant, and owes its SSMs."""
    import triton

    path = tmp_path / "result.json"
    monkeypatch.setattr(whole, "RESULT", path)
    kept = {"conv": {"variants": 1, "digest": whole.digest_of(["a"]), "kernels": {}}}
    made = {
        "triton": triton.__version__,
        "sources": whole.source_digest(),
        "owed": ["gfx942 ssm"],
        "chips": {"gfx942": kept},
    }
    path.write_text(json.dumps(made))
    return made


def test_a_result_of_other_variants_is_stale(result: dict[str, Any]) -> None:
    assert job.stale("gfx942", [found("a", False)]) == []
    (line,) = job.stale("gfx942", [found("b", False)])
    assert "gfx942 conv: the result is of 1 variants, not of these" in line


def test_a_part_that_the_result_neither_has_nor_owes_is_a_fault(result: dict[str, Any]) -> None:
    assert [line.split(":")[0] for line in job.stale("sm_80", [found("b", False)])] == ["sm_80 conv", "sm_80 ssm"]


def test_what_is_compiled_anew_is_written_beside_what_is_there_and_no_longer_owed(result: dict[str, Any]) -> None:
    resources = job.Resources(40, 30, 0, 0, 64, 0, 2)
    one = replace(found("c", False), machine=Machine(resources, False))
    whole.write({("gfx942", "ssm"): whole.chapter([one])}, itertools.product(("gfx942", "sm_80"), FAMILIES))
    now = whole.kept_result()
    assert now["chips"]["gfx942"]["conv"] == result["chips"]["gfx942"]["conv"]
    assert now["chips"]["gfx942"]["ssm"]["kernels"]["conv_decode_kernel"]["vectors"] == 40
    assert now["owed"] == ["sm_80 conv", "sm_80 ssm"]


def test_the_kept_result_is_of_these_kernels_launchers_launch_sizes_and_scenes() -> None:
    kept = whole.kept_result()
    assert kept["sources"] == whole.source_digest(), "make compile-kernels-check says what of it is stale"
    parts = {f"{chip} {family}" for chip, families in kept["chips"].items() for family in families}
    assert parts | set(kept["owed"]) == {f"{chip} {family}" for chip in job.CHIPS for family in FAMILIES}
    assert not parts & set(kept["owed"])
    for chip, families in kept["chips"].items():
        for family, one in families.items():
            rows = one["kernels"].values()
            assert sum(row["variants"] for row in rows) == one["variants"] > 0, (chip, family)
            if chip in job.AMD:
                spilled = {
                    name: row["spills"] for name, row in one["kernels"].items() if row["spills"] or row["scratch"]
                }
                # one cold variant: lazy drafts in float64 through the fused epilogue, as wide as a chip allows
                assert spilled in ({}, {"fused_add_rmsnorm_kernel": 1}), (chip, family)


def test_a_change_of_a_launch_size_makes_the_result_stale_and_a_comment_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "tuning.py"
    monkeypatch.setattr(whole, "sources", lambda: [path])
    monkeypatch.setattr(whole, "ROOT", tmp_path)
    digests = []
    for text in (
        "def f():\n    return 4\n",
        'def f():\n    """Four."""\n    return 4  # yes\n',
        "def f():\n    return 8\n",
    ):
        path.write_text(text)
        digests.append(whole.source_digest())
    assert digests[0] == digests[1] != digests[2]


def test_the_tables_of_the_page_are_those_of_the_kept_registers_and_of_the_code() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.rendered(text) == text, "run python tools/compile/page.py"
    with pytest.raises(ValueError, match="0 pairs of marks of registers"):
        page.rendered("no tables")
