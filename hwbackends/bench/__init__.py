"""What `hwbackends bench` measures: our hooks on the device at hand, its floor, and SGLang's kernels beside them."""
