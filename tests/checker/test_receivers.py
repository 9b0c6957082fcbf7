"""What a receiver is, by everything that Python writers use to get one: each tree with the keywords that must be
reported, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checker.trees import shown, write

TREES = {
    "a type test keeps alternatives apart": (
        """
        class A:
            def run(self, a): return a
        class B:
            def run(self, a, b): return a, b
        def go(x: "A | B"):
            if type(x) is A:
                x.run(1)
            elif type(x) in (B,):
                x.run(1, 2)
        """,
        [],
    ),
    "a subclass test keeps alternatives apart": (
        """
        class A:
            @classmethod
            def make(cls, a): return a
        class B:
            @classmethod
            def make(cls, a, b): return a, b
        def go(kind: "type[A] | type[B]"):
            if issubclass(kind, A):
                kind.make(1)
            else:
                kind.make(1, b=2)
        """,
        [],
    ),
    "what lists and dicts hold": (
        """
        class A:
            def run(self, a): return a
        class Many:
            def __init__(self):
                self.items: list[A] = []
                self.table: dict[str, A] = {}
                self.one = [A(), A()]
            def go(self):
                for item in self.items:
                    item.run(1, b=1)
                for key, value in self.table.items():
                    value.run(1, c=1)
                self.table["x"].run(1, d=1)
                [x.run(1, e=1) for x in self.one]
                self.table.get("x").run(1, f=1)
        """,
        [("HWB105", 10, "b"), ("HWB105", 12, "c"), ("HWB105", 13, "d"), ("HWB105", 14, "e"), ("HWB105", 15, "f")],
    ),
    "what functions return, annotated or not": (
        """
        class A:
            def run(self, a): return a
        def make() -> A: return A()
        def make_two(): return A(), A()
        def go():
            make().run(1, b=1)
            one, two = make_two()
            two.run(1, c=1)
            with make() as x: pass
        """,
        [("HWB105", 6, "b"), ("HWB105", 8, "c")],
    ),
    "properties and static methods": (
        """
        class A:
            def run(self, a): return a
        class Holder:
            def __init__(self): self._a = A()
            @property
            def a(self) -> A: return self._a
            @staticmethod
            def make(x): return A()
            def go(self):
                self.a.run(1, b=1)
                Holder.make(1).run(1, c=1)
                self.make(1, 2)
        """,
        [("HWB103", 12, "2nd positional"), ("HWB105", 10, "b"), ("HWB105", 11, "c")],
    ),
    "partials": (
        """
        from functools import partial
        def f(a, b): return a, b
        g = partial(f, 1)
        def go():
            g(2, c=3)
            partial(f, b=2)(1, d=2)
        """,
        [("HWB105", 5, "c"), ("HWB105", 6, "d")],
    ),
    "super with and without arguments": (
        """
        class A:
            def run(self, a): return a
        class B(A):
            def run(self, a, b=1):
                return super().run(a, b=b)
        class C(A):
            def run(self, a):
                return super(C, self).run(a, c=1)
        """,
        [("HWB105", 5, "b"), ("HWB105", 8, "c")],
    ),
    "a forwarder to what it forwards to": (
        """
        class A:
            def run(self, a): return a
            def any(self, *args, **kwargs):
                return self.run(*args, **kwargs)
        def go():
            A().any(1, b=2)
        """,
        [("HWB105", 6, "b")],
    ),
    "a torch module called through forward": (
        """
        import torch.nn as nn
        class Layer(nn.Module):
            def forward(self, x): return x
        def go():
            layer = Layer()
            layer(1, y=2)
        """,
        [("HWB105", 6, "y")],
    ),
    "the parameters of a dataclass": (
        """
        from dataclasses import dataclass
        @dataclass
        class P:
            a: int
            b: int = 2
        def go():
            P(1, c=3)
            P()
        """,
        [("HWB105", 7, "c"), ("HWB106", 8, "a")],
    ),
    "definitions of one name per platform": (
        """
        import platform
        if platform.system() == "Linux":
            def f(a, b): return a, b
        else:
            def f(a): return a
        def go():
            f(1, b=2)
        """,
        [("HWB101", 7, "b")],
    ),
    "conditional and assignment expressions": (
        """
        class A:
            def run(self, a): return a
        class B:
            def run(self, a, b=1): return a, b
        def go(flag):
            x = A() if flag else B()
            x.run(1, b=2)
            if (y := A()):
                y.run(1, c=2)
        """,
        [("HWB101", 7, "b"), ("HWB105", 9, "c")],
    ),
    "optional attributes behind a test": (
        """
        from typing import Optional
        class A:
            def run(self, a): return a
        class H:
            a: Optional[A] = None
            def go(self):
                if self.a is not None:
                    self.a.run(1, b=2)
                assert self.a
                self.a.run(1, c=2)
        """,
        [("HWB105", 8, "b"), ("HWB105", 10, "c")],
    ),
    "methods taken from an object first": (
        """
        class A:
            def run(self, a): return a
        def go():
            getattr(A(), "run")(1, b=2)
            f = A().run
            f(1, c=2)
        """,
        [("HWB105", 4, "b"), ("HWB105", 6, "c")],
    ),
    "lambdas": (
        """
        f = lambda a, b: a
        def go():
            f(1, c=2)
        """,
        [("HWB105", 3, "c", "b")],
    ),
    "awaited calls": (
        """
        class A:
            async def run(self, a): return a
        async def go(x: A):
            await x.run(1, b=2)
            async for z in x.many(1, c=3): pass
        """,
        [("HWB105", 4, "b")],
    ),
    "comprehensions": (
        """
        class A:
            def run(self, a): return a
        def go():
            return {k: v.run(1, b=2) for k, v in {"x": A()}.items()}
        """,
        [("HWB105", 4, "b")],
    ),
    "a look at the signature guards the call": (
        """
        import inspect
        class A:
            def run(self, a): return a
        def go(x: A):
            if "b" in inspect.signature(x.run).parameters:
                x.run(1, b=2)
            else:
                x.run(1)
        """,
        [],
    ),
    "a look for the attribute guards the call": (
        """
        class A:
            def run(self, a): return a
        def go(x: A):
            if hasattr(x, "other"):
                x.other(1)
            x.run(1)
        """,
        [],
    ),
    "a fallback of an import that cannot be seen": (
        """
        try:
            from fast import f
        except ImportError:
            def f(a): return a
        def go():
            f(1, b=2)
        """,
        [],
    ),
    "an abstract method and its implementations": (
        """
        from abc import ABC, abstractmethod
        class A(ABC):
            @abstractmethod
            def run(self, a, b=None): ...
        class B(A):
            def run(self, a): return a
        def go(x: A):
            x.run(1, b=2)
        """,
        [("HWB101", 8, "b")],
    ),
    "classes in a table": (
        """
        def resolve(name): ...
        class A:
            def run(self, a): return a
        TABLE = {"a": A}
        def go():
            TABLE["a"]().run(1, b=2)
        """,
        [("HWB105", 6, "b")],
    ),
}


@pytest.mark.parametrize(("source", "wanted"), TREES.values(), ids=TREES.keys())
def test_a_receiver_is_seen_through(tmp_path: Path, source: str, wanted: list[tuple[str, int, str]]) -> None:
    found = shown(write(tmp_path, {"module.py": source.lstrip("\n")}))
    got = sorted((f.rule, f.call.line if f.call else 0, *f.missing) for f in found)
    assert got == wanted
