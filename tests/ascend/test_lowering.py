"""The kernels through the vendor's own compiler, in an environment of its own: one variant in forty here, and all of
them with `-m npu` and in the job `make lowering`. The job proves on known-bad kernels that it can fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hwbackends.ascend.variants import all_variants

ROOT = Path(__file__).parents[2]
RUN = ROOT / "tools" / "lowering" / "run.sh"


def test_kernels_lower_without_scalar_access_loops(request: pytest.FixtureRequest) -> None:
    if sys.version_info[:2] != (3, 11) and not (ROOT / ".venv-ascend").exists():
        pytest.skip("the vendor's compiler has wheels for Python 3.11 at most: run `make lowering PYTHON=python3.11`")
    every = 1 if "npu" in str(request.config.getoption("markexpr")) else 40
    command = [RUN, "--every", str(every)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "slots_as_vector has 2 x DiscreteMemAccess, below_pointer is refused" in done.stdout


def test_each_variant_is_compiled_once_and_every_phase_and_layout_has_one() -> None:
    variants = list(all_variants())
    assert len({repr(variant) for variant in variants}) > 1_500
    uniform = [v.constants for v in variants if v.kernel == "conv_uniform_kernel"]
    assert {(c["MODE"], c["LAYOUT"]) for c in uniform} == {(mode, layout) for mode in range(3) for layout in range(3)}
    assert {c["LAYOUT"] for v in variants if v.kernel == "conv_extend_kernel" for c in [v.constants]} == {0, 1, 2}
