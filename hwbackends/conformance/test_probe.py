"""What a backend says about itself before it is used."""

from __future__ import annotations

import torch

from hwbackends.conformance.kit import Kit
from hwbackends.conformance.marks import clauses


def _text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


@clauses("CS-PROBE-01")
def test_the_probe_answers_with_reasons(kit: Kit) -> None:
    """Three fields; a reason always; a hint when the answer is no."""
    kit.need(hooks=("probe",))
    for device in (None, str(kit.device), kit.device.type, "meta:7"):
        result = kit.hooks.probe(device)
        kit.check("CS-PROBE-01", isinstance(result.available, bool), f"probe({device!r}).available: {result!r}")
        kit.check("CS-PROBE-01", _text(result.reason), f"probe({device!r}) gives no reason: {result!r}")
        fine = result.available or _text(result.hint)
        kit.check("CS-PROBE-01", fine, f"probe({device!r}) says no without a hint: {result!r}")


@clauses("CS-PROBE-02")
def test_probing_twice_allocates_nothing(kit: Kit) -> None:
    """The same answer twice, and no device memory."""
    kit.need(hooks=("probe",))
    used = torch.cuda.memory_allocated() if kit.device.type == "cuda" else 0
    first, second = kit.hooks.probe(str(kit.device)), kit.hooks.probe(str(kit.device))
    kit.check("CS-PROBE-02", tuple(first) == tuple(second), f"{first!r}, then {second!r}")
    now = torch.cuda.memory_allocated() if kit.device.type == "cuda" else 0
    kit.check("CS-PROBE-02", now == used, f"probing allocated {now - used} bytes on the device")
