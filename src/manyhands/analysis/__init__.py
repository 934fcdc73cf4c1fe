"""Comparisons of runs: pure functions from records to named tuples."""
