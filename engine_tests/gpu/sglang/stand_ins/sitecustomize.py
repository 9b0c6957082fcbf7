"""Only for a machine without nvidia-cutlass-dsl, which two modules of SGLang import at their top although
--attention-backend triton never runs them. FA4's package loads empty (so that `cute.batch_invariance` can be imported),
and the fused gate/up GEMM says that it cannot be used, after which SGLang runs the plain projections."""

import enum
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

_FA4 = "sglang.kernels.ops.attention.flash_attn.cute"
_DUAL = "sglang.kernels.ops.gemm.cutedsl_dual_gemm"


class _Loader(importlib.abc.Loader):
    def create_module(self, spec):
        return None

    def exec_module(self, module):
        if module.__name__ == _FA4:
            module.flash_attn_func = module.flash_attn_varlen_func = None
        else:
            module.MAX_DUAL_GEMM_DECODE_TOKENS = 0
            module.DualGemmQuantMode = enum.Enum("DualGemmQuantMode", "UNQUANT DYNAMIC_PER_TOKEN STATIC_PER_TENSOR")
            module.can_use_dual_gemm = lambda *a, **k: False


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in (_FA4, _DUAL):
            return None
        spec = importlib.machinery.ModuleSpec(name, _Loader(), is_package=name == _FA4)
        if name == _FA4:
            spec.submodule_search_locations = [os.path.join(next(iter(path)), "cute")]
        return spec


sys.meta_path.insert(0, _Finder())
