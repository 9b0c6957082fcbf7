"""The contract in pure torch: what the `reference` plugin is, and what a vendor's torch-native tier can start from.

Written to be read as the specification, so each formula is spelled out once. No operation here waits for the device:
no `item`, `nonzero` or boolean-mask indexing; what must not be written is handled by `rows.masked_write`. A hook runs
its ops in inference mode, so that it writes tensors of either kind and keeps no gradient, whoever calls it.
"""
