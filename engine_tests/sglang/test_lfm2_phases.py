"""SGLang's LFM2 convs on a backend of hwbackends: its transposed pool, its commit, and NPU, where SGLang has none."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from world import BOUND, DRAFTS, SLOTS, Lfm2Convs, World, lfm2_config, make_backend, make_pool, make_runner

ROWS = ((1, 4), (2, 7), (3, 2))


def admitted(world: World) -> World:
    """Three requests; request rows and slots never have the same number."""
    for row, slot in ROWS:
        world.admit(row, slot)
    return world


def npu_layout(pool: Any) -> None:
    """The conv state as SGLang allocates it on NPU: [L, slots, S + N - 1, D]."""
    mamba_pool = pool.mamba_pool
    (own,) = mamba_pool.mamba_cache.conv
    layers, slots, dim, history = own.shape
    state = torch.full((layers, slots, history + DRAFTS - 1, dim), float("nan"))
    mamba_pool.mamba_cache = dataclasses.replace(mamba_pool.mamba_cache, conv=[state])


@pytest.fixture
def on_npu() -> Iterator[None]:
    """SGLang thinks that it runs on NPU."""
    with mock.patch("sglang.srt.utils.is_npu", return_value=True):
        yield


def serve_every_phase(world: World) -> None:
    """Prefill, chunks, decode, verify, another forward, commit, decode."""
    world.extend([1, 2, 3], [5, 1, 2])
    world.extend([3, 1], [7, 1])
    world.decode([2, 0, 1])
    drawn = world.verify([2, 1], DRAFTS)
    world.decode([3, 0])
    world.commit([2, 1], [0, -1])
    world.keep(2, drawn, 0, 1)
    for row, slot in ROWS:
        world.check_slot(slot, row)
    world.decode([3, 1, 2])
    world.extend([1, 2], [2, 3])
    for row, slot in ROWS:
        world.check_slot(slot, row)
    assert world.worst <= BOUND


def test_every_phase_over_sglangs_transposed_pool() -> None:
    world = admitted(World(DRAFTS, convs=Lfm2Convs))
    (own,) = world.backend.short_conv_backend.steps.pool.conv_streams.values()
    (theirs,) = world.pool.mamba_pool.mamba_cache.conv
    assert own.data_ptr() == theirs.data_ptr()
    assert own.shape[-2:] == theirs.shape[:-3:-1], "a view of [L, slots, D, S]"
    serve_every_phase(world)


def test_every_phase_over_the_npu_pool(on_npu: None) -> None:
    world = admitted(World(DRAFTS, convs=Lfm2Convs, change_pool=npu_layout))
    serve_every_phase(world)
    state = world.pool.mamba_pool.mamba_cache.conv[0]
    assert state[:, :, 3:].isnan().all(), "SGLang's spare rows are left alone"


def test_sglang_alone_has_no_conv_backend_for_lfm2_on_npu(on_npu: None) -> None:
    """The function under our wrapper; the NPU modules that it imports on the way need hardware and stand empty here."""
    from sglang.srt.layers.attention.attention_registry import attn_backend_wrapper

    folder = "sglang.srt.hardware_backend.npu.attention"
    names = ("AscendGDNAttnBackend", "AscendHybridLinearAttnBackend", "AscendMamba2AttnBackend")
    empty = SimpleNamespace(**dict.fromkeys(names))
    modules = {f"{folder}.{name}": empty for name in ("ascend_gdn_backend", "ascend_hybrid_linear_attn_backend")}
    config = lfm2_config()
    runner = make_runner(config, make_pool(config, None))
    with mock.patch.dict(sys.modules, modules), pytest.raises(NotImplementedError, match="not yet supported on NPU"):
        attn_backend_wrapper.__wrapped__(runner, None)


def test_the_npu_wrapper_answers_with_our_backend(on_npu: None) -> None:
    from hwbackends.engines.sglang.short_conv import ShortConvHybridBackend, ShortConvStateBackend

    config = lfm2_config()
    backend = make_backend(config, make_pool(config, None))
    assert type(backend) is ShortConvHybridBackend
    assert type(backend.short_conv_backend) is ShortConvStateBackend
    assert backend.full_attn_layers == config.full_attention_layer_ids


def test_a_cpu_graph_is_refused_by_name() -> None:
    from hwbackends.errors import UnsupportedError

    world = World(DRAFTS, convs=Lfm2Convs)
    with pytest.raises(UnsupportedError, match="CPU graph"):
        world.backend.short_conv_backend.init_forward_metadata_capture_cpu_graph()


def test_zaya_gets_slots_and_host_mirrors_from_the_prepared_step() -> None:
    from sglang.srt.configs.zaya import ZayaConfig

    config = ZayaConfig(
        vocab_size=97,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
    )
    pool = make_pool(config, None)
    backend = make_backend(config, pool)
    pool.req_index_to_mamba_index_mapping[:3] = torch.tensor([0, 4, 7])
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=2,
        input_ids=torch.zeros(8, dtype=torch.int64),
        req_pool_indices=torch.tensor([2, 1]),
        seq_lens=torch.tensor([5, 9]),
        out_cache_loc=torch.zeros(8, dtype=torch.int64),
        seq_lens_sum=14,
        extend_num_tokens=8,
        extend_seq_lens=torch.tensor([5, 3]),
        extend_prefix_lens=torch.tensor([0, 6]),
    )
    backend.init_forward_metadata(batch)
    step = backend.conv_state_metadata(next(iter(pool.mamba_map)), batch)
    assert step.cache_indices.tolist() == step.slot_ids_cpu == [7, 4]
    assert step.query_start_loc.tolist() == [0, 5, 8]
    assert step.has_initial_state.tolist() == step.has_prefix_cpu == [False, True]
    assert step.cache_indices.dtype == torch.int64
    assert max(step.slot_ids_cpu) < SLOTS
    assert len(step.layer_cache.conv) == 2
