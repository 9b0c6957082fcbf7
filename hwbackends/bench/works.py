"""Every work that is measured, ours and SGLang's, as callables over rotating inputs. A work is a list of contenders
of one size; the report compares them."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hwbackends.bench import sizes, timing
from hwbackends.bench.ours import Bench, random, rotating, taps
from hwbackends.bench.peers import common
from hwbackends.bench.peers.common import Prefill
from hwbackends.bench.sizes import DIM, DRAFTS, HISTORY, KV_DIM, LAYERS, STREAMS, WIDTH

EPS = 1e-6


@dataclass
class Contender:
    """One implementation of a work: name, the work, how many sets of inputs it rotates through, and what to do before
    the first call."""

    name: str
    work: timing.Work
    count: int
    setup: Callable[[], object] = lambda: None


@dataclass
class Case:
    """One work of one size. `floor_bytes`: what any implementation must move; 0: launches alone."""

    work: str
    size: int
    floor_bytes: int
    contenders: list[Contender] = field(default_factory=list)
    eager: bool = False


Peer = Any
"""SGLang's kernels, or None."""
Others = Sequence[common.Peer]


def both(peer: Peer, work: timing.Work, count: int) -> Iterator[Contender]:
    """SGLang's CUDA kernels and its Triton ones."""
    for label, on in (("cuda", True), ("triton", False)):
        yield Contender(f"sglang {label}", work, count, partial(peer.use_cuda_kernels, on))


def metadata_decode(hooks: Any, peer: Peer, batch: int) -> Case:
    """Slots and offsets of a decode step."""
    case = Case("metadata decode", batch, 0, eager=True)
    bench = Bench(hooks, "ring", batch, (("attn", 16),), 1)
    step = bench.decode_batch()
    view = bench.prepare(step)
    case.contenders.append(Contender("ours", lambda i: bench.prepare(step, view), 64))
    if peer:
        out, slots = metadata_out(peer, batch, batch), torch.zeros(batch, dtype=torch.int32, device="cuda")

        def theirs(i: int) -> None:
            gather_slots(peer, bench, slots)
            peer.kernels.fused_decode_sconv_metadata(batch, slots, out=out)

        case.contenders.append(Contender("sglang", theirs, 64))
    return case


def metadata_out(peer: Peer, batch: int, tokens: int) -> Any:
    """Their static metadata buffers."""
    return peer.kernels._metadata_out(None, B=batch, T=tokens, device=torch.device("cuda"))


def gather_slots(peer: Peer, bench: Bench, slots: Tensor) -> None:
    """Their slot gather of a step."""
    peer.indices.fused_replay_state_indices(
        req_pool_indices=bench.rows,
        mamba_index_mapping=bench.pool.mamba_index_mapping,
        out_state_indices=slots,
        valid_bs=bench.batch,
        total_bs=bench.batch,
    )


def metadata_verify(hooks: Any, peer: Peer, batch: int) -> Case:
    """Slots and offsets of a verify step."""
    case = Case("metadata verify", batch, 0)
    bench = Bench(hooks, "ring", batch, (("attn", 16),), 1)
    step = bench.verify_batch()
    view = bench.prepare(step)
    case.contenders.append(Contender("ours", lambda i: bench.prepare(step, view), 64))
    if peer:
        tokens = batch * DRAFTS
        out, slots = metadata_out(peer, batch, tokens), torch.zeros(batch, dtype=torch.int32, device="cuda")

        def theirs(i: int) -> None:
            gather_slots(peer, bench, slots)
            peer.kernels.fused_extend_sconv_metadata(
                B=batch, T=tokens, cache_indices=slots, his_mode=3, draft_token_num=DRAFTS, out=out
            )

        case.contenders.append(Contender("sglang", theirs, 64))
    return case


