"""The plugin's builder and convs inside a running vLLM, over what its own model runner makes: metadata, block tables,
caches. The watching is `walk.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import answer_of

Seen = dict[str, int]


@pytest.fixture(scope="module")
def seen(checkpoint: Path) -> Seen:
    """What `walk.py` counted while five requests came and went."""
    counted: Seen = answer_of("walk.py", str(checkpoint), plugin=True)[0]["seen"]
    return counted


def test_a_step_of_decodes_is_described_as_vllm_describes_it(seen: Seen) -> None:
    assert seen["decodes"] > 20
    assert seen["decodes as stock"] == seen["decodes"]


def test_a_step_of_decodes_is_read_from_vllms_block_table_without_a_copy(seen: Seen) -> None:
    assert seen["decodes from the table"] == seen["decodes"]


def test_the_builder_launches_no_preparation(seen: Seen) -> None:
    assert seen["built"] > seen["decodes"]
    assert seen["prepared by the builder"] == 0


def test_each_cache_group_is_prepared_once_per_step_with_one_launch_per_phase(seen: Seen) -> None:
    assert seen["prepared"] == 2 * seen["built"], "two cache groups; the second takes the first one's metadata"
    assert seen["launches"] == seen["halves"]


def test_a_recorded_step_replays_with_other_requests_over_the_block_tables_of_vllm(seen: Seen) -> None:
    assert seen["tables"] > 3, "requests came and went"
    assert seen["replays"] > 40
    for what in ("replayed answers", "replayed padding", "replayed states", "states moved"):
        assert seen[what] == seen["replays"], what


def test_a_new_prompt_of_one_token_may_be_replayed_as_a_decode(seen: Seen) -> None:
    """A model runner that chooses its graph by shapes alone does that; the history must be empty then."""
    assert seen["new prompts replayed"] > 0
