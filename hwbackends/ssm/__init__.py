"""The SSM state family: Gated DeltaNet, KDA and Mamba2. Kinds, layouts and state; importing this package alone imports
no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwbackends.lazy import exports

if TYPE_CHECKING:
    from hwbackends.ssm.layouts import SSMKind as SSMKind
    from hwbackends.ssm.layouts import SSMLayout as SSMLayout
    from hwbackends.ssm.state import SSMState as SSMState
    from hwbackends.ssm.state import SSMStorage as SSMStorage
    from hwbackends.ssm.state import SSMStream as SSMStream

_HOMES = {
    "SSMKind": "hwbackends.ssm.layouts",
    "SSMLayout": "hwbackends.ssm.layouts",
    "SSMState": "hwbackends.ssm.state",
    "SSMStorage": "hwbackends.ssm.state",
    "SSMStream": "hwbackends.ssm.state",
}
__all__ = list(_HOMES)
__getattr__ = exports(__name__, _HOMES)
