"""The `reference` backend: pure torch on any device, every hook, every layout."""
