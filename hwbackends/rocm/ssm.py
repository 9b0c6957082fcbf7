"""The SSM hooks, over the launchers that GPU backends share."""

from __future__ import annotations

from hwbackends.rocm.traits import traits_of
from hwbackends.triton_ops import ssm_hooks

ssm_decode = ssm_hooks.of_phase("ssm_decode", traits_of)
ssm_extend = ssm_hooks.of_phase("ssm_extend", traits_of)
ssm_draft_extend = ssm_hooks.of_phase("ssm_draft_extend", traits_of)
ssm_target_verify = ssm_hooks.of_verify(traits_of)
materialize_slots = ssm_hooks.of_moves(traits_of)
