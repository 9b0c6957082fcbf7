"""Stand-in for sglang-kernel 0.4.10, whose binary needs torch 2.14: a few elementwise ops in torch, everything else
refuses. Nothing here touches a short conv or its state; SGLang's own conv kernels are Triton and JIT CUDA."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys

import torch
import torch.nn.functional as F

__version__ = "0.4.10"
CALLS: dict[str, int] = {}


def _counted(f):
    def g(*a, **k):
        CALLS[f.__name__] = CALLS.get(f.__name__, 0) + 1
        return f(*a, **k)

    g.__name__ = f.__name__
    return g


@_counted
def rmsnorm(input, weight, eps=1e-6, out=None, enable_pdl=None):
    x = input.float()
    y = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(input.dtype)
    if out is None:
        return y
    out.copy_(y)
    return out


@_counted
def fused_add_rmsnorm(input, residual, weight, eps=1e-6, enable_pdl=None):
    x = input.float() + residual.float()
    residual.copy_(x)
    input.copy_(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float())


def _gated(act, input, out):
    a, b = input.chunk(2, -1)
    y = (act(a.float()) * b.float()).to(input.dtype)
    if out is None:
        return y
    out.copy_(y)
    return out


@_counted
def silu_and_mul(input, out=None, enable_pdl=None):
    return _gated(F.silu, input, out)


@_counted
def gelu_and_mul(input, out=None, enable_pdl=None):
    return _gated(F.gelu, input, out)


@_counted
def gelu_tanh_and_mul(input, out=None, enable_pdl=None):
    return _gated(lambda t: F.gelu(t, approximate="tanh"), input, out)


def weak_ref_tensor(t):
    return t


class _Missing:
    def __init__(self, name):
        self.__name__ = self.__qualname__ = name

    def __call__(self, *a, **k):
        raise NotImplementedError(f"sgl_kernel.{self.__name__}: not in the stand-in")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(name)


class _Loader(importlib.abc.Loader):
    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__getattr__ = __getattr__


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith("sgl_kernel.") and name != "sgl_kernel.__init__":
            return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)
        return None


sys.meta_path.append(_Finder())
