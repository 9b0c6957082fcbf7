"""The `rocm` backend: the kernels of `triton_ops` on AMD GPUs, every hook, every layout, one launch per phase."""
