"""What the compile job asks of the SSM hooks: every kind, layout and dtype in every phase, and what moves their states.
Only shapes, dtypes and options matter: nothing runs.

Left out, because no launch of either backend makes them: decode on a ring that keeps its token (`ssm_defers` is false
in both backends' tuning), programs of other launch shapes than `tuning.ssm` has, and a state in float64, which the
contract does not have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hwbackends.ssm.layouts import SSMKind, SSMLayout
from hwbackends.ssm.state import SSMStream
from hwbackends.step.batch import ForwardMode
from hwbackends.step.metadata import MetadataBuffers, MetadataLimits, StepMetadata
from hwbackends.step.pool import StatePool

PHASES = {
    "ssm_decode": ForwardMode.DECODE,
    "ssm_target_verify": ForwardMode.TARGET_VERIFY,
    "ssm_draft_extend": ForwardMode.DRAFT_EXTEND,
    "ssm_extend": ForwardMode.EXTEND,
}
KINDS: tuple[SSMKind, ...] = ("gdn", "kda", "mamba2")
LAYOUTS: tuple[SSMLayout, ...] = ("ring", "intermediate")
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = {
    "whole": {"gdn": (16, 32, 128, 128), "kda": (32, 32, 128, 128), "mamba2": (8, 128, 128, 64)},
    "odd": dict.fromkeys(KINDS, (1, 3, 72, 40)),
}
"""Heads of q and k, heads of v, K and V: of the models that are benched, and dims that no tile divides."""


@dataclass(frozen=True, slots=True)
class SsmScene:
    """One call of a hook.

    Attributes:
        hook: of PHASES, or `materialize`, `ssm_commit`, `ssm_move`.
        kind, layout, state: of the state, and its dtype.
        dtype: of the inputs and the output.
        size: of SIZES.
        drafts: tokens per request of verify and draft extend.
        ring: dtype of k in the ring.
        options: `track`; of a kind: `plain` (no norm of q and k, no bias), `limit`, `safe`, `skip`; `tree` drafts;
            `long` (64-bit indices); `v2p`; `offset` (addresses that 16 does not divide); `own` (a materialization into
            the request's own slot).
    """

    hook: str
    kind: SSMKind = "gdn"
    layout: SSMLayout = "ring"
    state: str = "fp32"
    dtype: str = "bf16"
    size: str = "whole"
    drafts: int = 4
    ring: str = "fp32"
    options: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """What differs from the default scene of the hook, in words."""
        words = [self.hook, self.layout, self.kind]
        for field, default in (
            ("state", "fp32"),
            ("dtype", "bf16"),
            ("size", "whole"),
            ("drafts", 4),
            ("ring", "fp32"),
        ):
            if getattr(self, field) != default:
                words.append(f"{field}={getattr(self, field)}")
        return " ".join([*words, *sorted(self.options)])

    @property
    def hot(self) -> bool:
        """Whether it is what an engine runs on every layer of every step, in the sizes of the models."""
        return self in HOT

    @property
    def rewrites(self) -> bool:
        """Whether a program reads what another of its threads wrote: gates, norms, k and q of a step."""
        return self.hook in PHASES and self.hook != "ssm_extend"


def hot() -> Iterator[SsmScene]:
    """Decode and verify of every kind, with the state in float32 on a ring."""
    for kind, hook in itertools.product(KINDS, ("ssm_decode", "ssm_target_verify")):
        yield SsmScene(hook, kind)


HOT = frozenset(hot())
OPTIONS = {"gdn": (("plain",),), "kda": (("safe",), ("plain", "safe")), "mamba2": (("plain",), ("limit", "skip"))}


def scenes() -> list[SsmScene]:
    """Every scene once."""
    return list(dict.fromkeys([*hot(), *crossed(), *optional(), *moves()]))


def crossed() -> Iterator[SsmScene]:
    """Kinds, layouts and hooks against each other with every dtype of the state, with tracking and without, and with
    dims that no tile divides; every dtype of the inputs on a ring."""
    for kind, layout, hook in itertools.product(KINDS, LAYOUTS, PHASES):
        base = SsmScene(hook, kind, layout)
        tracked = frozenset() if hook == "ssm_target_verify" else frozenset({"track"})
        yield base
        yield replace(base, options=tracked)
        yield replace(base, state="bf16")
        yield replace(base, size="odd", options=tracked)
        if layout == "ring":
            yield replace(base, state="fp16", options=tracked)
            for dtype in ("fp32", "fp16"):
                yield replace(base, dtype=dtype)


def optional() -> Iterator[SsmScene]:
    """Options of each kind, rings in k's dtype, forms of tensors, numbers of drafts, and trees."""
    for kind, hook in itertools.product(KINDS, PHASES):
        base = SsmScene(hook, kind)
        for options in OPTIONS[kind]:
            yield replace(base, options=frozenset(options))
        yield replace(base, ring="bf16")
    for hook in PHASES:
        for option in ("offset", "long"):
            yield SsmScene(hook, options=frozenset({option}))
    for kind, layout in itertools.product(KINDS, LAYOUTS):
        for drafts in (2, 8):
            yield SsmScene("ssm_target_verify", kind, layout, drafts=drafts)
        yield SsmScene("ssm_draft_extend", kind, layout, drafts=3)
    for kind, state in itertools.product(KINDS, ("fp32", "bf16")):
        yield SsmScene("ssm_target_verify", kind, "intermediate", state, options=frozenset({"tree"}))


def moves() -> Iterator[SsmScene]:
    """Materializing into the request's slot and into others, the commit with snapshots, and copies of slots."""
    for kind, layout, state in itertools.product(KINDS, LAYOUTS, TYPES):
        for options in ((), ("own",), ("v2p",)):
            yield SsmScene("materialize", kind, layout, state, options=frozenset(options))
        yield SsmScene("ssm_commit", kind, layout, state, options=frozenset(("track", "v2p", "long")))
    for layout, state in itertools.product(LAYOUTS, TYPES):
        yield SsmScene("ssm_commit", layout=layout, state=state)
        yield SsmScene("ssm_commit", layout=layout, state=state, options=frozenset({"track"}))
        yield SsmScene("ssm_move", layout=layout, state=state)


REQUESTS, TOKENS = 3, 8


def play(scene: SsmScene, hooks: Any) -> None:
    """Call the hooks of a scene. Their launches are whatever the caller made of them."""
    pool = make_pool(scene)
    index = torch.int64 if "long" in scene.options else torch.int32
    rows = torch.zeros(REQUESTS, dtype=index)
    if scene.hook == "materialize":
        hooks.materialize_slots(pool, rows, rows, None if "own" in scene.options else rows)
    elif scene.hook == "ssm_commit":
        names = ("mamba_track_indices", "mamba_steps_to_track", "computed_lens") if "track" in scene.options else ()
        hooks.update_mamba_state_after_mtp_verify(pool, rows, rows, **dict.fromkeys(names, rows))
    elif scene.hook == "ssm_move":
        hooks.copy_slots(pool, rows.long(), rows.long())
        hooks.clear_slots(pool, rows.long())
    else:
        step(scene, pool, hooks)


def make_pool(scene: SsmScene) -> StatePool:
    """A pool of one state."""
    heads = SIZES[scene.size][scene.kind]
    stream = SSMStream(
        "s", scene.kind, *heads, dtype=TYPES[scene.state], layout=scene.layout, ring_dtype=TYPES[scene.ring]
    )
    table = torch.zeros(REQUESTS + 2, dtype=torch.int64) if "v2p" in scene.options else None
    return StatePool(
        [], num_slots=REQUESTS + 2, request_rows=REQUESTS + 1, draft_token_num=scene.drafts, states=[stream],
        mamba_v2p_table=table,
    )  # fmt: skip


def make_metadata(scene: SsmScene) -> StepMetadata:
    """Of a step of the scene's phase, as the prepare hooks leave it."""
    mode = PHASES[scene.hook]
    drafts = scene.drafts if mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND) else 1
    tokens = REQUESTS * (TOKENS if mode is ForwardMode.EXTEND else drafts)
    slots = torch.int64 if "long" in scene.options else torch.int32
    buffers = MetadataBuffers(MetadataLimits(REQUESTS, tokens, drafts), "cpu", slots)
    return buffers.view(mode, REQUESTS, tokens, drafts, "track" in scene.options)


