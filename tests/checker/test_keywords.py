"""What ``**name`` passes: each function body with what must be reported of its call, and nothing else."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

import pytest

from tests.checker.trees import shown, write

# name -> (a function's body, the rule and the names that are reported)
BODIES = {
    "a dict in the call passes its keys": ('f(**{"a": 1, "c": 1})', ("HWB105", "c", "b")),
    "a dict constructor in the call passes its keywords": ("f(**dict(a=1))", ("HWB106", "b")),
    "a dict written out before passes its keys": ('kw = {"a": 1, "b": 2, "c": 3}\nf(**kw)', ("HWB105", "c")),
    "a dict constructor before passes its keywords": ("kw = dict(a=1)\nf(**kw)", ("HWB106", "b")),
    "an annotation changes nothing": ('kw: dict[str, int] = {"a": 1}\nf(**kw)', ("HWB106", "b")),
    "a keyword beside the dict is passed, too": ('kw = {"a": 1, "b": 2}\nf(**kw, c=3)', ("HWB105", "c")),
    "a key that is set is passed": ('kw = {"a": 1}\nkw["b"] = kw["a"]\nkw["c"] = 3\nf(**kw)', ("HWB105", "c")),
    "a key that completes the call is no finding": ('kw = {"a": 1}\nkw["b"] = 2\nf(**kw)', None),
    "an update with known keys passes them": (
        'kw = {"a": 1}\nkw.update(b=1)\nkw.update({"c": 2})\nf(**kw)',
        ("HWB105", "c"),
    ),
    "a key that is set behind the call is not passed": ('kw = {"a": 1}\nf(**kw)\nkw["b"] = 2', ("HWB106", "b")),
    "the call may stand deeper than the dict": (
        'kw = {"a": 1}\nfor x in y:\n    if x:\n        f(**kw)',
        ("HWB106", "b"),
    ),
    "dict and call may stand in one branch": ('if x:\n    kw = {"a": 1}\n    f(**kw)', ("HWB106", "b")),
    "dict and call may stand in one handler": (
        'try:\n    y()\nexcept KeyError:\n    kw = {"a": 1}\n    f(**kw)',
        ("HWB106", "b"),
    ),
    "dict and call may stand in one case": (
        'match x:\n    case 1:\n        kw = {"a": 1}\n        f(**kw)',
        ("HWB106", "b"),
    ),
    "a key that is set under a condition may complete the call": (
        'kw = {"a": 1}\nif x:\n    kw["b"] = 2\nf(**kw)',
        None,
    ),
    "a key that is set under a condition does not excuse the others": (
        'kw = {"a": 1, "c": 1}\nif x:\n    kw["b"] = 2\nf(**kw)',
        ("HWB105", "c"),
    ),
    "a key that is set in the loop of the call may complete it": (
        'kw = {"a": 1}\nfor x in y:\n    f(**kw)\n    kw["b"] = x',
        None,
    ),
    "a key that nobody knows silences the call": ('kw = {"a": 1, x: 2, "c": 3}\nf(**kw)', None),
    "a key that is set and nobody knows silences the call": ('kw = {"a": 1, "c": 3}\nkw[x] = 2\nf(**kw)', None),
    "an update from elsewhere silences the call": ('kw = {"a": 1, "c": 3}\nkw.update(x)\nf(**kw)', None),
    "two updates from elsewhere silence the call": ('kw = {"a": 1, "c": 3}\nkw.update(x, **y)\nf(**kw)', None),
    "a dict inside the dict silences the call": ('kw = {"a": 1, "c": 3, **x}\nf(**kw)', None),
    "a constructor over another dict silences the call": ("kw = dict(x, c=1)\nf(**kw)", None),
    "a constructor with unknown keywords silences the call": ("kw = dict(**x, c=1)\nf(**kw)", None),
    "a key that is deleted silences the call": ('kw = {"a": 1, "b": 2, "c": 3}\ndel kw["c"]\nf(**kw)', None),
    "a dict that somebody else gets silences the call": ('kw = {"a": 1, "c": 3}\nx(kw)\nf(**kw)', None),
    "a name that is bound twice silences the call": ('kw = {"a": 1}\nif x:\n    kw = {"b": 1}\nf(**kw)', None),
    "a dict of another branch silences the call": ('if x:\n    kw = {"a": 1}\nf(**kw)', None),
    "a dict behind the call silences it": ('f(**kw)\nkw = {"a": 1}', None),
    "a dict that the whole module has silences the call": ('global kw\nkw = {"a": 1}\nf(**kw)', None),
    "a dict that came as one of several values silences the call": ('kw, x = {"a": 1}, 2\nf(**kw)', None),
    "a dict that a function returned silences the call": ("kw = x(1)\nf(**kw)", None),
    "a second dict silences the call as far as keys may be missing": ('kw = {"a": 1}\nf(**kw, **x)', None),
}


@pytest.mark.parametrize(("body", "wanted"), BODIES.values(), ids=BODIES.keys())
def test_the_keys_of_a_dict_are_keywords(tmp_path: Path, body: str, wanted: tuple[str, ...] | None) -> None:
    source = f"def f(a, b):\n    return a, b\ndef go(x, y):\n{indent(body, '    ')}\n"
    found = shown(write(tmp_path, {"module.py": source}))
    assert [(f.rule, *f.missing) for f in found] == ([wanted] if wanted else [])


def test_a_dict_of_the_function_around_is_not_followed_into_the_one_inside(tmp_path: Path) -> None:
    source = """
        def f(a, b): return a, b
        def go():
            kw = {"a": 1}
            def inner():
                return f(**kw)
            kw["b"] = 2
            return inner()
    """
    assert not shown(write(tmp_path, {"module.py": source}))
