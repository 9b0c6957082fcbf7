"""The wrapper in an attention backend's place: both are told of each step, and nothing of the backend is hidden."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hwbackends.errors import GraphLimitError, MissingArgumentError, TreeDraftsError, UnsupportedError
from hwbackends.step.batch import ForwardMode
from hwbackends.step.hybrid import (
    HybridAttentionBackend,
    refuse_tree_drafts,
    wrap_attention_backend,
    wrap_draft_decode_backend,
    wrap_draft_extend_backend,
)
from hwbackends.testing.guards import no_sync
from tests.step.sidecar_cases import (
    BATCH,
    DRAFTS,
    TOKENS,
    StaticInputs,
    decode,
    inputs,
    make_pool,
    make_sidecar,
    verify,
)


class Attention:
    """An engine's attention backend: remembers what it was told."""

    needs_cpu_seq_lens = True

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.token_to_kv_pool = "pool"

    def init_forward_metadata(self, batch: Any) -> None:
        self.told.append(("eager", batch))

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        self.told.append(("out", batch, in_capture))

    def init_forward_metadata_in_graph(self, batch: Any) -> None:
        self.told.append(("in", batch))

    def init_forward_metadata_replay_cuda_graph(self, *args: Any) -> None:
        self.told.append(("old", args))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.told.append(("limits", max_bs, max_num_tokens))

    def forward_decode(self, q: Any) -> Any:
        return ("attended", q)


def pair() -> tuple[Any, Attention]:
    attention = Attention()
    return wrap_attention_backend(attention, make_sidecar(make_pool())), attention


def test_each_metadata_hook_reaches_the_attention_backend_and_the_sidecar() -> None:
    wrapper, attention = pair()
    eager, static = decode([5, 3]), StaticInputs().step(ForwardMode.DECODE)
    wrapper.init_forward_metadata(eager)
    assert wrapper.conv_state_metadata(2, eager).metadata.cache_indices.tolist() == [1, 2]
    wrapper.init_forward_metadata_out_graph(static, in_capture=True)
    wrapper.init_forward_metadata_in_graph(static)
    wrapper.init_forward_metadata_out_graph(static)
    wrapper.init_cuda_graph_state(BATCH, TOKENS)
    limits = ("limits", BATCH, TOKENS)
    assert attention.told == [("eager", eager), ("out", static, True), ("in", static), ("out", static, False), limits]
    assert wrapper.sidecar.resolutions == 2


def test_the_sidecar_prepares_draft_extend_steps_too() -> None:
    wrapper, _ = pair()
    static = StaticInputs()
    static.fill([5, 3], [9, 9])
    wrapper.init_forward_metadata(static.step(ForwardMode.DRAFT_EXTEND))
    assert wrapper.conv_state_metadata(2).metadata.num_accept_tokens.tolist() == [1, 2, -1, -1, -1]


def test_an_engines_own_batch_is_converted_for_the_sidecar_only() -> None:
    attention = Attention()
    wrapper = wrap_attention_backend(attention, make_sidecar(make_pool()), lambda batch: decode(batch.rows))
    engines = SimpleNamespace(rows=[8, 3])
    wrapper.init_forward_metadata(engines)
    assert attention.told == [("eager", engines)]
    assert wrapper.conv_state_metadata(2).metadata.cache_indices.tolist() == [4, 2]


def test_a_step_that_the_sidecar_refuses_does_not_reach_the_attention_backend() -> None:
    wrapper, attention = pair()
    with pytest.raises(TreeDraftsError):
        wrapper.init_forward_metadata(verify([5], topk=2))
    with pytest.raises(GraphLimitError):
        wrapper.init_cuda_graph_state(BATCH + 1, TOKENS)
    assert not attention.told


def test_capabilities_and_methods_are_the_attention_backends() -> None:
    wrapper, _ = pair()
    assert wrapper.needs_cpu_seq_lens is True
    assert wrapper.forward_decode("q") == ("attended", "q")
    assert {"forward_decode", "conv_state_metadata", "token_to_kv_pool"} <= set(dir(wrapper))
    assert not hasattr(wrapper, "supports_ragged_verify_graph")
    with pytest.raises(AttributeError, match="Attention"):
        wrapper.no_such_capability  # noqa: B018


def test_assignments_and_deletions_reach_the_attention_backend() -> None:
    wrapper, attention = pair()
    wrapper.token_to_kv_pool = "another"
    wrapper.forward_metadata = "theirs"
    assert (attention.token_to_kv_pool, attention.forward_metadata) == ("another", "theirs")  # type: ignore[attr-defined]
    del wrapper.token_to_kv_pool
    assert not hasattr(attention, "token_to_kv_pool")
    assert wrapper.attention_backend is attention


def test_a_metadata_hook_that_would_pass_the_sidecar_by_is_refused() -> None:
    wrapper, attention = pair()
    with pytest.raises(UnsupportedError, match="init_forward_metadata_replay_cuda_graph"):
        wrapper.init_forward_metadata_replay_cuda_graph(3)
    assert not hasattr(wrapper, "init_forward_metadata_replay_cuda_graph"), "an engine that asks gets a no"
    assert not attention.told


def test_a_copy_of_the_wrapper_holds_the_same_two() -> None:
    wrapper, attention = pair()
    twin = copy.copy(wrapper)
    assert twin.attention_backend is attention
    assert twin.sidecar is wrapper.sidecar


def test_a_commit_goes_to_the_sidecar_with_the_request_rows() -> None:
    wrapper, _ = pair()
    pool, x = wrapper.sidecar.pool, inputs(DRAFTS)
    wrapper.init_forward_metadata(verify([5]))
    wrapper.conv_state_metadata(6).conv("k", *x)
    with no_sync():
        wrapper.update_mamba_state_after_mtp_verify(
            req_pool_indices=torch.full((1,), 5), last_correct_step_indices=torch.full((1,), 2)
        )
    assert torch.equal(pool.conv_streams["k"][1, 1], x[0])
    with pytest.raises(MissingArgumentError, match="req_pool_indices"):
        wrapper.update_mamba_state_after_mtp_verify(last_correct_step_indices=torch.tensor([1]))


def test_a_model_without_conv_state_keeps_its_own_backends() -> None:
    attention = Attention()
    assert wrap_attention_backend(attention, None) is attention
    assert wrap_draft_extend_backend(attention, None) is attention
    assert wrap_draft_decode_backend(attention, None) is attention
    refuse_tree_drafts(4, None)


def test_a_draft_with_conv_state_gets_a_wrapper_of_its_own_part() -> None:
    sidecar = make_sidecar(make_pool())
    wrapper = wrap_draft_extend_backend(Attention(), sidecar)
    assert isinstance(wrapper, HybridAttentionBackend)
    assert wrapper.sidecar is sidecar
    with pytest.raises(UnsupportedError, match="the draft's own attention backend"):
        wrap_draft_extend_backend(wrapper, make_sidecar(make_pool()))


def test_a_multi_step_draft_decode_container_is_refused_for_a_draft_with_conv_state() -> None:
    with pytest.raises(UnsupportedError, match="SimpleNamespace for a draft with conv state"):
        wrap_draft_decode_backend(SimpleNamespace(attn_backends=[]), make_sidecar(make_pool()))


def test_tree_drafts_are_refused_at_start_up_for_a_model_with_conv_state() -> None:
    sidecar = make_sidecar(make_pool())
    refuse_tree_drafts(1, sidecar)
    with pytest.raises(TreeDraftsError, match="topk: got 4"):
        refuse_tree_drafts(4, sidecar)
