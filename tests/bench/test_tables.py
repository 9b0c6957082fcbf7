"""The tables of the benchmark set every peer beside ours: one column for each further peer, SGLang's slower paths
apart, and what a peer leaves out is said below."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton ships for Linux only")

from hwbackends.bench import report


def row(work: str, ours: float, **peers: Any) -> dict[str, Any]:
    contenders = {
        name.replace("_", " "): {"us": us} if us else {"error": "out of memory"} for name, us in peers.items()
    }
    return {"work": work, "size": 32, "contenders": {"ours": {"us": ours}, **contenders}}


RESULTS = {
    "rows": [
        row("metadata decode", 1.5, sglang=2.0),
        row("decode ring", 1.25, sglang_cuda=2.5, sglang_triton=5.0, vllm=2.0, fla=10.0),
        row("extend", 5.0, sglang_triton=10.0, fla=None, torch=50.0),
    ],
    "peers": {
        "sglang": {"version": "0.5.23", "note": ""},
        "vllm": {"version": "", "note": "no residual"},
        "fla": {"version": "0.6.0", "note": ""},
    },
}


def test_each_further_peer_has_a_column_with_its_time_and_ours_over_it() -> None:
    assert report.others(RESULTS).splitlines()[:4] == [
        "| work | size | ours (us) | vllm (us) | fla (us) | torch (us) |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| decode ring | 32 | 1.25 | 2.00 (0.62) | 10.00 (0.12) |  |",
        "| extend | 32 | 5 |  | failed | 50.00 (0.10) |",
    ]


def test_versions_and_what_a_peer_leaves_out_stand_below() -> None:
    assert report.others(RESULTS).splitlines()[-1] == "sglang 0.5.23; vllm (no residual); fla 0.6.0."


def test_sglangs_slower_paths_have_a_table_of_their_own() -> None:
    assert report.slower(RESULTS).splitlines()[2:] == ["| decode ring | 32 | triton | 5.00 | 0.25 |"]
