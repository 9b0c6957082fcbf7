"""HWB101: A definition without a keyword that its kin take."""

from __future__ import annotations

from ..bind import Mismatch
from .record import Rule, Way, listed

PAGE = """
A call passes a keyword that this definition does not take, while another definition that the same call can reach does
(or, in contract mode, the contract lists it). The call works until it meets this definition, usually on other
hardware, and ends there with TypeError.

Bad:

```python
class Base:
    def commit(self, steps, req_pool_indices=None): ...
    def step(self):
        self.commit(steps=1, req_pool_indices=2)

class Npu(Base):
    def commit(self, steps): ...  # HWB101: req_pool_indices
```

Good:

```python
class Npu(Base):
    def commit(self, steps, req_pool_indices=None): ...
```
"""


def judges(mismatch: Mismatch, others_accept: bool) -> bool:
    return bool(mismatch.unknown) and others_accept


def said(mismatch: Mismatch) -> str:
    return f"does not take {listed(mismatch.unknown)}" if mismatch.unknown else ""


def ways(names: tuple[str, ...], definition: str) -> tuple[Way, ...]:
    return Way("definition", f"add {listed(names)} to {definition}"), Way("call", "stop passing it")


RULE = Rule(
    "HWB101",
    "definition lacks a keyword",
    "error",
    True,
    "contract and drift mode",
    PAGE,
    judges=judges,
    said=said,
    ways=ways,
)
