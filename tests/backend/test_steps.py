"""Illegal and borderline steps have one meaning on every backend: what is refused, by which rule, and what happens
where nothing is refused. Each case of a rule leaves every state as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hwbackends.conv.state import ConvState
from hwbackends.errors import ArgumentError, ShapeError, SlotError
from hwbackends.step import device_checks
from hwbackends.step.batch import ForwardMode
from hwbackends.step.checks import COMMIT, checked
from hwbackends.step.rulebook import RULES
from tests.backend.lab import PHASE, Lab, same_bits, spelled

MakeLab = Callable[..., Lab]
DIM = 3


def ready(lab: MakeLab, **extra: Any) -> Lab:
    """Requests 5, 6 and 7 in slots 1, 2 and 3, four tokens each."""
    it = lab(**({"rows": {5: 1, 6: 2, 7: 3}, "dim": DIM, "poison": 0.0} | extra))
    it.extend([5, 6, 7], [4, 4, 4], torch.arange(12.0) + 1)
    return it


def states(it: Lab) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in (*it.pool.storages(), *it.pool.draft_storages())]


def batch_of(it: Lab, mode: ForwardMode, rows: list[int], **extra: Any) -> Any:
    if mode is ForwardMode.EXTEND:
        return it.extend_batch(rows, extra.pop("lengths", [2] * len(rows)), **extra)
    if mode in (ForwardMode.DECODE, ForwardMode.IDLE):
        return replace(it.decode_batch(rows), forward_mode=mode, **extra)
    extra.setdefault("num_accept_tokens", it.ints([1] * len(rows)))
    return it.draft_batch(mode, rows, **extra)


def view_of(it: Lab, batch: Any, tracks: bool | None = None) -> Any:
    tracks = batch.mamba_track_mask is not None if tracks is None else tracks
    return it.buffers.view(batch.forward_mode, batch.padded_reqs, batch.num_tokens, batch.tokens_per_req, tracks)


def prepare(it: Lab, batch: Any, view: Any = None, deep: bool = False) -> Any:
    name = f"prepare_{PHASE.get(batch.forward_mode, 'decode')}_metadata"
    hook = getattr(it.hooks, name)
    view = view_of(it, batch) if view is None else view
    (checked(name, hook) if deep else hook)(batch, it.pool, view)
    return view


def conv(it: Lab, view: Any, x: torch.Tensor, deep: bool = False, **extra: Any) -> torch.Tensor:
    name = f"conv_{PHASE[view.forward_mode]}"
    given = {"weight": it.weight, "bias": None, "state": it.state, "metadata": view, "out": None} | extra
    hook = getattr(it.hooks, name)
    found: torch.Tensor = (checked(name, hook) if deep else hook)(x, **given)
    return found


def ones(it: Lab, rows: int) -> torch.Tensor:
    return torch.ones(rows, it.weight.shape[0], device=it.device)


# what is refused always


def _idle_view(it: Lab) -> Any:
    return prepare(it, batch_of(it, ForwardMode.IDLE, [5]))


def _wrong_kind(it: Lab) -> None:
    prepare(it, it.decode_batch([5]), view=object())


def _two_phases(it: Lab) -> None:
    batch = it.decode_batch([5])
    prepare(it, batch, view=view_of(it, replace(batch, forward_mode=ForwardMode.IDLE)))


def _conv_over(**extra: Any) -> Callable[[Lab], None]:
    def call(it: Lab) -> None:
        view = prepare(it, it.decode_batch([5, 6]))
        conv(it, view, **({"x": ones(it, 2)} | {k: v(it) if callable(v) else v for k, v in extra.items()}))

    return call


def _prepare_over(mode: ForwardMode, rows: tuple[int, ...] = (5, 6), **extra: Any) -> Callable[[Lab], None]:
    def call(it: Lab) -> None:
        given = {k: v(it) if callable(v) else v for k, v in extra.items()}
        batch = replace(batch_of(it, mode, list(rows)), **given)
        prepare(it, batch, view=view_of(it, batch_of(it, mode, list(rows)), batch.mamba_track_mask is not None))

    return call


def _tracks_into_an_output_without_tracks(it: Lab) -> None:
    batch = replace(
        it.decode_batch([5, 6]), mamba_track_mask=it.ints([1, 0], torch.bool), mamba_track_indices=it.ints([8, 9])
    )
    prepare(it, batch, view=view_of(it, it.decode_batch([5, 6])))


def _own_memory(name: str) -> Callable[[Lab], None]:
    def call(it: Lab) -> None:
        batch = it.decode_batch([5, 6])
        view = view_of(it, batch)
        prepare(it, replace(batch, **{name: getattr(view, name)}), view=view)

    return call


def _fused(**extra: Any) -> Callable[[Lab], None]:
    def call(it: Lab) -> None:
        view = prepare(it, it.decode_batch([5, 6]))
        x = ones(it, 2)
        given = {"residual_stream": ones(it, 2), "norm_weight": ones(it, 1)[0], "eps": 1e-5}
        given |= {k: v(it, x) if callable(v) else v for k, v in extra.items()}
        it.hooks.fused_decode_add_rmsnorm(x, it.weight, None, it.state, view, **given)

    return call


def _commit(**extra: Any) -> Callable[[Lab], None]:
    def call(it: Lab) -> None:
        given = {"pool": it.pool, "req_pool_indices": it.ints([5, 6]), "last_correct_step_indices": it.ints([0, 1])}
        given |= {k: v(it) if callable(v) else v for k, v in extra.items()}
        getattr(it.hooks, COMMIT)(**given)

    return call


def _no_drafts(it: Lab) -> None:
    state = ConvState(it.state.tensor[:, : it.history + (it.layout == "ring")], it.layout, it.width)
    conv(it, prepare(it, batch_of(it, ForwardMode.TARGET_VERIFY, [5])), ones(it, 3), state=state)


def _no_intermediate(it: Lab) -> None:
    it.pool.ssm_state = torch.zeros(1, 11, 2, device=it.device)
    _commit()(it)


def _partly(it: Lab) -> None:
    memory = torch.ones(3, DIM, device=it.device)
    conv(it, prepare(it, it.decode_batch([5, 6])), memory[:2], out=memory[1:])


ALWAYS: list[tuple[str, Callable[[Lab], None]]] = [
    ("kinds_of_a_preparation", _wrong_kind),
    ("phase_of_a_preparation", _two_phases),
    ("phase_of_a_preparation", _prepare_over(ForwardMode.DECODE, forward_mode="DECODE")),
    ("counts_of_a_batch", _prepare_over(ForwardMode.DECODE, num_reqs=None)),
    ("counts_of_a_batch", _prepare_over(ForwardMode.DECODE, num_reqs=3)),
    ("counts_of_a_batch", _prepare_over(ForwardMode.IDLE, num_reqs=3)),
    ("counts_of_a_batch", _prepare_over(ForwardMode.DECODE, num_reqs=lambda it: it.ints([1])[0])),
    ("tensors_of_a_batch", _prepare_over(ForwardMode.DECODE, seq_lens=[1, 2])),
    ("extents_of_the_output", _prepare_over(ForwardMode.EXTEND, num_tokens=3)),
    ("tensors_that_a_phase_needs", _prepare_over(ForwardMode.EXTEND, extend_seq_lens=None)),
    ("tracks_of_the_output", _tracks_into_an_output_without_tracks),
    ("one_chain_of_drafts", _prepare_over(ForwardMode.TARGET_VERIFY, topk=2)),
    ("sources_in_extend_alone", _prepare_over(ForwardMode.DECODE, source_indices=lambda it: it.ints([1, 2]))),
    ("sources_in_extend_alone", _prepare_over(ForwardMode.TARGET_VERIFY, source_indices=lambda it: it.ints([1, 2]))),
    ("outputs_apart_from_the_batch", _own_memory("computed_lens")),
    ("outputs_apart_from_the_batch", _own_memory("cache_indices")),
    ("kinds_of_a_conv", _conv_over(state=None)),
    ("kinds_of_a_conv", _conv_over(metadata=None)),
    ("phase_of_a_conv", lambda it: it.hooks.conv_extend(ones(it, 1), it.weight, None, it.state, _idle_view(it))),
    ("activations", _conv_over(x=None)),
    ("weights", _conv_over(weight=None)),
    ("weights", _conv_over(activation=["silu"])),
    ("rows_of_x", _conv_over(x=lambda it: ones(it, 1))),
    ("output", _conv_over(out=lambda it: ones(it, 3))),
    ("room_for_drafts", _no_drafts),
    ("epilogue", _fused(eps=None)),
    ("epilogue", _fused(residual_stream=None)),
    ("written_apart_from_read", _partly),
    ("written_apart_from_read", _conv_over(x=lambda it: it.state.tensor.view(-1, DIM)[:2])),
    ("written_apart_from_read", _conv_over(out=lambda it: it.state.tensor.view(-1, DIM)[:2])),
    ("written_apart_from_read", _conv_over(out=lambda it: torch.ones(1, DIM, device=it.device).expand(2, DIM))),
    ("written_apart_from_read", _fused(residual_stream=lambda it, x: x)),
    ("tensors_of_a_commit", _commit(pool=None)),
    ("tensors_of_a_commit", _commit(req_pool_indices=None)),
    ("snapshots_of_a_commit", _commit(mamba_steps_to_track=lambda it: it.ints([0, 0]))),
    ("what_a_commit_reads", _no_intermediate),
    ("slot_lists", lambda it: it.hooks.clear_slots(None, it.ints([1]))),
    ("slot_lists", lambda it: it.hooks.copy_slots(it.pool, it.ints([1]), it.ints([2, 3]))),
]


@pytest.mark.parametrize(("rule", "call"), ALWAYS, ids=[f"{rule}-{at}" for at, (rule, _) in enumerate(ALWAYS)])
def test_a_call_that_breaks_a_rule_is_refused_by_its_name_and_writes_nothing(
    lab: MakeLab, rule: str, call: Callable[[Lab], None]
) -> None:
    it = ready(lab)
    before = states(it)
    with pytest.raises(ArgumentError) as caught:
        call(it)
    assert caught.value.rule == rule
    assert all(map(same_bits, before, states(it)))


def test_tokens_that_do_not_reach_for_every_request_are_refused(lab: MakeLab) -> None:
    it = ready(lab)
    for mode, tokens in ((ForwardMode.DECODE, 1), (ForwardMode.TARGET_VERIFY, 5), (ForwardMode.DRAFT_EXTEND, 5)):
        batch = replace(batch_of(it, mode, [5, 6]), num_tokens=tokens)
        with pytest.raises(ShapeError, match=r"batch.num_tokens: got \d, wanted at least") as caught:
            prepare(it, batch, view=view_of(it, batch))
        assert caught.value.rule == "tokens_for_every_request"


def test_metadata_of_other_extents_is_refused(lab: MakeLab) -> None:
    it = ready(lab)
    view = prepare(it, it.decode_batch([5, 6]))
    wrong = replace(view, cache_indices=view.cache_indices[:1])
    with pytest.raises(ShapeError, match=r"metadata.cache_indices: got \[1\], wanted \[2\]") as caught:
        conv(it, wrong, ones(it, 2))
    assert caught.value.rule == "tensors_of_the_metadata"


def test_a_slice_beside_x_in_one_buffer_is_no_overlap(lab: MakeLab) -> None:
    it = ready(lab)
    plain = ready(lab)
    both = torch.ones(2, 2 * DIM, device=it.device)
    for _ in range(3):
        y = conv(it, prepare(it, it.decode_batch([5, 6])), both[:, :DIM], out=both[:, DIM:])
        z = conv(plain, prepare(plain, plain.decode_batch([5, 6])), ones(plain, 2))
        assert torch.equal(y, z)
        for each in (it, plain):
            each.lengths = {row: length + 1 for row, length in each.lengths.items()}


# what is refused in checked mode


def _deep_prepare(mode: ForwardMode, rows: tuple[int, ...] = (5, 6), **extra: Any) -> Callable[[Lab], None]:
    def call(it: Lab) -> None:
        given = {k: v(it) if callable(v) else v for k, v in extra.items()}
        batch = replace(batch_of(it, mode, list(rows)), **given)
        prepare(it, batch, deep=True)

    return call


def _deep_conv(mode: ForwardMode, **tensors: list[int]) -> Callable[[Lab], None]:
    def call(it: Lab) -> None:
        mask = {"mamba_track_mask": torch.tensor([True, True], device=it.device)}
        extra = mask | {"mamba_track_indices": it.ints([8, 9]), "mamba_track_seqlens": it.ints([5, 5])}
        view = prepare(it, batch_of(it, mode, [5, 6], **extra))
        for name, values in tensors.items():
            target = getattr(view, name)
            target.copy_(it.ints(values, target.dtype))
        conv(it, view, ones(it, view.num_tokens), deep=True)

    return call


def _deep_commit(**extra: Any) -> Callable[[Lab], None]:
    def call(it: Lab) -> None:
        given = {"req_pool_indices": it.ints([5, 6]), "last_correct_step_indices": it.ints([0, 1])}
        given |= {name: it.ints(values) for name, values in extra.items()}
        checked(COMMIT, getattr(it.hooks, COMMIT))(it.pool, **given)

    return call


def _track(**extra: Any) -> dict[str, Any]:
    mask = {"mamba_track_mask": lambda it: torch.tensor([True, True], device=it.device)}
    return (
        mask
        | {"mamba_track_indices": lambda it: it.ints([8, 9]), "mamba_track_seqlens": lambda it: it.ints([6, 6])}
        | extra
    )


D, E, V, X = ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND
CHECKED: list[tuple[str, Callable[[Lab], None]]] = [
    ("slots_of_a_batch", _deep_prepare(D, (5, 5))),
    ("slots_of_a_batch", _deep_prepare(V, (5, 13))),
    ("slots_of_a_batch", _deep_prepare(D, cache_indices=lambda it: it.ints([1, 11]))),
    ("other_slots_of_a_batch", _deep_prepare(E, source_indices=lambda it: it.ints([2, 0]))),
    ("other_slots_of_a_batch", _deep_prepare(E, source_indices=lambda it: it.ints([11, 0]))),
    ("other_slots_of_a_batch", _deep_prepare(D, **_track(mamba_track_indices=lambda it: it.ints([8, 8])))),
    ("other_slots_of_a_batch", _deep_prepare(D, **_track(mamba_track_indices=lambda it: it.ints([2, 8])))),
    ("other_slots_of_a_batch", _deep_prepare(D, **_track(mamba_track_indices=lambda it: it.ints([11, 8])))),
    ("lengths_of_an_extend", _deep_prepare(E, extend_seq_lens=lambda it: it.ints([2, 3]))),
    ("lengths_of_an_extend", _deep_prepare(E, extend_seq_lens=lambda it: it.ints([-1, 2]))),
    ("positions_of_a_batch", _deep_prepare(D, seq_lens=lambda it: it.ints([0, 5]))),
    ("positions_of_a_batch", _deep_prepare(D, computed_lens=lambda it: it.ints([2**31 - 1, 5]))),
    ("accepted_drafts", _deep_prepare(X, num_accept_tokens=lambda it: it.ints([4, 1]))),
    ("slots_of_the_metadata", _deep_conv(D, cache_indices=[1, 11])),
    ("slots_of_the_metadata", _deep_conv(D, cache_indices=[2, 2])),
    ("other_slots_of_the_metadata", _deep_conv(D, source_indices=[3, 2])),
    ("other_slots_of_the_metadata", _deep_conv(D, mamba_track_indices=[2, 9])),
    ("offsets_of_the_metadata", _deep_conv(E, query_start_loc=[0, 3, 9])),
    ("offsets_of_the_metadata", _deep_conv(E, query_start_loc=[0, 3, 2])),
    ("offsets_of_the_metadata", _deep_conv(E, seq_idx=[0, 0, 0, 1])),
    ("offsets_of_the_metadata", _deep_conv(D, query_start_loc=[0, 2, 2])),
    ("positions_of_the_metadata", _deep_conv(D, computed_lens=[-1, 4])),
    ("accepted_drafts_of_the_metadata", _deep_conv(X, num_accept_tokens=[4, 1])),
    ("track_windows", _deep_conv(D, mamba_track_tokens=[2, 1])),
    ("slots_of_a_commit", _deep_commit(req_pool_indices=[5, 13])),
    ("slots_of_a_commit", _deep_commit(req_pool_indices=[5, 5])),
    ("accepted_steps", _deep_commit(last_correct_step_indices=[0, 3])),
    (
        "track_slots_of_a_commit",
        _deep_commit(mamba_track_indices=[2, 8], mamba_steps_to_track=[0, 0], computed_lens=[4, 4]),
    ),
    (
        "track_slots_of_a_commit",
        _deep_commit(mamba_track_indices=[11, 8], mamba_steps_to_track=[0, 0], computed_lens=[4, 4]),
    ),
    ("slots_to_clear", lambda it: checked("clear_slots", it.hooks.clear_slots)(it.pool, it.ints([11]))),
    (
        "slots_to_copy",
        lambda it: checked("copy_slots", it.hooks.copy_slots)(it.pool, it.ints([1, 2]), it.ints([2, 4])),
    ),
]
OF_ONE_LAYOUT = {"kept_tokens", "draft_rows_of_a_verify", "draft_rows_of_a_commit"}


@pytest.mark.parametrize(("rule", "call"), CHECKED, ids=[f"{rule}-{at}" for at, (rule, _) in enumerate(CHECKED)])
def test_checked_mode_refuses_what_only_memory_tells(lab: MakeLab, rule: str, call: Callable[[Lab], None]) -> None:
    it = ready(lab)
    before = states(it)
    with pytest.raises(ArgumentError) as caught:
        call(it)
    assert caught.value.rule == rule
    assert all(map(same_bits, before, states(it)))


@pytest.mark.parametrize("kept", [0, 5, -1])
def test_checked_mode_refuses_kept_counts_that_lazy_cannot_hold(target: tuple[str, str], kept: int) -> None:
    it = ready(lambda **extra: Lab(*target, "lazy", **extra))
    with pytest.raises(ArgumentError, match="num_accepted_tokens") as caught:
        prepare(it, replace(it.decode_batch([5]), num_accepted_tokens=it.ints([kept])), deep=True)
    assert caught.value.rule == "kept_tokens"


def test_checked_mode_refuses_draft_rows_that_are_not_there(target: tuple[str, str]) -> None:
    it = ready(lambda **extra: Lab(*target, "window", **extra))
    view = prepare(it, batch_of(it, V, [5, 6]))
    view.draft_indices.copy_(it.ints([5, 13]))
    with pytest.raises(SlotError) as caught:
        conv(it, view, ones(it, 6), deep=True)
    assert caught.value.rule == "draft_rows_of_a_verify"
    with pytest.raises(SlotError) as caught:
        _deep_commit(draft_indices=[5, 13])(it)
    assert caught.value.rule == "draft_rows_of_a_commit"


def test_every_rule_is_shown_by_a_call_that_breaks_it() -> None:
    assert device_checks.rules(COMMIT)
    shown = {rule for rule, _ in (*ALWAYS, *CHECKED)} | OF_ONE_LAYOUT
    shown |= {"tokens_for_every_request", "tensors_of_the_metadata"}
    shown |= {"families_of_a_pool"}  # with the rules of other families, in tests of theirs
    assert {rule.name for rule in RULES if rule.check.__module__.startswith("hwbackends.step.")} == shown


# what happens without checked mode


def test_an_idle_step_has_no_live_rows_whatever_the_batch_says(lab: MakeLab) -> None:
    it = ready(lab)
    before = states(it)
    view = prepare(it, batch_of(it, ForwardMode.IDLE, [5, 6]))
    assert not conv(it, view, ones(it, 2)).any()
    assert all(map(same_bits, before, states(it)))


def test_an_idle_step_may_have_fewer_rows_than_requests(lab: MakeLab) -> None:
    it = ready(lab)
    view = prepare(it, replace(batch_of(it, ForwardMode.IDLE, [5, 6]), num_tokens=0))
    assert conv(it, view, ones(it, 1)).tolist() == [[0.0] * DIM]


@pytest.mark.parametrize("mode", [D, E, V, X])
def test_rows_of_x_without_requests_give_zeros(lab: MakeLab, mode: ForwardMode) -> None:
    it = ready(lab)
    before = states(it)
    view = prepare(it, replace(batch_of(it, mode, []), num_tokens=3))
    assert not conv(it, view, ones(it, 3), out=it.nan_like(ones(it, 3))).any()
    assert all(map(same_bits, before, states(it)))


def test_an_extend_without_a_token_changes_nothing_and_gives_zeros(lab: MakeLab) -> None:
    it = ready(lab)
    before = states(it)
    view = prepare(it, batch_of(it, E, [5, 6], lengths=[0, 0]))
    assert not conv(it, view, ones(it, 2)).any()
    assert conv(it, view, ones(it, 0)).shape == (0, DIM)
    assert all(map(same_bits, before, states(it)))


def test_lengths_beyond_the_tokens_are_cut_off_there(lab: MakeLab) -> None:
    it = ready(lab)
    view = prepare(it, replace(batch_of(it, E, [5, 6], lengths=[2, 7]), num_tokens=4))
    assert view.query_start_loc.tolist() == [0, 2, 4]
    memory = torch.full((9, DIM), 7777.0, device=it.device)
    y = conv(it, view, ones(it, 4), out=memory[:4])
    assert bool((memory[4:] == 7777.0).all())
    assert bool((y != 7777.0).all())


def test_offsets_behind_the_tokens_write_nothing_behind_the_output(lab: MakeLab) -> None:
    it = ready(lab)
    view = prepare(it, batch_of(it, E, [5, 6], lengths=[2, 2]))
    view.query_start_loc.copy_(it.ints([0, 3, 9], torch.int32))
    memory = torch.full((12, DIM), 7777.0, device=it.device)
    conv(it, view, ones(it, 4), out=memory[:4])
    assert bool((memory[4:] == 7777.0).all())


def test_padded_rows_of_an_extend_keep_their_tokens(lab: MakeLab) -> None:
    it = ready(lab)
    batch = it.extend_batch([5, -1, 6], [2, 3, 2])
    view = prepare(it, batch)
    assert view.query_start_loc.tolist() == [0, 2, 5, 7]
    assert view.seq_idx.tolist() == [0, 0, 1, 1, 1, 2, 2]
    y = conv(it, view, ones(it, 7))
    assert spelled(y)[2:5] == [0.0] * 3
    assert all(spelled(y)[:2])


def test_rows_that_are_not_there_are_padding(lab: MakeLab) -> None:
    it = ready(lab)
    before = states(it)
    it.pool.mamba_index_mapping[6] = 11
    view = prepare(it, it.decode_batch([13, 6, -7]))
    assert view.cache_indices.tolist() == [-1, -1, -1]
    view.cache_indices.copy_(it.ints([11, 900, -3]))
    assert not conv(it, view, ones(it, 3)).any()
    it.hooks.clear_slots(it.pool, it.ints([11, 900, -1]))
    it.hooks.copy_slots(it.pool, it.ints([1, 11, 2]), it.ints([11, 2, 0]))
    getattr(it.hooks, COMMIT)(it.pool, it.ints([13, 6]), it.ints([0, 0]))
    getattr(it.hooks, COMMIT)(it.pool, it.ints([5, 7]), it.ints([3, 99]))
    assert all(map(same_bits, before, states(it)))


@pytest.mark.parametrize("mode", [D, V])
def test_accepted_counts_are_read_in_draft_extend_alone(lab: MakeLab, mode: ForwardMode) -> None:
    it = ready(lab)
    view = prepare(it, batch_of(it, mode, [5, 6], num_accept_tokens=it.ints([-1, 99])))
    assert view.cache_indices.tolist() == [1, 2]


def test_a_lazy_history_begins_inside_of_the_slot(target: tuple[str, str]) -> None:
    it = ready(lambda **extra: Lab(*target, "lazy", **extra))
    view = prepare(it, it.decode_batch([5, 6, 7], num_accepted_tokens=it.ints([0, 7, 2])))
    assert view.history_offset.tolist() == [0, 2, 1]


def test_empty_lists_are_no_work(lab: MakeLab) -> None:
    it = ready(lab)
    before = states(it)
    it.hooks.clear_slots(it.pool, it.ints([]))
    it.hooks.copy_slots(it.pool, it.ints([]), it.ints([]))
    getattr(it.hooks, COMMIT)(it.pool, it.ints([]), it.ints([]))
    assert all(map(same_bits, before, states(it)))


# what a backend may keep from an earlier call


@pytest.mark.parametrize("swap", ["data", "transposed in place", "another tensor"])
def test_weights_that_were_swapped_underneath_are_seen(lab: MakeLab, swap: str) -> None:
    it, fresh = (lab(rows={5: 1}, dim=4, poison=0.0) for _ in range(2))
    numbers = torch.arange(16.0, device=it.device).view(4, 4)
    weight = torch.nn.Parameter(numbers.clone(), requires_grad=False)
    for _ in range(2):
        it.weight = weight
        it.decode([5], [1.0])
    if swap == "data":
        weight.data = numbers.t().contiguous().t() + 1
    elif swap == "transposed in place":
        weight.data = weight.data.t()
    else:
        it.weight = numbers * 2
    it.weight = weight if swap != "another tensor" else it.weight
    fresh.weight = it.weight.detach().clone()
    fresh.decode([5], [1.0])
    fresh.decode([5], [1.0])
    assert torch.equal(it.decode([5], [1.0]), fresh.decode([5], [1.0]))


def test_a_map_and_a_table_that_were_replaced_are_seen(lab: MakeLab) -> None:
    it = lab(rows={5: 1}, dim=2, v2p=[0, 3, 4], poison=0.0)
    assert prepare(it, it.decode_batch([5])).cache_indices.tolist() == [3]
    it.pool.mamba_v2p_table = it.ints([0, 7, 4])
    assert prepare(it, it.decode_batch([5])).cache_indices.tolist() == [7]
    it.pool.mamba_index_mapping = it.pool.mamba_index_mapping.clone().fill_(2)
    assert prepare(it, it.decode_batch([5])).cache_indices.tolist() == [4]


def test_a_state_keeps_its_tensors_and_a_replaced_one_has_no_plans(lab: MakeLab) -> None:
    it = ready(lab)
    view = prepare(it, it.decode_batch([5, 6]))
    conv(it, view, ones(it, 2))
    with pytest.raises(ArgumentError, match="ConvState: tensor: got another value"):
        it.state.tensor = it.state.tensor.clone()
    with pytest.raises(ArgumentError, match="StepMetadata: cache_indices: got another tensor"):
        view.cache_indices = view.cache_indices.clone()
    other = replace(view, cache_indices=torch.full_like(view.cache_indices, -1))
    assert not conv(it, other, ones(it, 2)).any()


# autograd


@pytest.mark.parametrize("made_in", [False, True], ids=["made outside", "made inside"])
@pytest.mark.parametrize("run_in", [False, True], ids=["run outside", "run inside"])
def test_inference_mode_changes_nothing(lab: MakeLab, made_in: bool, run_in: bool) -> None:
    with torch.inference_mode(made_in):
        it = ready(lab)
    weight = torch.nn.Parameter(it.weight.clone())
    with torch.inference_mode(run_in):
        it.weight = weight
        y = it.decode([5, 6], [1.0, 2.0], conv={"out": None})
        it.verify([5, 6], torch.ones(6), conv={"out": None})
        it.commit([5, 6], [2, 1])
        it.hooks.clear_slots(it.pool, it.ints([7]))
    assert not y.requires_grad
    assert not it.state.tensor.requires_grad
    assert all(spelled(y))
