"""Wrong backends, third part: what is kept from an earlier call, what is changed that is not the backend's, what is
left unfilled, what happens before an error, and which rows count as padded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hwbackends.errors import HwBackendsError
from hwbackends.step.metadata import StepMetadata
from tests.conformance.mutants import COMMIT, CONVS, FUSED, PREPARES, Call, live, live_tokens, mutant, spans

_PLANS: list[list[object]] = []


def kept_copy(tensor: Tensor) -> Tensor:
    """The copy that was made when a tensor object was first seen."""
    if not hasattr(tensor, "_repacked"):
        tensor._repacked = tensor.clone()  # type: ignore[attr-defined]
    return tensor._repacked  # type: ignore[attr-defined,no-any-return]


# --- kept from an earlier call ---


@mutant(*CONVS)
def keeps_a_copy_of_the_weights(c: Call) -> Tensor:
    return c.run(weight=kept_copy(c.weight) if c.weight.dim() == 2 and not c.weight.is_meta else c.weight)


@mutant(*CONVS)
def keeps_a_copy_of_the_bias(c: Call) -> Tensor:
    usable = isinstance(c.bias, Tensor) and not c.bias.is_meta
    return c.run(bias=kept_copy(c.bias) if usable else c.bias)


@mutant(*CONVS)
def keeps_the_layer_of_the_first_call(c: Call) -> Tensor:
    first = c.metadata.cache.setdefault("state", c.state)
    return c.run(state=first if first.tensor.shape == c.state.tensor.shape else c.state)


@mutant(*CONVS)
def keeps_the_weights_of_the_first_layer(c: Call) -> Tensor:
    first = c.metadata.cache.setdefault("weight", c.weight.clone())
    return c.run(weight=first if first.shape == c.weight.shape and not c.weight.is_meta else c.weight)


@mutant(*CONVS)
def keeps_the_first_epilogue(c: Call) -> Tensor:
    return c.run(residual=c.metadata.cache.setdefault("residual", c.residual))


@mutant(*CONVS)
def keeps_whether_there_was_a_bias(c: Call) -> Tensor:
    has = c.metadata.cache.setdefault("bias", c.bias is not None)
    return c.run(bias=c.bias if has else None)


@mutant(*CONVS)
def keeps_strides_of_the_first_x(c: Call) -> Tensor:
    x = c.x
    if x.dim() != 2 or x.is_meta:
        return c.run()
    stride = c.state.cache.setdefault("stride", x.stride(0))
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    fits = (x.shape[0] - 1) * stride + x.shape[1] <= room
    return c.run(x=x.as_strided(x.shape, (stride, 1)) if fits and x.stride(1) == 1 else x)


@mutant(*CONVS)
def keeps_strides_of_the_first_weights(c: Call) -> Tensor:
    w = c.weight
    if w.dim() != 2 or w.is_meta:
        return c.run()
    first = c.metadata.cache.setdefault("strides", w.stride())
    contiguous = first == (w.shape[1], 1) and w.stride() == (1, w.shape[0])
    return c.run(weight=w.as_strided(w.shape, first) if contiguous else w)


@mutant(*CONVS)
def keeps_its_output(c: Call) -> Tensor:
    y: Tensor = c.run()
    if c.out is not None:
        return y
    mine = c.state.cache.setdefault(("out", y.shape), torch.empty_like(y))
    return mine.copy_(y)  # type: ignore[attr-defined,no-any-return]


@mutant(*CONVS)
def keeps_a_plan_for_every_step(c: Call) -> Tensor:
    if "plan" not in c.metadata.cache:
        plan = c.metadata.cache["plan"] = [object() for _ in range(40)]
        _PLANS.append(plan)  # type: ignore[arg-type]
    return c.run()  # type: ignore[no-any-return]


@mutant(*PREPARES)
def remembers_every_preparation(c: Call) -> None:
    c.run()
    _PLANS.append([object() for _ in range(40)])


@mutant("clear_slots", "copy_slots", COMMIT)
def remembers_every_commit(c: Call) -> None:
    c.run()
    _PLANS.append([object() for _ in range(40)])


@mutant(*PREPARES)
def keeps_the_map(c: Call) -> None:
    first = c.pool.cache.setdefault("map", c.pool.mamba_index_mapping.clone())
    mapping, c.pool.mamba_index_mapping = c.pool.mamba_index_mapping, first
    try:
        c.run()
    finally:
        c.pool.mamba_index_mapping = mapping


@mutant(*PREPARES)
def keeps_the_table(c: Call) -> None:
    table = c.pool.mamba_v2p_table
    if table is None:
        return c.run()
    c.pool.mamba_v2p_table = c.pool.cache.setdefault("table", table.clone())
    try:
        return c.run()
    finally:
        c.pool.mamba_v2p_table = table


@mutant(*PREPARES)
def keeps_the_address_of_the_map(c: Call) -> None:
    first = c.pool.cache.setdefault("map", c.pool.mamba_index_mapping)
    mapping, c.pool.mamba_index_mapping = c.pool.mamba_index_mapping, first
    try:
        c.run()
    finally:
        c.pool.mamba_index_mapping = mapping


@mutant(*PREPARES)
def keeps_the_largest_batch(c: Call) -> None:
    c.run()
    most = c.pool.cache["most"] = max(c.out.num_reqs, int(c.pool.cache.get("most", 0)))
    if most > c.out.num_reqs:
        c.out.computed_lens.zero_()


@mutant(COMMIT)
def keeps_the_map_of_the_first_commit(c: Call) -> None:
    first = c.pool.cache.setdefault("map", c.pool.mamba_index_mapping.clone())
    mapping, c.pool.mamba_index_mapping = c.pool.mamba_index_mapping, first
    try:
        c.run()
    finally:
        c.pool.mamba_index_mapping = mapping


@mutant(COMMIT)
def keeps_the_intermediate_states(c: Call) -> None:
    states = c.pool.intermediate_ssm
    if states is None:
        return c.run()
    c.pool.intermediate_ssm = c.pool.cache.setdefault("states", states)
    try:
        return c.run()
    finally:
        c.pool.intermediate_ssm = states


_FAILED: list[bool] = []


@mutant(*CONVS)
def is_lost_after_an_error(c: Call) -> Tensor:
    try:
        y: Tensor = c.run()
    except HwBackendsError:
        _FAILED.append(True)
        raise
    return y.zero_() if _FAILED and not _FAILED.clear() else y  # type: ignore[func-returns-value]


# --- changed without being asked ---


@mutant(*CONVS)
def uses_x_as_scratch(c: Call) -> Tensor:
    y: Tensor = c.run()
    c.x.mul_(2)
    return y


@mutant(*CONVS)
def scales_the_weights_in_place(c: Call) -> Tensor:
    y: Tensor = c.run()
    c.weight.mul_(2)
    return y


@mutant(*CONVS)
def moves_the_metadata_on(c: Call) -> Tensor:
    y: Tensor = c.run()
    c.metadata.computed_lens.add_(live(c.metadata).int())
    return y


@mutant(*CONVS)
def marks_its_rows_as_done(c: Call) -> Tensor:
    y: Tensor = c.run()
    c.metadata.has_initial_state.fill_(True)
    return y


@mutant(*PREPARES)
def clamps_the_batch_in_place(c: Call) -> None:
    c.run()
    c.batch.req_pool_indices.clamp_(min=0)


@mutant(*PREPARES)
def writes_slots_into_the_map(c: Call) -> None:
    c.run()
    c.pool.mamba_index_mapping[-1] = 1


@mutant(*PREPARES)
def writes_behind_its_buffers(c: Call) -> None:
    c.run()
    out: StepMetadata = c.out
    whole = out.computed_lens.untyped_storage().nbytes() // 4
    if whole > out.num_reqs:
        out.computed_lens.as_strided((whole,), (1,))[out.num_reqs] = 0


@mutant("conv_decode")
def decode_clears_saved_drafts(c: Call) -> Tensor:
    y: Tensor = c.run()
    if c.state.draft_rows is not None:
        c.state.draft_rows.zero_()
    return y


@mutant("clear_slots")
def clears_the_draft_rows_of_the_slots_number(c: Call) -> None:
    c.run()
    for saved in c.pool.draft_rows.values():
        for slot in c.cache_indices.tolist():
            if 0 < slot < saved.shape[1]:
                saved[:, slot] = 0


@mutant("copy_slots")
def copies_the_draft_rows_of_the_slots_number(c: Call) -> None:
    c.run()
    for saved in c.pool.draft_rows.values():
        for source, target in zip(c.source_indices.tolist(), c.destination_indices.tolist(), strict=True):
            if 0 < source < saved.shape[1] and 0 < target < saved.shape[1]:
                saved[:, target] = saved[:, source]


@mutant(COMMIT)
def clears_drafts_once_they_are_committed(c: Call) -> None:
    c.run()
    for saved in c.pool.draft_rows.values():
        saved[:, c.req_pool_indices.clamp(min=0).long()] = 0


@mutant(COMMIT)
def clears_intermediate_states(c: Call) -> None:
    c.run()
    if c.pool.intermediate_ssm is not None:
        c.pool.intermediate_ssm.zero_()


@mutant("clear_slots")
def leaves_the_ssm_state_of_a_cleared_slot(c: Call) -> None:
    ssm, c.pool.ssm_state = c.pool.ssm_state, None
    try:
        c.run()
    finally:
        c.pool.ssm_state = ssm


@mutant("copy_slots")
def leaves_the_ssm_state_behind(c: Call) -> None:
    ssm, c.pool.ssm_state = c.pool.ssm_state, None
    try:
        c.run()
    finally:
        c.pool.ssm_state = ssm


@mutant("copy_slots")
def moves_instead_of_copying(c: Call) -> None:
    c.run()
    for tensor in c.pool.conv_streams.values():
        for source, target in zip(c.source_indices.tolist(), c.destination_indices.tolist(), strict=True):
            if source > 0 and target > 0:
                tensor[:, source] = 0


# --- bits that are lost ---


@mutant(*CONVS)
def loses_negative_zero(c: Call) -> Tensor:
    y: Tensor = c.run()
    c.state.tensor.add_(0.0)
    return y


@mutant(*CONVS)
def flushes_subnormal_state(c: Call) -> Tensor:
    y: Tensor = c.run()
    small = c.state.tensor.abs() < torch.finfo(c.state.tensor.dtype).tiny
    c.state.tensor.masked_fill_(small & (c.state.tensor != 0), 0.0)
    return y


@mutant(*CONVS)
def cleans_infinities_out_of_state(c: Call) -> Tensor:
    y: Tensor = c.run()
    c.state.tensor.masked_fill_(c.state.tensor.isinf(), 0.0)
    return y


@mutant(*CONVS)
def spreads_nan_over_the_batch(c: Call) -> Tensor:
    y: Tensor = c.run()
    tokens = live_tokens(c.metadata, c.x.shape[0])
    return y.add_((c.x * tokens[:, None]).sum() * 0) if bool(tokens.any()) else y


# --- outputs that are not filled ---


@mutant("conv_extend")
def ignores_out_in_extend(c: Call) -> Tensor:
    return c.run(out=None)  # type: ignore[no-any-return]


@mutant("conv_decode")
def ignores_out_in_decode(c: Call) -> Tensor:
    return c.run(out=None)  # type: ignore[no-any-return]


@mutant(*CONVS)
def leaves_padding_of_its_own_output(c: Call) -> Tensor:
    if c.out is not None or not c.x.is_floating_point() or c.x.is_meta:
        return c.run()  # type: ignore[no-any-return]
    made = torch.full_like(c.x, float("nan"), memory_format=torch.contiguous_format)  # what new memory may hold
    before = made.clone()
    y: Tensor = c.run(out=made)
    padded = ~live_tokens(c.metadata, c.x.shape[0])
    y[padded] = before[padded]
    return y


@mutant(*CONVS)
def leaves_rows_behind_the_tokens(c: Call) -> Tensor:
    before = None if c.out is None else c.out.clone()
    y: Tensor = c.run()
    end = int(c.metadata.query_start_loc[-1])
    if before is not None:
        y[end:] = before[end:]
    return y


@mutant("conv_extend")
def computes_padded_requests_of_an_extend(c: Call) -> Tensor:
    y: Tensor = c.run()
    for slot, start, end in spans(c.metadata):
        if slot <= 0:
            y[start:end] = c.x[start:end]
    return y


# --- before an error ---


@mutant(*PREPARES)
def refuses_after_it_wrote_the_metadata(c: Call) -> None:
    try:
        c.run()
    except HwBackendsError:
        c.out.cache_indices.fill_(-1)
        raise


@mutant(*CONVS)
def refuses_after_it_wrote_the_output(c: Call) -> Tensor:
    try:
        return c.run()  # type: ignore[no-any-return]
    except HwBackendsError:
        if isinstance(c.out, Tensor) and not c.out.is_meta:
            c.out.zero_()
        raise


@mutant(COMMIT)
def refuses_after_it_wrote_the_state(c: Call) -> None:
    try:
        c.run()
    except HwBackendsError:
        for tensor in c.pool.conv_streams.values():
            tensor[:, 1] = 0
        raise


@mutant("clear_slots", "copy_slots")
def refuses_after_it_cleared(c: Call) -> None:
    try:
        c.run()
    except HwBackendsError:
        for tensor in c.pool.conv_streams.values():
            tensor[:, 1] = 0
        raise


@mutant(*CONVS)
def raises_a_plain_error(c: Call) -> Tensor:
    try:
        return c.run()  # type: ignore[no-any-return]
    except HwBackendsError as error:
        raise RuntimeError(str(error)) from None


# --- which rows are padded, and whose slots they are ---


@mutant(*PREPARES)
def trusts_slots_that_the_engine_translated(c: Call) -> None:
    if c.batch.cache_indices is None or not isinstance(c.batch.req_pool_indices, Tensor):
        return c.run()
    return c.run(batch=replace(c.batch, req_pool_indices=c.batch.req_pool_indices.clamp(min=0)))


@mutant(*PREPARES)
def looks_minus_one_up_in_the_table(c: Call) -> None:
    c.run()
    if c.pool.mamba_v2p_table is None or c.batch.cache_indices is not None:
        return
    rows = c.batch.req_pool_indices.long()
    found = (rows >= 0) & (c.pool.mamba_index_mapping[rows.clamp(min=0)] == -1)
    c.out.cache_indices.copy_(torch.where(found, c.pool.mamba_v2p_table[-1], c.out.cache_indices))


@mutant("prepare_extend_metadata")
def gives_padded_requests_no_tokens(c: Call) -> None:
    c.run()
    lengths = (c.out.query_start_loc[1:] - c.out.query_start_loc[:-1]) * live(c.out)
    c.out.query_start_loc[1:].copy_(lengths.cumsum(0))


@mutant(*PREPARES)
def ignores_the_count_on_the_device(c: Call) -> None:
    c.run(batch=replace(c.batch, num_reqs_device=None))


@mutant("prepare_extend_metadata")
def ignores_a_given_flag(c: Call) -> None:
    c.run(batch=replace(c.batch, has_initial_state=None))


@mutant("prepare_extend_metadata")
def leaves_sources_untranslated(c: Call) -> None:
    c.run()
    given = c.batch.source_indices
    if given is not None:
        c.out.source_indices.copy_(torch.where(live(c.out) & (given > 0), given, c.out.source_indices))


@mutant(*PREPARES)
def translates_track_slots_twice(c: Call) -> None:
    c.run()
    table = c.pool.mamba_v2p_table
    if table is not None:
        slots = c.out.mamba_track_indices
        slots.copy_(torch.where(slots > 0, table[slots.clamp(min=0).long()], slots))


@mutant("prepare_draft_extend_metadata")
def leaves_accepted_counts_unclamped(c: Call) -> None:
    c.run()
    given = c.batch.num_accept_tokens
    if given is not None:
        c.out.num_accept_tokens.copy_(torch.where(live(c.out), given, -1))


@mutant(COMMIT)
def ignores_draft_indices_of_ssm_state(c: Call) -> None:
    c.run(draft_indices=c.draft_indices if c.pool.layout == "window" else None)


@mutant(COMMIT)
def ignores_draft_indices(c: Call) -> None:
    c.run(draft_indices=None)


@mutant(COMMIT)
def tracks_after_it_committed(c: Call) -> None:
    if c.mamba_steps_to_track is None or c.pool.layout != "window":
        return c.run()
    c.run(mamba_steps_to_track=None, mamba_track_indices=None)
    none = torch.full_like(c.last_correct_step_indices, -1)
    return c.run(last_correct_step_indices=none, mamba_steps_to_track=c.mamba_steps_to_track.clamp(max=1))


@mutant(*FUSED)
def fused_keeps_the_norm_weight(c: Call) -> Tensor:
    first: Any = c.state.cache.setdefault("norm", c.norm_weight.clone())
    return c.run(norm_weight=first * 1.01 if first.shape == c.norm_weight.shape else c.norm_weight)  # type: ignore[no-any-return]


@mutant(*FUSED)
def fused_writes_the_stream_of_a_refused_call(c: Call) -> Tensor:
    try:
        return c.run()  # type: ignore[no-any-return]
    except HwBackendsError:
        c.residual_stream.zero_()
        raise
