"""A small SGLang around the convs: its own pool, attention wrapper and conv modules for a real Inkling or LFM2
configuration, and the books of what every request has put in, from which Transformers' math gives the right answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.models.inkling.modeling_inkling import InklingShortConvolution as StockConv

Key = tuple[int, int]

CHUNK = 4
"""Tokens between snapshots in extend."""
DRAFTS = 3
"""Tokens per request in verify."""
TRACK_INTERVAL = 4
"""Tokens between snapshots in draft extend."""
LAYERS = 2
REQUESTS = 5
SLOTS = 11
BOUND = 1e-6
"""Largest difference to Transformers' math, relative to the largest answer."""


def inkling_config() -> Any:
    """Channels of every stream pairwise different."""
    from sglang.srt.configs.inkling import InklingModelConfig

    return InklingModelConfig(
        vocab_size=97,
        hidden_size=40,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        local_layer_ids=[1],
        swa_num_attention_heads=4,
        swa_num_key_value_heads=1,
        swa_head_dim=10,
        use_sconv=True,
        sconv_kernel_size=4,
    )


def lfm2_config() -> Any:
    """Two convs around an attention."""
    from sglang.srt.configs.lfm2 import Lfm2Config

    return Lfm2Config(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        conv_L_cache=4,
        layer_types=["conv", "full_attention", "conv"],
        block_auto_adjust_ff_dim=False,
    )


def make_pool(config: Any, drafts: int | None, pool_class: Any = None) -> Any:
    """SGLang's own pool on a CPU, its state in float32 so that rounding hides nothing, NaN in every slot."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    params = config.mamba2_cache_params
    params = dataclasses.replace(params, dtype=dataclasses.replace(params.dtype, conv=torch.float32))
    pool = (pool_class or HybridReqToTokenPool)(
        size=REQUESTS,
        mamba_size=SLOTS,
        mamba_spec_state_size=REQUESTS,
        max_context_len=64,
        device="cpu",
        enable_memory_saver=False,
        cache_params=params,
        mamba_layer_ids=list(params.layers),
        enable_mamba_extra_buffer=True,
        speculative_num_draft_tokens=drafts,
        speculative_eagle_topk=1,
    )
    for state in pool.mamba_pool.mamba_cache.conv:
        state.fill_(float("nan"))
    return pool


def full_attention_backend(pool: Any) -> Any:
    """A backend for softmax attention that prepares nothing."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    class Nothing(AttentionBackend):  # type: ignore[misc]
        needs_cpu_seq_lens = False

        def __init__(self) -> None:
            self.token_to_kv_pool = self.kv_index_translator = None
            self.req_to_token_pool = pool

        def init_forward_metadata(self, forward_batch: Any) -> None: ...

        def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None: ...

        def init_forward_metadata_in_graph(self, forward_batch: Any) -> None: ...

        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None: ...

    return Nothing()


def make_runner(config: Any, pool: Any, *, draft_worker: bool = False) -> Any:
    """SGLang's model runner as far as attention backends read it."""
    from sglang.srt.runtime_context import get_server_args

    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=config, hf_text_config=config, quantization=None),
        use_mla_backend=False,
        server_args=get_server_args(),
        device="cpu",
        is_draft_worker=draft_worker,
        req_to_token_pool=pool,
        token_to_kv_pool=None,
    )


def make_backend(config: Any, pool: Any, *, draft_worker: bool = False) -> Any:
    """What SGLang's `attn_backend_wrapper` answers for the configuration."""
    from sglang.srt.layers.attention.attention_registry import attn_backend_wrapper

    return attn_backend_wrapper(make_runner(config, pool, draft_worker=draft_worker), full_attention_backend(pool))


def verify_input(drafts: int) -> Any:
    """What an EAGLE verify brings, as SGLang makes it for a rank without requests."""
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    return EagleVerifyInput.create_idle_input(topk=1, spec_steps=drafts - 1, num_verify_tokens=drafts, device="cpu")


class InklingConvs:
    """SGLang's Inkling convs of every layer and stream, and Transformers' with the same weights. A key is (layer,
    stream)."""

    exact = True
    """State rows are the inputs themselves."""

    def __init__(self, generator: torch.Generator) -> None:
        from sglang.srt.models.inkling_common.sconv import SconvType, ShortConvolution

        self.config = inkling_config()
        dims = [dim for _, dim in self.config.mamba2_cache_params.shape.conv]
        self.own, self.stock = {}, {}
        for layer in range(LAYERS):
            for kind in SconvType:
                own = ShortConvolution(dims[kind], 4, kind, layer_id=layer, tp_rank=0)
                own.weight.data = torch.randn(own.weight.shape, generator=generator)
                stock = StockConv(dims[kind], 4, layer, int(kind))
                stock.conv1d.weight.data = own.weight.data.clone()
                self.own[layer, int(kind)], self.stock[layer, int(kind)] = own, stock

    def dim(self, key: Key) -> int:
        """Channels of the module's input."""
        dim: int = self.own[key].weight.shape[0]
        return dim

    def run(self, key: Key, x: Tensor, batch: Any) -> Tensor:
        """SGLang's own forward."""
        y: Tensor = self.own[key].forward(x, None, batch)
        return y

    def state(self, pool: Any, slot: int, key: Key) -> Tensor:
        """[S, D]: what SGLang's pool holds."""
        layer, kind = key
        state: Tensor = pool.mamba_pool.mamba_cache.conv[kind][layer, slot]
        return state

    def rows(self, key: Key, x: Tensor) -> Tensor:
        """[T, D]: what the conv keeps of its inputs."""
        return x


