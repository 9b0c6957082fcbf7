"""HWB108: A keyword that is lost in a catch-all."""

from __future__ import annotations

from ..bind import Mismatch
from .record import Rule, Way, listed

PAGE = """
A definition takes *args or **kwargs and never looks at them. In drift mode: a call passes a keyword that ends there,
while another definition, otherwise alike, names and reads it: no TypeError, but the argument is lost. In contract
mode: every future parameter of the hook would be lost.

Bad:

```python
class Base:
    def replay(self, bs, rows, track=None): return bs, rows, track
    def run(self):
        self.replay(1, 2, track=3)

class Npu(Base):
    def replay(self, bs, rows, **kwargs): return bs, rows  # HWB108: track
```

Good:

```python
class Npu(Base):
    def replay(self, bs, rows, track=None): return bs, rows, track
```
"""


def judges(mismatch: Mismatch, others_accept: bool) -> bool:
    return bool(mismatch.swallowed)


def said(mismatch: Mismatch) -> str:
    return f"loses {listed(mismatch.swallowed)} in a **kwargs that nothing reads" if mismatch.swallowed else ""


def ways(names: tuple[str, ...], definition: str) -> tuple[Way, ...]:
    return (Way("definition", f"name {listed(names)} in {definition}"),)


RULE = Rule(
    "HWB108",
    "catch-all never read",
    "warning",
    True,
    "contract and drift mode",
    PAGE,
    judges=judges,
    said=said,
    ways=ways,
)
