"""The conformance kit: what a vendor runs on its own backend to prove that it keeps the contract. The pytest plugin is
`plugin`, the tests by lane are `test_*`, the numbers they compare with come from `oracle`. Importing this package
imports neither torch nor pytest."""

from __future__ import annotations
