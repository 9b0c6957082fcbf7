"""A proof for each mutant: a call that the contract allows, with the same input for the reference and the mutant, whose
results differ. `python -m tests.conformance.proofs` finds one and keeps it in `proofs.json`: the test of the kit that
makes the call, its number in the test, and the clauses that the test turns red. Everything runs in this process, over
the same wire that the kit uses; which is quick, and no judge, because the mutants are imported here."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from hwbackends.conformance.inventory import shipped_tests
from hwbackends.conformance.kit import Kit, Outcome, run
from hwbackends.conformance.marks import Item, items
from hwbackends.contract.reader import installed
from hwbackends.reference import plugin as reference
from hwbackends.remote.client import Client
from hwbackends.remote.serve import Memory, Server
from hwbackends.remote.wire import Answer, Request
from tests.conformance import mutants

KEPT = Path(__file__).parent / "proofs.json"
EARLY = ("sizes", "memory", "pairs", "exact", "metadata", "commit", "errors", "limits")
"""Files whose tests see most faults with the smallest inputs."""


class LocalClient(Client):
    """A client whose hooks run in this process, over requests and answers as they would travel."""

    def __init__(self, hooks: Mapping[str, Any], traced: bool = False) -> None:
        super().__init__("local", "cpu")
        self.traced = traced
        self.server = Server.__new__(Server)
        self.server.plugin = SimpleNamespace(hooks=hooks, emulated=False, device=torch.device("cpu"))  # type: ignore[assignment]
        self.server.memory = Memory(torch.device("cpu"), False)
        self.server.graphs, self.server.last = {}, None
        self.trace: list[tuple[str, str]] = []

    def start(self) -> dict[str, Any]:
        """Describe the backend; nothing is started."""
        contracts = {name: contract.version for name, contract in installed().items()}
        present = list(installed().hooks)
        return {
            "device": "cpu",
            "emulated": False,
            "capabilities": {},
            "contracts": contracts,
            "hooks_present": present,
        }

    def _send(self, request: Request) -> None:
        traced = self.traced and request.kind == "call"
        before = _digest(request.calls, self._shadow) if traced else ""
        answer = self._answer = self.server.handle(request)
        if traced:
            error = answer.error and answer.error[0]
            after = _digest((answer.result, error, sorted(answer.notes)), {**answer.whole, **answer.contents})
            self.trace.append((before, after))

    def _receive(self, what: str, limit: float) -> Answer:
        return self._answer

    def stop(self) -> None:
        """A fresh process would know nothing."""
        self._clear()


def _digest(values: Any, contents: Mapping[int, bytes]) -> str:
    found = hashlib.blake2b(repr(values).encode(), digest_size=8)
    for token, data in sorted(contents.items()):
        found.update(token.to_bytes(8, "little"))
        found.update(data)
    return found.hexdigest()


@dataclass(frozen=True)
class Case:
    """One item of the kit."""

    id: str
    test: Any
    item: Item

    def run(self, hooks: Mapping[str, Any], traced: bool = False) -> tuple[Outcome, list[tuple[str, str]]]:
        """Run it on some hooks; the outcome, and, if it is asked for, a digest of what went in and came out of each
        call."""
        client = LocalClient({**{name: getattr(reference, name) for name in mutants.HOOKS}, **hooks}, traced)
        outcome = run(Kit(client), self.id, self.test, self.item, 0)
        return outcome, client.trace


def kit_cases() -> list[Case]:
    """The quick lane, the files that see most first; behind it, what only the full lane has of SSM state."""
    claims = Kit(LocalClient({})).claims
    found = []
    for name in shipped_tests():
        file, _, function = name.partition("::")
        module = importlib.import_module(f"hwbackends.conformance.{file.removesuffix('.py').replace('/', '.')}")
        test = getattr(module, function)
        kept = [i for i in items(test, claims) if i.quick or file.startswith("ssm/")]
        found += [Case(f"{name}[{i.id or 'once'}]", test, i) for i in kept]
    return sorted(found, key=lambda case: (not case.item.quick, _rank(case.id), case.id))


def _rank(test: str) -> int:
    return next((place for place, name in enumerate(EARLY) if f"test_{name}.py" in test), len(EARLY))


def first_difference(mine: list[tuple[str, str]], theirs: list[tuple[str, str]]) -> int | None:
    """Number of the first call with the same input and another result; None if there is none."""
    for number, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if one[0] != other[0]:
            return None
        if one[1] != other[1]:
            return number
    return None


def prove(name: str, cases: Iterable[Case], known: dict[str, Outcome]) -> dict[str, Any]:
    """The first case that turns red on a mutant, and the call in it that differs."""
    changed = mutants.all_mutants()[name]
    hooks = changed()
    for case in cases:
        if case.id not in known:
            known[case.id] = case.run({})[0]
        if not set(known[case.id].hooks) & set(hooks):
            continue
        outcome, _ = case.run(hooks)
        if outcome.outcome == "failed":
            red = sorted(clause for clause, holds in outcome.clauses.items() if not holds)
            call = first_difference(case.run(changed(), True)[1], case.run({}, True)[1])
            return {"test": case.id, "red": red, "call": call, "says": outcome.reason.splitlines()[0][:160]}
    return {"test": "", "red": [], "call": None, "says": "no test turned red"}


OTHERS = ("crashes", "hangs")
"""Their proof is a process that is lost; the run of the kit has it."""


def main() -> None:
    cases, known = kit_cases(), {}  # type: ignore[var-annotated]
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for name in sys.argv[1:] or mutants.all_mutants():
        if name in OTHERS:
            continue
        before = kept.pop(name, {}).get("test")
        found = prove(name, sorted(cases, key=lambda case: case.id != before), known)
        print(name, found["test"] or "NONE", " ".join(found["red"]), found["call"], flush=True)
        if found["test"]:
            kept[name] = found
        KEPT.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
