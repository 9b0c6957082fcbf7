"""Selection is a pure function: which candidate serves which request, and which requests are refused how."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwbackends.errors import (
    BackendNotFoundError,
    BackendTieError,
    BackendUnavailableError,
    BrokenPluginError,
    HookNotImplementedError,
    IncompatiblePluginError,
    PluginError,
)
from hwbackends.registry.candidates import Candidate, State
from hwbackends.registry.manifest import Manifest
from hwbackends.registry.selection import Request, select


def candidate(name: str, *, devices: str = "cpu", priority: int = 0, state: State = State.AVAILABLE) -> Candidate:
    manifest = Manifest(Path("manifest.yaml"), {"step": ">=1.0"}, tuple(devices.split()), priority)
    return Candidate(
        name, f"{name}.plugin", f"{name}-dist", "1.5", state, f"{name}'s reason", f"{name}'s hint", manifest
    )


REFERENCE = candidate("reference", devices="*")
CUDA = candidate("cuda", devices="cuda", priority=100)
ASCEND = candidate("ascend", devices="npu", priority=100)


def test_an_explicit_name_wins_over_the_environment_and_priority() -> None:
    request = Request("reference", None, "cuda")
    assert select(request, [CUDA, REFERENCE]).candidate is REFERENCE


def test_the_environment_wins_over_priority() -> None:
    assert select(Request(environment="reference"), [CUDA, REFERENCE]).candidate is REFERENCE


def test_the_environment_is_a_list_in_order_of_preference() -> None:
    broken = candidate("first", state=State.BROKEN)
    found = select(Request(environment=" first , absent, reference ,cuda"), [CUDA, REFERENCE, broken])
    assert found.candidate is REFERENCE
    assert found.rule == "HWBACKENDS_BACKEND= first , absent, reference ,cuda"


def test_the_environment_never_falls_back_to_what_it_does_not_name() -> None:
    gone = candidate("cuda", devices="cuda", state=State.UNAVAILABLE)
    with pytest.raises(BackendUnavailableError, match=r"HWBACKENDS_BACKEND=cuda: .*cuda's reason; cuda's hint"):
        select(Request(environment="cuda"), [gone, REFERENCE])


def test_a_list_of_which_nothing_is_usable_explains_each_name() -> None:
    gone = candidate("cuda", devices="cuda", state=State.UNAVAILABLE)
    with pytest.raises(BackendNotFoundError) as caught:
        select(Request(environment="cuda,refrence"), [gone, REFERENCE])
    assert "cuda's reason" in str(caught.value)
    assert "did you mean 'reference'?" in str(caught.value)


def test_a_device_chooses_the_backend_that_names_it() -> None:
    assert select(Request(device="npu:1"), [CUDA, ASCEND, REFERENCE]).candidate is ASCEND


def test_of_one_priority_a_backend_that_names_the_device_comes_before_one_that_takes_any() -> None:
    vendor = candidate("vendor", devices="xpu")
    assert select(Request(device="xpu"), [vendor, REFERENCE]).candidate is vendor


def test_a_backend_below_the_reference_is_never_chosen_by_itself() -> None:
    modest = candidate("modest", devices="xpu", priority=-5)
    for request in (Request(device="xpu"), Request()):
        assert select(request, [modest, REFERENCE]).candidate is REFERENCE


def test_a_backend_that_lacks_hooks_is_passed_over_unless_they_may_be_lent_or_it_is_named() -> None:
    partial = replace(candidate("partial", priority=7), missing=("conv_extend",))
    assert select(Request(), [partial, REFERENCE]).candidate is REFERENCE
    assert select(Request(environment="partial,reference"), [partial, REFERENCE]).candidate is REFERENCE
    assert select(Request(fallback=True), [partial, REFERENCE]).candidate is partial
    assert select(Request("partial"), [partial, REFERENCE]).candidate is partial
    with pytest.raises(HookNotImplementedError, match=r"HWBACKENDS_BACKEND=partial: .*does not have: conv_extend"):
        select(Request(environment="partial"), [partial, REFERENCE])


def test_a_device_that_nobody_names_goes_to_the_backend_that_takes_any() -> None:
    assert select(Request(device="mps"), [CUDA, REFERENCE]).candidate is REFERENCE


def test_without_a_device_the_largest_priority_wins() -> None:
    assert select(Request(), [REFERENCE, CUDA]).candidate is CUDA


def test_what_is_not_available_is_not_chosen_whatever_its_priority() -> None:
    states = [state for state in State if state is not State.AVAILABLE]
    others = [candidate(f"{state}", priority=9, state=state) for state in states]
    assert select(Request(), [*others, REFERENCE]).candidate is REFERENCE


def test_two_available_backends_of_one_priority_are_an_error_that_says_what_to_set() -> None:
    with pytest.raises(BackendTieError) as caught:
        select(Request(), [CUDA, ASCEND, REFERENCE])
    message = str(caught.value)
    for wanted in ("cuda's reason", "ascend's reason", "HWBACKENDS_BACKEND=cuda", "name='cuda'", "device"):
        assert wanted in message


def test_an_unknown_name_offers_the_nearest_match_and_lists_what_is_there() -> None:
    with pytest.raises(BackendNotFoundError, match=r"'cudda'; did you mean 'cuda'\? \(installed: cuda, reference\)"):
        select(Request("cudda"), [CUDA, REFERENCE])


def test_a_name_like_nothing_offers_nothing() -> None:
    with pytest.raises(BackendNotFoundError, match=r"no backend is called 'zzz' \(installed: none\)"):
        select(Request("zzz"), [])


def test_nothing_installed_is_said_so() -> None:
    with pytest.raises(BackendNotFoundError, match="none is installed"):
        select(Request(), [])


@pytest.mark.parametrize(
    ("state", "error"),
    [
        (State.FOUND, BackendUnavailableError),
        (State.UNAVAILABLE, BackendUnavailableError),
        (State.BROKEN, BrokenPluginError),
        (State.DUPLICATE, BrokenPluginError),
        (State.INCOMPATIBLE, IncompatiblePluginError),
    ],
)
def test_an_explicit_name_that_cannot_be_used_is_an_error_and_never_a_fallback(
    state: State, error: type[PluginError]
) -> None:
    named = candidate("named", state=state)
    with pytest.raises(error, match="named's reason; named's hint"):
        select(Request("named"), [named, REFERENCE])


def test_an_explicit_name_that_does_not_serve_the_device_is_an_error() -> None:
    with pytest.raises(BackendUnavailableError, match="got 'cpu', wanted one of: cuda"):
        select(Request("cuda", "cpu"), [CUDA, REFERENCE])


def test_no_backend_for_a_device_lists_every_candidate_with_its_reason() -> None:
    with pytest.raises(BackendNotFoundError, match=r"for device 'mps':\n  cuda \(cuda-dist 1.5\): available: cuda's"):
        select(Request(device="mps"), [CUDA])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c", "d"]),
            st.sampled_from(["cpu", "cuda", "cpu cuda", "*"]),
            st.integers(-2, 2),
            st.sampled_from(list(State)),
        ),
        max_size=5,
        unique_by=lambda item: item[0],
    ),
    st.sampled_from([None, "a", "z"]),
    st.sampled_from([None, "cpu", "cuda:1", "npu"]),
    st.sampled_from(["", "b", "d,a", "z,c"]),
    st.randoms(use_true_random=False),
)
def test_selection_is_pure_orderless_and_keeps_to_what_was_asked(items, name, device, environment, random) -> None:  # type: ignore[no-untyped-def]
    candidates = [candidate(n, devices=d, priority=p, state=s) for n, d, p, s in items]
    request = Request(name, device, environment)

    def outcome(order: list[Candidate]) -> object:
        try:
            return select(request, order).candidate
        except PluginError as error:
            return type(error)

    shuffled = list(candidates)
    random.shuffle(shuffled)
    found = outcome(candidates)
    assert found == outcome(shuffled)
    if isinstance(found, Candidate):
        assert found.state is State.AVAILABLE
        assert device is None or device.partition(":")[0] in found.devices or "*" in found.devices
        assert name is None or found.name == name
        assert name is not None or not environment or found.name in environment
