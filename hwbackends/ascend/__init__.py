"""The Ascend backend: two tiers under one plugin, pure torch ops and triton-ascend kernels. Importing this package
imports neither torch nor triton."""
