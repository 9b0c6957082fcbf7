"""HWB102: A definition that asks for more than its kin."""

from __future__ import annotations

from ..bind import Mismatch
from .record import Rule, Way, listed

PAGE = """
A definition requires a parameter that a call omits, while another definition that the same call can reach does
without it (or the contract lets callers omit it).

Bad:

```python
class Base:
    def matmul(self, x): ...
    def run(self):
        self.matmul(x=1)

class Cpu(Base):
    def matmul(self, x, offset): ...  # HWB102: offset
```

Good:

```python
class Cpu(Base):
    def matmul(self, x, offset=None): ...
```
"""


def judges(mismatch: Mismatch, others_accept: bool) -> bool:
    return bool(mismatch.missing) and not mismatch.excess and others_accept


def said(mismatch: Mismatch) -> str:
    return f"requires {listed(mismatch.missing)}, which the call omits" if mismatch.missing else ""


def ways(names: tuple[str, ...], definition: str) -> tuple[Way, ...]:
    return Way("definition", f"give {listed(names)} a default in {definition}"), Way("call", "pass it")


RULE = Rule(
    "HWB102",
    "definition requires an extra parameter",
    "error",
    True,
    "contract and drift mode",
    PAGE,
    judges=judges,
    said=said,
    ways=ways,
)
