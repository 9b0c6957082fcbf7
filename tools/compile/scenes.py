"""What the compile job asks of a GPU backend: steps and moves of state through its hooks, chosen so that every code
path of every kernel and every regime of the launch sizes comes up. Only shapes, dtypes and options matter: nothing
runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hwbackends.conv.state import ConvStream
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.metadata import MetadataBuffers, MetadataLimits
from hwbackends.step.pool import StatePool

LAYOUTS = ("window", "ring", "lazy")
HOOKS = {
    "decode": ("conv_decode", ForwardMode.DECODE),
    "extend": ("conv_extend", ForwardMode.EXTEND),
    "target_verify": ("conv_target_verify", ForwardMode.TARGET_VERIFY),
    "draft_extend": ("conv_draft_extend", ForwardMode.DRAFT_EXTEND),
    "fused_decode": ("fused_decode_add_rmsnorm", ForwardMode.DECODE),
    "fused_verify": ("fused_target_verify_add_rmsnorm", ForwardMode.TARGET_VERIFY),
}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True, slots=True)
class Scene:
    """One call of a hook, and the preparation of its step.

    Attributes:
        hook: of HOOKS, or `commit`, `move`.
        layout, width, dim, requests, tokens: sizes; tokens counts each request's tokens of an extend.
        dtype, state: of x and weights, and of the state.
        activation, residual, bias, track: options of the conv.
        batch: optional parts of the batch and pool: `device_count`, `given_slots`, `v2p`, `sources`, `lengths`, `long`
            (64-bit indices), `initial`, `drafts`, `ssm`.
        form: of x, weights or pool: `dense`, `turned` (channels outside), `padded` (x longer than the batch), `offset`
            (addresses that 16 does not divide), `rows` (weights with channels inside).
    """

    hook: str
    layout: str = "ring"
    width: int = 4
    dim: int = 4096
    requests: int = 32
    tokens: int = 16
    dtype: str = "bf16"
    state: str = "bf16"
    activation: str | None = None
    residual: bool = True
    bias: bool = False
    track: bool = False
    batch: frozenset[str] = frozenset()
    form: str = "dense"

    @property
    def name(self) -> str:
        """What differs from the default scene of the hook, in words."""
        default = Scene(self.hook, self.layout)
        words = [self.hook, self.layout]
        for field in ("width", "dim", "requests", "tokens", "dtype", "state", "activation", "form"):
            if getattr(self, field) != getattr(default, field):
                words.append(f"{field}={getattr(self, field)}")
        words += [flag for flag in ("bias", "track") if getattr(self, flag)]
        words += [] if self.residual else ["no residual"]
        return " ".join([*words, *sorted(self.batch)])

    @property
    def hot(self) -> bool:
        """Whether it is what an engine runs on every layer of every step, in the sizes of Inkling."""
        plain = (self.width, self.dim, self.dtype, self.state, self.form) == (4, 4096, "bf16", "bf16", "dense")
        sized = (self.requests, self.tokens) == (32, 16) and self.hook in HOOKS
        return plain and sized and not self.batch and self.activation is None and not self.bias

    @property
    def rewrites(self) -> bool:
        """Whether rows are read and rewritten by different threads of one program."""
        kept = ("move", "commit") if self.layout == "lazy" else ("move", "commit", "target_verify", "fused_verify")
        return self.layout != "ring" and self.hook not in kept


def scenes() -> list[Scene]:
    """Every scene once."""
    return list(dict.fromkeys([*hot(), *sizes(), *preparations(), *moves(), *crossed()]))


def hot() -> Iterator[Scene]:
    """The hot hooks in every layout, with tracking where they take it."""
    for layout, hook in itertools.product(LAYOUTS, HOOKS):
        yield Scene(hook, layout, track=hook not in ("target_verify", "fused_verify"))


def crossed() -> Iterator[Scene]:
    """Layouts, hooks and options against each other at W = 4; every width and every pair of dtypes with every hook."""
    on = (False, True)
    for layout, hook in itertools.product(LAYOUTS, HOOKS):
        base = Scene(hook, layout)
        for activation, residual, bias, track in itertools.product((None, "silu"), on, on, on):
            yield replace(base, activation=activation, residual=residual, bias=bias, track=track)
        for width in (2, 3, 5, 8):
            yield replace(base, width=width, track=True)
        for dtype, state in itertools.product(TYPES, TYPES):
            if (dtype == "fp64") == (state == "fp64"):
                yield replace(base, dtype=dtype, state=state, activation="silu")
        for form in ("turned", "padded", "offset", "rows"):
            yield replace(base, form=form, dim=4093, track=True)


def sizes() -> Iterator[Scene]:
    """Every regime of the launch sizes."""
    for requests, dim in ((1, 4096), (512, 4096), (32, 37), (32, 1024)):
        for hook in ("decode", "target_verify"):
            yield Scene(hook, "ring", dim=dim, requests=requests)
    for requests, tokens in ((8, 64), (8, 512), (8, 2048)):
        yield Scene("extend", "ring", requests=requests, tokens=tokens)
    for dim, requests in ((512, 32), (2048, 1), (8192, 128), (16384, 32), (4096, 200)):
        for hook in ("fused_decode", "fused_verify"):
            yield Scene(hook, "ring", dim=dim, requests=requests)
    for requests in (300, 2000, 5000):
        yield Scene("extend", "ring", dim=128, requests=requests, tokens=2)


def preparations() -> Iterator[Scene]:
    """What a batch may bring; preparing comes with the step."""
    parts = ("device_count", "given_slots", "v2p", "lengths", "long", "initial")
    for hook, layout in (("decode", "lazy"), ("extend", "lazy"), ("target_verify", "ring"), ("draft_extend", "window")):
        for part in parts:
            yield Scene(hook, layout, dim=64, track=True, batch=frozenset({part}))
        yield Scene(hook, layout, dim=64, batch=frozenset(("v2p", "device_count", "long")))
    yield Scene("extend", "window", dim=64, track=True, batch=frozenset(("v2p", "sources")))


def moves() -> Iterator[Scene]:
    """The commit with and without snapshots and SSM state, and copying and clearing slots."""
    for layout, track in itertools.product(LAYOUTS, (False, True)):
        yield Scene("commit", layout, track=track)
        yield Scene("commit", layout, track=track, batch=frozenset(("ssm", "v2p", "drafts")))
    for layout, state in itertools.product(LAYOUTS, ("bf16", "fp32", "fp64")):
        yield Scene("move", layout, state=state)


DRAFTS = 4


def play(scene: Scene, hooks: Any) -> None:
    """Call the hooks of a scene. Their launches are whatever the caller made of them."""
    pool = make_pool(scene)
    if scene.hook == "commit":
        commit(scene, pool, hooks)
    elif scene.hook == "move":
        slots = torch.ones(scene.requests, dtype=torch.int64)
        hooks.copy_slots(pool, slots, slots)
        hooks.clear_slots(pool, slots)
    else:
        step(scene, pool, hooks)


def make_pool(scene: Scene) -> StatePool:
    """A pool of one stream; with `turned` its channels lie outside its rows."""
    count, with_ssm = scene.requests, "ssm" in scene.batch
    pool = StatePool(
        [ConvStream("k", scene.dim, TYPES[scene.state])],
        num_slots=2 * count + 2,
        width=scene.width,
        layout=scene.layout,  # type: ignore[arg-type]
        draft_token_num=DRAFTS,
        request_rows=count + 1,
        track_interval=64,
        ssm_shape=(4, 128, 128) if with_ssm else None,
        mamba_v2p_table=torch.zeros(2 * count + 2, dtype=torch.int64) if "v2p" in scene.batch else None,
    )
    if scene.form != "turned":
        return pool
    tensor = pool.conv_streams["k"].transpose(-1, -2).contiguous().transpose(-1, -2)
    return StatePool.wrap(
        {"k": tensor},
        width=scene.width,
        mamba_index_mapping=pool.mamba_index_mapping,
        layout=scene.layout,  # type: ignore[arg-type]
        draft_token_num=DRAFTS,
        draft_rows=pool.draft_rows or None,
        track_interval=64,
    )


def make_batch(scene: Scene) -> StepBatch:
    """A batch of the scene's phase with the parts that it names."""
    mode, count = HOOKS[scene.hook][1], scene.requests
    index = torch.int64 if "long" in scene.batch else torch.int32
    rows = torch.zeros(count, dtype=index)
    drafts = mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)
    tokens = scene.tokens if mode is ForwardMode.EXTEND else DRAFTS if drafts else 1
    given: dict[str, Tensor | int | None] = {"draft_token_num": DRAFTS} if drafts else {}
    if mode is ForwardMode.EXTEND:
        given |= {"extend_seq_lens": rows, "extend_prefix_lens": rows}
    else:
        given["seq_lens" if "lengths" in scene.batch else "computed_lens"] = rows
    if mode is ForwardMode.DRAFT_EXTEND:
        given["num_accept_tokens"] = rows
    if scene.layout == "lazy":
        given["num_accepted_tokens"] = rows
    if scene.track and mode is not ForwardMode.TARGET_VERIFY:
        given |= {"mamba_track_mask": rows.bool(), "mamba_track_indices": rows}
        given |= {"mamba_track_seqlens": rows} if mode is ForwardMode.EXTEND else {}
    if "initial" in scene.batch and mode in (ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND):
        given["has_initial_state"] = rows.bool()
    if "sources" in scene.batch:
        given["source_indices"] = rows
    if "given_slots" in scene.batch:
        given["cache_indices"] = rows
    if "device_count" in scene.batch:
        given["num_reqs_device"] = torch.zeros(1, dtype=torch.int32)
    return StepBatch(mode, rows, count, count * tokens, **given)  # type: ignore[arg-type]


