"""HWB107: A parameter that is taken and dropped; judged where definitions are held against a contract."""

from __future__ import annotations

from .record import Rule

PAGE = """
A definition takes a parameter of the contract and never looks at it. The call succeeds and silently does something
else.

Bad:

```python
class Npu:
    def update_mamba_state_after_mtp_verify(self, steps, req_pool_indices=None):
        return self.metadata.slots[steps]  # HWB107: 'req_pool_indices' is never read
```

Good:

```python
class Npu:
    def update_mamba_state_after_mtp_verify(self, steps, req_pool_indices=None):
        return self.mapping[req_pool_indices][steps]
```
"""


RULE = Rule("HWB107", "parameter accepted but never read", "warning", False, "contract mode only", PAGE)
