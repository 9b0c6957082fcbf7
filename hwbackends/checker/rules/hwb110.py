"""HWB110: A definition that the contract does not allow; judged where definitions are held against a contract."""

from __future__ import annotations

from .record import Rule

PAGE = """
An implementation would hide a drift, or is none: a default where the contract has none (an argument that was left out
is not noticed), *args or **kwargs, a coroutine or generator, a name that is bound to no function, a function with a
hook's name and without the mark, a marked one that no hook is called. The registry refuses all of these when it binds
the plugin. Only for contracts that name every parameter, as our own do; definitions of an engine's hooks need only
accept what their callers pass.

Bad:

```python
# the contract: conv_decode(x, weight, bias, state, metadata, ...)
@hookimpl
def conv_decode(x, weight, bias=None, state=None, metadata=None): ...  # HWB110: hides a gap
```

Good:

```python
@hookimpl
def conv_decode(x, weight, bias, state, metadata): ...
```
"""

RULE = Rule("HWB110", "definition that the contract does not allow", "error", True, "contract mode only", PAGE)
