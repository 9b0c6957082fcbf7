"""How the attention layers of a stock model run over pages: an attention function of Transformers' interface that hands
each request's queries, with the keys and values of its own pages, to the function that the model chose (`sdpa`,
`eager`), or to torch's `varlen_attn`. No attention of our own."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

INTERFACE = "hwbackends_pages"
"""Name of our attention function among those of Transformers."""

Attention = Callable[..., tuple[Tensor, Any]]


@runtime_checkable
class PageOwner(Protocol):
    """A cache whose keys and values lie in pages."""

    def attend(
        self, stock: Attention, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attention of this step's queries [1, heads, T, head_dim]; returns [1, T, heads, head_dim]."""
        ...


class PagedConfig:
    """A config that names our attention function, and is the model's own in everything else."""

    _attn_implementation = INTERFACE

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class _Thread(threading.local):
    owner: PageOwner | None = None


_THREAD = _Thread()


def active() -> PageOwner | None:
    """The cache whose step runs in this thread."""
    return _THREAD.owner


@contextlib.contextmanager
def attending(owner: PageOwner) -> Iterator[None]:
    """Attention layers of this thread attend over the pages of `owner`."""
    _register()
    before, _THREAD.owner = _THREAD.owner, owner
    try:
        yield
    finally:
        _THREAD.owner = before


def _register() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if INTERFACE not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(INTERFACE, _attention)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function that attention layers call; masks are those of the step."""
    owner = active()
    assert owner is not None, "paged attention outside of a step"
    return owner.attend(_stock(module), module, query, key, value, **kwargs)


def _stock(module: nn.Module) -> Attention:
    """The attention function that the model's own config names."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager: Attention = sys.modules[type(module).__mro__[1].__module__].eager_attention_forward
    kind = module.__dict__["config"]._attn_implementation
    found: Attention = ALL_ATTENTION_FUNCTIONS.get_interface(kind, eager)
    return found


PAGE_OF_VARLEN = 256
"""Tokens per page that torch's flash attention wants in a block table."""


def varlen_serves(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Why torch's `varlen_attn` cannot read pages here; empty where it can. It is tried, not looked up."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return f"{dtype} on {device.type}: it takes 16-bit floats on a GPU"
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has none"
    if not {"block_table", "seqused_k", "window_size"} <= set(inspect.signature(varlen_attn).parameters):
        return f"that of torch {torch.__version__} takes no block table"
    pages = torch.zeros(2, PAGE_OF_VARLEN, 1, head_dim, dtype=dtype, device=device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    try:
        found: Any = varlen_attn(
            torch.zeros(1, 2, head_dim, dtype=dtype, device=device),
            pages,
            pages,
            torch.arange(2, dtype=torch.int32, device=device),
            None,
            1,
            PAGE_OF_VARLEN,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=one,
            block_table=one[None],
        )
        return "" if found.shape == (1, 2, head_dim) else f"it gave {tuple(found.shape)}"
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error).splitlines()[0]
