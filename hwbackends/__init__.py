"""The public names of hwbackends, re-exported lazily: importing the package imports neither torch nor a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwbackends.lazy import exports

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


__getattr__ = exports(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
