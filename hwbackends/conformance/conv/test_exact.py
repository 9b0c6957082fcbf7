"""Exact lane: whole numbers and digit (or bit) taps, so that an output spells the window that was read. No tolerance on
any hardware; state is compared by value where it must change and bit by bit everywhere else."""

from __future__ import annotations

import numpy as np

from hwbackends.conformance import oracle
from hwbackends.conformance.cases import Req, Rig, Weights, judge_outputs, judge_state, rig_for
from hwbackends.conformance.kit import Kit
from hwbackends.conformance.marks import cases, clauses, over

DECODE = [Req(3, length=7), Req(-1), Req(1, length=2), Req(0), Req(9, length=12)]
"""Padded rows in the middle, both kinds; a request shorter than its window."""
EXTEND = [
    Req(4, tokens=7), Req(2, tokens=2, length=11), Req(0, tokens=3), Req(7, tokens=1, length=1),
    Req(5, tokens=0, length=6), Req(-1, tokens=2), Req(9, tokens=1), Req(8, tokens=5, length=4),
]  # fmt: skip
"""Fresh and continuing requests, shorter and longer than the window, an empty one, padded ones in the middle."""
DRAFTS = [Req(3, length=7, accepted=2), Req(-1), Req(1, length=2), Req(0), Req(9, length=12, accepted=3)]


def _draw(rig: Rig, requests: list[Req]) -> None:
    rig.histories([r for r in requests if r.length > 0 or r.source > 0])
    rig.history(6, 9, values=1.0)  # somebody else's slot


@over("layout", "dtype", "width", "index", quick=3)
@clauses("CS-CONV-01", "CS-CONV-05", "CS-CONV-07", "CS-CONV-08", "CS-DECODE-01")
def test_decode(kit: Kit) -> None:
    """y spells the window, the slot moves on by one row, padded rows give 0 and write nothing."""
    rig = rig_for(kit, "decode")
    _draw(rig, DECODE)
    call = rig.run(rig.batch("decode", DECODE), Weights(rig.taps()), tail=2)
    judge_outputs(kit, call, "CS-CONV-01", "CS-CONV-05")
    judge_state(kit, call, rig, own="CS-DECODE-01", others="CS-CONV-07", padded="CS-CONV-05")
    judge_outputs(kit, call, "CS-CONV-08")


@over("layout", "index", quick=3)
@clauses("CS-DECODE-02", "CS-CONV-07")
def test_decode_snapshots_the_track_slot(kit: Kit) -> None:
    """Where a row is tracked the track slot gets the same window, and only there."""
    rig = rig_for(kit, "decode", virtual=True)
    requests = [Req(3, length=7, track=8), Req(5, length=1), Req(-1, track=4), Req(1, length=2, track=10)]
    _draw(rig, requests)
    call = rig.run(rig.batch("decode", requests), Weights(rig.taps()))
    judge_state(kit, call, rig, track="CS-DECODE-02", others="CS-CONV-07")


@cases("mode", ["idle", "decode"], quick=2)
@over("layout", "dtype", quick=3)
@clauses("CS-DECODE-03", "CS-CONV-05")
def test_a_step_without_live_rows_changes_nothing(kit: Kit, mode: str) -> None:
    """An idle step, or a decode step of padded rows alone; a stale row behind the live ones names a live slot."""
    rig = rig_for(kit, mode)
    requests = [Req(0), Req(-1), Req(3, length=7)]
    _draw(rig, requests)
    call = rig.run(rig.batch(mode, requests, live=0 if mode == "idle" else 2), Weights(rig.taps()), tail=1)
    judge_outputs(kit, call, padded="CS-CONV-05")
    judge_state(kit, call, rig, others="CS-DECODE-03", padded="CS-DECODE-03")


@over("dtype", "width", "index", layout=("ring",))
@clauses("CS-DECODE-04")
def test_a_decode_step_may_run_twice_on_a_ring(kit: Kit) -> None:
    """The same step again gives the same state and output: there is no head that moves."""
    rig = rig_for(kit, "decode")
    _draw(rig, DECODE)
    batch, weights = rig.batch("decode", DECODE), Weights(rig.taps())
    x = rig.whole_numbers(batch.num_tokens, 5)
    once = rig.run(batch, weights, x)
    twice = rig.run(batch, weights, x)
    kit.same_bits("CS-DECODE-04", twice.after, once.after, "state after the second run")
    kit.same_bits("CS-DECODE-04", twice.y, once.y, "output of the second run")


