"""Drift mode on the shapes of faults that other checkers find in published releases."""

from __future__ import annotations

from pathlib import Path

from tests.checker.trees import brief, shown, write


def test_a_platform_inside_the_trees_is_asked_beside_one_outside(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "pkg/__init__.py": "",
            "pkg/musa/topk.py": "def route(weights, ids, renormalize=False):\n    return weights, ids, renormalize\n",
            "pkg/topk.py": """
                if is_xpu:
                    from other_package import route
                elif is_musa:
                    from pkg.musa.topk import route
                def select(weights, ids):
                    route(weights, ids, True, 2.5)
            """,
        },
    )
    assert brief(shown(tmp_path)) == {("HWB103", "route", ("4th positional",))}
