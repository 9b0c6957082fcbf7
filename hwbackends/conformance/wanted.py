"""The tests that a backend's claims ask for, by id: what a run must hold to be whole."""

from __future__ import annotations

import importlib

from hwbackends.conformance.inventory import shipped_tests
from hwbackends.conformance.marks import items
from hwbackends.conformance.plugin import PACKAGE
from hwbackends.contract.claims import Claims


def wanted_ids(claims: Claims, seed: int) -> set[str]:
    """Ids as a report has them: `conv/test_file.py::test_name[case]`."""
    wanted = set()
    for name in shipped_tests():
        file, _, function = name.partition("::")
        module = importlib.import_module(f"{PACKAGE}.{file.removesuffix('.py').replace('/', '.')}")
        wanted |= {f"{name}[{item.id or 'once'}]" for item in items(getattr(module, function), claims, seed)}
    return wanted
