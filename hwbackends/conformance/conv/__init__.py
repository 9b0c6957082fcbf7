"""Clauses of the conv family: convs on every layout, commit, clear and copy, the fused epilogue."""
