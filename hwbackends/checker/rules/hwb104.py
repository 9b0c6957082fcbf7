"""HWB104: A default that is not the contract's; judged where definitions are held against a contract."""

from __future__ import annotations

from .record import Rule

PAGE = """
A parameter has another default than the contract writes, so that the same call means different things on different
backends.

Bad:

```python
# the contract writes default: false
class Npu:
    def init_forward_metadata_out_graph(self, forward_batch, in_capture=True): ...  # HWB104
```

Good:

```python
class Npu:
    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False): ...
```
"""


RULE = Rule("HWB104", "default differs from the contract", "warning", True, "contract mode only", PAGE)
