"""The public names of hwbackends, re-exported lazily: importing the package imports neither torch nor a backend."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hwbackends.errors import HwBackendsError as HwBackendsError
    from hwbackends.registry.binding import Backend as Backend
    from hwbackends.registry.loading import backends as backends
    from hwbackends.registry.loading import load as load

__version__ = "0.1.0"

_HOMES = {
    "Backend": "hwbackends.registry.binding",
    "HwBackendsError": "hwbackends.errors",
    "backends": "hwbackends.registry.loading",
    "load": "hwbackends.registry.loading",
}

__all__ = ["Backend", "HwBackendsError", "__version__", "backends", "load"]


def __getattr__(name: str) -> Any:
    """Import the module that holds `name` on first use (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'hwbackends' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
