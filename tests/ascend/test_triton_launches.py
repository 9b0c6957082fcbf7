"""What the triton tier launches: how often, over how many programs, at sizes that fit no block, and what it leaves to
the torch ops. Numbers are compared with the torch tier, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hwbackends.ascend import kernels_commit, kernels_conv, kernels_metadata, launch
from hwbackends.testing.guards import EagerMode
from tests.ascend.conftest import TRITON
from tests.backend.lab import Lab, same_bits

WIDE = 1029
"""Channels: more than one block of any kernel, and no multiple of one."""
KERNELS = {
    "conv_uniform_kernel": kernels_conv,
    "conv_extend_kernel": kernels_conv,
    "prepare_uniform_kernel": kernels_metadata,
    "prepare_extend_kernel": kernels_metadata,
    "commit_conv_kernel": kernels_commit,
    "commit_ssm_kernel": kernels_commit,
}

MakeLab = Callable[..., Lab]
Launches = list[tuple[str, int]]


class _Counting:
    """A kernel that notes its launches."""

    def __init__(self, name: str, kernel: Any, launches: Launches) -> None:
        self.name, self.kernel, self.launches, self.fn = name, kernel, launches, kernel.fn

    def __getitem__(self, grid: tuple[int]) -> Any:
        self.launches.append((self.name, grid[0]))
        return self.kernel[grid]


class _Ops(EagerMode):
    """Names of the torch ops inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Kernel name and programs of each launch."""
    found: Launches = []
    for name, home in KERNELS.items():
        monkeypatch.setattr(home, name, _Counting(name, getattr(home, name), found))
    return found


@pytest.fixture(scope="session")
def target() -> tuple[str, str]:
    """The lane of this file."""
    return TRITON


def numbers(*shape: int, seed: int = 5) -> torch.Tensor:
    """Small integers: their sums of products are exact, contracted or not."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def pair(layout: str, **settings: Any) -> SimpleNamespace:
    """The same pool, weights and histories in both tiers."""
    settings = {"rows": {5: 1, 3: 2, 8: 4}, "dim": WIDE, "streams": ["k", "v"], "layers": 2, **settings}
    both = Lab(*TRITON, layout, **settings), Lab("reference", TRITON[1], layout, **settings)
    for it in both:
        it.weight = numbers(it.weight.shape[0], it.width, seed=3).to(it.device)
        for tensor in (*it.pool.storages(), *it.pool.draft_storages()):
            tensor.copy_(numbers(*tensor.shape, seed=7))
        it.lengths = dict.fromkeys(it.lengths, 9)
    return SimpleNamespace(all=both, ours=both[0], theirs=both[1])


def assert_same(it: SimpleNamespace, y: list[torch.Tensor]) -> None:
    assert same_bits(*y)
    for ours, theirs in zip(it.ours.pool.storages(), it.theirs.pool.storages(), strict=True):
        assert same_bits(ours, theirs)
    for ours, theirs in zip(it.ours.pool.draft_storages(), it.theirs.pool.draft_storages(), strict=True):
        assert same_bits(ours, theirs)


def test_each_phase_is_one_preparation_and_one_conv(lab: MakeLab, launches: Launches) -> None:
    it = lab(rows={5: 1, 3: 2}, dim=5)
    it.extend([5, 3], [4, 7], numbers(11, 5))
    it.decode([5, 3], numbers(2, 5))
    it.verify([5, 3], numbers(6, 5))
    it.draft_extend([5, 3], [2, -1], numbers(6, 5))
    extend = ["prepare_extend_kernel", "conv_extend_kernel"]
    assert [name for name, _ in launches] == extend + ["prepare_uniform_kernel", "conv_uniform_kernel"] * 3


def test_a_commit_launches_nothing_where_the_layout_commits_itself(
    lab: MakeLab, layout: str, launches: Launches
) -> None:
    it = lab(rows={5: 1, 3: 2}, dim=5)
    it.verify([5, 3], numbers(6, 5))
    del launches[:]
    requests, steps = it.ints([5, 3]), it.ints([1, 2])
    with _Ops() as ops:
        it.hooks.update_mamba_state_after_mtp_verify(it.pool, requests, steps)
    assert ops.names == [] or layout == "window"
    assert [name for name, _ in launches] == (["commit_conv_kernel"] if layout == "window" else [])


def test_an_empty_commit_launches_nothing(lab: MakeLab, launches: Launches) -> None:
    it = lab(ssm_shape=(3, 7))
    it.commit([], [])
    assert not launches


