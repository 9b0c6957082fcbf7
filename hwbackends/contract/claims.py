"""What a backend's manifest claims in `capabilities`, and whether a need is inside it. Selection, binding and the
sidecar go by the same claims that the conformance kit judges. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hwbackends.contract.document import nearest
from hwbackends.contract.model import Contracts
from hwbackends.errors import ContractError

SSM_KINDS = ("gdn", "kda", "mamba2")
SSM_LAYOUTS = ("intermediate", "ring")
DTYPES = ("float16", "bfloat16", "float32", "float64")
LAYOUTS = ("window", "ring", "lazy")
WIDTHS = (2, 3, 4, 5)
"""Widths that the kit tests; `any` claims all of them."""
ALL = "all"
_KEYS = (
    "hooks", "layouts", "dtypes", "mixed_dtypes", "widths", "activations", "index_dtypes", "graphs", "asynchronous",
    "max_requests", "large_offsets", "ssm_kinds", "ssm_layouts",
)  # fmt: skip

NEEDS = (
    "hooks", "layout", "dtype", "state_dtype", "width", "activation", "index_dtype", "graphs", "asynchronous",
    "requests", "ssm_kind", "ssm_layout",
)  # fmt: skip
"""What can be asked of a backend's claims."""
_FLAGS = {"graphs": "graph capture", "asynchronous": "hooks that do not wait for the device"}


@dataclass(frozen=True, slots=True)
class Claims:
    """The section `capabilities` of a manifest. What it leaves out is claimed in full.

    Attributes:
        hooks: hooks of the contract that the backend has.
        layouts: of window, ring, lazy.
        dtypes: of x, weights and output; the state has the same one.
        mixed_dtypes: whether x and state may differ in dtype (at most 32 bits each).
        widths: kernel widths.
        activations: besides none.
        index_dtypes: of index tensors.
        graphs: whether recordable hooks can be captured in a graph.
        asynchronous: whether no hook waits for the device; false for backends that compute on the host.
        max_requests: most requests of one step, None for any.
        large_offsets: element offsets past 2**31 are exact; false: refused by name.
        ssm_kinds: of gdn, kda, mamba2. SSM hooks take `dtypes` but float64, for the state too.
        ssm_layouts: of intermediate, ring.
    """

    hooks: tuple[str, ...]
    layouts: tuple[str, ...] = LAYOUTS
    dtypes: tuple[str, ...] = DTYPES
    mixed_dtypes: bool = True
    widths: tuple[int, ...] = WIDTHS
    activations: tuple[str, ...] = ("silu",)
    index_dtypes: tuple[str, ...] = ("int32", "int64")
    graphs: bool = True
    asynchronous: bool = True
    max_requests: int | None = None
    large_offsets: bool = True
    ssm_kinds: tuple[str, ...] = SSM_KINDS
    ssm_layouts: tuple[str, ...] = SSM_LAYOUTS

    def missing(self, **needs: Any) -> str:
        """The first need that is not claimed, in words; empty if all are.

        Args:
            needs: hooks, layout, dtype, state_dtype, width, activation, index_dtype, graphs, asynchronous, requests,
                ssm_kind, ssm_layout. A dtype is its name, or torch's.

        Raises:
            ValueError: a need of another name.
        """
        for name, value in needs.items():
            reason = "" if value is None else self._missing(name, value)
            if reason:
                return reason
        dtype, state = needs.get("dtype"), needs.get("state_dtype")
        if dtype and state and dtype != state and not self.mixed_dtypes:
            return f"{dtype} x over {state} state"
        return ""

    def _missing(self, name: str, value: Any) -> str:
        if name not in NEEDS:
            raise ValueError(f"needs: unknown {name!r}{nearest(name, NEEDS)}; one of {', '.join(NEEDS)}")
        known: dict[str, tuple[str, Sequence[Any]]] = {
            "layout": ("layout", self.layouts), "dtype": ("dtype", self.dtypes), "state_dtype": ("dtype", self.dtypes),
            "width": ("width", self.widths), "activation": ("activation", self.activations),
            "index_dtype": ("index dtype", self.index_dtypes), "ssm_kind": ("SSM kind", self.ssm_kinds),
            "ssm_layout": ("SSM layout", self.ssm_layouts),
        }  # fmt: skip
        if name == "hooks":
            return next((f"hook {hook}" for hook in value if hook not in self.hooks), "")
        if name in _FLAGS:
            return _FLAGS[name] if value and not getattr(self, name) else ""
        if name == "requests":
            beyond = self.max_requests is not None and value > self.max_requests
            return f"{value} requests in a step" if beyond else ""
        word, claimed = known[name]
        value = str(value).removeprefix("torch.") if name.endswith("dtype") else value
        return "" if value in claimed else f"{word} {value}"