@over("layout", "dtype", "width", "index", quick=3)
@clauses("CS-CONV-01", "CS-CONV-05", "CS-CONV-07", "CS-CONV-08", "CS-EXTEND-01", "CS-EXTEND-06")
def test_extend(kit: Kit) -> None:
    """A mixed batch: each request's outputs and window are its own."""
    rig = rig_for(kit, "extend")
    _draw(rig, EXTEND)
    call = rig.run(rig.batch("extend", EXTEND), Weights(rig.taps()), tail=2)
    judge_outputs(kit, call, "CS-CONV-01", "CS-CONV-05")
    judge_state(kit, call, rig, own="CS-EXTEND-01", others="CS-CONV-07", padded="CS-CONV-05")
    judge_outputs(kit, call, "CS-EXTEND-06")
    judge_outputs(kit, call, "CS-CONV-08")


@cases("poison", ["nan", "rows", "inf"], quick=2)
@over("layout", "dtype", "width", quick=3)
@clauses("CS-CONV-03", "CS-EXTEND-08")
def test_a_dirty_slot_is_not_read(kit: Kit, poison: str) -> None:
    """A new request in a slot that holds another's rows, NaN or infinity; all S rows are written, zeros included."""
    rig = rig_for(kit, "extend")
    requests = [Req(4, tokens=1), Req(2, tokens=2), Req(8, tokens=6), Req(6, tokens=1, length=5, initial=False)]
    dirt = {"nan": np.nan, "rows": None, "inf": np.inf}[poison]
    for req in requests:
        rig.history(req.slot, 3, values=dirt)
    call = rig.run(rig.batch("extend", requests), Weights(rig.taps()))
    judge_outputs(kit, call, "CS-CONV-03")
    judge_state(kit, call, rig, own="CS-EXTEND-08")


@over("dtype", "width", layout=("ring",))
@clauses("CS-CONV-03")
def test_positions_below_zero_are_zeros_on_a_ring(kit: Kit) -> None:
    """A ring slot of a short request holds NaN where nothing was written yet."""
    rig = rig_for(kit, "decode", drafts=3)
    requests = [Req(4, length=1), Req(2, length=2)]
    rig.histories(requests)
    judge_outputs(kit, rig.run(rig.batch("decode", requests), Weights(rig.taps())), "CS-CONV-03")


@over("layout", "index", quick=3)
@clauses("CS-EXTEND-02")
def test_a_short_chunk_keeps_the_newest_history(kit: Kit) -> None:
    """One and two tokens, W = 4: the window is the end of history, then the tokens."""
    rig = rig_for(kit, "extend")
    requests = [Req(4, tokens=1, length=9), Req(2, tokens=2, length=5)]
    rig.histories(requests)
    judge_state(kit, rig.run(rig.batch("extend", requests), Weights(rig.taps())), rig, own="CS-EXTEND-02")


@over("layout", "index", quick=3)
@clauses("CS-EXTEND-03", "CS-EXTEND-08", "CS-CONV-01")
def test_extend_from_another_slot(kit: Kit) -> None:
    """A shared prefix: history from the source, which keeps its bits; the whole window goes to the destination."""
    rig = rig_for(kit, "extend", virtual=True)
    requests = [Req(4, tokens=1, length=9, source=7), Req(2, tokens=6, length=2, source=5), Req(9, tokens=2, length=4)]
    rig.histories(requests)
    call = rig.run(rig.batch("extend", requests), Weights(rig.taps()))
    judge_outputs(kit, call, "CS-CONV-01")
    judge_state(kit, call, rig, own="CS-EXTEND-08", source="CS-EXTEND-03")


@over("layout", "index", quick=3)
@clauses("CS-EXTEND-04", "CS-EXTEND-01")
def test_extend_snapshots_the_aligned_window(kit: Kit) -> None:
    """Track windows that lie in the tokens, that reach into history, that end where the step ends, and none."""
    rig = rig_for(kit, "extend", virtual=True, track_interval=3)
    requests = [
        Req(4, tokens=7, track=10, track_seqlen=7), Req(2, tokens=4, length=6, track=1, track_seqlen=9),
        Req(7, tokens=6, length=3, track=3, track_seqlen=9), Req(5, tokens=2, length=6, track=8, track_seqlen=7),
        Req(9, tokens=2, length=5, track=6, track_seqlen=-1),
    ]  # fmt: skip
    rig.histories([r for r in requests if r.length])
    call = rig.run(rig.batch("extend", requests), Weights(rig.taps()))
    judge_state(kit, call, rig, own="CS-EXTEND-01", track="CS-EXTEND-04", others="CS-EXTEND-04")


