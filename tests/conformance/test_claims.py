"""Claims of a manifest, waivers of a vendor, and clauses against tests: what is written must mean something."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from hwbackends.conformance.inventory import coverage, shipped_tests
from hwbackends.conformance.waivers import read_waivers, unknown_ids
from hwbackends.contract.claims import read_claims
from hwbackends.contract.reader import installed
from hwbackends.errors import ContractError

CONTRACTS = installed()
HOOKS = tuple(CONTRACTS.hooks)


def test_what_a_manifest_leaves_out_is_claimed_in_full() -> None:
    claims = read_claims({}, CONTRACTS, HOOKS)
    assert claims.hooks == HOOKS
    needs = {"layout": "lazy", "dtype": "float16", "state_dtype": "float32", "width": 5, "graphs": True}
    assert claims.missing(hooks=HOOKS, requests=10**6, **needs) == ""


def test_an_optional_hook_that_is_not_there_is_not_claimed_by_all() -> None:
    claims = read_claims({"hooks": "all"}, CONTRACTS, ("conv_decode",))
    assert "conv_extend" in claims.hooks  # a required hook that is missing is a failure, not a gap
    assert claims.missing(hooks=("fused_decode_add_rmsnorm",)) == "hook fused_decode_add_rmsnorm"


@pytest.mark.parametrize(
    ("capabilities", "needs", "reason"),
    [
        ({"hooks": []}, {"hooks": ("probe",)}, "hook probe"),
        ({"layouts": ["window"]}, {"layout": "ring"}, "layout ring"),
        ({"dtypes": ["float32"]}, {"dtype": "bfloat16"}, "dtype bfloat16"),
        ({"dtypes": ["float32"]}, {"dtype": "float32", "state_dtype": "float16"}, "dtype float16"),
        ({"mixed_dtypes": False}, {"dtype": "float32", "state_dtype": "float16"}, "float32 x over float16 state"),
        ({"widths": [4]}, {"width": 5}, "width 5"),
        ({"activations": []}, {"activation": "silu"}, "activation silu"),
        ({"index_dtypes": ["int64"]}, {"index_dtype": "int32"}, "index dtype int32"),
        ({"graphs": False}, {"graphs": True}, "graph capture"),
        ({"asynchronous": False}, {"asynchronous": True}, "hooks that do not wait for the device"),
        ({"max_requests": 512}, {"requests": 513}, "513 requests in a step"),
        ({"max_requests": 512}, {"requests": 512}, ""),
    ],
)
def test_a_need_outside_the_claims_is_named(capabilities: dict[str, Any], needs: dict[str, Any], reason: str) -> None:
    assert read_claims(capabilities, CONTRACTS, HOOKS).missing(**needs) == reason


@pytest.mark.parametrize(
    ("capabilities", "message"),
    [
        ({"layout": ["window"]}, "unknown key 'layout'; did you mean 'layouts'?"),
        ({"layouts": ["windows"]}, "unknown 'windows'; did you mean 'window'?"),
        ({"layouts": "window"}, "wanted a list or 'all'"),
        ({"hooks": ["conv_decod"]}, "unknown 'conv_decod'; did you mean 'conv_decode'?"),
        ({"graphs": 1}, "wanted true or false"),
        ({"widths": [1]}, "whole numbers from 2"),
        ({"max_requests": 0}, "a whole number from 1"),
    ],
)
def test_a_claim_that_means_nothing_is_refused(capabilities: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=r"capabilities.*") as caught:
        read_claims(capabilities, CONTRACTS, HOOKS)
    assert message in str(caught.value)


GOOD = "{id: test_a.py::test_b, clause: CS-CONV-01, reason: why, url: https://example.org, expires: 2026-06-30}"


def _waivers(folder: Path, text: str) -> Path:
    path = folder / "waivers.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_waiver_is_valid_through_its_last_day(tmp_path: Path) -> None:
    path = _waivers(tmp_path, f"- {GOOD}")
    (waiver,) = read_waivers(path, today=datetime.date(2026, 6, 30))
    assert (waiver.clause, waiver.expires) == ("CS-CONV-01", datetime.date(2026, 6, 30))
    with pytest.raises(ContractError, match="expired on 2026-06-30"):
        read_waivers(path, today=datetime.date(2026, 7, 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id: test_a.py::test_b", "wanted a list of waivers"),
        ("- {id: a, clause: CS-CONV-01, url: b, expires: 2999-01-01}", "key 'reason' is missing"),
        ("- " + GOOD.replace("}", ", owner: me}"), "0.owner: unknown key"),
        ("- " + GOOD.replace("CS-CONV-01", "CS-CONV-99"), "unknown clause 'CS-CONV-99'"),
        ("- " + GOOD.replace("2026-06-30", "soon"), "wanted a date such as"),
        (f"- {GOOD}\n- {GOOD}", "waived twice"),
    ],
)
def test_a_malformed_waiver_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ContractError, match=r"waivers\.yaml:\d+: ") as caught:
        read_waivers(_waivers(tmp_path, text), today=datetime.date(2026, 1, 1))
    assert message in str(caught.value)


def test_a_waiver_for_a_test_that_does_not_exist_is_named_with_the_nearest(tmp_path: Path) -> None:
    waivers = read_waivers(_waivers(tmp_path, f"- {GOOD}"), today=datetime.date(2026, 1, 1))
    (sentence,) = unknown_ids(waivers, ["test_a.py::test_bb"])
    assert sentence == "waiver for unknown test 'test_a.py::test_b'; did you mean 'test_a.py::test_bb'?"
    assert unknown_ids(waivers, ["test_a.py::test_b"]) == []


def test_every_clause_has_a_test_and_every_test_names_known_clauses() -> None:
    found = coverage()
    assert (found.untested, found.unknown, found.silent) == ((), {}, ())
    assert found.complete


def test_coverage_is_held_both_ways() -> None:
    tests = {**shipped_tests(), "test_x.py::test_new": ("CS-NEW-01",), "test_x.py::test_bare": ()}
    tests = {name: ids for name, ids in tests.items() if "CS-COPY-01" not in ids}
    found = coverage(tests)
    assert found.untested == ("CS-COPY-01",)
    assert found.unknown == {"test_x.py::test_new": ("CS-NEW-01",)}
    assert found.silent == ("test_x.py::test_bare",)
    assert not found.complete
