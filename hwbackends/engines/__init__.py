"""Adapters to engines, one per engine; each imports its engine only when it is itself imported."""
