"""The conv state family: what an engine holds of it."""
