"""Methods that are assigned anew behind their class: which definition a call meets."""

from __future__ import annotations

from pathlib import Path

import pytest

from hwbackends.checker.suppress import Selection
from tests.checker.test_contract_mode import CONTRACT, GOOD, LACKING
from tests.checker.trees import brief, shown, write

# name -> (what stands behind `class A` with `run(self, a)`, what is reported of `A().run(1, b=2)`)
REPLACEMENTS = {
    "nothing replaces the method": ("", {("HWB105", "A.run", ("b",))}),
    "a function that takes more": ("def new(self, a, b): return a, b\nA.run = new", set()),
    "a function that takes something else": (
        "def new(self, a, c): return a, c\nA.run = new",
        {("HWB105", "new", ("b", "c"))},
    ),
    "a static method": (
        "def new(a, c): return a, c\nA.run = staticmethod(new)",
        {("HWB105", "new", ("b", "c"))},
    ),
    "a static method that takes more": ("def new(a, b): return a, b\nA.run = staticmethod(new)", set()),
    "a class method": ("def new(cls, a): return a\nA.run = classmethod(new)", {("HWB105", "new", ("b",))}),
    "a lambda": ("A.run = lambda self, a, b: (a, b)", set()),
    "a static lambda": ("A.run = staticmethod(lambda a, b: (a, b))", set()),
    "a function set by name": ('def new(self, a, b): return a, b\nsetattr(A, "run", new)', set()),
    "a method of another class": ("class B:\n    def run(self, a, b): return a, b\nA.run = B.run", set()),
    "the last of two": ("def new(self, a, b): return a, b\nA.run = new\nA.run = lambda self, a, b=1: a", set()),
    "a forwarder to what was there before": (
        "old = A.run\ndef new(self, *args, **kwargs): return old(self, *args, **kwargs)\nA.run = new",
        {("HWB105", "A.run", ("b",))},
    ),
    "a decorator around what is there": (
        "def traced(f):\n    def inner(*args, **kwargs): return f(*args, **kwargs)\n    return inner\n"
        "A.run = traced(A.run)",
        {("HWB105", "A.run", ("b",))},
    ),
    "something that cannot be seen": ("import elsewhere\nA.run = elsewhere.run", {("HWB105", "A.run", ("b",))}),
    "a function on one platform only": (
        "def new(self, a, b): return a, b\nif is_npu():\n    A.run = new",
        {("HWB101", "A.run", ("b",))},
    ),
    "a function that somebody puts there later": (
        "def new(self, a, b): return a, b\ndef patch():\n    A.run = new",
        set(),
    ),
}


@pytest.mark.parametrize(("behind", "wanted"), REPLACEMENTS.values(), ids=REPLACEMENTS.keys())
def test_a_call_meets_the_method_that_is_in_force(
    tmp_path: Path, behind: str, wanted: set[tuple[str, str, tuple[str, ...]]]
) -> None:
    source = f"class A:\n    def run(self, a): return a\n{behind}\ndef go():\n    A().run(1, b=2)\n"
    assert brief(shown(write(tmp_path, {"module.py": source}))) == wanted


def test_what_another_file_may_have_replaced_is_of_low_confidence_for_calls_beside_the_replacement(
    tmp_path: Path,
) -> None:
    files = {
        "engine/a.py": "class A:\n    def run(self, a): return a\n",
        "vendor/patch.py": "from engine.a import A\ndef new(self, a, b): return a, b\nA.run = new\n",
        "vendor/use.py": "from engine.a import A\ndef go():\n    A().run(1, b=2)\n",
    }
    write(tmp_path, files)
    assert not shown(tmp_path)
    assert [f.confidence for f in shown(tmp_path, selection=Selection(confidence="low"))] == ["low"]
    (tmp_path / "vendor/use.py").rename(tmp_path / "engine/use.py")
    assert brief(shown(tmp_path)) == {("HWB101", "A.run", ("b",))}


def test_a_receiver_without_a_type_meets_the_replacement(tmp_path: Path) -> None:
    source = """
        class A:
            def run_all_rows(self, a): return a
        class B:
            def run_all_rows(self, a, b=None, c=None, d=None): return a, b, c, d
        def new(self, a, b=None, c=None, d=None): return a, b, c, d
        A.run_all_rows = new
        def go(x):
            x.run_all_rows(a=1, b=2, c=3, d=4)
    """
    write(tmp_path, {"module.py": source})
    assert not shown(tmp_path, selection=Selection(confidence="low"))


def test_contract_mode_holds_the_replacement_against_the_contract_and_not_what_it_replaced(tmp_path: Path) -> None:
    contract = write(tmp_path / "contracts", {"sample.yaml": CONTRACT}) / "sample.yaml"
    old = f"class Npu:\n    def update_state_after_verify(self, {LACKING}): return steps\n"
    new = f"def update(self, {GOOD}): return steps\nNpu.update_state_after_verify = update\n"
    static = f"def update({GOOD}): return steps\nNpu.update_state_after_verify = staticmethod(update)\n"
    write(tmp_path / "old", {"npu.py": old})
    assert {f.rule for f in shown(tmp_path / "old", contract=contract)} == {"HWB101"}
    assert not shown(write(tmp_path / "new", {"npu.py": old + new}), contract=contract)
    assert not shown(write(tmp_path / "static", {"npu.py": old + static}), contract=contract)
    bad = old + static.replace(GOOD, LACKING)
    assert {
        f.definition.name for f in shown(write(tmp_path / "bad", {"npu.py": bad}), contract=contract) if f.definition
    } == {"update"}