def read_claims(capabilities: Mapping[str, Any], contracts: Contracts, present: Sequence[str]) -> Claims:
    """The claims of a manifest's `capabilities`.

    Args:
        capabilities: the mapping as YAML gives it.
        contracts: those that the manifest names.
        present: hooks that the plugin implements; an optional hook that is not among them is not claimed by `all`.

    Raises:
        ContractError: an unknown key, hook, layout or dtype, or a value of another kind.
    """
    for key in capabilities:
        if key not in _KEYS:
            raise ContractError(f"capabilities: unknown key {key!r}{nearest(str(key), _KEYS)}")
    required = tuple(name for name, hook in contracts.hooks.items() if not hook.optional or name in present)
    return Claims(
        hooks=_choice(capabilities, "hooks", required, tuple(contracts.hooks)),
        layouts=_choice(capabilities, "layouts", LAYOUTS),
        dtypes=_choice(capabilities, "dtypes", DTYPES),
        mixed_dtypes=_flag(capabilities, "mixed_dtypes"),
        widths=_widths(capabilities),
        activations=_choice(capabilities, "activations", ("silu",)),
        index_dtypes=_choice(capabilities, "index_dtypes", ("int32", "int64")),
        graphs=_flag(capabilities, "graphs"),
        asynchronous=_flag(capabilities, "asynchronous"),
        max_requests=_count(capabilities, "max_requests"),
        large_offsets=_flag(capabilities, "large_offsets"),
        ssm_kinds=_choice(capabilities, "ssm_kinds", SSM_KINDS),
        ssm_layouts=_choice(capabilities, "ssm_layouts", SSM_LAYOUTS),
    )


def _choice(
    capabilities: Mapping[str, Any], key: str, default: tuple[str, ...], known: tuple[str, ...] | None = None
) -> tuple[str, ...]:
    value = capabilities.get(key, ALL)
    if value == ALL:
        return default
    if not isinstance(value, list):
        raise ContractError(f"capabilities.{key}: got {value!r}, wanted a list or {ALL!r}")
    for item in value:
        if item not in (known or default):
            raise ContractError(f"capabilities.{key}: unknown {item!r}{nearest(str(item), known or default)}")
    return tuple(value)


def _widths(capabilities: Mapping[str, Any]) -> tuple[int, ...]:
    value = capabilities.get("widths", ALL)
    if value == ALL:
        return WIDTHS
    if not isinstance(value, list) or not all(isinstance(width, int) and width >= 2 for width in value):
        raise ContractError(f"capabilities.widths: got {value!r}, wanted a list of whole numbers from 2, or {ALL!r}")
    return tuple(value)


def _flag(capabilities: Mapping[str, Any], key: str) -> bool:
    value = capabilities.get(key, True)
    if not isinstance(value, bool):
        raise ContractError(f"capabilities.{key}: got {value!r}, wanted true or false")
    return value


def _count(capabilities: Mapping[str, Any], key: str) -> int | None:
    value = capabilities.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ContractError(f"capabilities.{key}: got {value!r}, wanted a whole number from 1")
    return value
