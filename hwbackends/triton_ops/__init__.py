"""Kernels in Triton's language and their launching, shared by the GPU backends: one source for every vendor. What
differs between vendors lies in each backend's own folder."""
