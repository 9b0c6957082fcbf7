"""The fused epilogue, over the launchers that GPU backends share."""

from __future__ import annotations

from hwbackends.cuda.traits import traits_of
from hwbackends.triton_ops import conv_hooks

fused_decode_add_rmsnorm = conv_hooks.of_epilogue("fused_decode_add_rmsnorm", traits_of)
fused_target_verify_add_rmsnorm = conv_hooks.of_epilogue("fused_target_verify_add_rmsnorm", traits_of)
