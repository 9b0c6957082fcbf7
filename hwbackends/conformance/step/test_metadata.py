"""Preparation: every tensor that a phase writes, against the oracle, over buffers that hold stale values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hwbackends.conformance import oracle
from hwbackends.conformance.cases import MODES, Req, Rig, Weights, judge_outputs, prepare_rig, rig_for
from hwbackends.conformance.kit import Kit, bits
from hwbackends.conformance.marks import cases, clauses, over
from hwbackends.step.metadata import StepMetadata

REQUESTS = [
    Req(3, tokens=5, length=7, accept=2), Req(-1, tokens=2, accept=1), Req(1, tokens=1, length=2, accept=0),
    Req(0, tokens=4, accept=3), Req(9, tokens=0, length=12, accept=-1), Req(6, tokens=3, accept=3),
]  # fmt: skip


def _judge(kit: Kit, clause: str, rig: Rig, batch: oracle.Batch, got: StepMetadata, names: Sequence[str] = ()) -> None:
    """The tensors `names` (all that the phase writes by default) hold what the oracle says."""
    want = oracle.metadata(batch, oracle.prepare(batch, rig.facts))
    for name in names or want:
        kit.equal(clause, getattr(got, name), want[name], f"{batch.mode} on {rig.shape.layout}: {name}")


@cases("mode, virtual", [(mode, virtual) for virtual in (True, False) for mode in MODES], quick=4)
@over("layout", "index", quick=1)
@clauses("CS-PREP-01")
def test_slots_come_from_the_map(kit: Kit, mode: str, virtual: bool) -> None:
    """Through the map, and through the virtual-to-physical table where there is one."""
    rig = prepare_rig(kit, mode, virtual=virtual)
    batch = rig.batch(mode, REQUESTS)
    _judge(kit, "CS-PREP-01", rig, batch, rig.prepare(batch), ("cache_indices",))


@cases("mode", MODES)
@over("layout", "index", quick=1)
@clauses("CS-PREP-01")
def test_translated_slots_are_taken_as_they_are(kit: Kit, mode: str) -> None:
    """An engine that translates slots itself: neither map nor table is read, for track slots neither."""
    rig = prepare_rig(kit, mode, virtual=True)
    requests = [Req(3, tokens=5, length=7, accept=3, track=4, track_seqlen=9), Req(5, tokens=2, length=2, accept=1)]
    batch = rig.batch(mode, requests, cache_indices=[8, 0])
    names = ("cache_indices", "source_indices", "mamba_track_indices")
    _judge(kit, "CS-PREP-01", rig, batch, rig.prepare(batch), names)


@cases("mode", [*MODES, "idle"], quick=5)
@over("layout", "index", quick=1)
@clauses("CS-PREP-02", "CS-PREP-04")
def test_rows_behind_the_live_ones_are_padded(kit: Kit, mode: str) -> None:
    """Whatever they hold: live request rows, lengths, accepted counts, track slots."""
    rig = prepare_rig(kit, mode)
    requests = [*REQUESTS, Req(7, tokens=2, length=5, accept=2, track=10, track_seqlen=7), Req(8, tokens=1, accept=1)]
    batch = rig.batch(mode, requests, live=0 if mode == "idle" else 6)
    if mode == "extend":
        batch.num_tokens = sum(row.tokens for row in oracle.prepare(batch, rig.facts))
    got = rig.prepare(batch)
    rows = oracle.prepare(batch, rig.facts)
    want = oracle.metadata(batch, rows)
    for name, values in want.items():
        mine = kit.host(getattr(got, name))
        if len(values) == len(rows):
            where = [b for b, row in enumerate(rows) if row.padded]
            kit.equal("CS-PREP-02", mine[where], [values[b] for b in where], f"{mode}: padded rows of {name}")
    _judge(kit, "CS-PREP-04", rig, batch, got)


@cases("mode", MODES, quick=4)
@over("layout", "index", quick=1)
@clauses("CS-PREP-02")
def test_the_count_on_the_device_pads_too(kit: Kit, mode: str) -> None:
    """The smaller of `num_reqs` and `num_reqs_device` holds."""
    rig = prepare_rig(kit, mode)
    for live, device in ((6, 3), (2, 5), (6, 0)):
        batch = rig.batch(mode, REQUESTS, live=live, num_reqs_device=device)
        _judge(kit, "CS-PREP-02", rig, batch, rig.prepare(batch))


@cases("mode", MODES, quick=4)
@over("layout", "index", quick=1)
@clauses("CS-PREP-03")
def test_preparing_twice_changes_nothing(kit: Kit, mode: str) -> None:
    """No state is touched, and the second preparation gives the same tensors."""
    rig = prepare_rig(kit, mode, ssm=True)
    rig.histories([r for r in REQUESTS if r.slot > 0])
    batch = rig.batch(mode, REQUESTS)
    before, view = rig.snapshot(), rig.metadata(batch)
    want = oracle.metadata(batch, oracle.prepare(batch, rig.facts))
    prepared = []
    for _ in range(2):
        rig.prepare(batch, out=view)
        prepared.append({name: kit.host(getattr(view, name)) for name in want})
        after = rig.snapshot()
        changed = [str(key) for key, value in after.items() if not torch.equal(bits(value), bits(before[key]))]
        kit.check("CS-PREP-03", not changed, f"preparation changed {', '.join(changed)}")
    for name in want:
        kit.same_bits("CS-PREP-03", prepared[1][name], prepared[0][name], f"second preparation: {name}")


@cases("mode", MODES, quick=4)
@over("layout", "index", quick=3)
@clauses("CS-PREP-04", "CS-PREP-07")
def test_every_row_is_written(kit: Kit, mode: str) -> None:
    """All tensors of the phase, over stale values; the same buffers serve another step."""
    rig = prepare_rig(kit, mode)
    batch = rig.batch(mode, REQUESTS)
    got = rig.prepare(batch)
    _judge(kit, "CS-PREP-04", rig, batch, got)
    if mode in ("target_verify", "draft_extend"):
        _judge(kit, "CS-PREP-07", rig, batch, got, ("draft_indices",))
    _judge(kit, "CS-PREP-07", rig, batch, got, ("cache_indices",))


@over("layout", "index", quick=3)
@clauses("CS-PREP-07")
def test_request_rows_are_not_slots(kit: Kit) -> None:
    """Request rows [5, 3] map to slots 1 and 2; slots 3 and 5 hold NaN, and no NaN comes out."""
    rig = rig_for(kit, "decode")
    requests = [Req(1, length=4), Req(2, length=6)]
    rig.histories(requests)
    call = rig.run(rig.batch("decode", requests), Weights(rig.taps()))
    judge_outputs(kit, call, "CS-PREP-07")


@cases("mode, step", [(mode, step) for step in (1, 2) for mode in MODES], quick=8)
@over("layout", "index", quick=1)
@clauses("CS-PREP-05")
def test_index_dtypes_and_strides_may_mix(kit: Kit, mode: str, step: int) -> None:
    """Each index tensor of a batch in its own dtype, and with its own stride; the metadata in either."""
    rig = prepare_rig(kit, mode, virtual=True)
    requests = [Req(3, tokens=5, length=7, accept=3, track=4, track_seqlen=11), *REQUESTS[1:]]
    batch = rig.batch(mode, requests)
    claimed = list(kit.claims.index_dtypes)
    for mix in (claimed, claimed[::-1], claimed[:1]):
        got = rig.prepare(batch, rig.step_batch(batch, mix, step))
        _judge(kit, "CS-PREP-05", rig, batch, got)


@cases("mode", MODES, quick=4)
@over("layout", "index", quick=1)
@clauses("CS-PREP-06")
def test_computed_lengths(kit: Kit, mode: str) -> None:
    """Given directly, they win; else they follow from the lengths after the step, or the prefix of an extend."""
    rig = prepare_rig(kit, mode)
    given = rig.batch(mode, REQUESTS, computed_lens=[11, 0, 13, 0, 17, 19])
    _judge(kit, "CS-PREP-06", rig, given, rig.prepare(given), ("computed_lens",))
    tokens = 3 if mode in ("target_verify", "draft_extend") else 1
    extra: dict[str, Any] = (
        {} if mode == "extend" else {"computed_lens": None, "seq_lens": [r.length + tokens for r in REQUESTS]}
    )
    derived = rig.batch(mode, REQUESTS, **extra)
    _judge(kit, "CS-PREP-06", rig, derived, rig.prepare(derived), ("computed_lens",))


@cases("mode", MODES, quick=4)
@over("layout", "index", quick=3)
@clauses("CS-PREP-08")
def test_the_history_offset_of_the_lazy_layout(kit: Kit, mode: str) -> None:
    """Previous step's count less one; 0 where it is not given, and on other layouts."""
    requests = [Req(3, tokens=2, length=7, accept=1, accepted=3), Req(1, tokens=1, length=5, accept=1, accepted=2)]
    rig = prepare_rig(kit, mode, drafts=3)
    for counts in ([3, 2], None):
        batch = rig.batch(mode, requests, num_accepted_tokens=counts)
        _judge(kit, "CS-PREP-08", rig, batch, rig.prepare(batch), ("history_offset",))