@over("layout", "dtype", quick=3)
@clauses("CS-EXTEND-06", "CS-EXTEND-01")
def test_an_empty_request_in_the_middle(kit: Kit) -> None:
    """History does not cross it, and its slot keeps its bits."""
    rig = rig_for(kit, "extend")
    requests = [Req(4, tokens=2), Req(2, tokens=0, length=3), Req(7, tokens=3)]
    rig.histories([requests[1]])
    call = rig.run(rig.batch("extend", requests), Weights(rig.taps()))
    judge_outputs(kit, call, "CS-EXTEND-06")
    judge_state(kit, call, rig, own="CS-EXTEND-01")


@over("layout", "dtype", "width", "index", quick=3)
@clauses("CS-CONV-01", "CS-CONV-05", "CS-CONV-07", "CS-CONV-08", "CS-VERIFY-02", "CS-VERIFY-03")
def test_verify(kit: Kit) -> None:
    """Outputs of each draft, the committed state as it was, and what a commit will need."""
    rig = rig_for(kit, "target_verify")
    _draw(rig, DRAFTS)
    call = rig.run(rig.batch("target_verify", DRAFTS), Weights(rig.taps()), tail=2)
    judge_outputs(kit, call, "CS-CONV-01", "CS-CONV-05")
    judge_outputs(kit, call, "CS-CONV-08")
    saved = "CS-VERIFY-02" if rig.shape.layout == "window" else "CS-VERIFY-03"
    judge_state(kit, call, rig, own=saved, drafts="CS-VERIFY-03", others="CS-CONV-07", padded="CS-CONV-05")
    if rig.shape.layout == "ring":
        for req in (r for r in DRAFTS if r.slot > 0):
            window = oracle.read_history(
                call.before[1 + req.slot].double().numpy(), "ring", rig.shape.width, req.length
            )
            kit.equal("CS-VERIFY-02", rig.window_of(req.slot, req.length), window, f"history of slot {req.slot}")


@over("layout", "dtype", "width", quick=2, layout=("window", "ring"))
@clauses("CS-VERIFY-04")
def test_a_verify_step_may_run_twice(kit: Kit) -> None:
    """The second run reads what the first one read."""
    rig = rig_for(kit, "target_verify")
    _draw(rig, DRAFTS)
    batch, weights = rig.batch("target_verify", DRAFTS), Weights(rig.taps())
    x = rig.whole_numbers(batch.num_tokens, 5)
    once = rig.run(batch, weights, x)
    twice = rig.run(batch, weights, x)
    kit.same_bits("CS-VERIFY-04", twice.after, once.after, "state after the second run")
    kit.same_bits("CS-VERIFY-04", twice.y, once.y, "output of the second run")
    if once.drafts_after is not None and twice.drafts_after is not None:
        kit.same_bits("CS-VERIFY-04", twice.drafts_after, once.drafts_after, "draft rows after the second run")


ACCEPTS = [
    Req(3, length=7, accept=0), Req(-1, accept=2), Req(1, length=2, accept=1), Req(6, length=4, accept=-1),
    Req(9, length=12, accept=3), Req(6, length=4, accept=2),
]  # fmt: skip
"""Every accepted count; a padded row (negative count) that names the slot of a live one."""


@over("layout", "dtype", "width", "index", quick=3)
@clauses("CS-DRAFT-01", "CS-DRAFT-02", "CS-CONV-05", "CS-CONV-07", "CS-CONV-08")
def test_draft_extend(kit: Kit) -> None:
    """Outputs of verify, then the slot is the window after the accepted tokens."""
    rig = rig_for(kit, "draft_extend")
    rig.histories([r for r in ACCEPTS if r.slot > 0])
    call = rig.run(rig.batch("draft_extend", ACCEPTS), Weights(rig.taps()), tail=2)
    judge_outputs(kit, call, "CS-DRAFT-01", "CS-DRAFT-02")
    judge_outputs(kit, call, "CS-CONV-08", "CS-CONV-05")
    judge_state(kit, call, rig, own="CS-DRAFT-01", others="CS-CONV-07", padded="CS-CONV-05")


@over("layout", "index", quick=3)
@clauses("CS-DRAFT-02")
def test_a_negative_count_protects_a_live_slot(kit: Kit) -> None:
    """A padded row of a draft batch names another request's slot: nothing of it changes, draft rows included."""
    rig = rig_for(kit, "draft_extend")
    requests = [Req(3, length=7, accept=-1), Req(5, length=6, accept=2), Req(9, length=2, accept=-7)]
    rig.histories(requests)
    call = rig.run(rig.batch("draft_extend", requests), Weights(rig.taps()))
    judge_outputs(kit, call, padded="CS-DRAFT-02")
    judge_state(kit, call, rig, others="CS-DRAFT-02", drafts="CS-DRAFT-02", padded="CS-DRAFT-02")