class Lfm2Convs:
    """SGLang's LFM2 conv modules, and Transformers' with the same weights. A key is (layer, 0)."""

    exact = False
    """State rows come out of a matrix product, whose rounding depends on the batch."""

    def __init__(self, generator: torch.Generator) -> None:
        from sglang.srt.models.lfm2 import Lfm2ShortConv
        from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv as StockLfm2

        self.config = lfm2_config()
        self.own, self.stock = {}, {}
        for layer in self.config.linear_layer_ids:
            own, stock = Lfm2ShortConv(self.config, layer), StockLfm2(self.config, layer)
            for name, weight in stock.named_parameters():
                weight.data = torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5
                place = {"conv.weight": "conv_weight"}.get(name, name)
                own.get_parameter(place).data = weight.data.reshape(own.get_parameter(place).shape).clone()
            self.own[layer, 0], self.stock[layer, 0] = own, stock

    def dim(self, key: Key) -> int:
        """Channels of the module's input."""
        return int(self.config.hidden_size)

    def run(self, key: Key, x: Tensor, batch: Any) -> Tensor:
        """The module as SGLang's decoder layer calls it."""
        with torch.no_grad():
            y: Tensor = self.own[key].forward(x, batch)
        return y

    def state(self, pool: Any, slot: int, key: Key) -> Tensor:
        """[S, D]: what SGLang's pool holds, in whichever orientation."""
        layer = pool.mamba_map[key[0]]
        state: Tensor = pool.mamba_pool.mamba_cache.conv[0][layer, slot]
        return state[:3] if state.shape[1] == self.config.hidden_size else state.T

    def rows(self, key: Key, x: Tensor) -> Tensor:
        """[T, D]: gate times input."""
        with torch.no_grad():
            gate, _, value = self.stock[key].in_proj(x).chunk(3, dim=-1)
        rows: Tensor = gate * value
        return rows