@cases("virtual", [True, False], quick=2)
@over("layout", "index", quick=1)
@clauses("CS-PREP-DEC-01")
def test_decode_metadata(kit: Kit, virtual: bool) -> None:
    """Offsets, flags and track slots; without a mask nothing is tracked."""
    rig = prepare_rig(kit, "decode", virtual=virtual)
    tracked = [
        Req(3, length=7, track=8),
        Req(5, length=1),
        Req(-1, track=4),
        Req(1, length=2, track=10),
        Req(0, track=2),
    ]
    for requests in (tracked, [Req(3, length=7), Req(0)]):
        batch = rig.batch("decode", requests)
        _judge(kit, "CS-PREP-DEC-01", rig, batch, rig.prepare(batch))


@over("layout", "index", quick=3)
@clauses("CS-PREP-EXT-01", "CS-PREP-EXT-02")
def test_extend_metadata(kit: Kit) -> None:
    """Offsets and owners of tokens; prefix flags by length and as given; sources where positive."""
    rig = prepare_rig(kit, "extend", virtual=True)
    sourced = [Req(4, tokens=2, length=3, source=10), *(r for r in REQUESTS if r.slot != 4)]
    flagged = [Req(4, tokens=2, length=3, initial=False), Req(2, tokens=3, initial=True), Req(0, tokens=2)]
    for requests in (REQUESTS, sourced, flagged):
        batch = rig.batch("extend", requests)
        batch.num_tokens += 2  # padded extent of a graph or of an engine's buffer
        got = rig.prepare(batch)
        _judge(kit, "CS-PREP-EXT-01", rig, batch, got, ("query_start_loc", "seq_idx"))
        _judge(kit, "CS-PREP-EXT-02", rig, batch, got, ("has_initial_state", "source_indices", "cache_indices"))


