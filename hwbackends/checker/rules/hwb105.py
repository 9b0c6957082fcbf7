"""HWB105: A keyword that nobody takes."""

from __future__ import annotations

from ..bind import Mismatch
from . import hwb101
from .record import Rule, Way, listed

PAGE = """
No definition that the call can reach takes the keyword (or the contract does not list it).

Bad:

```python
def fuse(x, gate): ...

fuse(1, gate=2, quant=3)  # HWB105: quant
```

Good:

```python
fuse(1, gate=2)
```
"""


def judges(mismatch: Mismatch, others_accept: bool) -> bool:
    return bool(mismatch.unknown) and not others_accept


def ways(names: tuple[str, ...], definition: str) -> tuple[Way, ...]:
    return Way("call", f"remove {listed(names)} from the call"), Way("definition", f"add it to {definition}")


RULE = Rule(
    "HWB105",
    "call passes an unknown keyword",
    "error",
    True,
    "contract and drift mode",
    PAGE,
    judges=judges,
    ways=ways,
    said=hwb101.said,
)
