"""Chips that a GPU backend does not serve: every launch for one is refused by name before triton is asked."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton ships for Linux only")

from hwbackends.cuda import traits as cuda_traits
from hwbackends.errors import UnsupportedError
from hwbackends.rocm import traits as rocm_traits
from hwbackends.triton_ops.launch import Launch

KERNEL = SimpleNamespace(__name__="conv_decode_kernel")


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What torch says of the device, on either vendor's build."""
    said: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: said["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(gcnArchName=said["name"]))
    for cached in (cuda_traits._of, rocm_traits._architecture):
        cached.cache_clear()
    yield said
    for cached in (cuda_traits._of, rocm_traits._architecture):
        cached.cache_clear()


@pytest.mark.parametrize("name", ["gfx803", "gfx900:xnack-", "gfx940", "gfx9999"])
def test_an_amd_architecture_that_triton_does_not_know_is_refused_at_the_launch(
    chip: dict[str, Any], name: str
) -> None:
    chip["name"] = name
    traits = rocm_traits.traits_of(torch.device("cuda:1"))
    with pytest.raises(
        UnsupportedError, match=rf"conv_decode_kernel: device: got {name.partition(':')[0]}, wanted one"
    ):
        Launch(traits, KERNEL, 1, [], {}, 1)


@pytest.mark.parametrize("capability", [(5, 2), (6, 1), (7, 0), (7, 5)])
def test_an_nvidia_chip_before_8_0_is_refused_at_the_launch(chip: dict[str, Any], capability: tuple[int, int]) -> None:
    chip["capability"] = capability
    traits = cuda_traits.traits_of(torch.device("cuda:1"))
    with pytest.raises(
        UnsupportedError, match=r"got compute capability \d\.\d, wanted at least compute capability 8\.0"
    ):
        Launch(traits, KERNEL, 1, [], {}, 1)


def test_what_is_known_is_served(chip: dict[str, Any]) -> None:
    chip |= {"name": "gfx1201", "capability": (12, 0)}
    for module in (rocm_traits, cuda_traits):
        Launch(module.traits_of(torch.device("cuda:1")), KERNEL, 1, [], {}, 1)
