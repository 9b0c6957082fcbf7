"""Hooks in a process of their own: what travels, what is noticed, and what a crash, a hang or a cheat looks like."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hwbackends.errors import ShapeError
from hwbackends.remote.client import Client, HookError, ProcessLost
from hwbackends.remote.sparse import sparse_bytes
from hwbackends.remote.wire import Request
from hwbackends.ssm import SSMStream
from hwbackends.step.pool import StatePool

ROOT = Path(__file__).parents[2]
VENDORS = "tests.conformance.vendors:plugins"


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of the reference, or of the vendor that the test names."""
    made = Client(getattr(request, "param", "reference"), "cpu", 60)
    yield made
    made.close()


def _pool(client: Client) -> StatePool:
    pool = StatePool.wrap({"k": torch.ones(1, 5, 3, 2)}, width=4, mamba_index_mapping=torch.zeros(4, dtype=torch.int32))
    client.adopt(pool)
    return pool


def test_memory_of_a_terabyte_takes_the_pages_that_are_touched(client: Client) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wide = sparse_bytes(1 << 40).view(torch.float32).as_strided((1, 5, 3, 2), (1, 2**35, 2, 1))
    pool = StatePool.wrap({"k": wide.fill_(1)}, width=4, mamba_index_mapping=torch.zeros(4, dtype=torch.int32))
    client.adopt(pool)
    client.call("clear_slots", (pool, torch.tensor([2, 4])), {})
    assert wide[0, :, 0, 0].tolist() == [1, 1, 0, 1, 0]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_what_a_hook_writes_comes_back_into_the_callers_tensors(client: Client) -> None:
    pool = _pool(client)
    made = client.call("clear_slots", (pool, torch.tensor([2, 0])), {})
    assert pool.conv_streams["k"][0, :, 0, 0].tolist() == [1, 1, 0, 1, 1]
    assert made.changed == {client.token(pool.conv_streams["k"])}


@pytest.mark.parametrize("layout", ["ring", "intermediate"])
def test_named_states_of_a_pool_travel_with_all_their_tensors(client: Client, layout: str) -> None:
    pool = StatePool(
        [],
        num_slots=5,
        request_rows=4,
        draft_token_num=2,
        states=[SSMStream("s", "gdn", 1, 2, 8, 8, layout=layout)],  # type: ignore[arg-type]
    )
    client.adopt(pool)
    storage: Any = pool.states["s"]
    for tensor in storage.tensors().values():
        tensor.fill_(1)
    client.call("clear_slots", (pool, torch.tensor([2, 0])), {})
    from hwbackends.conformance.ownership import owned  # here: other tests serve this module, far from the kit

    mine = storage.slot_tensors()
    for tensor in storage.tensors().values():
        cleared = any(tensor is other for other in mine)
        assert tensor[0, 2].any() != cleared
        assert tensor[0, [0, 1, 3]].all()
    given = owned("copy_slots", (pool, torch.tensor([2]), torch.tensor([3])), {})
    named = {name for name, _, _ in given.inputs}
    assert all(any(tensor is other for other in given.writes) for tensor in mine)
    rest = {"ring": "ring_u", "intermediate": "intermediate"}[layout]
    assert {f"pool.states.{rest}", "pool.mamba_index_mapping"} <= named


def test_a_state_of_an_adopted_pool_is_that_pools_own_over_there(client: Client) -> None:
    pool = StatePool([], num_slots=5, request_rows=4, states=[SSMStream("s", "mamba2", 1, 2, 8, 8)])
    client.adopt(pool)
    state = pool.state("s", 0)
    request = Request("call")
    assert client._encode(state, request).kind == "family_state"
    assert client._encode(replace(state), request).kind == "object"
    assert request.objects[client._encode(pool, request).value][0] == ""


def test_a_named_error_keeps_its_class_and_nothing_changed(client: Client) -> None:
    pool = _pool(client)
    with pytest.raises(ShapeError, match="cache_indices") as caught:
        client.call("clear_slots", (pool, torch.tensor([[2, 1]])), {})
    assert caught.value.made.changed == frozenset()  # type: ignore[attr-defined]


def test_the_process_knows_no_kit_no_pytest_and_no_arguments() -> None:
    code = (
        "from hwbackends.remote.client import Client\n"
        "import hwbackends.conformance.kit, os\n"
        "os.environ['PYTEST_CURRENT_TEST'] = 'x'\n"
        "client = Client('tests.conformance.test_remote:Spy', 'cpu', 60)\n"
        "print(client.call('probe', (), {}).result[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[] [''] []", done.stderr


class Spy:
    """A plugin that looks around from inside."""

    @staticmethod
    def probe(device: str | None = None) -> tuple[bool, str, str]:
        """What the process shows of who started it."""
        import os

        shown = [name for name in sys.modules if name.startswith("hwbackends.conformance")]
        return True, f"{shown} {sys.argv} {[name for name in os.environ if name.startswith('PYTEST')]}", ""


Spy.probe.hwbackends_impl = {}  # type: ignore[attr-defined]  # the mark of hookimpl


@pytest.mark.parametrize(
    ("client", "how"),
    [(f"{VENDORS}.dies", "died of SIGSEGV"), (f"{VENDORS}.leaves", "ended with status 3")],
    indirect=["client"],
)
def test_a_crash_says_how_the_process_ended_and_the_next_call_gets_a_new_one(client: Client, how: str) -> None:
    with pytest.raises(ProcessLost, match=f"CRASH: conv_decode: the process {how}"):
        client.call("conv_decode", (torch.ones(1, 2),) * 5, {})
    client.call("clear_slots", (_pool(client), torch.tensor([2])), {})
    assert client.started == 2


@pytest.mark.parametrize("client", [f"{VENDORS}.sleeps"], indirect=True)
def test_a_hang_is_ended(client: Client) -> None:
    client.start()
    client.timeout_s = 0.5
    with pytest.raises(ProcessLost, match=r"HANG: conv_decode: no answer in 0\.5 s"):
        client.call("conv_decode", (torch.ones(1, 2),) * 5, {})


def test_a_backend_that_is_not_there_is_named() -> None:
    made = Client("nowhere", "cpu", 60)
    with pytest.raises(HookError, match="no backend is called 'nowhere'"):
        made.start()
    made.close()
