"""Which tier serves which hook: `torch` (the ops of `hwbackends.torch_ops`, which torch_npu runs) or `triton` (the
kernels of this package). Decided by what is installed, or by HWBACKENDS_ASCEND_TIER. Imports no torch by itself."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Literal, get_args

from hwbackends.errors import UnsupportedError

ENVIRONMENT = "HWBACKENDS_ASCEND_TIER"
Tier = Literal["torch", "triton"]
TIERS: tuple[Tier, ...] = get_args(Tier)

TRITON_HOOKS = (
    "prepare_decode_metadata",
    "prepare_extend_metadata",
    "prepare_target_verify_metadata",
    "prepare_draft_extend_metadata",
    "conv_decode",
    "conv_extend",
    "conv_target_verify",
    "conv_draft_extend",
    "update_mamba_state_after_mtp_verify",
)
"""Hooks that have kernels; the others are served by torch ops in either tier."""
TORCH_HOOKS = (
    "clear_slots",
    "copy_slots",
    "ssm_decode",
    "ssm_extend",
    "ssm_target_verify",
    "ssm_draft_extend",
    "materialize_slots",
    "fused_decode_add_rmsnorm",
    "fused_target_verify_add_rmsnorm",
)


def chosen() -> Tier:
    """The tier of HWBACKENDS_ASCEND_TIER; without it `triton` where triton-ascend, and it alone, is installed.

    Raises:
        UnsupportedError: the variable names no tier.
    """
    wanted = os.environ.get(ENVIRONMENT, "")
    if not wanted:
        return "torch" if triton_ascend() is None or clash() else "triton"
    for tier in TIERS:
        if wanted == tier:
            return tier
    raise UnsupportedError("ascend", ENVIRONMENT, repr(wanted), f"one of {', '.join(TIERS)}, or unset")


def triton_ascend() -> str | None:
    """Version of the installed triton-ascend, or None; its import name `triton` is shared with another project."""
    return version_of("triton-ascend")


def clash() -> bool:
    """Whether triton and triton-ascend are both installed: they overwrite each other's files."""
    return triton_ascend() is not None and version_of("triton") is not None


def version_of(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def hook_origins() -> dict[str, str]:
    """Tier that serves each hook, for the doctor."""
    return {**dict.fromkeys(TRITON_HOOKS, chosen()), **dict.fromkeys(TORCH_HOOKS, "torch")}


def modules() -> tuple[ModuleType, ModuleType, ModuleType]:
    """The modules of the chosen tier that hold the prepare hooks, the conv hooks and the commit."""
    home = "hwbackends.ascend" if chosen() == "triton" else "hwbackends.torch_ops"
    metadata, conv, commit = (import_module(f"{home}.{name}") for name in ("metadata", "conv", "commit"))
    return metadata, conv, commit
