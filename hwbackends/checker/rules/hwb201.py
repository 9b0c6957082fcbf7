"""HWB201: A file that was not checked."""

from __future__ import annotations

import os

from ..findings import Finding, Place
from ..model import Problem
from .record import Rule

PAGE = """
A file or folder of the tree was not checked: syntax error, encoding, size, nesting so deep that the parser gives up,
a link out of the tree or in a circle, or no permission. The rest of the tree is still checked. It cannot be ignored
inline; exclude the file if it is meant to be so.

Bad:

```python
def broken(:  # HWB201: syntax error
```

Good:

```python
def repaired(): ...
```
"""


def finding(problem: Problem) -> Finding:
    """What is said of a file that was not checked."""
    message = f"{os.path.basename(problem.path)}: {problem.reason}. Fix: make it readable, or exclude it."
    return Finding("HWB201", "error", "high", message, (), Place(problem.path, problem.line, ""), None)


RULE = Rule("HWB201", "file not readable", "error", True, "contract and drift mode", PAGE)