class World:
    """Requests over SGLang's convs.

    Args:
        drafts: tokens per request in verify; None for a pool without speculation.
        draft_worker: make the backend as for a draft model.
        pool_class: a subclass of SGLang's pool.
        convs: the model's convs.
        change_pool: changes the pool before the backend is made.

    Attributes:
        worst: largest difference to Transformers so far, relative to the largest answer of the request.
        largest: the same over every world.
    """

    largest = 0.0

    def __init__(
        self,
        drafts: int | None,
        *,
        draft_worker: bool = False,
        pool_class: Any = None,
        convs: type[InklingConvs] | type[Lfm2Convs] = InklingConvs,
        change_pool: Callable[[Any], None] | None = None,
    ) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.model = convs(self.generator)
        self.pool = make_pool(self.model.config, drafts, pool_class)
        if change_pool is not None:
            change_pool(self.pool)
        self.backend = make_backend(self.model.config, self.pool, draft_worker=draft_worker)
        self.convs = self.model.own
        self.inputs: dict[int, dict[Key, Tensor]] = {}
        self.worst = 0.0

    def admit(self, row: int, slot: int) -> None:
        """A new request in request row `row`, its state in `slot`."""
        self.pool.req_index_to_mamba_index_mapping[row] = slot
        self.inputs[row] = {key: torch.zeros(0, self.model.dim(key)) for key in self.convs}

    def length(self, row: int) -> int:
        """Tokens that the request has kept."""
        return len(next(iter(self.inputs[row].values())))

    def batch(self, mode: str, rows: list[int], **fields: Any) -> Any:
        """SGLang's own ForwardBatch; fields that are not given are as SGLang leaves them."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        given = {"seq_lens": torch.tensor([self.length(r) if r in self.inputs else 0 for r in rows]), **fields}
        return ForwardBatch(
            forward_mode=getattr(ForwardMode, mode),
            batch_size=len(rows),
            input_ids=torch.zeros(0, dtype=torch.int64),
            req_pool_indices=torch.tensor(rows, dtype=torch.int64),
            out_cache_loc=torch.zeros(0, dtype=torch.int64),
            seq_lens_sum=0,
            **given,
        )

    def prepare(self, batch: Any) -> None:
        """What SGLang's model runner does before an eager forward."""
        self.backend.init_forward_metadata(batch)

    def answers(self, batch: Any, tokens: int) -> dict[Key, Tensor]:
        """Run every conv on new random inputs and keep no books of it."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        with forward_context(ForwardContext(attn_backend=self.backend)):
            xs = {key: torch.randn(tokens, self.model.dim(key), generator=self.generator) for key in self.convs}
            return {key: self.model.run(key, x, batch) for key, x in xs.items()}

    def forward(self, batch: Any, lengths: list[int]) -> dict[Key, list[Tensor]]:
        """Run every conv on new random inputs of `lengths` tokens per request through SGLang's own
        `ShortConvolution.forward`, compare what live requests get with Transformers, and return the inputs."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        rows, drawn = batch.req_pool_indices.tolist(), {}
        with forward_context(ForwardContext(attn_backend=self.backend)):
            for key in self.convs:
                x = torch.randn(sum(lengths), self.model.dim(key), generator=self.generator)
                y = self.model.run(key, x, batch)
                drawn[key] = list(x.split(lengths))
                for row, own, answer in zip(rows, drawn[key], y.split(lengths), strict=True):
                    if row in self.inputs:
                        self._compare(key, row, own, answer)
                    else:
                        assert not answer.any(), "padded rows answer 0"
        return drawn

    def _compare(self, key: Key, row: int, x: Tensor, y: Tensor) -> None:
        if not len(x):
            return
        whole = torch.cat([self.inputs[row][key], x])
        with torch.no_grad():
            right = self.model.stock[key](whole[None])[0, -len(x) :]
        self.worst = max(self.worst, float((y - right).abs().max() / right.abs().max()))
        World.largest = max(World.largest, self.worst)

    def keep(self, row: int, drawn: dict[Key, list[Tensor]], place: int, count: int) -> None:
        """The request keeps the first `count` tokens of its inputs in the last forward."""
        for key, parts in drawn.items():
            self.inputs[row][key] = torch.cat([self.inputs[row][key], parts[place][:count]])

    def state(self, slot: int, key: Key) -> Tensor:
        """[S, D]: what SGLang's pool holds."""
        return self.model.state(self.pool, slot, key)

    def window(self, row: int, key: Key, length: int | None = None) -> Tensor:
        """[S, D]: the last rows of the request, or those before token `length`."""
        kept = self.inputs[row][key]
        rows = self.model.rows(key, kept if length is None else kept[:length])
        return torch.cat([torch.zeros(3, rows.shape[1]), rows])[-3:]

    def check_slot(self, slot: int, row: int, length: int | None = None) -> None:
        """Every stream of the slot holds the request's window, bit by bit where the rows are the inputs."""
        for key in self.convs:
            held, right = self.state(slot, key), self.window(row, key, length)
            if self.model.exact:
                assert torch.equal(held, right), (slot, key)
            else:
                assert (held - right).abs().max() <= BOUND * max(1.0, float(right.abs().max())), (slot, key)

    def extend(self, rows: list[int], lengths: list[int], **fields: Any) -> None:
        """Prefill or a chunk of one for each request; 0 tokens are legal."""
        batch = self.batch(
            "EXTEND",
            rows,
            extend_num_tokens=sum(lengths),
            extend_seq_lens=torch.tensor(lengths, dtype=torch.int32),
            extend_prefix_lens=torch.tensor([self.length(r) if r in self.inputs else 0 for r in rows]).int(),
            **fields,
        )
        self.prepare(batch)
        drawn = self.forward(batch, lengths)
        for place, row in enumerate(rows):
            if row in self.inputs:
                self.keep(row, drawn, place, lengths[place])

    def decode(self, rows: list[int], **fields: Any) -> None:
        """One token for each request."""
        batch = self.batch("DECODE", rows, **fields)
        self.prepare(batch)
        drawn = self.forward(batch, [1] * len(rows))
        for place, row in enumerate(rows):
            if row in self.inputs:
                self.keep(row, drawn, place, 1)

    def verify(self, rows: list[int], drafts: int) -> dict[Key, list[Tensor]]:
        """Drafts for each request; nothing is kept before the commit."""
        batch = self.batch("TARGET_VERIFY", rows, spec_info=verify_input(drafts))
        self.prepare(batch)
        return self.forward(batch, [drafts] * len(rows))

    def commit(self, rows: list[int], last: list[int], **fields: Any) -> None:
        """SGLang's commit after a verify step."""
        self.backend.update_mamba_state_after_mtp_verify(
            last_correct_step_indices=torch.tensor(last),
            mamba_track_indices=fields.get("track"),
            mamba_steps_to_track=fields.get("steps"),
            model=None,
            req_pool_indices=torch.tensor(rows, dtype=torch.int64),
        )
