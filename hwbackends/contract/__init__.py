"""The contract: the only reader of its YAML, the only comparison of a definition with it, and its hookspecs.
Knows no torch."""
