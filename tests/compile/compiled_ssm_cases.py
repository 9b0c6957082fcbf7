"""What NVIDIA's and AMD's compilers make of the SSM kernels, on a CPU: registers, spills, and that every launch shape
sums a dot product in the same layout, which is what pins its order."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton ships for Linux only")

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "compile"))

import code_object

from hwbackends.bench import ssm as bench
from hwbackends.bench.ssm_sizes import DECODE_SHAPES, SIZES, VERIFY_SHAPES, Inputs, Size, Weights, storage
from hwbackends.rocm.traits import traits_for
from hwbackends.step.batch import ForwardMode
from hwbackends.triton_ops import ssm
from hwbackends.triton_ops.traits import SsmShape, Traits

TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.bool: "*i1",
}  # fmt: skip
FEW = Size("few", "gdn", 1, 2, 64, 64)


def launch_of(hook: str, size: Size, dtype: torch.dtype, traits: Traits) -> tuple[Any, list[Tensor]]:
    """The launch that a hook makes ready, and its tensors."""
    state = storage(size, 1, 3, 2, dtype, "cpu", 16, 4).layer(0)
    x, weights, verify = Inputs(size, 8, "cpu"), Weights(size, "cpu"), hook == "ssm_target_verify"
    at = torch.ones(2, dtype=torch.int32)
    mode = ForwardMode.TARGET_VERIFY if verify else ForwardMode.DECODE
    step = bench.metadata(mode, at, at, at, 4)
    tensors = (x.q, x.k, x.v, x.a, x.b, weights.A_log, weights.dt_bias, weights.D, None)
    launch, _ = ssm._planned(traits, hook, tensors, state, step, (None, None, None, size.kind != "mamba2"))
    rate = weights.A_log
    given = [x.q, x.k, x.v, x.a, x.a if x.b is None else x.b, rate, weights.dt_bias, rate, x.v, rate, rate, rate]
    return launch, [*given, *launch._fixed]


def compiled(hook: str, size: Size, dtype: torch.dtype, traits: Traits, chip: str) -> Any:
    """The machine code of a hook's kernel."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as to_machine_code

    launch, tensors = launch_of(hook, size, dtype, traits)
    target = GPUTarget("hip", chip, 64) if chip.startswith("gfx") else GPUTarget("cuda", int(chip[3:]), 32)
    kernel, constants = launch._kernel, {**launch._constants, "PTX": not chip.startswith("gfx")}
    names = [name for name in kernel.arg_names if name not in constants]
    kinds = [TYPES[t.dtype] for t in tensors] + ["fp32" if isinstance(s, float) else "i32" for s in launch._scalars]
    signature = dict(zip(names, kinds, strict=True)) | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(tensors))}
    source = ASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, constants, aligned)
    return to_machine_code(source, target=target, options=launch._options)


def resources(found: Any) -> code_object.Resources:
    """Registers and spills."""
    import triton

    if "hsaco" in found.asm:
        return code_object.amd(found.asm["hsaco"], found.asm["amdgcn"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return code_object.nvidia(found.asm["cubin"], str(tool))


def layouts(found: Any) -> set[str]:
    """Layouts that dot products are summed in, but for how many warps stand below each other."""
    text = found.asm["ttgir"]
    known = dict(re.findall(r"^(#\w+) = (#ttg[^\n]*)", text, flags=re.MULTILINE))
    sums = re.findall(r'"tt\.reduce"[^\n]*axis = 1 : i32.*?\}\) : \(tensor<\d+x\d+xf32, (#\w+)>', text, flags=re.DOTALL)
    assert sums
    return {re.sub(r"warpsPerCTA = \[[^]]*\]", "", known[name]) for name in sums}


@pytest.mark.parametrize("chip", ["sm_90", "gfx942"])
def test_decode_compiles_without_a_spill_and_sums_rows_over_four_lanes(chip: str) -> None:
    traits = traits_for("gfx942") if chip == "gfx942" else bench.traits(SsmShape(16, 1))
    found = compiled("ssm_decode", FEW, torch.float32, traits, chip)
    assert not resources(found).spills
    (layout,) = layouts(found)
    assert "sizePerThread = [1, 4]" in layout
    assert ", 4]" in layout.partition("threadsPerWarp")[2]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES[:3], ids=lambda size: size.name)
def test_every_launch_shape_sums_in_one_layout_and_spills_little(size: Size, dtype: torch.dtype) -> None:
    found = set()
    for hook, choices in {"ssm_target_verify": VERIFY_SHAPES, "ssm_decode": DECODE_SHAPES}.items():
        for shape in bench.shapes(choices, size, dtype, small=False):
            for registers in {0, shape.registers}:
                one = compiled(hook, size, dtype, bench.traits(replace(shape, registers=registers)), "sm_90")
                found |= layouts(one)
                assert resources(one).spills <= (32 if registers else 0), (hook, shape)
    assert len(found) == 1, found
