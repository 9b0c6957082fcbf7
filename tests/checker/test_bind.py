"""The binder, and the checker around it, say what Python says when the call is made."""

from __future__ import annotations

import inspect
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checker.trees import shown

NAMES = ("a", "b", "c", "d", "e")
KINDS = ("plain", "method", "static", "class", "init", "inherited", "overridden", "forwarded")


@st.composite
def parameter_lists(draw: st.DrawFn) -> str:
    """The text between the parentheses of a definition, receiver left out."""
    names = draw(st.permutations(NAMES))
    counts = [draw(st.integers(0, 2)) for _ in range(3)]
    posonly, plain, kwonly = (
        names[: counts[0]],
        names[counts[0] : sum(counts[:2])],
        names[sum(counts[:2]) :][: counts[2]],
    )
    first_default = draw(st.integers(0, len(posonly) + len(plain)))
    parts = [name if index < first_default else f"{name}=None" for index, name in enumerate((*posonly, *plain))]
    if posonly:
        parts.insert(len(posonly), "/")
    vararg = draw(st.booleans())
    if vararg:
        parts.append("*args")
    elif kwonly:
        parts.append("*")
    parts += [name if draw(st.booleans()) else f"{name}=None" for name in kwonly]
    if draw(st.booleans()):
        parts.append("**kwargs")
    return ", ".join(parts)


@st.composite
def argument_lists(draw: st.DrawFn) -> str:
    """The text between the parentheses of a call."""
    positional = ["0"] * draw(st.integers(0, 5))
    keywords = draw(st.lists(st.sampled_from((*NAMES, "z")), unique=True, max_size=4))
    return ", ".join((*positional, *(f"{name}=0" for name in keywords)))


# What stands behind the family, and the callee: other ways to the method of a Leaf.
WAYS = {
    "replaced": ("def new({other}): return None\nLeaf.m = new\n", "Leaf().m"),
    "replaced by a static method": ("def new({static}): return None\nLeaf.m = staticmethod(new)\n", "Leaf().m"),
    "made in __new__": ("class Made:\n    def __new__(cls): return object.__new__(Leaf)\n", "Made().m"),
    "entered": (
        "class Entered(Leaf):\n    def __enter__(self): return self\n    def __exit__(self, *exc): return None\n"
        "with Entered() as leaf:\n    pass\n",
        "leaf.m",
    ),
    "yielded": (
        "import contextlib\n@contextlib.contextmanager\ndef session():\n    yield Leaf()\n"
        "with session() as leaf:\n    pass\n",
        "leaf.m",
    ),
}


@st.composite
def families(draw: st.DrawFn) -> tuple[str, str]:
    """A module with a family of classes, and the callee of a call with a receiver that is known exactly."""
    kind = draw(st.sampled_from([*KINDS, *WAYS]))
    parameters = draw(parameter_lists())
    slash = "/" in parameters.split(", ")
    bound = f"self, {parameters}" if parameters else "self"
    first_kind = {"static": "@staticmethod\n    ", "class": "@classmethod\n    "}.get(kind, "")
    written = parameters if kind == "static" else bound
    assert not slash or written.index("/") > 0
    if kind == "plain":
        return f"def f({parameters}): return None\n", "f"
    name = "__init__" if kind == "init" else "m"
    base = f"class Base:\n    {first_kind}def {name}({written}): self = None\n"
    other = draw(parameter_lists())
    body = f"({'self, ' + other if other else 'self'}): return None"
    if kind == "forwarded":
        body = "(self, *args, **kwargs): return super().m(*args, **kwargs)"
    middle = f"class Middle(Base):\n    def {'m' if kind in ('overridden', 'forwarded') else 'other'}{body}\n"
    leaf = "class Leaf(Middle):\n    pass\n"
    if kind in WAYS:
        behind, callee = WAYS[kind]
        return base + middle + leaf + behind.format(other=f"self, {other}" if other else "self", static=other), callee
    callee = {
        "init": "Leaf",
        "inherited": "Leaf().m",
        "overridden": "Leaf().m",
        "forwarded": "Leaf().m",
        "class": "Leaf.m",
        "static": "Leaf.m",
    }.get(kind, "Base().m")
    return base + middle + leaf, callee


def python_accepts(source: str, callee: str, arguments: str) -> bool:
    """Whether the call itself succeeds. Bodies do nothing or forward, so that a TypeError is about arguments alone.

    `inspect.signature(...).bind` says the same, but for a positional-only parameter whose name also lands in
    `**kwargs`: Python 3.11 binds `f(a=0)` to `def f(a=None, /, **kwargs)`, and `bind` refuses it.
    """
    space: dict[str, Any] = {}
    exec(source, space)
    exec(f"def passed(*args, **kwargs): return args, kwargs\nresult = passed({arguments})", space)
    args, kwargs = space["result"]
    function = eval(callee, space)
    try:
        function(*args, **kwargs)
        called = True
    except TypeError:
        called = False
    if "return super()" not in source and not set(kwargs) & _positional_only(function):
        assert _binds(function, args, kwargs) == called
    return called


def _positional_only(function: Any) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_ONLY}


def _binds(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def checker_accepts(source: str, callee: str, arguments: str, in_dict: bool) -> bool:
    """Whether the checker is silent about the same call, written into a module; keywords may come from a dict."""
    call = f"{callee}({arguments})"
    if in_dict:
        parts = arguments.split(", ") if arguments else []
        given = ", ".join([*(part for part in parts if "=" not in part), "**kw"])
        keys = "".join(f"    kw['{part.partition('=')[0]}'] = 0\n" for part in parts if "=" in part)
        call = f"def go():\n    kw = {{}}\n{keys}    {callee}({given})"
    with TemporaryDirectory() as folder:
        Path(folder, "sample.py").write_text(f"{source}\n{call}\n")
        return not shown(Path(folder))


@given(families(), argument_lists(), st.booleans())
def test_the_checker_agrees_with_the_call_itself(family: tuple[str, str], arguments: str, in_dict: bool) -> None:
    assert checker_accepts(*family, arguments, in_dict) == python_accepts(*family, arguments), (family, arguments)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=20_000, derandomize=False)
@given(families(), argument_lists(), st.booleans())
def test_the_checker_agrees_with_the_call_itself_in_twenty_thousand_examples(
    family: tuple[str, str], arguments: str, in_dict: bool
) -> None:
    assert checker_accepts(*family, arguments, in_dict) == python_accepts(*family, arguments), (family, arguments)