def test_programs_stay_below_the_limit_of_the_device() -> None:
    assert launch.MAX_PROGRAMS < 65_535
    assert launch.grid(0) == (1,)
    assert launch.grid(7) == (7,)
    assert launch.grid(5_000_000) == (launch.MAX_PROGRAMS,)


def test_channels_and_tokens_that_fit_no_block_give_the_same_bits(layout: str) -> None:
    it = pair(layout)
    x = numbers(23, WIDE)
    assert_same(it, [lab.extend([5, 3, 8], [2, 0, 21], x, conv={"residual": True}) for lab in it.all])
    assert_same(it, [lab.decode([8, -1, 5], x[:3], conv={"bias": x[4].to(TRITON[1])}) for lab in it.all])
    assert_same(it, [lab.verify([3, 5], x[:6]) for lab in it.all])
    for lab in it.all:
        lab.commit([3, 5], [1, 3])
    assert_same(it, [lab.draft_extend([3, 8], [2, 0], x[:6]) for lab in it.all])


def test_more_work_items_than_programs_give_the_same_bits(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_PROGRAMS", 3)
    it = pair(layout, dim=523)
    x = numbers(17, 523)
    assert_same(it, [lab.extend([5, 3, 8], [9, 1, 7], x) for lab in it.all])
    assert_same(it, [lab.decode([8, 5], x[:2]) for lab in it.all])


def test_snapshots_and_ssm_states_are_committed_alike(layout: str) -> None:
    it = pair(layout, dim=7, ssm_shape=(3, 5))
    x = numbers(9, 7)
    for lab in it.all:
        lab.verify([5, 3, 8], x)
        lab.pool.ssm_state.copy_(numbers(*lab.pool.ssm_state.shape))
        lab.pool.intermediate_ssm.copy_(numbers(*lab.pool.intermediate_ssm.shape, seed=6))
        extra = {
            "mamba_track_indices": lab.ints([6, 9, 7]),
            "mamba_steps_to_track": lab.ints([1, -1, 2]),
            "computed_lens": lab.ints([9, 9, 9]),
        }
        lab.commit([5, 3, 8], [2, 1, 0], **extra)
    assert_same(it, [lab.pool.ssm_state for lab in it.all])


def test_positions_and_values_past_131072_survive(lab: MakeLab) -> None:
    """131,072 and more overflow float16: no detour through it, for positions or for rows."""
    far = 131_075
    it = lab(rows={5: 1}, taps=(1.0, 1.0, 1.0, 1.0))
    it.put(5, [131_072, 1, 1], length=far)
    assert it.decode([5], [131_072])[0, 0] == 262_146
    assert it.seen(5) == [1, 1, 131_072]


@pytest.mark.parametrize(
    "settings", [{"width": 6}, {"drafts": 9}, {"dtype": torch.float64}], ids=["width 6", "9 drafts", "float64"]
)
def test_what_has_no_kernel_is_served_by_torch_ops(layout: str, settings: Any, launches: Launches) -> None:
    drafts = settings.get("drafts", 3)
    it = pair(layout, dim=5, taps=(1.0,) * 6, **settings)
    x = numbers(2 * drafts, 5)
    assert_same(it, [lab.verify([5, 3], x) for lab in it.all])
    assert not [name for name, _ in launches if name.startswith("conv")]


def test_a_wider_state_keeps_its_bits_when_rows_move(layout: str) -> None:
    """float32 rows over float16 activations: shifting, saving and committing copy them. Not over bfloat16: the
    interpreter truncates where it should round."""
    it = pair(layout, dim=5, dtype=torch.float16, state_dtype=torch.float32)
    for lab in it.all:
        for tensor in lab.pool.storages():
            tensor.copy_(numbers(*tensor.shape) + 2.0**-12)
    x = numbers(6, 5)
    assert_same(it, [lab.decode([5, 3], x[:2]) for lab in it.all])
    assert it.ours.seen(5)[0] % 1 == 2.0**-12
    assert_same(it, [lab.verify([5, 3], x) for lab in it.all])
    for lab in it.all:
        lab.commit([5, 3], [1, 2])
    assert_same(it, [lab.extend([5, 3], [1, 2], x[:3]) for lab in it.all])


def test_a_negative_draft_row_commits_nothing(layout: str) -> None:
    it = pair(layout, dim=5, ssm_shape=(3,))
    for lab in it.all:
        lab.verify([5, 3], numbers(6, 5))
        before = [tensor.clone() for tensor in lab.pool.storages()]
        lab.hooks.update_mamba_state_after_mtp_verify(
            lab.pool, lab.ints([5, 3]), lab.ints([1, 2]), draft_indices=lab.ints([-1, -1])
        )
        assert all(map(same_bits, before, lab.pool.storages()))
