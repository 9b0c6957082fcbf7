"""Which backend serves the GPUs of the installed torch, for tests that any vendor's GPU can run."""

from __future__ import annotations


def _backend() -> str:
    try:
        import torch
    except ModuleNotFoundError:
        return "cuda"
    return "cuda" if torch.version.hip is None else "rocm"


def visible() -> bool:
    """Whether torch sees a GPU."""
    try:
        import torch
    except ModuleNotFoundError:
        return False
    return torch.cuda.is_available()


def missing_gpu(expression: str, backend: str, seen: bool) -> str:
    """Why the GPU tests cannot run here, empty if they can.

    Args:
        expression: what `-m` selects; one that names a vendor asks for that vendor's device.
        backend: that serves this torch's devices.
        seen: whether there is one.
    """
    words = {"cuda": "an NVIDIA GPU and a CUDA build of torch", "rocm": "an AMD GPU and a ROCm build of torch"}
    asked = [name for name in words if name in expression.split()]
    if not seen:
        return f"needs {words[asked[0]] if asked else 'a GPU'}"
    others = [name for name in asked if name != backend]
    return f"needs {words[others[0]]}" if others and backend not in asked else ""


GPU = _backend()
"""`cuda`, or `rocm` on a torch that was built for it; torch names the devices of both `cuda`."""