def step(scene: SsmScene, pool: StatePool, hooks: Any) -> None:
    """One SSM of a step."""
    metadata, has = make_metadata(scene), scene.options
    q, k, v, a, b = inputs(scene, metadata.num_tokens)
    heads, dim = a.shape[1], a.shape[2:]
    weights = (torch.empty(heads), None if "plain" in has else torch.empty(heads, *dim))
    given: dict[str, Any] = {"use_qk_l2norm_in_kernel": scene.kind != "mamba2" and "plain" not in has}
    if "skip" in has:
        given["D"] = torch.empty(heads)
    if "limit" in has:
        given["dt_limit"] = (0.001, 0.1)
    if "safe" in has:
        given["lower_bound"] = -5.0
    if "tree" in has:
        given["retrieve_parent_token"] = torch.zeros(REQUESTS, scene.drafts, dtype=torch.int64)
    getattr(hooks, scene.hook)(q, k, v, a, b, *weights, pool.state("s", 0), metadata, **given)


def inputs(scene: SsmScene, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """q, k and v as views of one row per token, as a conv leaves them; a and b by themselves."""
    heads, wide, key, value = SIZES[scene.size][scene.kind]
    dtype, keys, off = TYPES[scene.dtype], heads * key, int("offset" in scene.options)
    row = torch.empty(tokens * (2 * keys + wide * value) + off, dtype=dtype)[off:].view(tokens, -1)
    q, k = (part.unflatten(1, (heads, key)) for part in (row[:, :keys], row[:, keys : 2 * keys]))
    v = row[:, 2 * keys :].unflatten(1, (wide, value))
    a = torch.empty(tokens, wide, *((key,) if scene.kind == "kda" else ()), dtype=dtype)
    return q, k, v, a, None if scene.kind == "mamba2" else torch.empty(tokens, wide, dtype=dtype)
