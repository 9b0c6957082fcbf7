"""An engine's own pool, wrapped without a copy, gives the numbers and the bits of a pool of ours."""

from __future__ import annotations

import pytest
import torch

from hwbackends.step.pool import StatePool
from tests.backend.lab import Lab, same_bits


@pytest.mark.parametrize("transposed", [False, True], ids=["rows-then-channels", "channels-then-rows"])
def test_every_phase_runs_on_an_engines_pool(target: tuple[str, str], layout: str, transposed: bool) -> None:
    ours, theirs = (Lab(*target, layout, rows={5: 1, 6: 2}, dim=7, requests=13, poison=0.0) for _ in range(2))
    shape = list(theirs.pool.conv_streams["k"].shape)
    engine = torch.zeros(shape[:2] + shape[:1:-1] if transposed else shape, device=theirs.device)
    theirs.pool = StatePool.wrap(
        {"k": engine.transpose(-1, -2) if transposed else engine},
        width=4,
        mamba_index_mapping=theirs.pool.mamba_index_mapping,
        layout=theirs.pool.layout,
        draft_token_num=3,
        track_interval=2,
    )
    theirs.state = theirs.pool.conv_state("k", 0)
    weight = torch.randn(7, 4, generator=torch.Generator().manual_seed(1)).to(ours.device)
    results = []
    for it in (ours, theirs):
        numbers, it.weight = torch.Generator().manual_seed(2), weight
        mask, track = torch.tensor([True, False], device=it.device), it.ints([8, 9])
        y = [it.extend([5, 6], [5, 2], torch.randn(7, 7, generator=numbers))]
        y.append(
            it.decode([6, 5], torch.randn(2, 7, generator=numbers), mamba_track_mask=mask, mamba_track_indices=track)
        )
        y.append(it.verify([5, 6], torch.randn(6, 7, generator=numbers)))
        it.commit([5, 6], [2, 1])
        y.append(it.draft_extend([6, 5], [3, 1], torch.randn(6, 7, generator=numbers)))
        results.append(torch.cat(y))
    assert torch.equal(*results)
    assert same_bits(ours.state.tensor, theirs.state.tensor)
    assert engine.data_ptr() == theirs.state.tensor.data_ptr()
