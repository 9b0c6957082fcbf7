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
        """,
        [("HWB105", 6, "b"), ("HWB105", 8, "c")],
    ),
    "what generators yield": (
        """
        class A:
            def run(self, a): return a
        def some():
            yield A()
        def all():
            yield
            yield from some()
        def go():
            for x in some():
                x.run(1, b=1)
            [x.run(1, c=1) for x in all()]
        """,
        [("HWB105", 10, "b"), ("HWB105", 11, "c")],
    ),
    "what a with statement enters": (
        """
        class Other:
            def run(self, a): return a
        class A:
            def __enter__(self): return self
            def run(self, a): return a
        class Below(A):
            def run(self, a, below=1): return a, below
        class Gives:
            def __enter__(self) -> Other: return make()
        class Later:
            async def __aenter__(self): return self
            def run(self, a): return a
        async def go(unknown):
            with A() as a, Gives() as other, unknown as nobody, open("x") as file:
                a.run(1, b=1)
                other.run(1, c=1)
                nobody.run(1, d=1)
            with Below() as below:
                below.run(1, below=1)
            async with Later() as later:
                later.run(1, e=1)
        """,
        [("HWB105", 15, "b"), ("HWB105", 16, "c"), ("HWB105", 21, "e")],
    ),
    "what a context manager function yields": (
        """
        from contextlib import asynccontextmanager, contextmanager
        from typing import Iterator
        class A:
            def run(self, a): return a
            @contextmanager
            def session(self):
                yield self
        @contextmanager
        def seen():
            a = A()
            try:
                yield a
            finally:
                print("end")
        @contextmanager
        def declared() -> Iterator[A]:
            yield make()
        @asynccontextmanager
        async def later():
            yield A()
        async def go():
            with seen() as x, declared() as y:
                x.run(1, b=1)
                y.run(1, c=1)
            async with later() as z:
                z.run(1, d=1)
            with A().session() as mine:
                mine.run(1, e=1)
        """,
        [("HWB105", 23, "b"), ("HWB105", 24, "c"), ("HWB105", 26, "d"), ("HWB105", 28, "e")],
    ),
    "what an exit stack enters, and what is closed": (
        """
        from contextlib import ExitStack, closing, nullcontext
        class A:
            def __enter__(self): return self
            def run(self, a): return a
        def go():
            with ExitStack() as stack:
                a = stack.enter_context(A())
                a.run(1, b=1)
            with closing(A()) as x, nullcontext(A()) as y:
                x.run(1, c=1)
                y.run(1, d=1)
        """,
        [("HWB105", 8, "b"), ("HWB105", 10, "c"), ("HWB105", 11, "d")],
    ),
    "the instance that a class makes in __new__": (
        """
        class A:
            def __new__(cls, a):
                self = super().__new__(cls)
                self.helper = Helper()
                self.setup(a, b=2)
                return self
            def setup(self, a): return a
            def go(self):
                self.helper.help(1, c=2)
        class Helper:
            def help(self, a): return a
        """,
        [("HWB105", 5, "b"), ("HWB105", 9, "c")],
    ),
    "another class than the called one, made in its __new__": (
        """
        class A:
            def __new__(cls, *args, **kwargs):
                if flag():
                    return super().__new__(Npu)
                return object.__new__(cls)
            def __init__(self, size): self.size = size
            def commit(self, a, b=1): return a, b
        class Npu(A):
            def __init__(self, size, device): self.size = size, device
            def commit(self, a): return a
        class Cpu(A):
            def commit(self, a): return a
        def go():
            A(1).commit(1, b=2)
        """,
        [("HWB101", 14, "b"), ("HWB102", 14, "device")],
    ),
    "one instance for all, made in __new__": (
        """
        class A:
            _one = None
            def __new__(cls):
                if cls._one is None:
                    cls._one = super().__new__(cls)
                return cls._one
            def run(self, a): return a
        def go():
            A().run(1, b=2)
        """,
        [("HWB105", 9, "b")],
    ),
    "a class that is written in __new__": (
        """
        class A:
            def __new__(cls, a):
                class Inner(A):
                    def run(self, a): return a
                return object.__new__(Inner)
        def go():
            A(1).run(1, b=2)
        """,
        [("HWB105", 7, "b")],
    ),
    "a __new__ that hands on to the one of its base": (
        """
        class Root:
            def __new__(cls, a): return object.__new__(cls)
        class A(Root):
            def __new__(cls, a): return super().__new__(cls, a)
            def run(self, a): return a
        class B(A):
            def __new__(cls, a): return A.__new__(cls, a)
        def go(unknown):
            B(1).run(1, b=2)
            object.__new__(A).run(1, c=2)
            object.__new__(unknown).run(1, d=2)
        """,
        [("HWB105", 9, "b"), ("HWB105", 10, "c")],
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
    "a conditional expression and the same condition later": (
        """
        class A:
            def run(self, a): return a
        class B:
            def run(self, a, b=1): return a, b
        def go(old, flag):
            kind = A if not flag else B
            one = A() if old else B()
            if flag:
                kind().run(1, b=2)
            else:
                kind().run(1, b=3)
            if not old:
                one.run(1, b=4)
            elif flag:
                one.run(1, b=5)
        """,
        [("HWB105", 11, "b"), ("HWB105", 15, "b")],
    ),
    "aliases of types": (
        """
        from typing import Optional, Self, TypeVar, Union
        class A:
            def run(self, a): return a
            def me(self) -> Self: return make()
        class B:
            def run(self, a): return a
        Either = Union[A, B]
        Newer = A | None
        T = TypeVar("T", bound=A)
        def go(x: Either, y: Newer, z: T, u: "Optional[A]"):
            x.run(1, b=1)
            y.run(1, c=1)
            z.run(1, d=1)
            u.run(1, e=1)
            A().me().run(1, f=1)
        """,
        [
            ("HWB105", 11, "b"),
            ("HWB105", 11, "b"),
            ("HWB105", 12, "c"),
            ("HWB105", 14, "e"),
            ("HWB105", 15, "f"),
        ],
    ),
    "an alias of a type that stands in itself": (
        """
        from typing import Union
        class A:
            def run(self, a): return a
        Tree = Union[A, dict[str, "Tree"], list["Tree"]]
        Newer = A | dict[str, "Newer"]
        def go(x: Tree, y: Newer):
            x.run(1, b=1)
            y.run(1, c=1)
        """,
        [("HWB105", 7, "b"), ("HWB105", 8, "c")],
    ),
    "annotations around a type": (
        """
        from typing import Annotated, Any, Awaitable, Callable, ClassVar, Coroutine, Literal, Mapping, Type
        class A:
            def run(self, a): return a
        class H:
            shared: ClassVar[A]
            def go(self, kind: Type[A], table: Mapping[str, A], pair: tuple[int, A], late: Annotated[A, "x"]):
                kind().run(1, b=1)
                table["x"].run(1, c=1)
                pair[1].run(1, d=1)
                late.run(1, e=1)
                self.shared.run(1, f=1)
            def no(self, word: Literal["x"], anything: Any, f: Callable[[], A], o: object, w: Awaitable):
                word.run(1, g=1), anything.run(1, h=1), f().run(1, i=1), o.run(1, j=1), w.run(1, k=1)
        async def later() -> Coroutine[Any, Any, A]: ...
        async def wait():
            (await later()).run(1, l=1)
        """,
        [
            ("HWB105", 7, "b"),
            ("HWB105", 8, "c"),
            ("HWB105", 9, "d"),
            ("HWB105", 10, "e"),
            ("HWB105", 11, "f"),
            ("HWB105", 16, "l"),
        ],
    ),
    "items of what is indexed and iterated": (
        """
        class A:
            def run(self, a): return a
        class Many:
            def __getitem__(self, index) -> A: return make(index)
        def go(flags, pairs: "list[tuple[int, A]]"):
            Many()["x"].run(1, b=1)
            next(iter([A()])).run(1, c=1)
            for index, one in enumerate([A()]):
                one.run(1, d=1)
            for flag, two in zip(flags, [A()]):
                two.run(1, e=1)
            for number, three in pairs:
                three.run(1, f=1)
            first, *rest = [A(), A()]
            four = (1, A())[1]
            four.run(1, g=1)
        """,
        [
            ("HWB105", 6, "b"),
            ("HWB105", 7, "c"),
            ("HWB105", 9, "d"),
            ("HWB105", 11, "e"),
            ("HWB105", 13, "f"),
            ("HWB105", 16, "g"),
        ],
    ),
    "the class of an instance": (
        """
        class A:
            @classmethod
            def make(cls, a): return a
            def go(self):
                self.__class__.make(1, b=1)
                type(self).make(1, c=1)
        """,
        [("HWB105", 5, "b"), ("HWB105", 6, "c")],
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
