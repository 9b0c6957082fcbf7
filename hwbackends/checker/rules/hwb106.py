"""HWB106: A parameter that everybody requires and the call leaves out."""

from __future__ import annotations

from ..bind import Mismatch
from . import hwb102
from .record import Rule, Way, listed

PAGE = """
Every definition that the call can reach requires a parameter that the call does not pass (or the contract requires
it).

Bad:

```python
def gather(batch, tp_size, cp_size): ...

gather(batch=1, tp_size=2)  # HWB106: cp_size
```

Good:

```python
gather(batch=1, tp_size=2, cp_size=1)
```
"""


def judges(mismatch: Mismatch, others_accept: bool) -> bool:
    return bool(mismatch.missing) and not mismatch.excess and not others_accept


def ways(names: tuple[str, ...], definition: str) -> tuple[Way, ...]:
    return (Way("call", f"pass {listed(names)} in the call"),)


RULE = Rule(
    "HWB106",
    "call omits a required parameter",
    "error",
    True,
    "contract and drift mode",
    PAGE,
    judges=judges,
    ways=ways,
    said=hwb102.said,
)
