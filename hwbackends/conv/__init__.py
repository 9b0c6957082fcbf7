"""The conv state family: layouts, state, and the layers that engines build models from. Importing this package alone
imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwbackends.lazy import exports

if TYPE_CHECKING:
    from hwbackends.conv.layers import ShortConvolution as ShortConvolution
    from hwbackends.conv.layouts import Layout as Layout
    from hwbackends.conv.state import ConvState as ConvState
    from hwbackends.conv.state import ConvStream as ConvStream

_HOMES = {
    "ConvState": "hwbackends.conv.state",
    "ConvStream": "hwbackends.conv.state",
    "Layout": "hwbackends.conv.layouts",
    "ShortConvolution": "hwbackends.conv.layers",
}
__all__ = list(_HOMES)
__getattr__ = exports(__name__, _HOMES)