@over("layout", "index", quick=3)
@clauses("CS-PREP-EXT-03")
def test_extend_track_windows(kit: Kit) -> None:
    """k for every length from masked to beyond the step, at several intervals and prefixes; floor, not truncation."""
    for interval in (1, 3, 4):
        rig = prepare_rig(kit, "extend", track_interval=interval, virtual=True, slots=23)
        for prefix in (0, 2, 5):
            lengths = range(-1, prefix + 9)
            requests = [
                Req(1 + i, tokens=5, length=prefix, track=22 - i, track_seqlen=n) for i, n in enumerate(lengths)
            ]
            requests = requests[:11]
            requests[2:2] = [Req(0, tokens=2, track=22, track_seqlen=2)]
            batch = rig.batch("extend", requests[:12])
            names = ("mamba_track_indices", "mamba_track_tokens")
            _judge(kit, "CS-PREP-EXT-03", rig, batch, rig.prepare(batch), names)


@over("layout", "index", quick=3)
@clauses("CS-PREP-VER-01")
def test_verify_metadata(kit: Kit) -> None:
    """Offsets in steps of the draft count, request rows as draft rows, nothing tracked even under a mask."""
    rig = prepare_rig(kit, "target_verify")
    for requests in (REQUESTS, [Req(3, length=7, track=8), Req(0), Req(5, length=2, track=4)]):
        batch = rig.batch("target_verify", requests)
        _judge(kit, "CS-PREP-VER-01", rig, batch, rig.prepare(batch))


@over("layout", "index", quick=3)
@clauses("CS-PREP-DEX-01", "CS-PREP-DEX-03")
def test_draft_extend_metadata(kit: Kit) -> None:
    """A negative count pads a row that names a live slot; counts beyond the drafts are clamped; flags as given."""
    rig = prepare_rig(kit, "draft_extend")
    shared = [Req(3, length=7, accept=-1), Req(5, length=6, accept=2), Req(3, length=7, accept=9), Req(0, accept=1)]
    fresh = [Req(3, length=7, accept=2, initial=False), Req(5, length=6, accept=2), Req(-1, initial=True)]
    for requests in (shared, fresh, REQUESTS):
        batch = rig.batch("draft_extend", requests)
        got = rig.prepare(batch)
        names = ("num_accept_tokens", "cache_indices", "draft_indices", "computed_lens")
        _judge(kit, "CS-PREP-DEX-01", rig, batch, got, names)
        _judge(kit, "CS-PREP-DEX-03", rig, batch, got, ("has_initial_state",))


@over("layout", "index", quick=3)
@clauses("CS-PREP-DEX-02")
def test_draft_extend_track_windows(kit: Kit) -> None:
    """Every accepted count across boundaries of the interval, and rows that are not tracked or padded."""
    for interval in (2, 3, 7):
        rig = prepare_rig(
            kit, "draft_extend", track_interval=interval, drafts=4, virtual=True, slots=107, request_rows=53
        )
        requests = []
        for length in range(7):
            first = 1 + 14 * length
            requests += [Req(first + a, length=length, accept=a, track=first + 13 - a) for a in range(5)]
            requests += [
                Req(first + 5, length=length, accept=4),
                Req(first + 6, length=length, accept=-1, track=first + 7),
            ]
        batch = rig.batch("draft_extend", requests)
        names = ("mamba_track_indices", "mamba_track_tokens")
        _judge(kit, "CS-PREP-DEX-02", rig, batch, rig.prepare(batch), names)
