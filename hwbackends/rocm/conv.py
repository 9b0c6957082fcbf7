"""The conv hooks, over the launchers that GPU backends share."""

from __future__ import annotations

from hwbackends.rocm.traits import traits_of
from hwbackends.triton_ops import conv_hooks

conv_decode = conv_hooks.of_phase("conv_decode", traits_of)
conv_extend = conv_hooks.of_phase("conv_extend", traits_of)
conv_target_verify = conv_hooks.of_phase("conv_target_verify", traits_of)
conv_draft_extend = conv_hooks.of_phase("conv_draft_extend", traits_of)
