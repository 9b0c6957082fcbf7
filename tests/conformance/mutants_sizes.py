"""Wrong backends, second part: faults that small sizes, plain strides and one dtype do not show. Blocks that end,
tables that are full, integers that overflow, strides and dtypes that are taken for granted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hwbackends.conv.state import ConvState
from hwbackends.errors import HwBackendsError
from tests.conformance.mutants import COMMIT, CONVS, FUSED, PREPARES, Call, live, live_tokens, mutant, spans

UNIFORM = ("conv_decode", "conv_target_verify", "conv_draft_extend")
DRAFTED = ("conv_target_verify", "conv_draft_extend")
PREPARE_UNIFORM = ("prepare_decode_metadata", "prepare_target_verify_metadata", "prepare_draft_extend_metadata")


def fake(tensor: Tensor, size: int, stride: int) -> Tensor:
    """[size] read from where a tensor begins, with another stride, as far as its storage goes."""
    room = (tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset() - 1) // max(1, stride)
    count = max(0, min(size, room + 1))
    found = tensor.as_strided((count,), (stride,))
    return torch.nn.functional.pad(found, (0, size - count))


# --- blocks that end ---


@mutant(*CONVS)
def drops_channels_past_256(c: Call) -> Tensor:
    y = c.run()
    y[:, 256:] = 0
    return y


@mutant(*CONVS)
def drops_channels_past_2048(c: Call) -> Tensor:
    y = c.run()
    y[:, 2048:] = 0
    return y


@mutant(*CONVS)
def writes_256_channels_of_state(c: Call) -> Tensor:
    kept, y = c.state.tensor[..., 256:].clone(), c.run()
    c.state.tensor[..., 256:] = kept
    return y


@mutant(*UNIFORM)
def stops_at_64_requests(c: Call) -> Tensor:
    y = c.run()
    y[64 * c.metadata.draft_token_num :] = 0
    return y


@mutant("conv_extend")
def extends_128_requests(c: Call) -> Tensor:
    y = c.run()
    if 128 < c.metadata.num_reqs < 1000:
        y[int(c.metadata.query_start_loc[128]) :] = 0
    return y


@mutant("conv_extend")
def a_long_prompt_keeps_its_first_tokens(c: Call) -> Tensor:
    y, history = c.run(), c.state.history
    for slot, start, end in spans(c.metadata):
        if slot > 0 and end - start > 256 and c.state.layout != "ring":
            c.state.tensor[slot, :history] = c.x[start + 256 - history : start + 256].to(c.state.tensor.dtype)
    return y


@mutant("conv_extend")
def convolves_1024_tokens_of_a_request(c: Call) -> Tensor:
    y = c.run()
    for _, start, end in spans(c.metadata):
        y[start + 1024 : max(end, start + 1024)] = 0
    return y


@mutant(*DRAFTED)
def knows_four_drafts(c: Call) -> Tensor:
    y, drafts = c.run(), c.metadata.draft_token_num
    if drafts > 4:
        for b in range(c.metadata.num_reqs):
            y[b * drafts + 4 : (b + 1) * drafts] = 0
    return y


@mutant("conv_target_verify")
def saves_drafts_by_the_pools_count(c: Call) -> Tensor:
    y, drafts = c.run(), c.state.draft_rows
    if drafts is not None:
        used = c.state.history + c.metadata.draft_token_num
        extra = drafts.shape[1] - used
        for row in c.metadata.draft_indices.tolist() if extra else []:
            if row >= 0:
                drafts[row, extra:] = drafts[row, :used].clone()
    return y


@mutant("conv_extend")
def prefills_a_speculative_ring_by_its_least_size(c: Call) -> Tensor:
    least = c.state.history + 1
    if c.state.layout != "ring" or c.state.rows <= least:
        return c.run()
    return c.run(state=ConvState(c.state.tensor[:, :least], "ring", c.state.width))


@mutant("conv_decode")
def decodes_a_ring_by_its_least_size(c: Call) -> Tensor:
    least = c.state.history + 1
    if c.state.layout != "ring" or c.state.rows <= least:
        return c.run()
    return c.run(state=ConvState(c.state.tensor[:, :least], "ring", c.state.width))


@mutant("conv_target_verify")
def verifies_a_ring_by_its_least_size(c: Call) -> Tensor:
    least = c.state.history + c.metadata.draft_token_num
    if c.state.layout != "ring" or c.state.rows <= least:
        return c.run()
    return c.run(state=ConvState(c.state.tensor[:, :least], "ring", c.state.width))


@mutant(COMMIT)
def commits_16_tensors_at_most(c: Call) -> None:
    places = [(name, layer) for layer in range(c.pool.num_layers) for name in c.pool.conv_streams][16:]
    kept = {(name, layer): c.pool.conv_streams[name][layer].clone() for name, layer in places}
    c.run()
    for (name, layer), tensor in kept.items():
        c.pool.conv_streams[name][layer] = tensor


@mutant(COMMIT)
def commits_64_rows_at_most(c: Call) -> None:
    rows = c.last_correct_step_indices.shape[0]
    c.run(last_correct_step_indices=torch.where(torch.arange(rows) < 64, c.last_correct_step_indices, -1))


@mutant(COMMIT)
def commits_256_channels_at_most(c: Call) -> None:
    kept = {name: tensor[..., 256:].clone() for name, tensor in c.pool.conv_streams.items()}
    c.run()
    for name, tensor in c.pool.conv_streams.items():
        tensor[..., 256:] = kept[name]


@mutant(COMMIT)
def knows_four_steps(c: Call) -> None:
    c.run(last_correct_step_indices=c.last_correct_step_indices.clamp(max=3))


@mutant("clear_slots")
def clears_64_slots_at_most(c: Call) -> None:
    c.run(cache_indices=c.cache_indices[:64] if c.cache_indices.dim() == 1 else c.cache_indices)


@mutant("copy_slots")
def copies_128_pairs_at_most(c: Call) -> None:
    plain = c.source_indices.dim() == 1 and c.source_indices.shape == c.destination_indices.shape
    cut = slice(0, 128 if plain else None)
    c.run(source_indices=c.source_indices[cut], destination_indices=c.destination_indices[cut])


@mutant("copy_slots")
def copies_each_source_once(c: Call) -> None:
    if c.source_indices.dim() != 1 or c.source_indices.shape != c.destination_indices.shape:
        return c.run()
    seen: set[int] = set()
    targets = c.destination_indices.clone()
    for place, source in enumerate(c.source_indices.tolist()):
        if source in seen:
            targets[place] = 0
        seen.add(source)
    return c.run(destination_indices=targets)


@mutant(*FUSED)
def norms_over_256_channels(c: Call) -> Tensor:
    y = c.run()
    if y.shape[1] <= 256:
        return y
    h = c.residual_stream.float()
    rest = torch.rsqrt(h[:, :256].square().mean(-1, keepdim=True) + c.eps) * h * c.norm_weight.float()
    return y.copy_(torch.where(live_tokens(c.metadata, len(y))[:, None], rest, 0.0))


@mutant(*CONVS)
def divides_by_an_empty_batch(c: Call) -> Tensor:
    if not c.metadata.num_reqs:
        raise ZeroDivisionError("a grid of no block")
    return c.run()


@mutant("clear_slots", "copy_slots")
def clears_nothing_badly(c: Call) -> None:
    if any(value.shape == (0,) for value in c.arguments.values() if isinstance(value, Tensor)):
        raise ZeroDivisionError("a grid of no block")
    c.run()


@mutant(COMMIT)
def commits_nothing_badly(c: Call) -> None:
    if isinstance(c.req_pool_indices, Tensor) and c.req_pool_indices.shape == (0,):
        raise ZeroDivisionError("a grid of no block")
    c.run()


# --- integers that overflow ---


@mutant(*PREPARES)
def keeps_lengths_in_16_bits(c: Call) -> None:
    c.run()
    c.out.computed_lens.bitwise_and_(0xFFFF)


@mutant(*PREPARES)
def counts_lengths_in_float32(c: Call) -> None:
    c.run()
    c.out.computed_lens.copy_(c.out.computed_lens.float().clamp(max=2**31 - 200))


@mutant(*PREPARE_UNIFORM)
def keeps_slots_in_16_bits(c: Call) -> None:
    c.run()
    c.out.cache_indices.copy_(torch.where(live(c.out), c.out.cache_indices % 65536, -1))


@mutant(*PREPARES)
def keeps_slots_in_15_bits(c: Call) -> None:
    c.run()
    for tensor in (c.out.cache_indices, c.out.source_indices):
        tensor.copy_(torch.where(live(c.out), tensor & 0x7FFF, -1))


@mutant("prepare_target_verify_metadata", "prepare_draft_extend_metadata")
def keeps_draft_rows_in_16_bits(c: Call) -> None:
    c.run()
    c.out.draft_indices.copy_(torch.where(live(c.out), c.out.draft_indices % 32768, -1))


@mutant(*CONVS)
def addresses_a_ring_in_float32(c: Call) -> Tensor:
    return c.with_metadata(computed_lens=c.metadata.computed_lens.float().clamp(max=2**31 - 200).int())


@mutant("conv_extend")
def has_32_bit_offsets_of_x(c: Call) -> Tensor:
    far = c.x.dim() == 2 and (c.x.shape[0] - 1) * c.x.stride(0) >= 2**31
    return c.run(x=c.x[:1].expand(c.x.shape).clone()) if far else c.run()


# --- strides ---


@mutant(COMMIT)
def ignores_strides_of_slot_lists(c: Call) -> None:
    steps = c.last_correct_step_indices
    c.run(last_correct_step_indices=fake(steps, steps.shape[0], 1) if steps.dim() == 1 else steps)


@mutant(COMMIT)
def ignores_strides_of_request_rows(c: Call) -> None:
    rows = c.req_pool_indices
    plain = isinstance(rows, Tensor) and rows.dim() == 1 and not rows.is_meta
    c.run(req_pool_indices=fake(rows, rows.shape[0], 1) if plain else rows)


@mutant(COMMIT)
def ignores_strides_of_draft_indices(c: Call) -> None:
    rows = c.draft_indices
    c.run(draft_indices=None if rows is None else fake(rows, rows.shape[0], 1))


@mutant("clear_slots")
def ignores_strides_of_a_clear(c: Call) -> None:
    slots = c.cache_indices
    c.run(cache_indices=fake(slots, slots.shape[0], 1) if slots.dim() == 1 and not slots.is_meta else slots)


@mutant("copy_slots")
def ignores_strides_of_a_copy(c: Call) -> None:
    slots = c.destination_indices
    plain = slots.dim() == 1 and not slots.is_meta
    c.run(destination_indices=fake(slots, slots.shape[0], 1) if plain else slots)


def _plain(c: Call, field: str) -> Any:
    value = getattr(c.batch, field)
    usable = isinstance(value, Tensor) and value.dim() == 1 and not value.is_meta
    return fake(value, value.shape[0], 1) if usable else value


@mutant(*PREPARES)
def ignores_strides_of_a_batch(c: Call) -> None:
    c.run(batch=replace(c.batch, req_pool_indices=_plain(c, "req_pool_indices")))


@mutant(*PREPARES)
def ignores_strides_of_lengths(c: Call) -> None:
    names = ("computed_lens", "extend_prefix_lens")
    c.run(batch=replace(c.batch, **{name: _plain(c, name) for name in names}))


@mutant(*CONVS)
def ignores_the_stride_of_bias(c: Call) -> Tensor:
    plain = isinstance(c.bias, Tensor) and c.bias.dim() == 1 and not c.bias.is_meta
    return c.run(bias=fake(c.bias, c.bias.shape[0], 1) if plain else c.bias)


@mutant(*CONVS)
def ignores_the_strides_of_weights(c: Call) -> Tensor:
    w = c.weight
    plain = w.dim() == 2 and not w.is_meta and w.stride() == (1, w.shape[0])
    return c.run(weight=w.as_strided(w.shape, (w.shape[1], 1)) if plain else w)


@mutant(*CONVS)
def ignores_the_strides_of_out(c: Call) -> Tensor:
    y = c.run()
    if c.out is None or c.out.is_contiguous():
        return y
    made = y.clone()
    c.out.as_strided(made.shape, (made.shape[1], 1)).copy_(made)
    return y


@mutant(COMMIT)
def leaves_transposed_pools_uncommitted(c: Call) -> None:
    if all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in c.pool.conv_streams.values()):
        c.run()


@mutant("clear_slots", "copy_slots")
def leaves_transposed_pools_alone(c: Call) -> None:
    kept = {n: t.clone() for n, t in c.pool.conv_streams.items() if t.stride(-1) != 1}
    c.run()
    for name, tensor in kept.items():
        c.pool.conv_streams[name].copy_(tensor)


# --- dtypes ---


@mutant(*UNIFORM)
def misreads_int32_slots(c: Call) -> Tensor:
    slots = c.metadata.cache_indices
    if slots.dtype != torch.int32:
        return c.run()
    return c.with_metadata(cache_indices=torch.where(torch.arange(len(slots)) % 2 == 0, slots, -1))


@mutant(*PREPARES)
def takes_one_dtype_for_all_index_tensors(c: Call) -> None:
    def misread(value: Any) -> Any:
        rows = c.batch.req_pool_indices
        usable = isinstance(value, Tensor) and not value.is_meta and value.dtype in (torch.int32, torch.int64)
        if not usable or rows.dtype not in (torch.int32, torch.int64) or value.dtype == rows.dtype or value.dim() != 1:
            return value
        padded = torch.nn.functional.pad(value, (0, len(value) % 2)).contiguous().view(rows.dtype)
        return torch.nn.functional.pad(padded, (0, max(0, len(value) - len(padded))))[: len(value)].clamp(0, 9)

    names = ("computed_lens", "seq_lens", "extend_prefix_lens", "extend_seq_lens")
    c.run(batch=replace(c.batch, **{name: misread(getattr(c.batch, name)) for name in names}))


@mutant(COMMIT)
def reads_steps_in_the_dtype_of_rows(c: Call) -> None:
    rows, steps = c.req_pool_indices, c.last_correct_step_indices
    usable = isinstance(rows, Tensor) and rows.dtype != steps.dtype and not steps.is_floating_point()
    c.run(last_correct_step_indices=torch.zeros_like(steps) if usable and not rows.is_floating_point() else steps)


@mutant(COMMIT)
def commits_ssm_state_through_bfloat16(c: Call) -> None:
    c.run()
    if c.pool.ssm_state is not None:
        c.pool.ssm_state.copy_(c.pool.ssm_state.bfloat16())


@mutant(COMMIT)
def commits_ssm_state_through_float32(c: Call) -> None:
    c.run()
    if c.pool.ssm_state is not None:
        c.pool.ssm_state.copy_(c.pool.ssm_state.float())


@mutant(COMMIT)
def commits_float64_windows_through_float32(c: Call) -> None:
    c.run()
    if c.pool.layout == "window":
        for tensor in c.pool.conv_streams.values():
            tensor.copy_(tensor.float())


@mutant(*CONVS)
def rounds_float32_weights_to_x(c: Call) -> Tensor:
    return c.run(
        weight=c.weight.to(c.x.dtype) if c.weight.is_floating_point() and c.x.is_floating_point() else c.weight
    )


@mutant(*CONVS)
def rounds_float32_bias_to_x(c: Call) -> Tensor:
    plain = isinstance(c.bias, Tensor) and c.x.is_floating_point()
    return c.run(bias=c.bias.to(c.x.dtype) if plain else c.bias)


@mutant(*CONVS)
def computes_float64_in_float32(c: Call) -> Tensor:
    y = c.run()
    return y.copy_(y.float()) if y.dtype == torch.float64 else y


@mutant(*CONVS)
def returns_an_output_of_its_own_dtype(c: Call) -> Tensor:
    y: Tensor = c.run()
    return y.float() if c.out is None else y


@mutant(*FUSED)
def fused_rounds_the_norm_weight(c: Call) -> Tensor:
    return c.run(norm_weight=c.norm_weight.to(c.x.dtype))


@mutant(*FUSED)
def fused_norms_the_rounded_sum(c: Call) -> Tensor:
    y = c.run()
    h = c.residual_stream.float()
    normed = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + c.eps) * c.norm_weight.float()
    rounded = normed.bfloat16() if y.dtype == torch.float32 else normed
    return y.copy_(torch.where(live_tokens(c.metadata, len(y))[:, None], rounded.float(), 0.0))


@mutant(*FUSED)
def fused_swallows_errors(c: Call) -> Tensor:
    try:
        return c.run()  # type: ignore[no-any-return]
    except HwBackendsError:
        return torch.zeros_like(c.x)


@mutant(*FUSED)
def fused_waits_for_the_device(c: Call) -> Tensor:
    y: Tensor = c.run()
    y.sum().item()
    return y


# --- offsets in 32 bits ---


def is_far(tensor: Tensor | None) -> bool:
    """Whether an entry lies 2**31 elements or more from the first."""
    if tensor is None or not tensor.numel():
        return False
    return sum((size - 1) * abs(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True)) >= 2**31


def _first_entries(tensor: Tensor) -> Tensor:
    """Every entry of the dimension of the largest stride is the first one."""
    dim = max(range(tensor.dim()), key=tensor.stride)
    return tensor.narrow(dim, 0, 1).expand(tensor.shape).clone()


@mutant(*CONVS)
def has_32_bit_offsets_of_weights(c: Call) -> Tensor:
    return c.run(weight=_first_entries(c.weight) if is_far(c.weight) else c.weight)


@mutant(*CONVS)
def has_32_bit_offsets_of_bias(c: Call) -> Tensor:
    return c.run(bias=_first_entries(c.bias) if is_far(c.bias) else c.bias)


@mutant(*CONVS)
def has_32_bit_offsets_of_the_output(c: Call) -> Tensor:
    return c.run(out=None if is_far(c.out) else c.out)


@mutant(*CONVS)
def has_32_bit_offsets_of_state(c: Call) -> Tensor:
    return c.run(state=c.spare_state() if is_far(c.state.tensor) else c.state)


@mutant("conv_target_verify", "conv_draft_extend")
def has_32_bit_offsets_of_draft_rows(c: Call) -> Tensor:
    return c.run(state=c.spare_state() if is_far(c.state.draft_rows) else c.state)


@mutant(COMMIT)
def commits_with_32_bit_offsets_of_intermediate_states(c: Call) -> None:
    states = c.pool.intermediate_ssm
    if not is_far(states):
        return c.run()
    c.pool.intermediate_ssm = _first_entries(states)
    try:
        return c.run()
    finally:
        c.pool.intermediate_ssm = states


@mutant(COMMIT)
def commits_with_32_bit_offsets_of_draft_rows(c: Call) -> None:
    return None if any(is_far(rows) for rows in c.pool.draft_rows.values()) else c.run()


@mutant(COMMIT, "clear_slots", "copy_slots")
def has_32_bit_offsets_between_steps(c: Call) -> None:
    return None if any(is_far(stream) for stream in c.pool.conv_streams.values()) else c.run()


@mutant("clear_slots", "copy_slots")
def has_32_bit_offsets_of_ssm_slots(c: Call) -> None:
    return None if is_far(c.pool.ssm_state) else c.run()


@mutant("clear_slots")
def has_32_bit_offsets_of_a_list(c: Call) -> None:
    return c.run(cache_indices=_first_entries(c.cache_indices) if is_far(c.cache_indices) else c.cache_indices)


@mutant(*PREPARES)
def has_32_bit_offsets_of_the_map(c: Call) -> None:
    mapping = c.pool.mamba_index_mapping
    if not is_far(mapping):
        return c.run()
    c.pool.mamba_index_mapping = _first_entries(mapping)
    try:
        return c.run()
    finally:
        c.pool.mamba_index_mapping = mapping


@mutant(*FUSED)
def fused_has_32_bit_offsets_of_the_stream(c: Call) -> Tensor:
    return c.run(residual_stream=c.residual_stream.clone() if is_far(c.residual_stream) else c.residual_stream)
