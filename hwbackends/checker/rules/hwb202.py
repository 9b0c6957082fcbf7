"""HWB202: A fault of the checker's own."""

from __future__ import annotations

from .record import Rule

PAGE = """
The checker itself failed on one file or call. Everything else was checked and is reported; here the report is
incomplete. The exit status is 3. It is shown whatever is selected, and neither a comment nor a baseline hides it.

Bad:

```python
# HWB202: internal error while checking a call: IndexError: ...
```

Good:

```python
# report the line, exclude the file meanwhile
```
"""


RULE = Rule("HWB202", "internal error of the checker", "error", True, "contract and drift mode", PAGE)
