"""Builds the CUDA kernels of SGLang that the runs ask for, at once; SGLang builds each at its first use."""

from __future__ import annotations

import ast
import concurrent.futures as cf
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang.kernels.jit.utils import load_jit
from sglang.kernels.ops.mamba import inkling_sconv

Job = tuple[str, Callable[[], Any]]


def recorded() -> list[Job]:
    """Requests of the tiny Inkling, as SGLang makes them: with dependent launch where an op knows it."""
    jobs: dict[tuple[str, ...], dict[str, Any]] = {}
    for line in (Path(__file__).parent / "jit_requests.txt").read_text().splitlines():
        args, options = ast.literal_eval(line)
        new = ["true" if a == "false" and args[0] != "qknorm" else a for a in args]
        if args[0] == "qknorm":
            new[2] = "true"
        text = repr(options).replace(f"<{', '.join(args[1:])}>", f"<{', '.join(new[1:])}>")
        jobs[tuple(new)] = ast.literal_eval(text)
    return [(args[0], lambda a=args, o=options: load_jit(*a, **o)) for args, options in jobs.items()]


def convs() -> list[Job]:
    """SGLang's own short-conv kernels, which the stock engine needs."""
    s, b = inkling_sconv, torch.bfloat16
    jobs: list[Job] = [
        (f"conv {d}", lambda d=d: s._jit_causal_conv1d_module(4, False, True, d, b)) for d in (False, True)
    ]
    jobs += [("update", lambda: s._jit_update_sconv_cache_module(3, b))]
    jobs += [("gather", lambda: s._jit_gather_scatter_sconv_module(3, b))]
    jobs += [
        (f"decode {t}", lambda t=t: s._jit_fused_decode_update_module(4, False, True, t, b)) for t in (False, True)
    ]
    jobs += [(f"draft {t}", lambda t=t: s._jit_draft_extend_sconv_module(3, t, b)) for t in (False, True)]
    from sglang.kernels.ops.speculative.tree import _jit_tree_module

    return [*jobs, ("tree", _jit_tree_module)]


def build(job: Job) -> str:
    start = time.time()
    try:
        job[1]()
    except Exception as error:  # what is missing is built later, one by one
        return f"{job[0]}: FAILED {type(error).__name__}: {str(error)[-300:]}"
    return f"{job[0]}: {time.time() - start:.1f} s"


def main() -> None:
    start = time.time()
    with cf.ThreadPoolExecutor(int(os.environ.get("JOBS", "16"))) as pool:
        for text in pool.map(build, recorded() + convs()):
            print("jit", text, flush=True)
    print(f"jit: all in {time.time() - start:.1f} s")


if __name__ == "__main__":
    main()
