"""What a backend says about itself before it is used."""

from __future__ import annotations

from hwbackends.conformance.kit import Kit
from hwbackends.conformance.marks import clauses


def _text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


@clauses("CS-PROBE-01")
def test_the_probe_answers_with_reasons(kit: Kit) -> None:
    """Three fields; a reason always; a hint when the answer is no."""
    kit.need(hooks=("probe",))
    for device in (None, kit.target, kit.target.partition(":")[0], "meta:7"):
        result = kit.hooks.probe(device)
        shaped = isinstance(result, tuple) and len(result) == 3 and isinstance(result[0], bool)
        if not kit.check("CS-PROBE-01", shaped, f"probe({device!r}) gives {result!r}, no ProbeResult"):
            continue
        available, reason, hint = result
        kit.check("CS-PROBE-01", _text(reason), f"probe({device!r}) gives no reason: {result!r}")
        kit.check("CS-PROBE-01", available or _text(hint), f"probe({device!r}) says no without a hint: {result!r}")


@clauses("CS-PROBE-02")
def test_probing_twice_allocates_nothing(kit: Kit) -> None:
    """The same answer twice, and no memory that stays."""
    kit.need(hooks=("probe",))
    first, second = kit.hooks.probe(kit.target), kit.hooks.probe(kit.target)
    kit.check("CS-PROBE-02", first == second, f"{first!r}, then {second!r}")
    growth = kit.repeat([("probe", (kit.target,), {})], 20)
    kit.check("CS-PROBE-02", growth.get("device", 0) == 0, f"probing allocates on the device: {growth}")
