"""For which vendor the installed torch was built, and which triton there is, read from their source: nothing of them is
imported."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Build(NamedTuple):
    """Version of the installed torch, and of CUDA and of ROCm (`hip`), as far as it was built for them."""

    version: str
    cuda: str | None
    hip: str | None

    def __str__(self) -> str:
        """In words: `torch 2.13.0+rocm7.1, built for ROCm 7.1`."""
        kinds = {"CUDA": self.cuda, "ROCm": self.hip}
        found = [f"{name} {version}" for name, version in kinds.items() if version]
        return f"torch {self.version}, built for {found[0] if found else 'the CPU alone'}"


def torch_build() -> Build:
    """What `torch/version.py` of the installed torch says."""
    spec = find_spec("torch")
    path = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else Path()
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = dict(re.findall(r"^(__version__|cuda|hip)\b[^=\n]*= *'([^']+)'", text, flags=re.MULTILINE))
    return Build(found.get("__version__", "of an unknown version"), found.get("cuda"), found.get("hip"))


def triton_version() -> str:
    """What `triton/__init__.py` of the installed triton says, `?` where there is none."""
    spec = find_spec("triton")
    path = Path(spec.origin) if spec is not None and spec.origin else Path()
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = re.search(r"^__version__ *= *['\"]([^'\"]+)", text, flags=re.MULTILINE)
    return found[1] if found else "?"
