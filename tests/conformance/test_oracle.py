"""The oracle against numbers worked out by hand: what it says is right is what the kit says is right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hwbackends.conformance import oracle

TAPS = np.array([[1.0, 10.0, 100.0, 1000.0]])


def _column(*values: float) -> oracle.Array:
    return np.array(values, dtype=np.float64)[:, None]


def test_the_output_spells_the_window() -> None:
    v = oracle.v_rows(None, _column(1, 2, 3, 4, 5), 4)
    assert oracle.conv(v, TAPS).ravel().tolist() == [1000, 2100, 3210, 4321, 5432]
    assert oracle.window(v, 5, 4).ravel().tolist() == [3, 4, 5]


def test_width_five() -> None:
    v = oracle.v_rows(None, _column(1, 2, 3, 4, 5), 5)
    taps = np.array([[1.0, 10.0, 100.0, 1000.0, 10000.0]])
    assert oracle.conv(v, taps).ravel().tolist() == [10000, 21000, 32100, 43210, 54321]


def test_bias_activation_and_residual() -> None:
    v = oracle.v_rows(None, _column(2.0), 2)
    taps, bias = np.array([[0.0, 3.0]]), np.array([1.0])
    silu = 7 / (1 + np.exp(-7.0))
    assert oracle.conv(v, taps, bias).item() == 7
    assert float(oracle.conv(v, taps, bias, "silu").item()) == pytest.approx(silu, rel=1e-15)
    assert float(oracle.conv(v, taps, bias, "silu", residual=True).item()) == pytest.approx(silu + 2, rel=1e-15)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rounding_is_the_hardwares(dtype: str) -> None:
    rng = np.random.default_rng(3)
    values = (rng.standard_normal(20_000) * np.exp(rng.uniform(-40, 40, 20_000))).astype(np.float32).astype(np.float64)
    edges = [0.0, -0.0, np.inf, np.nan, 65504, 65519.99, 65520, 6e-8, 2.9e-8, 3.4e38, 3.3961e38, 1 + 2**-8, 1 + 2**-11]
    values = np.concatenate([values, np.float32(edges).astype(np.float64)])
    want = torch.from_numpy(values).float().to(getattr(torch, dtype)).double().numpy()
    np.testing.assert_array_equal(oracle.round_to(values, dtype), want)


def test_an_ulp_is_the_gap_to_the_next_number() -> None:
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        kind = getattr(torch, dtype)
        for value in (1.0, 1.5, 2.0, 0.3, 1000.0):
            near = torch.tensor(value, dtype=kind)
            gap = torch.nextafter(near, torch.tensor(torch.inf, dtype=kind)) - near
            assert float(oracle.ulp(near.double().numpy(), dtype)) == float(gap)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_bound_holds_for_sums_in_any_order_and_is_tight(dtype: str, activation: str | None) -> None:
    rng = np.random.default_rng(11)
    v, taps = (oracle.round_to(rng.standard_normal(shape), dtype) for shape in ((2003, 7), (7, 4)))
    want = oracle.conv(v, taps, None, activation)
    bound = oracle.error_bound(v, taps, None, activation, False, dtype)
    sums = np.float64 if dtype == "float64" else np.float32
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)):
        total = np.zeros(want.shape, sums)
        for i in order:
            total += taps[:, i].astype(sums) * v[i : i + len(want)].astype(sums)
        y = total / (1 + np.exp(-total)) if activation else total
        error = np.abs(oracle.round_to(y, dtype) - want)
        assert (error <= bound).all()
        assert (error / bound).max() > 0.15  # a bound that nothing comes near proves little


def test_products_rounded_to_bfloat16_break_the_bound() -> None:
    rng = np.random.default_rng(12)
    v, taps = (oracle.round_to(rng.standard_normal(shape), "bfloat16") for shape in ((203, 7), (7, 4)))
    products = [oracle.round_to(taps[:, i] * v[i : i + 200], "bfloat16") for i in range(4)]
    error = np.abs(oracle.round_to(np.sum(products, axis=0), "bfloat16") - oracle.conv(v, taps))
    assert (error > oracle.error_bound(v, taps, None, None, False, "bfloat16")).mean() > 0.1


def _facts(layout: str, rows: int) -> oracle.PoolFacts:
    return oracle.PoolFacts(layout, 4, rows, [0, 3, 0, 1, 0, 2], None, 2)


def _state(layout: str, rows: int, held: dict[int, tuple[list[float], int]]) -> oracle.Array:
    """[4, rows, 1]: NaN, but for the given windows at their lengths."""
    tensor = np.full((4, rows, 1), np.nan)
    for slot, (window, length) in held.items():
        tensor[slot, oracle.window_rows(layout, rows, 4, length), 0] = window
    return tensor


@pytest.mark.parametrize(("layout", "rows"), [("window", 3), ("ring", 7), ("lazy", 6)])
def test_a_padded_row_in_the_middle(layout: str, rows: int) -> None:
    held: dict[int, tuple[list[float], int]] = {1: ([1, 2, 3], 9), 2: ([4, 5, 6], 8), 3: ([7, 8, 9], 5)}
    tensor = _state(layout, rows, held)
    batch = oracle.Batch("decode", [1, -1, 3], 3, 3, computed_lens=[5, 0, 9])
    result = oracle.step("decode", oracle.prepare(batch, _facts(layout, rows)), _column(4, 9, 5), TAPS, tensor, layout)
    assert result.y.ravel().tolist() == [4987, 0, 5321]
    after = result.state.apply(tensor, "float32")
    assert oracle.read_history(after[3], layout, 4, 6).ravel().tolist() == [8, 9, 4]
    assert oracle.read_history(after[1], layout, 4, 10).ravel().tolist() == [2, 3, 5]
    np.testing.assert_array_equal(after[[0, 2]], tensor[[0, 2]])


ROLLBACKS = [
    (layout, rows, accepted, y)
    for layout, rows in (("window", 3), ("ring", 7), ("lazy", 5))
    for accepted, y in ((0, 5987), (1, 5198), (2, 5219), (3, 5321))
    if layout != "lazy" or accepted > 0  # a commit of no token cannot be expressed there
]


@pytest.mark.parametrize(("layout", "rows", "accepted", "y"), ROLLBACKS)
def test_rollback_to_every_count(layout: str, rows: int, accepted: int, y: int) -> None:
    facts, tensor = _facts(layout, rows), _state(layout, rows, {3: ([7, 8, 9], 5)})
    batch = oracle.Batch("target_verify", [1], 1, 3, computed_lens=[5], draft_token_num=3)
    rows_of = oracle.prepare(batch, facts)
    verify = oracle.step("target_verify", rows_of, _column(1, 2, 3), TAPS, tensor, layout)
    assert verify.y.ravel().tolist() == [1987, 2198, 3219]
    tensor = verify.state.apply(tensor, "float32")
    drafts = verify.drafts.apply(np.full((6, 6, 1), np.nan), "float32") if layout == "window" else None
    effect = oracle.commit_conv([oracle.CommitRow(1, accepted - 1, computed_len=5)], facts, tensor, drafts)
    assert bool(effect.writes) == (layout == "window" and accepted > 0)
    tensor = effect.apply(tensor, "float32")
    later = oracle.Batch("decode", [1], 1, 1, computed_lens=[5 + accepted], num_accepted_tokens=[accepted])
    assert oracle.step("decode", oracle.prepare(later, facts), _column(5), TAPS, tensor, layout).y.item() == y


def test_an_empty_request_in_the_middle() -> None:
    tensor = _state("window", 3, {2: ([4, 5, 6], 3)})
    batch = oracle.Batch("extend", [1, 5, 3], 3, 5, extend_seq_lens=[2, 0, 3], extend_prefix_lens=[0, 3, 0])
    rows = oracle.prepare(batch, _facts("window", 3))
    result = oracle.step("extend", rows, _column(1, 2, 3, 4, 5), TAPS, tensor, "window")
    assert result.y.ravel().tolist() == [1000, 2100, 3000, 4300, 5430]
    after = result.state.apply(tensor, "float32")
    assert after[[3, 2, 1], :, 0].tolist() == [[0, 1, 2], [4, 5, 6], [3, 4, 5]]


def test_track_windows_of_an_extend_step() -> None:
    facts = _facts("window", 3)
    expected = {-1: -1, 2: -1, 3: 0, 4: 0, 5: 2, 6: 2, 7: 4, 8: 4, 9: -1}  # seqlen to k, prefix 3, 5 tokens, interval 2
    for seqlen, k in expected.items():
        batch = oracle.Batch(
            "extend", [1], 1, 5, extend_seq_lens=[5], extend_prefix_lens=[3], mamba_track_mask=[True],
            mamba_track_indices=[2], mamba_track_seqlens=[seqlen],
        )  # fmt: skip
        assert oracle.prepare(batch, facts)[0].track_tokens == k, seqlen


def test_track_windows_of_a_draft_extend_step() -> None:
    facts = oracle.PoolFacts("window", 4, 3, [0, 3], None, 4)
    expected = {(6, 1): -1, (6, 2): 2, (6, 3): 2, (7, 1): 1, (8, 3): -1, (3, 3): 1}  # (computed, accepted) to k
    for (computed, accepted), k in expected.items():
        batch = oracle.Batch(
            "draft_extend", [1], 1, 3, computed_lens=[computed], draft_token_num=3, num_accept_tokens=[accepted],
            mamba_track_mask=[True], mamba_track_indices=[2],
        )  # fmt: skip
        assert oracle.prepare(batch, facts)[0].track_tokens == k, (computed, accepted)