def metadata_extend(hooks: Any, peer: Peer, batch: int) -> Case:
    """Offsets, owners and track rows of an extend step."""
    tokens = sizes.EXTEND_METADATA_TOKENS
    case = Case("metadata extend", batch, 0)
    bench = Bench(hooks, "window", batch, (("attn", 16),), 1)
    step = bench.extend_batch(tokens)
    view = bench.prepare(step)
    case.contenders.append(Contender("ours", lambda i: bench.prepare(step, view), 32))
    if peer:
        slots = torch.zeros(batch, dtype=torch.int32, device="cuda")
        rows = torch.zeros(batch, HISTORY, dtype=torch.int64, device="cuda")
        lengths: Any = step.extend_seq_lens
        prefix: Any = step.extend_prefix_lens
        seqlens = step.mamba_track_seqlens

        def track(starts: Tensor) -> None:
            peer.tracking.fill_track_conv_indices(
                query_start_loc=starts,
                track_seqlens=seqlens,
                prefix_lens=prefix,
                output=rows,
                live=batch,
                chunk_size=64,
            )

        if batch <= 2047:
            out = metadata_out(peer, batch, tokens)

            def fused(i: int) -> None:
                gather_slots(peer, bench, slots)
                starts, _, _ = peer.kernels.fused_extend_sconv_metadata(
                    B=batch, T=tokens, cache_indices=slots, his_mode=1, extend_seq_lens=lengths, his_src=prefix, out=out
                )
                track(starts)

            case.contenders.append(Contender("sglang fused", fused, 32))

        def unfused(i: int) -> None:
            gather_slots(peer, bench, slots)
            starts = torch.zeros(batch + 1, dtype=torch.int32, device="cuda")
            starts[1:] = lengths.cumsum(dim=0)
            initial = prefix > 0
            peer.kernels.precompute_helion_extend_metadata(
                B=batch,
                T=tokens,
                W=WIDTH,
                cache_indices=slots,
                has_initial_state=initial,
                query_start_loc=starts,
            )
            track(starts)

        case.contenders.append(Contender("sglang unfused", unfused, 32))
    return case


def decode(hooks: Any, peer: Peer, batch: int, layout: str, others: Others = ()) -> Case:
    """One conv of a decode step, residual, no track."""
    floor = sizes.decode_bytes(batch, DIM, layout)
    case = Case(f"decode {layout}", batch, floor, eager=layout == "ring")
    count = timing.copies(sizes.decode_bytes(batch, DIM, "ring"))
    bench = Bench(hooks, layout, batch, (("attn", DIM),), count, slots=batch + 1)
    view = bench.prepare(bench.decode_batch())
    x, weights = rotating(count, batch, DIM), taps(count, DIM)
    states = [bench.pool.conv_state("attn", i) for i in range(count)]
    case.contenders.append(
        Contender("ours", lambda i: hooks.conv_decode(x[i], weights[i], None, states[i], view, None, True), count)
    )
    case.contenders += [other_decode(other, view.cache_indices, batch, count) for other in others]
    if peer:
        slots, mask = view.cache_indices.clone(), torch.ones(batch, 1, 1, dtype=torch.bool, device="cuda")
        cache = rotating(count, batch + 1, HISTORY, DIM)
        flat = [weight.contiguous() for weight in weights]

        def theirs(i: int) -> Any:
            return peer.kernels.fused_causal_conv1d_update_decode(x[i], flat[i], cache[i], slots, mask, None, True)

        case.contenders += both(peer, theirs, count)
        update = peer.update.causal_conv1d_update
        case.contenders.append(
            Contender(
                "vLLM-style in SGLang, no residual",
                lambda i: update(x[i], cache[i].transpose(1, 2), flat[i], conv_state_indices=slots),
                count,
            )
        )
    return case


