"""Illegal and borderline steps, made from a seed, through several backends at once: each must give the same named error
or the same bits, and none may write outside of what the contract lets it. Run as a program it prints the first step on
which two backends differ, with the seed that makes it again:

    TRITON_INTERPRET=1 python -m tests.backend.borderline --seconds 60
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hwbackends.conv.state import ConvState
from hwbackends.errors import HwBackendsError
from hwbackends.registry.loading import load
from hwbackends.step.batch import ForwardMode, StepBatch
from hwbackends.step.checks import checked
from hwbackends.step.metadata import MetadataBuffers, MetadataLimits, StepMetadata
from hwbackends.step.pool import StatePool

GUARD = 7777.0
"""Stands around every tensor that a hook may write."""
ROWS, SLOTS, TABLE = 6, 6, 9
PHASES = {
    ForwardMode.DECODE: "decode",
    ForwardMode.IDLE: "decode",
    ForwardMode.EXTEND: "extend",
    ForwardMode.TARGET_VERIFY: "target_verify",
    ForwardMode.DRAFT_EXTEND: "draft_extend",
}
COMMIT = "update_mamba_state_after_mtp_verify"


class Guarded:
    """Memory with a margin on both sides that nobody may write."""

    def __init__(self, shape: tuple[int, ...], device: str, dtype: torch.dtype, value: Tensor | None = None) -> None:
        count = max(1, int(torch.tensor(shape).prod()))
        self.all = torch.full((count + 64,), GUARD, dtype=dtype, device=device)
        self.view = self.all[32 : 32 + count][: count if 0 not in shape else 0].view(shape)
        if value is not None:
            self.view.copy_(value)

    def intact(self) -> bool:
        kept = self.view.numel()
        return bool((self.all[:32] == GUARD).all()) and bool((self.all[32 + kept :] == GUARD).all())


@dataclass
class Step:
    """One call to judge: everything in plain numbers, so that each backend gets memory of its own."""

    layout: str
    width: int
    dim: int
    drafts: int
    table: list[int] | None
    mapping: list[int]
    interval: int
    ssm: bool
    index_dtype: torch.dtype
    mode: Any
    rows: list[int]
    fields: dict[str, Any]
    tokens: int
    count: Any
    x_rows: int
    x_form: str
    out_form: str
    fused: bool
    hook: str
    absent: str
    seed: int
    commit: dict[str, Any] = field(default_factory=dict)
    between: str = ""
    slots: dict[str, list[int]] = field(default_factory=dict)


def make(seed: int) -> Step:
    """A step of a seed: mostly legal, with a few things wrong or at a border."""
    rng = random.Random(seed)
    pick = rng.choice
    mode = pick(list(ForwardMode))
    drafts = pick([1, 2, 3])
    batch = pick([0, 1, 2, 3, 4])
    wild = rng.random() < 0.45

    def index(low: int, high: int, odd: list[int]) -> int:
        return pick(odd) if wild and rng.random() < 0.12 else rng.randint(low, high)

    def column(low: int, high: int, odd: list[int]) -> list[int]:
        return [index(low, high, odd) for _ in range(batch)]

    table = None if rng.random() < 0.7 else [0, *(index(1, SLOTS - 1, [-1, 0, SLOTS, 40]) for _ in range(TABLE - 1))]
    top = SLOTS - 1 if table is None else TABLE - 1
    rows = rng.sample(range(ROWS), min(batch, ROWS))
    rows = [index(row, row, [-5, -1, ROWS, ROWS + 900, 0]) for row in rows]
    mapping = [*rng.sample(range(1, SLOTS), SLOTS - 1), 0]
    mapping = [index(slot, slot, [-1, 0, SLOTS, 300, 1]) for slot in mapping]
    far = [-3, 0, 2**31 - 1, 2**31 - 40]
    fields: dict[str, Any] = {"seq_lens": column(4, 9, far)}
    if rng.random() < 0.5:
        fields["computed_lens"] = column(0, 9, far)
    per_row = drafts if mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND) else 1
    tokens = batch * per_row
    if mode is ForwardMode.EXTEND or rng.random() < 0.1:
        lengths = column(0, 5, [-2, 0, 17, 2**31 - 1])
        fields |= {"extend_seq_lens": lengths, "extend_prefix_lens": column(0, 9, far)}
        if mode is ForwardMode.EXTEND:
            tokens = sum(length for length in lengths if 0 < length < 100)
    if mode is ForwardMode.DRAFT_EXTEND or rng.random() < 0.3:
        fields["num_accept_tokens"] = column(0, drafts, [-1, -9, drafts + 1, 99])
    if rng.random() < 0.3:
        fields["has_initial_state"] = [rng.random() < 0.5 for _ in rows]
    if rng.random() < 0.4:
        fields |= {
            "mamba_track_mask": [rng.random() < 0.6 for _ in rows],
            "mamba_track_indices": column(1, top, [-1, 0, top + 1, 500]),
            "mamba_track_seqlens": column(0, 14, [-1, 2**31 - 1]),
        }
    if rng.random() < (0.4 if mode is ForwardMode.EXTEND else 0.05):
        fields["source_indices"] = column(1, top, [-1, 0, top + 1, 500])
    if rng.random() < 0.7:
        fields["num_accepted_tokens"] = column(1, drafts, [0, -4, drafts + 1, 77])
    if rng.random() < 0.15:
        given = rng.sample(range(1, SLOTS), min(batch, SLOTS - 1))
        fields["cache_indices"] = [index(slot, slot, [-1, 0, SLOTS, 70]) for slot in given]
    count: Any = index(0, batch, [0, batch]) if rng.random() < 0.5 else batch
    if rng.random() < 0.2:
        fields["num_reqs_device"] = index(0, batch, [-1, batch + 2])
    if rng.random() < 0.05:
        count = pick([-1, batch + 1, None, 1.5])
    if rng.random() < 0.15:
        tokens = max(0, tokens + pick([-1, 1, 3, -tokens]))
    if rng.random() < 0.08 and fields:
        name = pick(list(fields))
        fields[name] = pick([None, "short", "float", "list"])
    if rng.random() < 0.05:
        fields["topk"] = pick([0, 2, None])
    fused = mode in (ForwardMode.DECODE, ForwardMode.IDLE, ForwardMode.TARGET_VERIFY) and rng.random() < 0.2
    hook = PHASES[mode] if rng.random() < 0.95 else pick(list(PHASES.values()))
    form = rng.random()
    step = Step(
        layout=pick(["window", "ring", "lazy"]), width=pick([2, 3, 4]), dim=pick([1, 3]), drafts=drafts, table=table,
        mapping=mapping, interval=pick([1, 2, 3]), ssm=rng.random() < 0.3, index_dtype=pick([torch.int32, torch.int64]),
        mode=mode if rng.random() < 0.97 else pick(["DECODE", None]), rows=rows, fields=fields, tokens=tokens,
        count=count, x_rows=tokens + (0 if rng.random() < 0.8 else pick([-1, 2])),
        x_form="plain" if form < 0.8 else pick(["wide", "turned", "double", "none", "in state"]),
        out_form=pick(["none", "own"]) if rng.random() < 0.8 else pick(["x", "shifted", "state", "weight", "short"]),
        fused=fused, hook=hook, seed=seed,
        absent="" if rng.random() < 0.93 else pick(["weight", "state", "metadata", "pool", "x"]),
    )  # fmt: skip
    step.between = pick(["", "", "commit", "clear", "copy"])
    step.commit = {
        "last_correct_step_indices": column(-1, drafts - 1, [-7, drafts, 50]),
        "mamba_track_indices": column(1, top, [-1, 0, top + 1, 500]) if rng.random() < 0.5 else None,
        "mamba_steps_to_track": column(-1, drafts - 1, [-7, drafts, 50]),
        "computed_lens": column(0, 9, far) if rng.random() < 0.8 else None,
        "draft_indices": column(0, ROWS - 1, [-1, ROWS, 90]) if rng.random() < 0.3 else None,
    }
    if step.commit["mamba_track_indices"] is None and rng.random() < 0.9:
        step.commit["mamba_steps_to_track"] = None
    many = pick([0, 1, 3])
    odd = [-1, 0, SLOTS, 900]
    step.slots = {n: [index(1, SLOTS - 1, odd) for _ in range(many)] for n in ("source", "destination")}
    return step


class World:
    """Memory of one backend for a step, every writable tensor between guards."""

    def __init__(self, step: Step, device: str) -> None:
        generator = torch.Generator().manual_seed(step.seed)
        history = step.width - 1
        extra = {"window": 0, "ring": step.drafts + 1, "lazy": step.drafts - 1}[step.layout]

        def noise(*shape: int) -> Tensor:
            return torch.randint(1, 9, shape, generator=generator).float()

        def guarded(*shape: int) -> Guarded:
            return Guarded(shape, device, torch.float32, noise(*shape))

        self.step, self.device = step, device
        self.state = guarded(1, SLOTS, history + extra, step.dim)
        self.saved = guarded(1, ROWS, history + step.drafts, step.dim)
        self.ssm, self.middle = guarded(1, SLOTS, 2), guarded(1, ROWS, step.drafts, 2)
        table = None if step.table is None else torch.tensor(step.table, dtype=torch.int64, device=device)
        self.pool = StatePool.wrap(
            {"k": self.state.view},
            width=step.width,
            mamba_index_mapping=torch.tensor(step.mapping, dtype=torch.int32, device=device),
            layout=step.layout,  # type: ignore[arg-type]
            draft_token_num=step.drafts,
            draft_rows={"k": self.saved.view} if step.layout == "window" else None,
            ssm_state=self.ssm.view if step.ssm else None,
            intermediate_ssm=self.middle.view if step.ssm else None,
            mamba_v2p_table=table,
            track_interval=step.interval,
        )
        self.conv: ConvState = self.pool.conv_state("k", 0)
        self.weight = Guarded((step.width, step.dim), device, torch.float32, noise(step.width, step.dim))
        self.norm = noise(step.dim).to(device)
        self.buffers = MetadataBuffers(MetadataLimits(16, 96, 3), device, step.index_dtype)
        rows = max(0, step.x_rows)
        self.memory = Guarded((2 * rows + 4, step.dim), device, torch.float32, noise(2 * rows + 4, step.dim))
        self.out = Guarded((rows, step.dim), device, torch.float32, torch.zeros(rows, step.dim))
        self.stream = Guarded((rows, step.dim), device, torch.float32, noise(rows, step.dim))

    def ints(self, values: Any, dtype: torch.dtype | None = None) -> Any:
        if values is None:
            return None
        dtype = dtype or self.step.index_dtype
        return torch.tensor(values, dtype=dtype, device=self.device)

    def batch(self) -> StepBatch:
        step = self.step
        found: dict[str, Any] = {}
        for name, value in step.fields.items():
            plain = [0] * len(step.rows)
            if name == "topk":
                found[name] = value
            elif name == "num_reqs_device" and isinstance(value, int):
                found[name] = self.ints([value], torch.int32)
            elif isinstance(value, str):
                made = {"short": [0], "float": [0.5], "list": plain}[value]
                found[name] = made if value == "list" else torch.tensor(made, device=self.device)
            else:
                found[name] = self.ints(
                    value, torch.bool if name in ("has_initial_state", "mamba_track_mask") else None
                )
        return StepBatch(step.mode, self.ints(step.rows), step.count, step.tokens, draft_token_num=step.drafts, **found)

    def x(self) -> Any:
        rows, dim = max(0, self.step.x_rows), self.step.dim
        form, memory = self.step.x_form, self.memory.view
        if form == "none":
            return None
        if form == "double":
            return memory[:rows].double()
        if form == "in state":
            return self.conv.tensor.reshape(-1, dim)[:rows]
        if form == "wide":
            return memory.reshape(-1)[: 2 * rows * dim].view(rows, 2 * dim)[:, :dim]
        return memory[:rows].t().contiguous().t() if form == "turned" else memory[:rows]

    def output(self, x: Any) -> Any:
        rows, dim, form = max(0, self.step.x_rows), self.step.dim, self.step.out_form
        if form == "own":
            return self.out.view
        if form == "x":
            return x
        if form == "shifted":
            return self.memory.view[1 : rows + 1]
        if form == "state":
            return self.conv.tensor.reshape(-1, dim)[:rows]
        if form == "weight":
            return self.weight.view.reshape(-1, dim)[:rows]
        return self.out.view[1:] if form == "short" else None

    def held(self) -> dict[str, Tensor]:
        found = {name: getattr(self, name).view.clone() for name in ("state", "saved", "ssm", "middle", "stream")}
        return found | {"x": self.memory.view.clone(), "weight": self.weight.view.clone()}

    def intact(self) -> bool:
        names = ("state", "saved", "ssm", "middle", "stream", "memory", "out", "weight")
        return all(getattr(self, name).intact() for name in names)


def call(hooks: Any, name: str, check: bool, *args: Any, **kwargs: Any) -> Any:
    function = getattr(hooks, name)
    return (checked(name, function) if check else function)(*args, **kwargs)


def between(hooks: Any, world: World, check: bool) -> None:
    """The commit, clear or copy of a step."""
    step, pool = world.step, None if world.step.absent == "pool" else world.pool
    if step.between == "commit":
        given = {name: world.ints(value) for name, value in step.commit.items()}
        call(hooks, COMMIT, check, pool, world.ints(step.rows), **given)
    elif step.between == "clear":
        call(hooks, "clear_slots", check, pool, world.ints(step.slots["destination"]))
    elif step.between == "copy":
        lists = [world.ints(step.slots[name]) for name in ("source", "destination")]
        call(hooks, "copy_slots", check, pool, *lists)


def forward(hooks: Any, world: World, check: bool, seen: dict[str, Any]) -> Tensor:
    """Prepare and conv of a step."""
    step, batch = world.step, world.batch()
    mode = step.mode if isinstance(step.mode, ForwardMode) else ForwardMode.DECODE
    per_row = step.drafts if mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND) else 1
    tracks = batch.mamba_track_mask is not None
    view = world.buffers.view(mode, len(step.rows), step.tokens, per_row, tracks)
    pool = None if step.absent == "pool" else world.pool
    call(hooks, f"prepare_{step.hook}_metadata", check, batch, pool, view)
    seen["metadata"] = view
    x = None if step.absent == "x" else world.x()
    weight = None if step.absent == "weight" else world.weight.view.t()
    state = None if step.absent == "state" else world.conv
    metadata = None if step.absent == "metadata" else view
    seen["before"] = world.held()
    if step.fused:
        given = (x, weight, None, state, metadata, world.stream.view, world.norm, 1e-6)
        name = "fused_target_verify_add_rmsnorm" if step.hook == "target_verify" else "fused_decode_add_rmsnorm"
        return call(hooks, name, check, *given, out=world.output(x))
    return call(hooks, f"conv_{step.hook}", check, x, weight, None, state, metadata, out=world.output(x))


@dataclass
class Outcome:
    """What a backend did: an error by type, hook, parameter and rule, or tensors."""

    error: tuple[str, ...] | None
    tensors: dict[str, Tensor]
    intact: bool
    untouched: bool
    metadata: StepMetadata | None

    def __str__(self) -> str:
        told = {name: value.tolist() for name, value in self.tensors.items()}
        return f"{self.error}" if self.error else f"{told}"


def run(hooks: Any, step: Step, device: str = "cpu", check: bool = False) -> Outcome:
    """A step through one backend, on memory of its own."""
    world, seen = World(step, device), {}
    error, y = None, None
    before = world.held()
    try:
        between(hooks, world, check)
        before = world.held()
        y = forward(hooks, world, check, seen)
    except HwBackendsError as found:
        error = (
            type(found).__name__,
            getattr(found, "hook", ""),
            getattr(found, "parameter", ""),
            getattr(found, "rule", ""),
        )
    after = world.held()
    untouched = all(torch.equal(value, after[name]) for name, value in before.items())
    tensors = {name: after[name] for name in ("state", "saved", "ssm", "stream")}
    metadata: StepMetadata | None = seen.get("metadata")
    if metadata is not None:
        tensors |= {f"metadata.{n}": v.clone() for n, v in metadata.tensors().items() if written(step, n)}
    if y is not None:
        tensors["y"] = y.clone()
    return Outcome(error, tensors, world.intact(), untouched, metadata)


def written(step: Step, name: str) -> bool:
    """Whether the phase writes a tensor of the metadata."""
    only = {"seq_idx": ForwardMode.EXTEND, "num_accept_tokens": ForwardMode.DRAFT_EXTEND}
    return name not in only or step.mode is only[name]


def races(step: Step, metadata: StepMetadata | None) -> bool:
    """Whether rows of the step write what others read or write: undefined, and refused in checked mode."""
    if step.between == "copy":
        pairs = [p for p in zip(step.slots["source"], step.slots["destination"], strict=True) if min(p) > 0]
        found = [to for _, to in pairs]
        if len(set(found)) < len(found) or set(found) & {source for source, _ in pairs}:
            return True
    if step.between == "commit":
        slots = [physical(step, step.mapping[row]) for row in step.rows if 0 <= row < ROWS]
        tracks = [physical(step, slot) for slot in step.commit["mamba_track_indices"] or []]
        if repeated([slot for slot in slots + tracks if slot > 0]):
            return True
    if metadata is None:
        return False
    live = [slot for slot in metadata.cache_indices.tolist() if slot > 0]
    tracks = [slot for slot in metadata.mamba_track_indices.tolist() if slot > 0]
    pairs = zip(metadata.source_indices.tolist(), metadata.cache_indices.tolist(), strict=True)
    sources = {source for source, slot in pairs if source > 0 and source != slot}
    drafts = [row for row in metadata.draft_indices.tolist() if row >= 0]
    return repeated(live + tracks) or bool(sources & set(live + tracks)) or repeated(drafts)


def physical(step: Step, slot: int) -> int:
    if step.table is None:
        return slot
    return step.table[slot] if 0 < slot < len(step.table) else 0


def repeated(values: list[int]) -> bool:
    return len(set(values)) < len(values)


def judge(step: Step, backends: dict[str, Any], device: str = "cpu") -> str:
    """What is wrong with what the backends do to a step; empty if nothing is. The first one is the measure."""
    outcomes = {name: run(hooks, step, device) for name, hooks in backends.items()}
    (first, wanted), *others = outcomes.items()
    careful = run(backends[first], step, device, check=True)
    racy = races(step, wanted.metadata)
    for name, found in outcomes.items():
        if not found.intact:
            return f"{name} wrote outside of its memory"
        if found.error and not found.untouched:
            return f"{name} wrote before it refused: {found.error}"
    if wanted.error and not careful.error:
        return f"checked mode lets through what is refused without it: {wanted.error}"
    if racy and not wanted.error and not careful.error:
        return "checked mode lets a race through"
    for name, found in others:
        if found.error != wanted.error:
            return f"{name}: {found.error or 'no error'}; {first}: {wanted.error or 'no error'}"
        if not racy and (wrong := differing(step, wanted, found)):
            both = [outcome.tensors[wrong].tolist() for outcome in (found, wanted)]
            return f"{name} and {first} differ in {wrong}: {both[0]}, {both[1]}"
    return ""


def differing(step: Step, one: Outcome, two: Outcome) -> str:
    for name, value in one.tensors.items():
        other = two.tensors[name]
        close = step.fused and name == "y" and torch.allclose(value, other, rtol=1e-5, atol=1e-5, equal_nan=True)
        same = torch.equal(value.nan_to_num(-7), other.nan_to_num(-7)) if value.is_floating_point() else None
        if not (close or (same if same is not None else torch.equal(value, other))):
            return name
    return ""


def backends_here() -> dict[str, Any]:
    """The reference, and every backend whose kernels run on this machine's CPU."""
    from hwbackends.ascend import tier
    from hwbackends.torch_ops import commit, epilogue

    found = {"reference": load("reference")}
    if os.environ.get("TRITON_INTERPRET") == "1":
        found["cuda"] = load("cuda")
        os.environ[tier.ENVIRONMENT] = "triton"
        homes = (epilogue, commit, *tier.modules())
        del os.environ[tier.ENVIRONMENT]
        names = (*tier.TRITON_HOOKS, *tier.TORCH_HOOKS)
        hooks = {name: getattr(home, name) for home in homes for name in names if hasattr(home, name)}
        found["ascend's triton tier"] = SimpleNamespace(**hooks)
    return found


def main() -> int:
    """Judge steps for some seconds; 1 at the first wrong one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=None)
    parser.add_argument("--keep-going", action="store_true")
    options = parser.parse_args()
    backends, end = backends_here(), time.monotonic() + options.seconds
    seed, wrong, refused = options.seed, 0, 0
    while time.monotonic() < end and (options.count is None or seed < options.seed + options.count):
        step = make(seed)
        text = judge(step, backends)
        refused += run(backends["reference"], step, check=True).error is not None
        if text:
            print(f"seed {seed}: {text}\n  {replace(step)}")
            wrong += 1
            if not options.keep_going:
                return 1
        seed += 1
    print(f"{seed - options.seed} steps, {refused} refused in checked mode, {len(backends)} backends, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
