"""How a definition is located and worded, for every kind of callable that a plugin may register."""

from __future__ import annotations

import functools
from pathlib import Path

from hwbackends.contract.reader import installed
from hwbackends.contract.signatures import compare, definition_of, inspected, location_of

HOOKS = installed().hooks


def clear_slots(pool: object, cache_indices: object) -> None: ...


@functools.lru_cache
def decorated(pool: object) -> None: ...


def tuned(pool: object, cache_indices: object, *, _block: int) -> None: ...


def line_of(text: str) -> str:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"{__file__}:{1 + lines.index(text)}"


def test_a_function_is_located_at_its_def_not_at_its_decorator() -> None:
    assert location_of(clear_slots) == line_of("def clear_slots(pool: object, cache_indices: object) -> None: ...")
    assert location_of(decorated.__wrapped__) == line_of("def decorated(pool: object) -> None: ...")


def test_a_partial_is_located_at_the_function_in_it_and_judged_by_what_is_left() -> None:
    partial = functools.partial(tuned, _block=7)
    assert location_of(partial) == line_of(
        "def tuned(pool: object, cache_indices: object, *, _block: int) -> None: ..."
    )
    assert compare(HOOKS["clear_slots"], inspected(partial)) == ()
    assert [drift.kind for drift in compare(HOOKS["clear_slots"], inspected(tuned))] == ["extra-required"]


def test_a_function_without_source_is_located_by_what_it_knows() -> None:
    scope: dict[str, object] = {}
    exec(compile("def made(pool): ...", "made_up.py", "exec"), scope)
    assert location_of(scope["made"]) == "made_up.py:1"
    assert location_of(len) == "builtins"
    assert location_of(decorated) == __name__


def test_a_definition_is_shown_without_annotations() -> None:
    assert definition_of(clear_slots) == "def clear_slots(pool, cache_indices)"
    assert definition_of(functools.partial(tuned, _block=7)) == "def partial(pool, cache_indices, *, _block=7)"


def test_a_drift_reads_as_location_hook_sentence_and_definition() -> None:
    (drift,) = compare(HOOKS["copy_slots"], inspected(lambda pool, source_indices: None))
    location, rest = str(drift).split(": copy_slots: ")
    assert location.startswith(f"{__file__}:")
    assert rest == "parameters missing: destination_indices\n    def <lambda>(pool, source_indices)"
