"""Which classes a condition around a call keeps away: each tree with the calls that must be reported, and no others."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from hwbackends.checker.suppress import Selection
from tests.checker.trees import shown, write

# Npu and Cpu lack `b`, Gpu has it.
FAMILY = """
class Base:
    def commit(self, a, b=1): return a, b
class Npu(Base):
    def commit(self, a): return a
class NewNpu(Npu): pass
class Cpu(Base):
    def commit(self, a): return a
class Gpu(Base):
    def commit(self, a, b=2): return a, b
"""

# name -> (what follows the family, the classes of which the call is reported)
GUARDS = {
    "nothing keeps a call from the whole family": (
        """
        def go(x: Base):
            x.commit(1, b=2)
        """,
        ["Cpu", "Npu"],
    ),
    "a class that leaves early is not called, and neither are those below it": (
        """
        def go(x: Base):
            if isinstance(x, Npu):
                return
            x.commit(1, b=2)
        """,
        ["Cpu"],
    ),
    "every class of a tuple leaves early": (
        """
        def go(x: Base):
            if isinstance(x, (Npu, Cpu)):
                return
            x.commit(1, b=2)
        """,
        [],
    ),
    "a tuple may have a name": (
        """
        WITHOUT = (Npu, Cpu)
        def go(x: Base):
            if isinstance(x, WITHOUT):
                raise TypeError(x)
            x.commit(1, b=2)
        """,
        [],
    ),
    "a union of classes is a tuple of them": (
        """
        def go(x: Base):
            if not isinstance(x, Npu | Cpu):
                x.commit(1, b=2)
        """,
        [],
    ),
    "what is not of a tuple leaves early": (
        """
        def go(x: Base):
            if not isinstance(x, (Gpu, Cpu)):
                return
            x.commit(1, b=2)
        """,
        ["Cpu"],
    ),
    "two tests joined by or are one tuple": (
        """
        def go(x: Base):
            if isinstance(x, Npu) or isinstance(x, Cpu):
                x.commit(1)
            else:
                x.commit(1, b=2)
        """,
        [],
    ),
    "two tests joined by or hold for either": (
        """
        def go(x: Base):
            if isinstance(x, Npu) or isinstance(x, Gpu):
                x.commit(1, b=2)
        """,
        ["Npu"],
    ),
    "a test joined with something else excludes nothing": (
        """
        def go(x: Base, flag):
            if isinstance(x, (Npu, Cpu)) and flag:
                return
            x.commit(1, b=2)
        """,
        ["Cpu", "Npu"],
    ),
    "the exact type keeps no subclass away": (
        """
        def go(x: Base):
            if type(x) is Npu:
                return
            x.commit(1, b=2)
        """,
        ["Cpu", "Npu"],
    ),
    "the exact type is the only one called": (
        """
        def go(x: Base):
            if type(x) is Gpu:
                x.commit(1, b=2)
        """,
        [],
    ),
    "exact types in a tuple": (
        """
        def go(x: Base):
            if type(x) not in (Npu, NewNpu):
                x.commit(1, b=2)
        """,
        ["Cpu"],
    ),
    "the class attribute of an instance is its exact type": (
        """
        def go(x: Base):
            assert x.__class__ == Gpu
            x.commit(1, b=2)
        """,
        [],
    ),
    "self is asked like everything else": (
        """
        class Step(Base):
            def step(self):
                if isinstance(self, (Slow, Old)):
                    return self.commit(1)
                return self.commit(1, b=2)
        class Slow(Step):
            def commit(self, a): return a
        class Old(Step):
            def commit(self, a): return a
        class New(Step):
            def commit(self, a): return a
        """,
        ["New"],
    ),
    "an attribute of self is asked like everything else": (
        """
        class Holder:
            backend: Base
            def go(self):
                if not isinstance(self.backend, (Npu, Cpu)):
                    self.backend.commit(1, b=2)
        """,
        [],
    ),
    "the answer may have a name": (
        """
        def go(x: Base):
            old = isinstance(x, (Npu, Cpu))
            if not old:
                x.commit(1, b=2)
        """,
        [],
    ),
    "a name that is bound anew behind the test is not what was asked": (
        """
        def go(x: Base):
            if isinstance(x, Gpu):
                x = Cpu()
                x.commit(1, b=2)
        """,
        ["Cpu"],
    ),
    "an attribute that is bound anew behind the test is not what was asked": (
        """
        class Holder:
            def go(self, given: Base):
                if isinstance(self.backend, Gpu):
                    self.backend = Cpu()
                    self.backend.commit(1, b=2)
        """,
        ["Cpu"],
    ),
    "a class out of sight in a tuple asks for more than is seen": (
        """
        import torch
        def go(x: Base):
            if isinstance(x, (torch.Tensor, Npu)):
                return
            x.commit(1, b=2)
        """,
        ["Cpu"],
    ),
    "a class that came as an argument excludes nobody": (
        """
        def go(x: Base, kind: type[Base]):
            if isinstance(x, kind) or type(x) is kind:
                return
            x.commit(1, b=2)
        """,
        ["Cpu", "Npu"],
    ),
    "a receiver without a type is asked by the method's name": (
        """
        class One:
            def commit_rows(self, a, c): return a, c
        class Two:
            def commit_rows(self, a, c): return a, c
        def go(x):
            if isinstance(x, (One, Two)):
                return
            x.commit_rows(a=1, c=1, d=2)
        """,
        [],
    ),
    "a class is asked for its bases": (
        """
        class Maker(Base):
            @classmethod
            def make(cls, a, b=1): return a, b
        class OldMaker(Maker):
            @classmethod
            def make(cls, a): return a
        class NewMaker(Maker): pass
        def go(kind: type[Maker]):
            if issubclass(kind, (OldMaker, Npu)):
                return
            kind.make(1, b=2)
        """,
        [],
    ),
    "a module that is called is asked, too": (
        """
        import torch.nn as nn
        class Layer(nn.Module):
            def forward(self, x, y=1): return x, y
        class Short(Layer):
            def forward(self, x): return x
        class Shorter(Layer):
            def forward(self, x): return x
        def go(layer: Layer):
            if isinstance(layer, (Short, Shorter)):
                return layer(1)
            return layer(1, y=2)
        """,
        [],
    ),
}


@pytest.mark.parametrize(("source", "wanted"), GUARDS.values(), ids=GUARDS.keys())
def test_a_condition_keeps_classes_away(tmp_path: Path, source: str, wanted: list[str]) -> None:
    write(tmp_path, {"module.py": FAMILY + dedent(source)})
    found = shown(tmp_path)
    assert {f.rule for f in found} <= {"HWB101", "HWB105"}
    assert sorted(f.definition.name.partition(".")[0] for f in found if f.definition) == wanted


# The Npu of this family lacks `b` and says so.
FLAGGED = """
import inspect
class Base:
    takes_b = True
    set_later = True
    def takes(self): return True
    def commit(self, a, b=1): return a, b