def decode_kv(hooks: Any, peer: Peer, batch: int) -> Case:
    """k and v of a decode step, columns of one projection."""
    case = Case("decode k and v", batch, sizes.decode_bytes(batch, 2 * KV_DIM, "ring"))
    count = timing.copies(case.floor_bytes)
    bench = Bench(hooks, "ring", batch, (("k", KV_DIM), ("v", KV_DIM)), count, slots=batch + 1)
    view = bench.prepare(bench.decode_batch())
    x, weights = rotating(count, batch, 2 * KV_DIM), taps(count, 2 * KV_DIM)
    states = [bench.pool.conv_state(("k", "v"), i) for i in range(count)]
    case.contenders.append(
        Contender("ours", lambda i: hooks.conv_decode(x[i], weights[i], None, states[i], view, None, True), count)
    )
    if peer:
        slots, mask = view.cache_indices.clone(), torch.ones(batch, 1, 1, dtype=torch.bool, device="cuda")
        k_cache, v_cache = (rotating(count, batch + 1, HISTORY, KV_DIM) for _ in range(2))
        k_x, v_x = [t[:, :KV_DIM] for t in x], [t[:, KV_DIM:] for t in x]
        k_taps, v_taps = ([w.contiguous()[part] for w in weights] for part in (slice(KV_DIM), slice(KV_DIM, None)))

        def theirs(i: int) -> None:
            conv = peer.kernels.fused_causal_conv1d_update_decode
            conv(k_x[i], k_taps[i], k_cache[i], slots, mask, None, True)
            conv(v_x[i], v_taps[i], v_cache[i], slots, mask, None, True)

        case.contenders += both(peer, theirs, count)
    return case


def extend(hooks: Any, peer: Peer, tokens: int, others: Others = ()) -> Case:
    """One conv of a prefill step with snapshots."""
    batch = sizes.EXTEND_REQUESTS
    case = Case("extend", tokens, sizes.extend_bytes(batch, tokens, DIM))
    count = timing.copies(case.floor_bytes, least=3)
    bench = Bench(hooks, "window", batch, (("attn", DIM),), count)
    step = bench.extend_batch(tokens)
    view = bench.prepare(step)
    x, weights = rotating(count, tokens, DIM), taps(count, DIM)
    states = [bench.pool.conv_state("attn", i) for i in range(count)]
    case.contenders.append(
        Contender("ours", lambda i: hooks.conv_extend(x[i], weights[i], None, states[i], view, None, True), count)
    )
    prefill = prefill_of(view, step)
    case.contenders += [other_extend(other, prefill, tokens, count) for other in others]
    if peer:
        meta = theirs_extend(peer, bench, step, tokens)
        cache = rotating(count, 2 * batch + 1, HISTORY, DIM)
        flat = [weight.contiguous() for weight in weights]

        def theirs(i: int) -> None:
            peer.modules.fused_gather_scatter_to_sconv_cache(
                x[i], cache[i], meta.track_rows, step.mamba_track_mask, bench.tracks
            )
            peer.kernels.causal_conv1d(x[i], flat[i], cache[i], use_residual=True, **meta.precomputed)
            peer.kernels.update_sconv_cache(x[i], cache[i], meta.slots, meta.initial, meta.starts)

        case.contenders += both(peer, theirs, count)
    return case


def other_decode(other: common.Peer, slots: Tensor, batch: int, count: int) -> Contender:
    """One conv of a decode step of another peer."""
    indices = other.indices(slots)
    x, caches, flat = other_inputs(other, batch, batch + 1, count)
    return Contender(
        other.name,
        lambda i: other.decode(x[i], flat[i], caches[i], indices),
        count,
        partial(other.ready, batch),
    )


def other_extend(other: common.Peer, prefill: Prefill, tokens: int, count: int) -> Contender:
    """One conv of a prefill step of another peer."""
    plan = other.plan(prefill)
    x, caches, flat = other_inputs(other, tokens, 2 * len(prefill.lengths) + 1, count)
    return Contender(
        other.name,
        lambda i: other.extend(x[i], flat[i], caches[i], plan),
        count,
        partial(other.ready, tokens),
    )


def other_inputs(other: common.Peer, tokens: int, slots: int, count: int) -> tuple[list[Tensor], ...]:
    """x, caches and weights of a peer, `count` of each. Of its own, since a peer may write over x."""
    caches = [other.cache(windows) for windows in rotating(count, slots, HISTORY, DIM)]
    return rotating(count, tokens, DIM), caches, [weight.contiguous() for weight in taps(count, DIM)]