def step(scene: Scene, pool: StatePool, hooks: Any) -> None:
    """Prepare a step and run its conv."""
    batch = make_batch(scene)
    slots = torch.int64 if "long" in scene.batch else torch.int32
    limits = MetadataLimits(batch.padded_reqs, batch.num_tokens, batch.draft_token_num)
    buffers = MetadataBuffers(limits, "cpu", slots)
    tracks = batch.mamba_track_mask is not None
    view = buffers.view(batch.forward_mode, batch.padded_reqs, batch.num_tokens, batch.tokens_per_req, tracks)
    phase = batch.forward_mode.name.lower()
    getattr(hooks, f"prepare_{phase}_metadata")(batch, pool, view)
    spare = 5 * batch.tokens_per_req if scene.form == "padded" and scene.hook != "extend" else 0
    x, weight, bias = tensors(scene, batch.num_tokens + spare)
    state, given = pool.conv_state("k", 0), (scene.activation, scene.residual)
    hook = getattr(hooks, HOOKS[scene.hook][0])
    if scene.hook.startswith("fused"):
        hook(x, weight, bias, state, view, torch.empty_like(x), torch.empty(scene.dim, dtype=x.dtype), 1e-6, *given)
    else:
        hook(x, weight, bias, state, view, *given)


def tensors(scene: Scene, rows: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, weights and bias in the scene's form."""
    dtype, off = TYPES[scene.dtype], int(scene.form == "offset")
    x = torch.empty(rows * scene.dim + off, dtype=dtype)[off:].view(rows, scene.dim)
    weight = torch.empty(scene.dim, scene.width, dtype=dtype)
    if scene.form == "rows":
        weight = torch.empty(scene.width, scene.dim, dtype=dtype).t()
    return x, weight, torch.empty(scene.dim, dtype=dtype) if scene.bias else None


def commit(scene: Scene, pool: StatePool, hooks: Any) -> None:
    """A commit, with snapshots where the scene tracks."""
    rows = torch.zeros(scene.requests, dtype=torch.int32)
    names = ("mamba_track_indices", "mamba_steps_to_track", "computed_lens") if scene.track else ()
    given = dict.fromkeys((*names, *(["draft_indices"] if "drafts" in scene.batch else [])), rows)
    hooks.update_mamba_state_after_mtp_verify(pool, rows, rows, **given)
