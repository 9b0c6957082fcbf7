"""HWB103: Positions that do not fit."""

from __future__ import annotations

from ..bind import Mismatch
from .record import Rule, Way, listed

PAGE = """
A call passes more positional arguments than a definition takes, fills one parameter twice, or, in contract mode, the
definition has the contract's parameters in another order while callers pass them by position.

Bad:

```python
class Base:
    def load(self, name, revision, patterns): ...
    def run(self):
        self.load('m', None, [])

class Quantized(Base):
    def load(self, name, revision): ...  # HWB103: patterns (3rd positional)
```

Good:

```python
class Quantized(Base):
    def load(self, name, revision, patterns): ...
```
"""


def judges(mismatch: Mismatch, others_accept: bool) -> bool:
    return mismatch.rejects


def said(mismatch: Mismatch) -> str:
    parts = []
    if mismatch.excess:
        given = mismatch.capacity + mismatch.excess
        parts.append(f"takes {mismatch.capacity} positional arguments, the call passes {given}")
    if mismatch.twice:
        parts.append(f"gets {listed(mismatch.twice)} both by position and by keyword")
    return " and ".join(parts)


def ways(names: tuple[str, ...], definition: str) -> tuple[Way, ...]:
    return (Way("definition", f"align the parameters of {definition} with the call"),)


RULE = Rule(
    "HWB103",
    "positional arguments do not fit",
    "error",
    True,
    "contract and drift mode",
    PAGE,
    judges=judges,
    said=said,
    ways=ways,
)