def prefill_of(view: Any, step: Any) -> Prefill:
    """What the other peers' prefill reads of an extend step whose snapshots fall on the requests' ends."""
    return Prefill(
        lengths=step.extend_seq_lens.tolist(),
        starts=view.query_start_loc.int(),
        slots=view.cache_indices,
        initial=step.extend_prefix_lens > 0,
        tracks=step.mamba_track_indices,
    )


def theirs_extend(peer: Peer, bench: Bench, step: Any, tokens: int) -> Any:
    """Their metadata of an extend step."""
    batch = bench.batch
    slots = torch.zeros(batch, dtype=torch.int32, device="cuda")
    gather_slots(peer, bench, slots)
    starts, initial, precomputed = peer.kernels.fused_extend_sconv_metadata(
        B=batch,
        T=tokens,
        cache_indices=slots,
        his_mode=1,
        extend_seq_lens=step.extend_seq_lens,
        his_src=step.extend_prefix_lens,
    )
    rows = torch.zeros(batch, HISTORY, dtype=torch.int64, device="cuda")
    peer.tracking.fill_track_conv_indices(
        query_start_loc=starts,
        track_seqlens=step.mamba_track_seqlens,
        prefix_lens=step.extend_prefix_lens,
        output=rows,
        live=batch,
        chunk_size=64,
    )
    return types.SimpleNamespace(slots=slots, starts=starts, initial=initial, precomputed=precomputed, track_rows=rows)


def theirs_verify(peer: Peer, bench: Bench) -> Any:
    """Their metadata of a verify step."""
    batch = bench.batch
    slots = torch.zeros(batch, dtype=torch.int32, device="cuda")
    gather_slots(peer, bench, slots)
    starts, initial, precomputed = peer.kernels.fused_extend_sconv_metadata(
        B=batch, T=batch * DRAFTS, cache_indices=slots, his_mode=3, draft_token_num=DRAFTS
    )
    return types.SimpleNamespace(slots=slots, starts=starts, initial=initial, precomputed=precomputed)


def verify(hooks: Any, peer: Peer, batch: int, layout: str) -> Case:
    """One conv of a verify step with what the commit needs."""
    case = Case(f"verify {layout}", batch, sizes.verify_bytes(batch, DIM, layout))
    count = timing.copies(sizes.verify_bytes(batch, DIM, "ring"))
    bench = Bench(hooks, layout, batch, (("attn", DIM),), count, slots=batch + 1)
    view = bench.prepare(bench.verify_batch())
    x, weights = rotating(count, batch * DRAFTS, DIM), taps(count, DIM)
    states = [bench.pool.conv_state("attn", i) for i in range(count)]
    case.contenders.append(
        Contender(
            "ours", lambda i: hooks.conv_target_verify(x[i], weights[i], None, states[i], view, None, True), count
        )
    )
    if peer:
        meta = theirs_verify(peer, bench)
        cache = rotating(count, batch + 1, HISTORY, DIM)
        windows = list(torch.zeros(count, batch, DRAFTS, HISTORY, DIM, dtype=torch.bfloat16, device="cuda"))
        flat = [weight.contiguous() for weight in weights]

        def theirs(i: int) -> None:
            peer.kernels.causal_conv1d(x[i], flat[i], cache[i], use_residual=True, **meta.precomputed)
            peer.kernels.save_intermediate_conv_windows(
                sconv_cache=cache[i],
                hidden_states=x[i],
                cache_indices=meta.slots,
                intermediate_out=windows[i],
                batch_size=batch,
                draft_token_num=DRAFTS,
            )

        case.contenders += both(peer, theirs, count)
    return case


