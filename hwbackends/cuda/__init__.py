"""The `cuda` backend: Triton kernels for NVIDIA GPUs, every hook, every layout, one launch per phase."""