@over("layout", "index", quick=3)
@clauses("CS-DRAFT-03", "CS-CONV-03")
def test_a_fresh_draft_reads_zeros(kit: Kit) -> None:
    """`has_initial_state` false over a slot that holds NaN."""
    rig = rig_for(kit, "draft_extend")
    requests = [Req(3, length=7, accept=1, initial=False), Req(5, length=6, accept=2), Req(9, accept=0, initial=False)]
    rig.histories([requests[1]])
    call = rig.run(rig.batch("draft_extend", requests), Weights(rig.taps()))
    judge_outputs(kit, call, "CS-CONV-03")
    judge_state(kit, call, rig, own="CS-DRAFT-03")


@over("layout", "index", quick=3)
@clauses("CS-DRAFT-04", "CS-DRAFT-01")
def test_draft_extend_snapshots_the_boundary(kit: Kit) -> None:
    """The track slot gets the window at the last multiple of the interval, read before the slot is rewritten."""
    rig = rig_for(kit, "draft_extend", drafts=5, track_interval=3, virtual=True)
    requests = [
        Req(3, length=7, accept=4, track=8), Req(5, length=6, accept=2, track=2), Req(9, length=2, accept=5, track=1),
        Req(7, length=5, accept=1, track=10), Req(4, length=4, accept=-1, track=6),
    ]  # fmt: skip
    rig.histories(requests)
    call = rig.run(rig.batch("draft_extend", requests), Weights(rig.taps()))
    judge_state(kit, call, rig, own="CS-DRAFT-01", track="CS-DRAFT-04", others="CS-DRAFT-04")


PHASES = {"decode": DECODE, "extend": EXTEND, "draft_extend": ACCEPTS, "target_verify": DRAFTS}
_SMALL = ("float32", "bfloat16", "float16")
PAIRS = [(x, state) for x in _SMALL for state in _SMALL if x != state]


@cases("dtype, state", PAIRS, quick=2)
@over("layout", quick=1)
@clauses("CS-CONV-08", "CS-CONV-04")
def test_state_of_another_dtype(kit: Kit, dtype: str, state: str) -> None:
    """x in one dtype over state in another, exact with bit taps, in all phases."""
    for mode, requests in PHASES.items():
        rig = rig_for(kit, mode, dtype=dtype, state_dtype=state)
        rig.histories([r for r in requests if r.slot > 0 and r.length > 0])
        call = rig.run(rig.batch(mode, requests), Weights(rig.taps()))
        judge_outputs(kit, call, "CS-CONV-08")
        judge_state(kit, call, rig, own="CS-CONV-04")


@cases("mode", list(PHASES), quick=4)
@over("layout", "dtype", "width", quick=3)
@clauses("CS-CONV-04", "CS-CONV-01")
def test_state_rows_are_raw_inputs(kit: Kit, mode: str) -> None:
    """Bias and residual reach the output, not the state."""
    requests = PHASES[mode]
    rig = rig_for(kit, mode)
    rig.histories([r for r in requests if r.slot > 0 and r.length > 0])
    bias = np.arange(1.0, 6.0) * (32 if rig.small else 100000)
    call = rig.run(rig.batch(mode, requests), Weights(rig.taps(), bias, residual=True))
    judge_outputs(kit, call, "CS-CONV-01")
    judge_state(kit, call, rig, own="CS-CONV-04", drafts="CS-CONV-04")


@cases("mode", list(PHASES), quick=4)
@over("layout", "dtype", quick=1)
@clauses("CS-CONV-07", "CS-CONV-01")
def test_one_stream_of_one_layer(kit: Kit, mode: str) -> None:
    """A conv of one stream in one layer leaves the pool's other streams and layers alone."""
    requests = PHASES[mode]
    rig = rig_for(kit, mode, dims=(5, 3), layers=3, ssm=True)
    rig.histories([r for r in requests if r.slot > 0 and r.length > 0])
    call = rig.run(rig.batch(mode, requests), Weights(rig.taps(3)), name="v", layer=1)
    judge_outputs(kit, call, "CS-CONV-01")
    judge_state(kit, call, rig, others="CS-CONV-07", drafts="CS-CONV-07" if mode == "target_verify" else "")


@over("dtype", quick=3, dtype=("float32", "bfloat16", "float64"))
@clauses("CS-CONV-02")
def test_large_numbers_take_no_detour(kit: Kit) -> None:
    """131072 is beyond float16: a detour through it overflows."""
    rig = rig_for(kit, "extend")
    weights = Weights(np.tile((1.0, 2.0, 4.0, 8.0, 16.0)[: rig.shape.width], (5, 1)))
    x = np.full((3, 5), 131072.0)
    judge_outputs(kit, rig.run(rig.batch("extend", [Req(4, tokens=3)]), weights, x), "CS-CONV-02")
