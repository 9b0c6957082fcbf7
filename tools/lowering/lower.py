"""Lowers every variant of every Ascend kernel to Linalg with the vendor's own compiler, on any x86 CPU, and counts the
scalar access loops in what comes out. Runs in the environment of `constraints-ascend.txt`, which has no torch."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import time
import tomllib
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

from hwbackends.ascend.variants import Variant, all_variants  # noqa: E402

DISCRETE = "DiscreteMemAccess"
ARCHITECTURE = "Ascend910B"


def lower(function: Any, types: dict[str, str], constants: dict[str, Any]) -> str:
    """The Linalg text of one compilation.

    Raises:
        RuntimeError: the compiler refuses the kernel; the message is the compiler's.
    """
    from triton._C.libtriton import ir
    from triton.backends.ascend.compiler import AscendBackend, make_ttir, ttir_to_linalg
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = GPUTarget("npu", ARCHITECTURE, 0)
    backend = AscendBackend(target)
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    signature = {p.name: "constexpr" if p.is_constexpr else types[p.name] for p in function.params}
    source = ASTSource(function, signature, constants)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = {"target": target, **options.__dict__}
    module = make_ttir(module, metadata, options)
    try:
        text: str = ttir_to_linalg(module, metadata, options, named_ops=True)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(error.stderr.decode(errors="replace")[:2000]) from error
    return text


def lowered(variant: Variant) -> str:
    """The Linalg text of a variant."""
    module = importlib.import_module(f"hwbackends.ascend.{variant.module}")
    function = getattr(module, variant.kernel)
    names = [p.name for p in function.params if not p.is_constexpr]
    return lower(function, {name: variant.pointer(name) or "i32" for name in names}, variant.constants)


def lower_variant(variant: Variant) -> tuple[Variant, int, str]:
    """Scalar access loops of a variant, and the compiler's message where it refused."""
    try:
        return variant, lowered(variant).count(DISCRETE), ""
    except Exception as error:
        return variant, 0, f"{type(error).__name__}: {error}"


def bad_kernels_fail() -> list[str]:
    """What is wrong with the check itself: nothing, as long as it sees the kernels of `known_bad` fail."""
    import known_bad

    wrong = []
    pointers = {"state": "*bf16", "slots": "*i32", "out": "*bf16", "count": "i32", "dim": "i32"}
    found = lower(known_bad.slots_as_vector, pointers, {"ROWS": 4, "BLOCK": 128}).count(DISCRETE)
    if not found:
        wrong.append(f"known_bad.slots_as_vector lowered without {DISCRETE}")
    try:
        lower(known_bad.below_pointer, {"out": "*i32", "lens": "*i32", "count": "i32"}, {"BLOCK": 128})
        wrong.append("known_bad.below_pointer was not refused")
    except RuntimeError:
        pass
    print(f"known-bad kernels: slots_as_vector has {found} x {DISCRETE}, below_pointer is refused", flush=True)
    return wrong


def rows_are_loaded_once() -> list[str]:
    """Elimination of equal loads: a verify of 4 drafts at W = 4 with a bias copies 7 rows, 4 taps and the bias."""
    wanted = {"MODE": 1, "LAYOUT": 0, "W": 4, "N": 4, "BIAS": True, "RESIDUAL": True}
    found = next(v for v in all_variants() if wanted.items() <= v.constants.items())
    copies = lowered(found).count("memref.copy")
    print(f"verify of 4 drafts, W = 4, bias: {copies} copies", flush=True)
    return [] if copies == 12 else [f"verify of 4 drafts, W = 4, bias: {copies} copies, wanted 12"]


def judge(variant: Variant, found: int, error: str, allowed: dict[str, int]) -> str:
    """What is wrong with one variant; empty if nothing is."""
    name = f"{variant.kernel} {variant.constants} {variant.types or ''}"
    if error:
        return f"{name}: refused: {error}"
    wanted = allowed.get(variant.kernel, 0)
    return "" if found == wanted else f"{name}: {found} x {DISCRETE}, wanted {wanted}"


def main() -> int:
    """Lower everything and print one line per kernel.

    Returns:
        0 if every variant lowers with exactly the scalar loops of `allowed.toml`, else 1.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one variant in N")
    given = parser.parse_args()
    allowed = {
        row["kernel"]: row["count"] for row in tomllib.loads((HERE / "allowed.toml").read_text()).get("allowed", [])
    }
    wrong: list[str] = []
    start, counts, loops = time.monotonic(), Counter[str](), Counter[str]()
    variants = list({repr(v): v for v in all_variants() if given.kernel in v.kernel}.values())[:: given.every]
    # The compiler starts threads, which a fork would not survive: workers are spawned, and all compiling is theirs.
    with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn")) as pool:
        for check in (bad_kernels_fail, rows_are_loaded_once):
            wrong += pool.submit(check).result()
        for variant, found, error in pool.map(lower_variant, variants, chunksize=16):
            counts[variant.kernel] += 1
            loops[variant.kernel] += found
            wrong += filter(None, [judge(variant, found, error, allowed)])
    for kernel, count in counts.items():
        print(f"{kernel}: {count} variants, {loops[kernel]} x {DISCRETE}")
    for line in wrong[:20]:
        print(line, file=sys.stderr)
    print(f"{len(variants)} variants in {time.monotonic() - start:.0f} s, {len(wrong)} faults")
    return 1 if wrong or not variants else 0


if __name__ == "__main__":
    sys.exit(main())
