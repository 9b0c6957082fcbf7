"""Clauses of the step contract: preparation and the probe."""