class Npu(Base):
    takes_b = False
    def __init__(self, later): self.set_later = later
    def takes(self): return False
    def commit(self, a): return a
class Gpu(Base):
    has_b = True
    def commit(self, a, b=2): return a, b
"""

# name -> (what stands before `x.commit(1, b=2)`, whether the call is reported of Npu)
FLAGS = {
    "a flag of the class": ("if x.takes_b:", False),
    "a flag that is off": ("if not x.takes_b:", True),
    "a method that returns a constant": ("if x.takes():", False),
    "a flag under a name": ("known = x.takes_b\n    if known:", False),
    "a flag read with a default": ("if getattr(x, 'takes_b', False):", False),
    "a flag that only some have, read with a default": ("if getattr(x, 'has_b', False):", False),
    "a flag that only some have, on by default": ("if getattr(x, 'has_b', True):", True),
    "a flag that instances set": ("if x.set_later:", True),
    "a flag of another object": ("if y.takes_b:", True),
    "an attribute that only some have": ("if hasattr(x, 'has_b'):", False),
    "an attribute that instances have": ("if hasattr(x, 'set_later'):", True),
    "an attribute of another object": ("if hasattr(y, 'has_b'):", True),
    "a parameter of the method": ("if 'b' in inspect.signature(x.commit).parameters:", False),
    "a parameter that is not there": ("if 'b' not in inspect.signature(x.commit).parameters:", True),
    "a parameter of a signature under a name": (
        "found = inspect.signature(x.commit)\n    if 'b' in found.parameters:",
        False,
    ),
    "a parameter in a list under a name": (
        "names = inspect.getfullargspec(x.commit).args\n    if 'b' in names:",
        False,
    ),
    "a parameter in a set": ("if 'b' in set(inspect.signature(x.commit).parameters.keys()):", False),
    "an answer under a name": ("fits = 'b' in inspect.signature(x.commit).parameters\n    if fits:", False),
    "a keyword in some list of what is supported": ("if supports(x, 'b'):", False),
    "a list that nobody knows": ("if 1 in names:", True),
}


@pytest.mark.parametrize(("test", "reported"), FLAGS.values(), ids=FLAGS.keys())
def test_a_condition_asks_the_receiver_what_it_can_do(tmp_path: Path, test: str, reported: bool) -> None:
    source = f"{FLAGGED}def go(x: Base, y, names):\n    {test}\n        x.commit(1, b=2)\n"
    found = shown(write(tmp_path, {"module.py": source}), selection=Selection(confidence="low"))
    assert [f.definition.name for f in found if f.definition] == (["Npu.commit"] if reported else [])