def commit(hooks: Any, peer: Peer, batch: int, layout: str) -> Case:
    """The commit of all layers and streams."""
    dims = sum(dim for _, dim in STREAMS)
    case = Case(f"commit {layout}", batch, sizes.commit_bytes(batch, dims) if layout == "window" else 0)
    bench = Bench(hooks, layout, batch, STREAMS, LAYERS, slots=batch + 1)
    arguments = bench.commit_arguments()
    case.contenders.append(Contender("ours", lambda i: hooks.update_mamba_state_after_mtp_verify(*arguments), 4))
    if peer and layout == "window":
        caches = types.SimpleNamespace(
            conv=[random(LAYERS, batch + 1, HISTORY, dim) for _, dim in STREAMS],
            intermediate_conv_window=[random(LAYERS, batch, DRAFTS, HISTORY, dim) for _, dim in STREAMS],
            temporal=torch.empty(0, device="cuda"),
            intermediate_ssm=torch.empty(0, device="cuda"),
        )
        slots = bench.pool.mamba_index_mapping[1:].clone()
        scatter = peer.scatter.scatter_mamba_states_after_mtp_verify
        case.contenders.append(Contender("sglang", lambda i: scatter(caches, slots, arguments[2], None, None), 4))
    return case


def draft_extend(hooks: Any, peer: Peer, batch: int, layout: str) -> Case:
    """One conv of a draft-extend step with snapshots."""
    case = Case(f"draft extend {layout}", batch, sizes.draft_extend_bytes(batch, DIM))
    count = timing.copies(case.floor_bytes, most=256)
    bench = Bench(hooks, layout, batch, (("attn", DIM),), count)
    step = bench.draft_extend_batch()
    view = bench.prepare(step)
    x, weights = rotating(count, batch * DRAFTS, DIM), taps(count, DIM)
    states = [bench.pool.conv_state("attn", i) for i in range(count)]
    case.contenders.append(
        Contender("ours", lambda i: hooks.conv_draft_extend(x[i], weights[i], None, states[i], view, None, True), count)
    )
    if peer:
        meta = theirs_verify(peer, bench)
        meta.track_cache_indices = bench.tracks
        cache = rotating(count, 2 * batch + 1, HISTORY, DIM)
        flat = [weight.contiguous() for weight in weights]
        module = peer.modules.ShortConvolution(DIM, WIDTH, peer.modules.SconvType.ATTN, layer_id=0, tp_rank=0)
        module._conv_state = lambda batch: meta
        forward = types.SimpleNamespace(
            batch_size=batch,
            seq_lens=step.seq_lens,
            spec_info=types.SimpleNamespace(num_accept_tokens=step.num_accept_tokens),
        )

        def theirs(i: int) -> None:
            peer.kernels.causal_conv1d(x[i], flat[i], cache[i], use_residual=True, **meta.precomputed)
            module._update_sconv_cache_for_draft_extend(forward, cache[i], meta.slots, x[i])

        case.contenders += both(peer, theirs, count)
    return case


def epilogue(hooks: Any, peer: Peer, batch: int) -> Case:
    """Decode conv, add to the residual stream, RMSNorm."""
    case = Case("conv, add, RMSNorm", batch, sizes.fused_bytes(batch, DIM))
    count = timing.copies(case.floor_bytes)
    bench = Bench(hooks, "ring", batch, (("attn", DIM),), count, slots=batch + 1)
    view = bench.prepare(bench.decode_batch())
    x, weights, gain = rotating(count, batch, DIM), taps(count, DIM), random(DIM)
    stream = rotating(count, batch, DIM)
    states = [bench.pool.conv_state("attn", i) for i in range(count)]
    fused = hooks.fused_decode_add_rmsnorm
    case.contenders.append(
        Contender(
            "ours", lambda i: fused(x[i], weights[i], None, states[i], view, stream[i], gain, EPS, None, True), count
        )
    )
    if peer:
        slots, mask = view.cache_indices.clone(), torch.ones(batch, 1, 1, dtype=torch.bool, device="cuda")
        cache = rotating(count, batch + 1, HISTORY, DIM)
        flat = [weight.contiguous() for weight in weights]

        def theirs(i: int) -> None:
            y = peer.kernels.fused_causal_conv1d_update_decode(x[i], flat[i], cache[i], slots, mask, None, True)
            peer.norm.fused_add_rmsnorm(y, stream[i], gain, EPS)

        case.contenders += both(peer, theirs, count)
    return case
