"""The plugin module of the `cuda` backend: its hooks under the contract's names."""

from __future__ import annotations

from hwbackends.contract.hookspecs import hookimpl
from hwbackends.cuda import commit, conv, epilogue, metadata, ssm
from hwbackends.cuda import probe as device_probe

probe = hookimpl(device_probe.probe)
prepare_decode_metadata = hookimpl(metadata.prepare_decode_metadata)
prepare_extend_metadata = hookimpl(metadata.prepare_extend_metadata)
prepare_target_verify_metadata = hookimpl(metadata.prepare_target_verify_metadata)
prepare_draft_extend_metadata = hookimpl(metadata.prepare_draft_extend_metadata)
conv_decode = hookimpl(conv.conv_decode)
conv_extend = hookimpl(conv.conv_extend)
conv_target_verify = hookimpl(conv.conv_target_verify)
conv_draft_extend = hookimpl(conv.conv_draft_extend)
update_mamba_state_after_mtp_verify = hookimpl(commit.update_mamba_state_after_mtp_verify)
clear_slots = hookimpl(commit.clear_slots)
copy_slots = hookimpl(commit.copy_slots)
ssm_decode = hookimpl(ssm.ssm_decode)
ssm_extend = hookimpl(ssm.ssm_extend)
ssm_target_verify = hookimpl(ssm.ssm_target_verify)
ssm_draft_extend = hookimpl(ssm.ssm_draft_extend)
materialize_slots = hookimpl(ssm.materialize_slots)
fused_decode_add_rmsnorm = hookimpl(epilogue.fused_decode_add_rmsnorm)
fused_target_verify_add_rmsnorm = hookimpl(epilogue.fused_target_verify_add_rmsnorm)
